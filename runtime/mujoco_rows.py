"""MuJoCo's locomotion tasks, stepped without Gymnasium's Python around each simulation.

`MujocoRows` keeps Gymnasium's environments: they are made, seeded, reset and saved as ever. Only a step goes another way.
MuJoCo advances each row's simulation, on all CPUs that this process may use (it lets go of Python's lock meanwhile), with
one model for all rows, which stays in the cache. Then observations, rewards and ends of all rows are computed at once, from
Gymnasium's settings, by the same operations in the same order. So every bit is what `env.step` would have given, however
many threads there are; the tests compare.

Helper threads work only where a CPU is idle. A worker with a CPU of its own has one too: when another worker has finished
its episodes, or waits, the helper works on that one's CPU.

    rows                  `sync`     here, 1 CPU    here, 2 CPUs
    64 HalfCheetah-v5     22 k       29 k           50 k frames/s
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fdg.capacity import cores, lent
from fdg.runtime.backends import SyncRows
from fdg.runtime.mujoco_model import quick_model

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


class Job:
    """Rows of one step, of which each thread takes the next that nobody has."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows: Iterator[int] = iter(rows)
        self.count = len(rows)
        self.finished: list[int] = []
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        """From each helper, when it found no more rows: what it raised."""

    def wait(self) -> None:
        """Until every row is finished. A helper that comes when all are taken is not waited for."""
        while len(self.finished) < self.count:
            if (error := self.done.get()) is not None:
                raise error


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
        self._simulations = [env.data for env in inner]
        self._views = [self._view(env.data) for env in inner]
        model = self._model = quick_model(self.one)
        self._qpos, self._qvel = np.zeros((num_envs, model.nq)), np.zeros((num_envs, model.nv))
        self._path = np.zeros((2, num_envs))
        self._contacts = np.zeros((num_envs, model.nbody, 6)) if self.task.contacts else None
        self._helpers: list[threading.Thread] = []
        self._seconds = 0.0  # for a row, as last measured
        self._work: SimpleQueue[Job | None] = SimpleQueue()

    def _view(self, data: Any) -> tuple[Any, ...]:
        """The memory of a row's simulation. The distance covered is that of the first joint, or of the torso as of the last
        forward pass."""
        place = data.xpos[self.one._main_body] if self.task.contacts else data.qpos
        return data.ctrl, place, data.qpos, data.qvel, data.cfrc_ext

    def _advance(
        self, actions: np.ndarray, rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        count = len(self._simulations)
        if len(rows) == count:
            return self._moved(actions, rows)
        which = np.array(rows, np.intp)
        observation, *others = self._moved(actions[which], rows)
        final = self._standing.copy()
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
        """Advance some rows. What Python does is done before and after: between two steps of MuJoCo, threads would wait
        for its lock, and sleeping takes longer than a row."""
        all_qpos, all_qvel, contacts, views = self._qpos, self._qvel, self._contacts, self._views
        before, after = self._path
        for at, row in enumerate(rows):
            control, place, _, _, _ = views[row]
            control[:], before[at] = actions[at], place[0]
        self._run_timed(rows)
        for at, row in enumerate(rows):
            _, place, all_qpos[at], all_qvel[at], forces = views[row]
            after[at] = place[0]
            if contacts is not None:
                contacts[at] = forces
            limit: Any = self.vector.envs[row]  # the outermost wrapper: Gymnasium's time limit
            limit._elapsed_steps += 1
            truncated[at] = limit._elapsed_steps >= limit._max_episode_steps

    def _run_timed(self, rows: Sequence[int]) -> None:
        helpers = self._helpers_for(len(rows))
        start = perf_counter()
        if not helpers:
            for row in rows:
                self._run_row(self._simulations[row])
            self._seconds = (perf_counter() - start) / len(rows) if rows else self._seconds
            return
        job = Job(rows)
        for _ in range(helpers):
            self._work.put(job)
        try:
            own = self._run(job)
        except BaseException:  # an interrupt, say: nobody moves a row any more when it is heard of
            job.rows = iter(())
            for _ in range(helpers):
                job.done.get()
            raise
        if own:
            self._seconds = (perf_counter() - start) / own
        job.wait()

    def _helpers_for(self, rows: int) -> int:
        """How many helpers have enough to do; they are there when this returns."""
        count = int(rows * self._seconds / ENOUGH) - 1
        if count < 1:
            return 0
        count = min(max(cores(), 2 if lent() else 1) - 1, count)
        if self._helpers and not self._helpers[0].is_alive():  # in a forked process none is
            self._helpers = []
        while len(self._helpers) < count:
            self._helpers.append(threading.Thread(target=self._help, daemon=True))
            self._helpers[-1].start()
        return count

    def _run(self, job: Job) -> int:
        """Advance rows that nobody has taken, until there are none; how many these were."""
        count = 0
        while (row := next(job.rows, None)) is not None:
            self._run_row(self._simulations[row])
            job.finished.append(row)
            count += 1
        return count

    def _run_row(self, simulation: Any) -> None:
        self._step(self._model, simulation, self._frames)
        if self._contacts is not None:
            self._forces(self._model, simulation)

    def _help(self) -> None:
        """Only where a CPU has nothing else to do: a helper that is not let run has taken no row, and nobody waits for it."""
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, os.sched_getaffinity(0) | lent())
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while (job := self._work.get()) is not None:
            error = None
            try:
                self._run(job)
            except BaseException as raised:
                error = raised
            job.done.put(error)

    def close(self) -> None:
        for _ in self._helpers:
            self._work.put(None)
        self._helpers = []
        super().close()
