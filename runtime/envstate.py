"""The state of environments: how it is read and set, and what is done where it cannot be.

    own         the environment has get_state() and set_state(state): its own word, with its generator beside it
    attributes  everything it is made of can be read: Python's own objects, and MuJoCo's by an adapter (pickling a MuJoCo
                environment would lose the simulation). All of Gymnasium's classic control and MuJoCo
    actions     something in it cannot be read (a physics engine, a Python generator): the actions since each row's last
                reset are recorded as it runs, and taken again
    none        not even that; the run goes on with new episodes

Wrappers (a time limit, say) are read attribute by attribute in all cases. Every restore is compared with what was saved:
all that can be read, to the bit, and for `actions` the observation too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from fdg.errors import CheckpointError
from fdg.runtime.snapshot import Adapter, decode, encode, equal, restore, state_of

LIMIT = 2**26
"""Bytes of recorded actions, per vector environment, after which recording is given up: episodes that never end."""


# reading and setting --------------------------------------------------------------------------------------------------


def read(envs: Sequence[Any]) -> tuple[str, Any, str]:
    """How the environments' state was read, the state as plain data, and if it could not be, why not."""
    why = ""
    for how in ("own", "attributes"):
        if how == "own" and not any(has_own(env.unwrapped) for env in envs):
            continue
        try:
            return how, state_of(list(envs), "env", adapters=_adapters(how), strict=True), ""
        except Exception as error:
            why = _sentence(error)
    return "none", None, why


def write(envs: Sequence[Any], how: str, data: Any) -> None:
    """Bring environments of the same make into a state that `read` returned.

    Raises:
        CheckpointError: they are not in that state afterwards.
    """
    restore(list(envs), data, "env", adapters=_adapters(how), strict=True)


def has_own(env: Any) -> bool:
    """Whether an environment has get_state() and set_state(state), to be called with so many arguments."""
    try:
        inspect.signature(env.get_state).bind()
        inspect.signature(env.set_state).bind(None)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _adapters(how: str) -> list[Adapter]:
    own = Adapter("environment", lambda value: isinstance(value, gymnasium.Env) and has_own(value), _get_own, _set_own)
    return [*([own] if how == "own" else []), *_ADAPTERS]


def _get_own(env: Any) -> dict[str, Any]:
    return {"state": env.get_state(), "random": getattr(env, "_np_random", None)}


def _set_own(env: Any, saved: dict[str, Any]) -> None:
    here, random = getattr(env, "_np_random", None), saved["random"]
    if here is not None and random is not None and type(here.bit_generator) is type(random.bit_generator):
        here.bit_generator.state = random.bit_generator.state
    else:
        env._np_random = random
    env.set_state(saved["state"])


# MuJoCo ---------------------------------------------------------------------------------------------------------------


def _is(name: str) -> Any:
    return lambda value: type(value).__name__ == name and "mujoco" in type(value).__module__


def _get_simulation(data: Any) -> dict[str, Any]:
    """The full state of integration, with the solver's warm start, and all that was last computed from it: environments
    read positions and forces of the step before, and computing them anew would give those of the present state."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    return {"state": state, "computed": b"".join(array.tobytes() for array in _computed(data))}


def _set_simulation(data: Any, saved: dict[str, Any]) -> None:
    import mujoco

    arrays, computed, start = _computed(data), np.frombuffer(saved["computed"], np.uint8), 0
    if sum(array.nbytes for array in arrays) != len(computed):
        raise CheckpointError(f"the simulation was saved by another version of MuJoCo than this, {mujoco.__version__}")
    mujoco.mj_setState(data.model, data, saved["state"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for array in arrays:
        array[...] = computed[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += array.nbytes


def _computed(data: Any) -> list[np.ndarray]:
    """The arrays of a simulation whose size is the model's. Those of contacts and constraints have another in each step,
    and are made anew before they are used."""
    return [getattr(data, name) for name in _names(data.model)]


def _names(model: Any) -> list[str]:
    import mujoco

    key = (model.nq, model.nv, model.nbody, model.nbuffer)
    if key not in _NAMES:
        new = mujoco.MjData(model)
        names = [
            name for name in dir(new) if not name.startswith(("_", "efc_", "iefc_", "map_")) and "island" not in name
        ]
        arrays = {name: array for name in names if isinstance(array := getattr(new, name), np.ndarray)}
        _NAMES[key] = [name for name, array in arrays.items() if array.size and array.flags.writeable]
    return _NAMES[key]


_NAMES: dict[tuple[int, ...], list[str]] = {}


def _get_model(model: Any) -> str:
    """Its sha256: a model is built, and an environment that changes it cannot be restored."""
    import mujoco

    data = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, data)
    return hashlib.sha256(data.tobytes()).hexdigest()


_ADAPTERS = (
    Adapter("MuJoCo simulation", _is("MjData"), _get_simulation, _set_simulation),
    Adapter("MuJoCo model", _is("MjModel"), _get_model),
    Adapter("MuJoCo renderer", _is("MujocoRenderer"), lambda renderer: None),
    Adapter("specification", lambda value: isinstance(value, EnvSpec), lambda spec: spec.id),
)


# taking actions again -------------------------------------------------------------------------------------------------


class Recorder:
    """Seeds and actions of each row since its last reset, and what could be read of the environment before that."""

    def __init__(self, envs: Sequence[Any], seeds: Sequence[int | None]) -> None:
        self.envs = envs
        self.before: list[Any] = [None] * len(envs)  # None: as it was made
        self.seeds: list[int | None] = list(seeds)
        self.begin = [0] * len(envs)
        self.actions: np.ndarray | None = None
        self.taken = np.ones((0, len(envs)), np.bool_)  # which of the actions were
        self.count = 0
        self.full = False
        self.skip: set[str] = set()  # attributes that are no plain values

    def resets(self, row: int, seed: int | None = None) -> None:
        """Note that a row is about to be reset."""
        self.before[row], self.seeds[row] = readable(self.envs[row], self.skip), seed
        self.begin[row] = self.count
        oldest = min(self.begin)
        if self.actions is not None and oldest > len(self.actions) // 2:  # forget what every row has left behind
            for array in (self.actions, self.taken):
                array[: self.count - oldest] = array[oldest : self.count]
            self.begin = [begin - oldest for begin in self.begin]
            self.count -= oldest

    def step(self, actions: np.ndarray, live: np.ndarray | None) -> None:
        """Note the actions of all rows, or of those that are live."""
        if self.actions is None:
            self.actions = np.empty((256, *actions.shape), actions.dtype)
            self.taken = np.ones((256, len(actions)), np.bool_)
        elif self.count == len(self.actions):
            if self.full or 2 * self.actions.nbytes > LIMIT:
                self.full = True
                return
            self.actions = np.concatenate([self.actions, np.empty_like(self.actions)])
            self.taken = np.concatenate([self.taken, np.ones_like(self.taken)])
        self.actions[self.count] = actions
        self.taken[self.count] = True if live is None else live
        self.count += 1

    def state(self) -> list[dict[str, Any]]:
        """What leads each row to where it is now, and how to know that it is there."""
        if self.full:
            raise CheckpointError(f"an episode is longer than the {LIMIT >> 20} MB of actions that are recorded")
        none = np.empty((0, len(self.envs)), np.int64)
        actions = none if self.actions is None else self.actions[: self.count]
        taken = self.taken[: self.count]
        return [
            {
                "before": self.before[row],
                "seed": self.seeds[row],
                "actions": actions[self.begin[row] :, row][taken[self.begin[row] :, row]],
                "after": readable(env, set()),
            }
            for row, env in enumerate(self.envs)
        ]

    def load_state(self, rows: list[dict[str, Any]], at: np.ndarray) -> None:
        """Take the actions again, in environments as they are made, and compare where that leads.

        Raises:
            CheckpointError: to somewhere else.
        """
        lengths = [len(row["actions"]) for row in rows]
        self.count = max(lengths)
        if self.count:
            one = rows[0]["actions"]
            self.actions = np.empty((self.count, len(rows), *one.shape[1:]), one.dtype)
            self.taken = np.ones((self.count, len(rows)), np.bool_)
        for index, (env, row) in enumerate(zip(self.envs, rows, strict=True)):
            self.before[index], self.seeds[index] = row["before"], row["seed"]
            self.begin[index] = self.count - lengths[index]
            if row["before"] is not None:
                _set_readable(env, row["before"])
            observation, ended = env.reset(seed=row["seed"])[0], False
            for step, action in enumerate(row["actions"]):
                observation, _, terminated, truncated, _ = env.step(action)
                self.actions[self.begin[index] + step, index] = action  # type: ignore[index]
                ended = bool(terminated or truncated)
                if ended:
                    break
            reached = np.asarray(observation, at.dtype)
            if ended or reached.tobytes() != at[index].tobytes():
                raise CheckpointError(
                    f"row {index}: taking the {lengths[index]} actions of its episode again led to the observation "
                    f"{_short(reached)}, saved was {_short(at[index])}"
                )
            if not equal(readable(env, set()), row["after"]):
                raise CheckpointError(
                    f"row {index}: taking the {lengths[index]} actions of its episode again left other values in the environment"
                )


def readable(env: Any, skip: set[str]) -> Any:
    """The attributes of an environment and its wrappers that are plain values, generators among them, as data.

    `skip` are names of attributes known not to be; more of them are added to it.
    """
    values = {name: value for name, value in _attributes(env).items() if name not in skip}
    try:
        return encode(values)
    except CheckpointError:
        for name, value in values.items():
            try:
                encode({name: value}, copy=False)
            except CheckpointError:
                skip.add(name)
        return encode({name: value for name, value in values.items() if name not in skip})


def _set_readable(env: Any, data: Any) -> None:
    owners = _owners(env)
    for name, value in decode(data).items():
        depth, _, attribute = name.partition(".")
        vars(owners[int(depth)])[attribute] = value


def _attributes(env: Any) -> dict[str, Any]:
    found = enumerate(_owners(env))
    return {f"{depth}.{name}": value for depth, owner in found for name, value in vars(owner).items() if name != "env"}


def _owners(env: Any) -> list[Any]:
    """The wrappers, from the outermost, and the environment."""
    owners = [env]
    while isinstance(owners[-1], gymnasium.Wrapper):
        owners.append(owners[-1].env)
    return owners


def _short(array: np.ndarray) -> str:
    text = ", ".join(f"{number:g}" for number in array.reshape(-1)[:6].tolist())
    return f"[{text}{', …' if array.size > 6 else ''}]"
