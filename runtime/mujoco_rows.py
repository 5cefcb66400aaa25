"""MuJoCo's locomotion tasks, stepped without Gymnasium's Python around each simulation.

`MujocoRows` keeps Gymnasium's environments: they are made, seeded, reset and saved as ever. Only a step goes another way.
MuJoCo advances each row's simulation, with one model for all rows, which stays in the cache. Then observations,
rewards and ends are computed from Gymnasium's settings, by the same operations in the same order. So every bit is
what `env.step` would have given; the tests compare.

`fill` does all of it in compiled code (_native.c), on all CPUs that this process may use, however many threads that are
with the same bits. `step` does it with numpy, all rows at once and one simulation after the other, where there is no compiled code.

Helper threads work only where a CPU is idle. A worker with a CPU of its own has one too: when another worker has finished
its episodes, or waits, the helper works on that one's CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdg.capacity import cores, lent
from fdg.runtime.backends import Episodes, SyncRows
from fdg.runtime.mujoco_model import quick_model
from fdg.runtime.native import native

ENOUGH = 80e-6
"""Seconds of work for a thread; with less to do, waking it takes longer than it saves."""


class Task(NamedTuple):
    """What tells one locomotion task from another; `one` is an environment of it, for its settings."""

    skipped: int
    """Positions at the front that are not observed."""
    clipped: bool
    """Whether velocities are observed within -10 … 10."""
    contacts: bool
    """Whether forces of contacts are observed and cost something."""
    healthy: Callable[[Any, np.ndarray, np.ndarray], np.ndarray] | None
    """Which rows are in good health, from positions and velocities; None: there is no such thing."""


def _hopper(one: Any, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
    low, high = one._healthy_state_range
    good = _within(one._healthy_z_range, qpos[:, 1]) & _within(one._healthy_angle_range, qpos[:, 2])
    return good & ((low < qpos[:, 2:]) & (qpos[:, 2:] < high)).all(1) & ((low < qvel) & (qvel < high)).all(1)


def _walker(one: Any, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
    return _within(one._healthy_z_range, qpos[:, 1]) & _within(one._healthy_angle_range, qpos[:, 2])


def _ant(one: Any, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
    (low, high), height = one._healthy_z_range, qpos[:, 2]
    good = (low <= height) & (height <= high)
    if math.isfinite(np.add.reduce(qpos, axis=None) + np.add.reduce(qvel, axis=None)):  # as nearly always
        return good
    return good & np.isfinite(qpos).all(1) & np.isfinite(qvel).all(1)


def _within(limits: tuple[float, float], values: np.ndarray) -> np.ndarray:
    return (limits[0] < values) & (values < limits[1])


def _clipped(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """np.clip in half its time."""
    within = np.maximum(values, low)
    return np.minimum(within, high, out=within)


TASKS = {
    "HalfCheetah-v5": Task(1, False, False, None),
    "Hopper-v5": Task(1, True, False, _hopper),
    "Walker2d-v5": Task(1, True, False, _walker),
    "Ant-v5": Task(2, False, True, _ant),
}


class MujocoRows(SyncRows):
    """Rows of one of `TASKS`."""

    private_random = True

    def __init__(self, env_id: str, num_envs: int) -> None:
        import mujoco

        super().__init__(env_id, num_envs)
        self.task = TASKS[env_id]
        self._step, self._forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        inner: list[Any] = [env.unwrapped for env in self.vector.envs]
        self.one = inner[0]
        for env in inner:
            env.model = self.one.model
        self._frames, self._seconds_per_frame = self.one.frame_skip, self.one.dt
        model = self._model = quick_model(self.one)
        self._qpos, self._qvel = np.zeros((num_envs, model.nq)), np.zeros((num_envs, model.nv))
        self._path = np.zeros((2, num_envs))
        self._contacts = np.zeros((num_envs, model.nbody, 6)) if self.task.contacts else None
        self._seconds = 0.0  # for a row, as last measured
        self.fills = native is not None
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_bound_for": None}  # a copy has other memory, maybe in another process

    def _bind(self) -> None:
        """Look where the simulations are. A copy of these rows has others."""
        import mujoco

        self._functions = _functions(mujoco, self.task.contacts)
        self.fills = self.fills and bool(self._functions)
        inner: list[Any] = [env.unwrapped for env in self.vector.envs]
        self._bound_for = id(self)
        self._simulations = [env.data for env in inner]
        self._views = [self._view(env.data) for env in inner]
        if self.fills:
            memory = [[array.ctypes.data for array in view] for view in self._views]
            each = zip(self._simulations, memory, strict=True)
            self._memory = np.array([(data._address, *arrays) for data, arrays in each], np.int64)
            self._sizes, self._numbers = _settings(self.task, self.one, self._model)
            space: Any = self.action_space
            self._low, self._high = (np.array(bound, np.float32) for bound in (space.low, space.high))

    def fill(
        self, action: int, live: int, out: Sequence[int], returns: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, Episodes | None]:
        if self._bound_for != id(self):
            self._bind()
        if self.standing.dtype != np.float32:
            self.standing = self.standing.astype(np.float32)
        rows, width = self.standing.shape
        moved, episodes, self._seconds = native.locomotion(
            *(self._memory, self._sizes, self._numbers, self._low, self._high, self.standing, returns, lengths),
            *(self.vector.envs, rows, width, self._model._address, *self._functions, self._frames),
            *(self._helpers_for(rows), action, live, *out),
        )
        return moved, episodes

    def _view(self, data: Any) -> tuple[Any, ...]:
        """The memory of a row's simulation. The distance covered is that of the first joint, or of the torso as of the last
        forward pass."""
        place = data.xpos[self.one._main_body] if self.task.contacts else data.qpos
        return data.ctrl, place, data.qpos, data.qvel, data.cfrc_ext

    def _advance(
        self, actions: np.ndarray, rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if self._bound_for != id(self):
            self._bind()
        count = len(self._simulations)
        if len(rows) == count:
            return self._moved(actions, rows)
        which = np.array(rows, np.intp)
        observation, *others = self._moved(actions[which], rows)
        final = self.standing.copy()
        final[which] = observation
        full = [np.zeros(count, part.dtype) for part in others]
        for everywhere, part in zip(full, others, strict=True):
            everywhere[which] = part
        return final, full[0], full[1], full[2]

    def _moved(self, actions: np.ndarray, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What comes of an action for each of some rows, and of them alone."""
        task, one, count = self.task, self.one, len(rows)
        truncated = np.zeros(count, np.bool_)
        self._simulate(rows, actions, truncated)
        qpos, qvel, (before, after) = self._qpos[:count], self._qvel[:count], self._path[:, :count]
        reward = after - before
        reward /= self._seconds_per_frame
        reward *= one._forward_reward_weight
        if task.healthy is None:
            terminated = np.zeros(count, np.bool_)
        else:
            healthy = task.healthy(one, qpos, qvel)
            reward += healthy * one._healthy_reward
            terminated = ~healthy if one._terminate_when_unhealthy else np.zeros(count, np.bool_)
        cost = np.add.reduce(np.square(actions), axis=1)
        cost = one._ctrl_cost_weight * cost
        parts = [qpos[:, task.skipped :], _clipped(qvel, -10, 10) if task.clipped else qvel]
        if self._contacts is not None:
            forces = _clipped(self._contacts[:count], *one._contact_force_range).reshape(count, self._contacts[0].size)
            parts.append(forces[:, 6:])  # without the world's own
            cost = cost + one._contact_cost_weight * np.add.reduce(np.square(forces), axis=1)
        reward -= cost
        return np.concatenate(parts, axis=1), reward, terminated, truncated

    def _simulate(self, rows: Sequence[int], actions: np.ndarray, truncated: np.ndarray) -> None:
        """Advance some rows."""
        all_qpos, all_qvel, contacts, views = self._qpos, self._qvel, self._contacts, self._views
        before, after = self._path
        for at, row in enumerate(rows):
            control, place, _, _, _ = views[row]
            control[:], before[at] = actions[at], place[0]
        for row in rows:
            self._step(self._model, self._simulations[row], self._frames)
            if contacts is not None:
                self._forces(self._model, self._simulations[row])
        for at, row in enumerate(rows):
            _, place, all_qpos[at], all_qvel[at], forces = views[row]
            after[at] = place[0]
            if contacts is not None:
                contacts[at] = forces
            limit: Any = self.vector.envs[row]  # the outermost wrapper: Gymnasium's time limit
            limit._elapsed_steps += 1
            truncated[at] = limit._elapsed_steps >= limit._max_episode_steps

    def _helpers_for(self, rows: int) -> int:
        """How many helpers have enough to do; they are there when this returns."""
        count = int(rows * self._seconds / ENOUGH) - 1
        if count < 1 or not hasattr(os, "SCHED_IDLE"):  # Linux has it
            return 0
        count = min(max(cores(), 2 if lent() else 1) - 1, count)
        while native.helpers() < count:
            try:
                thread = native.helper()
            except OSError:  # the system has no thread left for us
                return int(native.helpers())
            # only where a CPU has nothing else to do: a helper that is not let run takes no row, and nobody waits for it
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, os.sched_getaffinity(0) | lent())
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        return count


def _functions(mujoco: Any, contacts: bool) -> list[int]:
    """Where MuJoCo's own functions are: a step, and the forces of contacts if wanted; and where it keeps the one that tells
    the time, for a profile of its steps. Empty if they are not found."""
    try:
        library = ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco.*"))))
        step, forces = library.mj_step, library.mj_rnePostConstraint
        clock = ctypes.addressof(ctypes.c_void_p.in_dll(library, "mjcb_time"))
    except (StopIteration, OSError, AttributeError, ValueError):
        return []
    found = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (step, forces)]
    return [found[0], found[1] if contacts else 0, clock]


def _settings(task: Task, one: Any, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """What _native.c wants to know of a task, in the order of its two lists."""
    kinds: list[Any] = [None, _hopper, _walker, _ant]
    health = kinds.index(task.healthy)
    forces = 6 * model.nbody if task.contacts else 0
    ends = task.healthy is not None and one._terminate_when_unhealthy
    sizes = [model.nq, model.nv, model.nu, forces, task.skipped, task.clipped, health, ends]

    def pair(name: str) -> tuple[float, float]:
        return tuple(getattr(one, name, (0.0, 0.0)))  # type: ignore[return-value]

    ranges = [pair(f"_healthy_{name}_range") for name in ("z", "angle", "state")]
    numbers = [one.dt, one._forward_reward_weight, getattr(one, "_healthy_reward", 0.0), one._ctrl_cost_weight]
    numbers += [getattr(one, "_contact_cost_weight", 0.0), *pair("_contact_force_range")]
    numbers += [number for limits in ranges for number in limits]
    return np.array(sizes, np.int64), np.array(numbers, np.float64)
