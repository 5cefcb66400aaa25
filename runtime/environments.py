"""Environments: each logical actor's vector environment, spoken to in TorchRL's keys.

    reset()     observation, done, terminated, truncated                                  batch [E], names ["env"]
    step(td)    the same td, with next: observation, reset_observation, reward, done, terminated, truncated
    step_mdp    the root of the following step

A row whose episode ends is reset within that very step. `next.observation` stays the true final observation, and
`next.reset_observation` is where the row goes on: the first observation of its new episode, or `next.observation` again
for a row that did not end. So no row of an automatic reset exists, for an algorithm to insert, count or learn from.

A partial step, as TorchRL has it: where `td["_step"]` is False, a row stays where it is. It costs nothing and is no
frame; its `next` is where it stands, without reward and not done. The entry is taken out of `td`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from fdg.errors import CheckpointError, UsageError, did_you_mean
from fdg.runtime.backends import ALIASES, BACKENDS, Rows, Step, backend_for, make_rows, resolve_env
from fdg.runtime.values import plain

if TYPE_CHECKING:
    import gymnasium

__all__ = [
    "ALIASES",
    "BACKENDS",
    "EnvSpec",
    "Environment",
    "backend_for",
    "begin_rows",
    "make_env",
    "resolve_env",
    "stack",
    "step_mdp",
]

DONE_KEYS = ("done", "terminated", "truncated")
_COUNTERS = ("frames", "_started", "_restarted")
_NOT_CARRIED = ("next", "action", "reward")
_TENSORS_ALONE = {torch.Tensor}
_NAMES = ["env"]
Data = TypeVar("Data")


@dataclass(frozen=True)
class EnvSpec:
    """What an algorithm may know of its environment: the spaces of a single one, and who serves them."""

    id: str
    backend: str
    num_envs: int
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    if not TYPE_CHECKING:  # type checkers know the fields

        def __getattr__(self, name: str) -> Any:
            known = {field.name for field in fields(self)} | {name for name in dir(EnvSpec) if not name.startswith("_")}
            raise AttributeError(f"EnvSpec has no {name!r}: {did_you_mean(name, known)}")

    @property
    def obs_dim(self) -> int:
        """How many numbers an observation has."""
        return math.prod(self.observation_space.shape or ())

    @property
    def features(self) -> int:
        """`obs_dim`, where linear layers can take an observation as it is; a UsageError for images and bytes."""
        space = self.observation_space
        if len(space.shape or ()) != 1 or space.dtype == np.uint8:
            wrapped = "gymnasium.wrappers.FlattenObservation({})"
            if space.dtype == np.uint8:
                wrapped = f"gymnasium.wrappers.DtypeObservation({wrapped}, np.float32)"
            raise UsageError(
                f"{self.id} observes {space}, and a row of floats is needed: {_returning(self.id, wrapped)}, or write an algorithm "
                "with a network for such observations"
            )
        return self.obs_dim

    @property
    def discrete(self) -> bool:
        """Whether an action is one of `n_actions`; otherwise it is `action_dim` numbers."""
        return hasattr(self.action_space, "n")

    @property
    def n_actions(self) -> int:
        """How many discrete actions there are; a UsageError where actions are continuous."""
        if not self.discrete:
            raise UsageError(f"{self.id} has continuous actions {self.action_space}, discrete ones are needed")
        return int(self.action_space.n)  # type: ignore[attr-defined]

    @property
    def action_dim(self) -> int:
        """How many numbers a continuous action has; a UsageError where actions are discrete."""
        if self.discrete:
            raise UsageError(f"{self.id} has discrete actions {self.action_space}, continuous ones are needed")
        return math.prod(self.action_space.shape or ())


def make_env(name: str, num_envs: int, seed: int, *, backend: str | None = None) -> Environment:
    """E environments of one kind; rows get seeds of their own, all derived from `seed`.

    >>> env = make_env("cartpole", 2, seed=1)
    >>> env.reset()["observation"].shape, env.spec.n_actions, env.spec.backend
    (torch.Size([2, 4]), 2, 'cartpole-vector')

    Raises:
        UsageError: the name, a missing package, the numbers or the environment's spaces do not allow it.
    """
    env_id = resolve_env(name)
    backend = backend or backend_for(env_id)
    if num_envs < 1 or seed < 0:
        raise UsageError(f"{name}: envs is {num_envs}, seed is {seed}; envs must be at least 1, seed at least 0")
    rows = make_rows(env_id, num_envs, backend)
    return Environment(EnvSpec(env_id, backend, num_envs, rows.observation_space, rows.action_space), rows, seed)


class Environment:
    """A vector environment of `spec.num_envs` rows.

    `episodes` holds (return, length) of each finished episode until drained; `frames` counts steps of single rows.
    """

    def __init__(self, spec: EnvSpec, rows: Rows, seed: int) -> None:
        _check_spaces(spec)
        self.spec, self.frames = spec, 0
        self.episodes: list[tuple[float, int]] = []
        self._rows, self._seed = rows, seed
        self.private_random = rows.private_random
        """Whether its steps need no random stream of their own."""
        self._size = torch.Size([spec.num_envs])
        self._one = np.array(1)  # an array: numpy would make one of a Python number in every step
        self._dtype = np.uint8 if spec.observation_space.dtype == np.uint8 else np.float32
        self._returns, self._lengths = np.zeros(spec.num_envs), np.zeros(spec.num_envs, np.int64)
        self._started = self._restarted = False
        self._at: np.ndarray | None = None  # the observations that rows go on from
        self._cut: Step | None = None
        """What the next step is, instead of one: the end of episodes that could not be restored."""
        space: Any = spec.action_space
        self._discrete = spec.discrete
        self._first_action, self._n = (int(space.start), int(space.n)) if spec.discrete else (0, 0)
        self._beyond = np.array(self._n, np.uint64)
        self._bounds: Any = (
            None if spec.discrete else [np.stack([at] * spec.num_envs) for at in (space.low, space.high)]
        )
        self._action_shape = (spec.num_envs, *space.shape)
        self._action_dtype = torch.int64 if spec.discrete else torch.float32
        self._observed = (spec.num_envs, *(spec.observation_space.shape or ()))

    def reset(self, seed: int | None = None) -> TensorDict:
        """Begin new episodes in all rows; the first time, or when a seed is given, from the seed."""
        if seed is None and not self._started:
            seed = self._seed
        seeds = None
        if seed is not None:
            # 31 bits: a seed that every environment takes
            states = np.random.SeedSequence(seed).generate_state(self.spec.num_envs + 2) >> 1
            action_seed, observation_seed, *seeds = states.tolist()
            self.spec.action_space.seed(action_seed)
            self.spec.observation_space.seed(observation_seed)
        self._at = self._rows.reset(seeds)
        root = {"observation": self._observation(self._at)}
        root.update({key: torch.zeros(self.spec.num_envs, 1, dtype=torch.bool) for key in DONE_KEYS})
        self._returns[:], self._lengths[:] = 0, 0
        self._started, self._restarted, self._cut = True, False, None
        return _tensordict(root, self._size, [*_NAMES])

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Take `td["action"]` in every row; returns `td` with `next` filled. Other entries of `next` are kept."""
        entries = self._check(td)
        following = self._filled(td, entries) if self._rows.fills else None
        if following is None:
            following = self._stepped(td, entries)
        written = entries.get("next")  # what the actor wrote for the next step, such as a recurrent state
        if written is not None:
            following = {**dict(written.items()), **following}
        _put(td, "next", _tensordict(following, self._size, [*_NAMES]))
        return td

    def _stepped(self, td: TensorDictBase, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What follows, by way of numpy."""
        actions, cut = self._actions(td, entries.get("action")), self._cut
        live = self._live(td) if "_step" in entries else None
        final, first, reward, terminated, truncated = self._rows.step(actions, live) if cut is None else cut
        self._at, self._cut = first, None
        ended = terminated | truncated
        self.frames += self.spec.num_envs if live is None else int(np.count_nonzero(live))
        self._returns += reward
        self._lengths += self._one if live is None else live
        self._restarted = 1 in ended.tobytes()  # a fifth of the time of ended.any()
        if self._restarted:
            if cut is None:
                self.episodes += zip(self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True)
            self._returns[ended], self._lengths[ended] = 0, 0
        observation = final.astype(self._dtype, order="C")  # a copy in any case
        return {
            "observation": torch.from_numpy(observation),
            "reset_observation": torch.from_numpy(observation.copy()) if first is final else self._observation(first),
            "reward": torch.from_numpy(reward.astype(np.float32, copy=False)[:, None]),
            "done": torch.from_numpy(ended[:, None]),
            "terminated": torch.from_numpy(terminated[:, None]),
            "truncated": torch.from_numpy(truncated[:, None]),
        }

    def _filled(self, td: TensorDictBase, entries: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """What follows, by compiled code; None if what was given needs a second look."""
        action: Any = entries.get("action")
        live = entries.get("_step")
        if self._cut is not None or not plain(action, self._action_dtype, self._action_shape):
            return None
        if (
            torch._C._len_torch_function_stack()
        ):  # such as torch.set_default_device: what is made below would be elsewhere
            return None
        if live is not None and not plain(live, torch.bool, self._size):
            return None
        rows = self.spec.num_envs
        following = {
            "observation": torch.empty(self._observed, dtype=torch.float32),
            "reset_observation": torch.empty(self._observed, dtype=torch.float32),
            "reward": torch.empty(rows, 1, dtype=torch.float32),
            "done": torch.empty(rows, 1, dtype=torch.bool),
            "terminated": torch.empty(rows, 1, dtype=torch.bool),
            "truncated": torch.empty(rows, 1, dtype=torch.bool),
        }
        out = [part.data_ptr() for part in following.values()]
        moved, episodes = self._rows.fill(
            action.data_ptr(), 0 if live is None else live.data_ptr(), out, self._returns, self._lengths
        )
        if moved < 0:
            return None
        if live is not None:
            _take_out(td, "_step")
        self.frames += moved
        self._restarted = episodes is not None
        if episodes is not None:
            self.episodes += episodes
            self._rows.begin(len(episodes), following["done"], following["reset_observation"])
        self._at = self._rows.standing
        return following

    def drain_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes finished since the last call; rows in order within a step."""
        episodes, self.episodes = self.episodes, []
        return episodes

    def state(self) -> dict[str, Any]:
        """Everything that decides how it goes on, for a checkpoint: values that `checkpoint.encode` takes."""
        spaces = (self.spec.action_space, self.spec.observation_space)
        generators = [getattr(space, "_np_random", None) for space in spaces]
        own = {name: getattr(self, name) for name in _COUNTERS}
        return {
            "id": self.spec.id,
            "backend": self.spec.backend,
            "envs": self.spec.num_envs,
            "counters": {**own, "episodes": list(self.episodes)},
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "spaces": [None if random is None else random.bit_generator.state for random in generators],
            "at": None if self._at is None else self._at.copy(),
            "cut": self._cut is not None,
            "rows": self._rows.state() if self._started else None,
        }

    def load_state(self, state: dict[str, Any]) -> str | None:
        """Go on where another environment of the same make was. Only for one that was just made.

        Returns None if all rows are where they were, to the bit. Else the reason why that could not be: then all rows
        begin new episodes, and the next step says so by ending the old ones (truncated, at their last observation and
        without reward); they are not counted as finished.

        Raises:
            CheckpointError: the state is of other environments.
        """
        here = {"id": self.spec.id, "backend": self.spec.backend, "envs": self.spec.num_envs}
        for name, value in here.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the environments' {name} is {state[name]!r} in the checkpoint and {value!r} here: resume with the "
                    "settings of the run that wrote it"
                )
        why = None
        if state["rows"] is not None:
            why = "they were not there when the checkpoint was written" if state["cut"] else self._load_rows(state)
        for name, value in state["counters"].items():
            setattr(self, name, list(value) if name == "episodes" else value)
        self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
        self._at = state["at"]
        if why is not None:
            self._cut_off()
        for space, saved in zip((self.spec.action_space, self.spec.observation_space), state["spaces"], strict=True):
            if saved is None:
                space._np_random = None  # type: ignore[assignment]
            else:
                space.np_random.bit_generator.state = saved
        return why

    def _load_rows(self, state: dict[str, Any]) -> str | None:
        """Why the rows cannot go on; None if they can."""
        try:
            self._rows.load_state(state["rows"], state["at"])
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # of the environment itself, while it is brought back
            return f"{type(error).__name__}: {error}"
        return None

    def _cut_off(self) -> None:
        """Begin new episodes, whose seeds no other ones had, and let the next step tell."""
        rows, last = self.spec.num_envs, self._at
        assert last is not None
        seeds = np.random.SeedSequence([self._seed, self.frames]).generate_state(rows) >> 1
        first = np.array(self._rows.reset(seeds.tolist()))
        self._cut = last, first, np.zeros(rows), np.zeros(rows, np.bool_), np.ones(rows, np.bool_)

    def close(self) -> None:
        """Release what the rows hold."""
        self._rows.close()

    def _observation(self, array: np.ndarray) -> torch.Tensor:
        """A copy of its own, in row order: the layout in memory changes the last bits of a matrix product."""
        return torch.from_numpy(array.copy() if array.dtype == self._dtype else array.astype(self._dtype, order="C"))

    def _check(self, td: TensorDictBase) -> Mapping[str, Any]:
        """The entries of td. Refuse what cannot be stepped, before the environment moves."""
        if type(td) is not TensorDict and not isinstance(td, TensorDictBase):
            raise UsageError(f"env_step takes a TensorDict, got {type(td).__name__}: return td from act")
        if not self._started:
            raise UsageError("env_step before env_reset: write td = self.msrl.env_reset() first")
        if td.batch_size != self._size:
            raise UsageError(
                f"env_step takes all rows of the environment, batch size {list(self._size)}, "
                f"got {list(td.batch_size)}: pass on what env_reset or step_mdp returned"
            )
        entries = _entries(td)
        following = entries.get("next")
        if following is not None and "reset_observation" in _entries(following):
            raise UsageError(
                "env_step: td is what the last env_step returned, still with its 'next': its observation is that of the step before; "
                "write td = fdg.step_mdp(td) after env_step"
            )
        if self._restarted and (done := td.get("done", None)) is not None and done.any():
            raise UsageError(
                f"env_step: rows {done.flatten().nonzero().flatten().tolist()} are done, and the environment has begun "
                "new episodes there: write td = fdg.step_mdp(td) after env_step"
            )
        return entries

    def _live(self, td: TensorDictBase) -> np.ndarray | None:
        """Which rows are to move; None: all of them."""
        given = _take_out(td, "_step")
        if not isinstance(given, torch.Tensor) or given.dtype != torch.bool or given.numel() != self.spec.num_envs:
            seen = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise UsageError(
                f"env_step: td['_step'] is {seen}; it says which rows are to move, a bool tensor [{self.spec.num_envs}]"
            )
        live = given.numpy(force=True).reshape(-1)
        return None if live.all() else live

    def _actions(self, td: TensorDictBase, action: Any) -> np.ndarray:
        """The environment's actions: integers [E], or numbers within the space's bounds [E, …]."""
        if action is None:
            raise UsageError(f"env_step needs an action, td has {_keys(td)}: write td['action'] = … in act")
        given = action.numpy(force=True)
        return self._indices(given) if self._discrete else self._continuous(given)

    def _continuous(self, given: np.ndarray) -> np.ndarray:
        if given.shape != self._action_shape:
            raise UsageError(f"{_seen(given)}, {self.spec.id} takes {list(self._action_shape)}")
        if math.isnan(np.minimum.reduce(given, axis=None)):
            row = np.isnan(given).reshape(len(given), -1).any(1).argmax()
            raise UsageError(f"env_step: the action of row {row} is {given[row].tolist()}: has the policy diverged?")
        low, high = self._bounds
        within = np.maximum(given, low)
        np.minimum(within, high, out=within)
        return within if within.dtype == low.dtype else within.astype(low.dtype)

    def _indices(self, given: np.ndarray) -> np.ndarray:
        rows, n, index = self.spec.num_envs, self._n, given
        if given.shape == self._action_shape:
            pass
        elif given.shape == (rows, 1):
            index = given[:, 0]
        elif given.shape == (rows, n):
            if (np.count_nonzero(given, axis=1) != 1).any():
                raise UsageError(f"{_seen(given)}, not one-hot ({given[0].tolist()}): write q.argmax(-1)")
            index = given.argmax(1)
        if index.shape != (rows,) or index.dtype.kind not in "iu":
            raise UsageError(f"{_seen(given)}, {self.spec.id} takes integers [{rows}] or one-hot rows [{rows}, {n}]")
        index = index.astype(np.int64, copy=False)
        if 1 in (index.view(np.uint64) >= self._beyond).tobytes():  # seen as unsigned, a negative number is a huge one
            raise UsageError(f"env_step: actions {index.tolist()}, {self.spec.id} takes 0 to {n - 1}")
        return index + self._first_action if self._first_action else index


def _seen(action: np.ndarray) -> str:
    return f"env_step: the action is {action.dtype} of shape {list(action.shape)}"


def _keys(td: TensorDictBase) -> str:
    return ", ".join(map(str, td.keys()))


def _returning(env_id: str, what: str) -> str:
    """What to write so that an environment comes in a wrapper."""
    _, is_file, function = env_id.partition(".py:")
    if is_file:
        return f"return {what.format('env')} from `{function}`"
    return f"write a FILE.py:make_env that returns {what.format(f'gymnasium.make({env_id!r})')}"


def _check_spaces(spec: EnvSpec) -> None:
    from gymnasium.spaces import Box, Discrete

    if not isinstance(spec.observation_space, Box):
        raise UsageError(
            f"{spec.id} observes {spec.observation_space}, only Box can be served: "
            + _returning(spec.id, "gymnasium.wrappers.FlattenObservation({})")
        )
    action = spec.action_space
    if not isinstance(action, Discrete) and not (isinstance(action, Box) and action.dtype.kind == "f"):
        raise UsageError(
            f"{spec.id} acts in {action}, only Discrete and Box of floats can be served: "
            + _returning(spec.id, "{} in a gymnasium.ActionWrapper")
        )


def _tensordict(
    source: dict[str, Any], batch_size: torch.Size, names: list[str] | None, device: torch.device | None = None
) -> TensorDict:
    """A TensorDict of entries known to fit: what its `_new_unsafe` makes, which would spend a µs more on looking at them."""
    made = TensorDict.__new__(TensorDict)
    made._tensordict, made._batch_size, made._td_dim_names, made._device = source, batch_size, names, device
    return made


def _entries(td: TensorDictBase) -> Mapping[str, Any]:
    """The entries of a TensorDict, as it holds them: its own methods take a µs each."""
    return td._tensordict if type(td) is TensorDict else dict(td.items())  # type: ignore[attr-defined]


def _take_out(td: TensorDictBase, key: str) -> Any:
    """`td.pop(key)`."""
    plain = type(td) is TensorDict and not td.is_locked
    return td._tensordict.pop(key) if plain else td.pop(key)  # type: ignore[attr-defined]


def _put(td: TensorDictBase, key: str, value: TensorDict) -> None:
    """`td.set(key, value)` of rows of environments, without checks where nothing is left to check."""
    if type(td) is TensorDict and not td.is_locked and td.device is None and td.names == _NAMES:
        td._tensordict[key] = value  # type: ignore[attr-defined]
    else:
        td.set(key, value)


def step_mdp(td: TensorDictBase) -> TensorDict:
    """The root of the following step, from what `env_step` returned.

    As TorchRL's `step_mdp`: `next` moves to the root, action and reward are dropped, other entries stay. In addition,
    rows whose episode ended stand at the first observation of their next one, not done.

    Raises:
        UsageError: `td` has no `next`.
    """
    entries = _entries(td)
    following = entries.get("next")
    if following is None:
        raise UsageError(f"step_mdp needs what env_step returned, td has no 'next' ({_keys(td)})")
    root = {**entries, **_entries(following)}
    for key in _NOT_CARRIED:
        root.pop(key, None)
    if {*map(type, root.values())} != _TENSORS_ALONE:
        root = _merged(td, following)
    if "reset_observation" in root:
        root["observation"] = root.pop("reset_observation")
        for key in DONE_KEYS:
            if key in root:
                root[key] = _cleared(root[key])
    names = following.names
    return _tensordict(root, following.batch_size, list(names) if any(names) else None, following.device)


def _merged(td: TensorDictBase, following: TensorDictBase) -> dict[str, Any]:
    """The entries of the following step's root, where some are TensorDicts themselves, or no tensors."""
    root: dict[str, Any] = {}
    for part in (td, following):
        for key, value in _entries(part).items():
            if key in _NOT_CARRIED:
                continue
            if isinstance(value, torch.Tensor) or is_non_tensor(value):
                root[key] = value
            elif key in root:
                root[key].update(value.copy())
            elif not value.is_empty():
                root[key] = value.copy()  # its structure: root and next must not share a nested TensorDict
    return root


def _cleared(flag: torch.Tensor) -> torch.Tensor:
    """`torch.zeros_like(flag)`, in half its time where it is one of the environment's own."""
    if flag.dtype is torch.bool and flag.is_cpu:
        return torch.from_numpy(np.zeros(flag.shape, np.bool_))
    return torch.zeros_like(flag)


def stack(steps: Sequence[TensorDictBase]) -> TensorDictBase:
    """`torch.stack(steps)` for the steps of a rollout, each a TensorDict of the same entries, in a fraction of its time.

    >>> env = make_env("cartpole", 2, seed=1)
    >>> stack([env.reset(), env.reset(), env.reset()]).batch_size
    torch.Size([3, 2])
    """
    first: Any = steps[0] if len(steps) else None
    each = [_entries(step) for step in steps if type(step) is TensorDict and _alike(step, first)]
    if not each or len(each) < len(steps) or any(entries.keys() != each[0].keys() for entries in each):
        return torch.stack(list(steps))  # type: ignore[call-overload, no-any-return]
    stacked: dict[str, Any] = {}
    for key, value in each[0].items():
        values = [entries[key] for entries in each]
        stacked[key] = stack(values) if type(value) is TensorDict else torch.stack(values)
    names = [None, *first.names] if any(first.names) else None
    size = torch.Size([len(steps), *first.batch_size])
    return TensorDict._new_unsafe(stacked, batch_size=size, names=names, device=first.device)


def _alike(a: TensorDictBase, b: TensorDictBase) -> bool:
    return a.batch_size == b.batch_size and a.device == b.device and a.names == b.names


def begin_rows(td: Data) -> Data:
    """Turn rows that ended, as TorchRL's `step_mdp` leaves them, into rows that begin; in place, `td` is returned.

    Anything else is returned as it is. After FDG's own `step_mdp` there is nothing to do.
    """
    if type(td) is TensorDict and "reset_observation" not in td._tensordict:  # type: ignore[attr-defined]
        return td
    if not isinstance(td, TensorDictBase) or "reset_observation" not in td.keys():  # noqa: SIM118
        return td
    first = td.get("reset_observation")
    del td["reset_observation"]
    flags = {key: flag for key in DONE_KEYS if (flag := td.get(key, None)) is not None}
    ended = flags.get("done")
    for flag in flags.values() if ended is None else ():  # TorchRL's exclude_done drops done, and only that
        ended = flag if ended is None else ended | flag
    if ended is None:
        td.set("observation", first)
    elif ended.any():
        mask = ended.reshape(first.shape[0], *[1] * (first.ndim - 1))
        td.set("observation", torch.where(mask, first, td.get("observation")))
        for key, flag in flags.items():
            td.set(key, torch.zeros_like(flag))
    return td
