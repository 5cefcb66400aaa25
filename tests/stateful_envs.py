"""Environments by how their state can be had: a number goes up by the action and a random part, episodes last 5 steps.

make_plain      everything is an attribute
make_own        get_state and set_state, beside a part that nobody can read
make_hidden     a part that nobody can read: only its actions lead there again
make_lost       nor do they: it draws from the system's entropy
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import gymnasium
import numpy as np


class Plain(gymnasium.Env):
    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(3)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.total, self.steps, self.episodes = 0.0, 0, 0

    def begin(self, start: float) -> None:
        self.total = start

    def add(self, number: float) -> None:
        self.total += number

    def observe(self) -> np.ndarray:
        return np.array([self.total, self.episodes])

    def noise(self) -> float:
        return self.np_random.random()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        self.begin(self.noise())
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        self.add(float(action) + self.noise())
        return self.observe(), self.total, self.steps == 5 and action == 1, self.steps == 5 and action != 1, {}


def adding(total: float) -> Generator[float, float, None]:
    while True:
        total += yield total


class Hidden(Plain):
    """The sum is in a generator."""

    def begin(self, start: float) -> None:
        self.sum = adding(start)
        self.sum.send(None)
        self.total = start

    def add(self, number: float) -> None:
        self.total = self.sum.send(number)


class Own(Hidden):
    def get_state(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps, "episodes": self.episodes}

    def set_state(self, state: dict[str, Any]) -> None:
        self.begin(state["total"])
        self.steps, self.episodes = state["steps"], state["episodes"]


class Wrong(Own):
    """Its set_state forgets the steps."""

    def set_state(self, state: dict[str, Any]) -> None:
        self.begin(state["total"])


class Lost(Hidden):
    def noise(self) -> float:
        return random.SystemRandom().random()


class Broken(Hidden):
    """Fails when it is stepped a second time in the same way."""

    worn = 0

    def step(self, action: Any) -> Any:
        Broken.worn += 1
        if Broken.worn > 7:
            raise RuntimeError("the motor is worn")
        return super().step(action)


make_plain, make_own, make_hidden, make_lost, make_wrong, make_broken = Plain, Own, Hidden, Lost, Wrong, Broken


def make_limited() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Own(), 3)


def make_limited_hidden() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Hidden(), 3)


class Randomized(gymnasium.Wrapper):
    """Changes the model at each reset."""

    def reset(self, **options: Any) -> Any:
        result = self.env.reset(**options)
        self.unwrapped.model.body_mass[1] *= 1 + self.unwrapped.np_random.random()
        return result


def make_randomized() -> gymnasium.Env:
    return Randomized(gymnasium.make("Hopper-v5"))
