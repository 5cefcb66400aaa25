"""Who serves an environment: names (aliases, Gymnasium ids, a user's own factory) and the vector backends behind them.

Free of torch, so that a wrong name is reported at once.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fdg.errors import CheckpointError, UsageError, did_you_mean
from fdg.registry import import_file, parse_file, split_file
from fdg.runtime.native import native

if TYPE_CHECKING:
    import gymnasium
    import torch

PUBLISHED = (
    *("Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"),
    *("BipedalWalker-v3", "LunarLander-v3", "LunarLanderContinuous-v3"),
    *("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5"),
    *("InvertedPendulum-v5", "InvertedDoublePendulum-v5"),
)
ALIASES = {env_id.partition("-v")[0].lower(): env_id for env_id in PUBLISHED}
"""Short names: cartpole, halfcheetah, … Versions are fixed, so that an upgrade of Gymnasium changes no experiment."""

_EXTRAS = {"classic_control": "classic-control", "phys2d": "jax", "tabular": "jax", "toy_text": "toy-text"}
"""pip's name for a folder of gymnasium.envs, where it differs."""


def resolve_env(name: str) -> str:
    """The full name of an environment: of an alias, of any Gymnasium id, or of `FILE.py:make_env`.

    >>> resolve_env("cartpole"), resolve_env("half-cheetah"), resolve_env("pendulum-v1")
    ('CartPole-v1', 'HalfCheetah-v5', 'Pendulum-v1')

    Raises:
        UsageError: nobody knows the name, or a package the environment needs is not installed.
    """
    module, _, plain = name.rpartition(":")
    if name.endswith(".py") or module.endswith(".py"):
        load_factory(name)
        return f"{Path(module).expanduser().resolve()}:{plain}"  # absolute: a worker may run in another folder

    import gymnasium

    if module:  # Gymnasium's own "module:Id": importing the module registers the id
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(f"environment {name!r}: there is no module {error.name!r} to import") from error
    ids = {known.lower(): known for known in gymnasium.registry}
    plain = plain.lower()
    found = ALIASES.get(plain.replace("-", "").replace("_", "")) or ids.get(plain)
    if found is None:
        near = [ids[known] for known in difflib.get_close_matches(plain, ids, n=3)]
        raise UsageError(
            f"unknown environment {name!r}: {did_you_mean(name, {*near, *ALIASES})}; "
            "also any Gymnasium id, or FILE.py:make_env for your own"
        )
    _check_installed(found)
    return f"{module}:{found}" if module else found


def _check_installed(env_id: str) -> None:
    """Import the environment's code, to learn now rather than in a worker that an extra is missing."""
    import gymnasium

    entry = gymnasium.spec(env_id).entry_point
    if not isinstance(entry, str):
        return
    module = entry.partition(":")[0]
    try:
        importlib.import_module(module)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        folder = module.split(".")[2] if module.startswith("gymnasium.envs.") else ""
        write = f'pip install "gymnasium[{_EXTRAS.get(folder, folder)}]"' if folder else "install the package it is in"
        reason = str(error).partition(", you can")[0]
        raise UsageError(f"environment {env_id} cannot be made: {reason}; write: {write}") from error


GIVEN: dict[str, Callable[[], Any]] = {}
"""Functions that came with a run, by `FILE.py:make_env`: the file is the driver's, and need not be here."""


def load_factory(name: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """The function that `FILE.py:make_env` names, which makes one environment.

    Raises:
        UsageError: no such file, it does not parse, it has no such function, or that one wants arguments.
    """
    if name in GIVEN:
        return GIVEN[name]
    place = split_file(name)
    if place is None or not place[1]:
        raise UsageError(f"environment {name!r} is a file: write {name}:make_env, the function in it that makes one")
    path, function = place
    parse_file(path)
    members = vars(import_file(str(path))).items()
    functions = {key: value for key, value in members if callable(value) and not key.startswith("_")}
    if function not in functions:
        raise UsageError(f"{path} has no function {function!r}: {did_you_mean(function, functions)}")
    try:
        inspect.signature(functions[function]).bind()
    except TypeError as error:
        raise UsageError(f"{path}:{function} is called without arguments, and cannot be: {error}") from error
    return functions[function]


def maker(env_id: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """What makes one environment of a resolved name."""
    import gymnasium

    if ".py:" not in env_id:
        return partial(gymnasium.make, env_id, disable_env_checker=True)
    factory = load_factory(env_id)

    def make() -> gymnasium.Env[Any, Any]:
        env = factory()
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"{env_id} returned {type(env).__name__}: return one gymnasium.Env, rows are made of it")
        return env

    return make


Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""(next observation, observation to go on from, reward, terminated, truncated), each with E rows.

The two observations may be one array; the other arrays are the caller's own.
"""


Episodes = list[tuple[float, int]]
"""Return and length of each."""


class Rows(Protocol):
    """A backend: E environments side by side, each reset within the step that ends it."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    private_random: bool
    """Whether it is known to draw from generators of its own alone, never from global ones."""

    def reset(self, seeds: list[int] | None) -> np.ndarray:
        """First observations of new episodes in all rows; without seeds the random streams go on."""

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Step:
        """Take a step in every row, or in those that are live: the others stay where they are, and have no reward."""

    fills: bool
    """Whether `fill` and `begin` can take the place of `step`."""

    def fill(
        self, action: int, live: int, out: Sequence[int], returns: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, Episodes | None]:
        """A step in compiled code, from and to memory at the given addresses: actions (int64 [E], or float32 [E, A]), which
        rows are live (bool [E]; 0: all), and what comes of it: observation, the observation to go on from (float32),
        reward (float32), done, terminated, truncated (bool). Also adds to the returns and lengths of episodes.

        How many rows moved, and which episodes ended. -1 if an action cannot be taken: then nothing has moved."""

    def begin(self, count: int, done: torch.Tensor, first: torch.Tensor) -> None:
        """Begin new episodes in the `count` rows that are done after `fill`, and write where they go on from to `first`."""

    @property
    def standing(self) -> np.ndarray:
        """Where all rows are after `fill`; its own memory, changed by the next one."""

    def state(self) -> dict[str, Any]:
        """Where all rows are, for a checkpoint: {"how": …, "data": …, "why": …}, see `envstate`."""

    def load_state(self, state: dict[str, Any], at: np.ndarray | None) -> None:
        """Bring rows just made to where others were; `at` are the observations they go on from.

        Raises:
            CheckpointError: that cannot be done.
        """

    def close(self) -> None: ...


class _Readable:
    """Rows whose state is that of some environments, read and set by `envstate` (imported late: it needs torch)."""

    private_random = False
    fills = False
    standing: np.ndarray
    _recorder: Any = None
    """Records actions where environments cannot be read."""

    def fill(
        self, action: int, live: int, out: Sequence[int], returns: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, Episodes | None]:
        raise NotImplementedError

    def begin(self, count: int, done: torch.Tensor, first: torch.Tensor) -> None:
        raise NotImplementedError

    def _environments(self) -> list[Any]:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        from fdg.runtime import envstate

        how, data, why = envstate.read(self._environments())
        if how == "none" and self._recorder is not None:
            try:
                how, data = "actions", self._recorder.state()
            except CheckpointError as error:
                why = str(error)
        return {"how": how, "data": data, "why": why}

    def load_state(self, state: dict[str, Any], at: np.ndarray | None) -> None:
        from fdg.runtime import envstate

        if state["how"] == "none":
            raise CheckpointError(state["why"])
        environments = self._environments()
        if state["how"] != "actions":
            envstate.write(environments, state["how"], state["data"])
        elif at is not None:
            self.fills = False  # a recorder wants to see every step
            self._recorder = envstate.Recorder(environments, [None] * len(environments))
            self._recorder.load_state(state["data"], at)


def _is_environments_own(error: Exception) -> bool:
    """Whether an error was raised inside an environment, and not where Gymnasium or FDG use what it returned."""
    users = ("/gymnasium/wrappers/", "/gymnasium/vector/", "/gymnasium/core.py", "/numpy/", "/functools.py")
    below = [Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)[1:]]
    return not all(any(part in file for part in users) for file in below)


class SyncRows(_Readable):
    """Gymnasium's SyncVectorEnv, automatic resets disabled: environments in turn, in this process.

    It builds, checks, seeds and closes the rows. They are stepped here one by one, since its own `step` merges info
    dictionaries nobody reads and copies twice: 821 against 716 µs for 16 HalfCheetah, 168 against 132 for 16 CartPole.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        self.vector = SyncVectorEnv([maker(env_id)] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self._shape = (num_envs, *(self.observation_space.shape or ()))
        self._watched, self._id = False, env_id
        self.standing = np.zeros(self._shape, self.observation_space.dtype)

    def _environments(self) -> list[Any]:
        return list(self.vector.envs)

    def reset(self, seeds: list[int] | None) -> np.ndarray:
        each: Sequence[int | None] = seeds or [None] * self._shape[0]
        if self._recorder is not None:
            for row, seed in enumerate(each):
                self._recorder.resets(row, seed)
        try:
            first = self.vector.reset(seed=seeds)[0]  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            if not _is_environments_own(error):
                raise self._no_reset(getattr(self.vector, "_env_obs", ()), error) from error
            raise
        if not self._watched:
            self._watch(each)
        self.standing = first
        return first

    def _watch(self, seeds: Sequence[int | None]) -> None:
        """After the first reset, when an environment has all its parts: record actions if one of them is unreadable."""
        from fdg.runtime import envstate

        self._watched = True
        if self._recorder is None and envstate.read(self.vector.envs[:1])[0] == "none":
            self.fills = False  # a recorder wants to see every step
            self._recorder = envstate.Recorder(self._environments(), seeds)

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Step:
        recorder = self._recorder
        if recorder is not None:
            recorder.step(actions, live)
        rows = range(self._shape[0]) if live is None else np.flatnonzero(live).tolist()
        final, reward, terminated, truncated = self._advance(actions, rows)
        ended, first = terminated | truncated, final
        if ended.any():
            first = final.copy()
            self._reset_rows(ended, first)
        self.standing = first
        return final, first, reward, terminated, truncated

    def _reset_rows(self, ended: np.ndarray, first: np.ndarray) -> None:
        for row in np.flatnonzero(ended).tolist():
            if self._recorder is not None:
                self._recorder.resets(row)
            begun = None
            try:
                begun = self.vector.envs[row].reset()[0]
                first[row] = begun
            except (ValueError, TypeError) as error:
                if not _is_environments_own(error):
                    raise self._no_reset([begun], error) from error
                raise

    def begin(self, count: int, done: torch.Tensor, first: torch.Tensor) -> None:
        ended, begun = done.numpy().reshape(-1), first.numpy()
        self._reset_rows(ended, begun)
        self.standing[ended] = begun[ended]

    def load_state(self, state: dict[str, Any], at: np.ndarray | None) -> None:
        super().load_state(state, at)
        if at is not None:
            self.standing = at.copy()

    def _advance(
        self, actions: np.ndarray, rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take a step in some rows; observation, reward, terminated, truncated, of all rows."""
        count, envs = self._shape[0], self.vector.envs
        final, reward = self.standing.copy(), np.zeros(count)
        terminated, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        seen: Any = None
        try:
            for row in rows:
                seen = envs[row].step(actions[row])
                final[row], reward[row], terminated[row], truncated[row], _ = seen
        except (ValueError, TypeError) as error:
            if not _is_environments_own(error):
                raise self._no_step(seen, error) from error
            raise
        return final, reward, terminated, truncated

    def _no_step(self, seen: Any, error: Exception) -> UsageError:
        """What is wrong with what `step` of an environment returned."""
        write = "return observation, reward, terminated, truncated, info"
        below = traceback.extract_tb(error.__traceback__)[1:]
        if below or not isinstance(seen, tuple):  # a wrapper of Gymnasium's could not use it
            return UsageError(f"{self._id}: step returned what cannot be used ({error}): {write} from it")
        if len(seen) != 5:
            old = ", as Gym's did before version 0.26" if len(seen) == 4 else ""
            return UsageError(f"{self._id}: step returned {len(seen)} values{old}: {write} from it")
        return self._other_shape("step", seen[0]) or UsageError(
            f"{self._id}: step returned {', '.join(type(part).__name__ for part in seen)} ({error}): {write} from it, a number and "
            "two bools beside the observation"
        )

    def _other_shape(self, call: str, observation: Any) -> UsageError | None:
        shape, wanted = list(np.shape(observation)), list(self._shape[1:])
        if shape == wanted:
            return None
        return UsageError(
            f"{self._id}: {call} returned an observation of shape {shape}, and observation_space says {wanted}: make the "
            "two the same"
        )

    def _no_reset(self, seen: Sequence[Any], error: Exception) -> UsageError:
        """What is wrong with `reset` of an environment, by the observations it gave and how it failed."""
        for observation in seen:
            if observation is not None and (other := self._other_shape("reset", observation)):
                return other
        return UsageError(
            f"{self._id}: reset cannot be used ({error}): write def reset(self, *, seed=None, options=None), and return "
            f"observation, info from it, the observation of shape {list(self._shape[1:])} as observation_space says"
        )

    def close(self) -> None:
        self.vector.close()


class CartPoleRows(_Readable):
    """Gymnasium's own vectorised CartPole: all rows in a few numpy expressions.

    It knows only next-step resets. Finished rows are therefore given their new state here, drawn from its own
    generator as it would have done, and it never hears that one is waiting. Its `step` is written anew: the same
    operations in the same order, in compiled code (`fill`) or by half as many calls of numpy. The tests compare the bits.
    """

    private_random = True

    def __init__(self, env_id: str, num_envs: int) -> None:
        import gymnasium

        made = gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode="vector_entry_point")
        vector: Any = made.unwrapped
        self.vector = vector
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self._forces = np.array([-vector.force_mag, vector.force_mag])
        limits = np.array([[vector.x_threshold], [vector.theta_threshold_radians]])
        self._limits = np.repeat(limits, num_envs, axis=1)
        self._ones = np.ones(num_envs, np.float32)
        self._numbers = (
            *(vector.total_mass, vector.masspole, vector.polemass_length),
            *(vector.gravity, vector.length, vector.tau, 4.0 / 3.0),
        )
        # as arrays: numpy makes one of a Python number in every call, which takes half as long as the call itself
        self._one, self._longest = np.array(1, np.int32), np.array(vector.max_episode_steps, np.int32)
        self._arrays = [np.array(number) for number in self._numbers]
        self._change = np.empty((4, num_envs))
        """What a step adds to the state."""
        self._cosine, self._sine, self._inertia, self._pull = np.empty((4, num_envs))
        self.fills = native is not None
        self.standing = np.empty((num_envs, 4), np.float32)
        self._settings = np.array([*self._numbers, vector.force_mag, *limits[:, 0]])

    def fill(
        self, action: int, live: int, out: Sequence[int], returns: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, Episodes | None]:
        vector = self.vector
        angle = vector.state[2]
        cosine, sine = np.cos(angle, self._cosine), np.sin(angle, self._sine)
        found: tuple[int, Episodes | None] = native.cartpole(
            *(vector.state, vector.steps, cosine, sine, self._settings, self.standing, returns, lengths),
            *(len(lengths), vector.max_episode_steps, action, live, *out),
        )
        return found

    def begin(self, count: int, done: torch.Tensor, first: torch.Tensor) -> None:
        vector = self.vector
        drawn = vector.np_random.uniform(vector.low, vector.high, (4, count))
        state, steps, rows = vector.state, vector.steps, len(first)
        native.cartpole_begin(state, steps, self.standing, drawn, rows, done.data_ptr(), first.data_ptr())

    def _environments(self) -> list[Any]:
        return [self.vector]

    def reset(self, seeds: list[int] | None) -> np.ndarray:
        return self.vector.reset(seed=seeds[0] if seeds else None)[0]

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Step:
        vector = self.vector
        state = self._moved(vector.state, self._forces[actions])
        if live is not None:
            state = np.where(live, state, vector.state)
        outside = np.abs(state[::2]) > self._limits
        terminated = outside[0] | outside[1]
        vector.steps += self._one if live is None else live
        truncated = vector.steps >= self._longest
        vector.state = state
        final = first = state.T.astype(np.float32, order="C")
        ended = terminated | truncated
        if 1 in ended.tobytes():  # a fifth of the time of ended.any()
            count = np.count_nonzero(ended)
            state[:, ended] = vector.np_random.uniform(low=vector.low, high=vector.high, size=(4, count))
            vector.steps[ended] = 0
            first = state.T.astype(np.float32, order="C")
        return final, first, self._ones.copy() if live is None else live.astype(np.float32), terminated, truncated

    def _moved(self, state: np.ndarray, force: np.ndarray) -> np.ndarray:
        """The state one step of Euler's method later; its rows are x, its speed, theta, its speed."""
        mass, pole, leverage, gravity, length, tau, third = self._arrays
        change, angle, angular = self._change, state[2], state[3]
        cosine, sine = np.cos(angle, self._cosine), np.sin(angle, self._sine)
        push = np.square(angular, change[1])
        push *= leverage
        push *= sine
        push += force
        push /= mass
        inertia = np.square(cosine, self._inertia)
        inertia *= pole
        inertia /= mass
        np.subtract(third, inertia, inertia)
        inertia *= length
        turn = np.multiply(sine, gravity, change[3])
        turn -= np.multiply(cosine, push, self._pull)
        turn /= inertia
        pull = np.multiply(turn, leverage, self._pull)
        pull *= cosine
        pull /= mass
        push -= pull
        change[::2] = state[1::2]
        change *= tau
        return change + state

    def close(self) -> None:
        self.vector.close()


def _mujoco_rows(env_id: str, num_envs: int) -> Rows:
    from fdg.runtime.mujoco_rows import TASKS, MujocoRows

    if env_id not in TASKS:
        raise UsageError(f"the backend 'mujoco' serves {', '.join(TASKS)}, not {env_id}: leave it out")
    return MujocoRows(env_id, num_envs)


ADAPTERS: dict[str, Callable[[str, int], Rows]] = {
    "sync": SyncRows,
    "cartpole-vector": CartPoleRows,
    "mujoco": _mujoco_rows,
}
"""The backends by name."""

BACKENDS = {
    **dict.fromkeys(("CartPole-v0", "CartPole-v1"), "cartpole-vector"),
    **dict.fromkeys(("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"), "mujoco"),
}
"""Which backend serves an id: one made for it, where there is one, else `sync`."""


def backend_for(env_id: str) -> str:
    """The backend that serves an environment: part of the experiment, since each draws random numbers its own way."""
    return BACKENDS.get(env_id, "sync")


def make_rows(env_id: str, num_envs: int, backend: str) -> Rows:
    """Build a backend for a resolved name.

    Raises:
        UsageError: there is no such backend, or the environment cannot be made.
    """
    if backend not in ADAPTERS:
        raise UsageError(f"unknown environment backend {backend!r}: {did_you_mean(backend, ADAPTERS)}")
    import gymnasium

    try:
        with _mujoco_warnings_logged():
            return ADAPTERS[backend](env_id, num_envs)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"environment {env_id} cannot be made: {error}") from error


@contextmanager
def _mujoco_warnings_logged() -> Iterator[None]:
    """Log what MuJoCo says while reading a model, which it would print for every row and keep in a file beside us."""
    mujoco: Any = sys.modules.get("mujoco")
    if not hasattr(mujoco, "set_mju_user_warning"):
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(logging.getLogger(__name__).info)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
