"""An environment whose every number is known: an episode lasts 3 steps, observations are (episode, step, last action).

It is cut off (truncated) at the third step, or ends (terminated) there if that step's action is 1. The reward is the
step's number, so that each episode returns 6.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class ThreeSteps(gymnasium.Env):
    def __init__(self, actions: gymnasium.Space, dtype: type = np.float64) -> None:
        self.action_space = actions
        self.observation_space = gymnasium.spaces.Box(0, 255, (3,), dtype)
        self.episode = self.steps = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.buffer = np.zeros(3, dtype)  # reused, as a fast environment would

    def _observe(self, action: float = 0) -> np.ndarray:
        self.buffer[:] = self.episode, self.steps, action
        return self.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.steps < 3, "stepped after the end: an episode was not reset"
        self.actions.append(action)
        self.steps += 1
        last = self.steps == 3
        number = float(np.max(action))
        return self._observe(number), float(self.steps), last and number == 1, last and number != 1, {"noise": 1}


def make_env() -> gymnasium.Env:
    return ThreeSteps(gymnasium.spaces.Discrete(2))


def make_shifted() -> gymnasium.Env:
    return ThreeSteps(gymnasium.spaces.Discrete(3, start=10))


def make_continuous() -> gymnasium.Env:
    return ThreeSteps(gymnasium.spaces.Box(-1, 1, (2,), np.float32))


def make_pixels() -> gymnasium.Env:
    return ThreeSteps(gymnasium.spaces.Discrete(2), np.uint8)


def make_dict() -> gymnasium.Env:
    env = make_env()
    env.observation_space = gymnasium.spaces.Dict({"x": env.observation_space})
    return env


def make_multi() -> gymnasium.Env:
    return ThreeSteps(gymnasium.spaces.MultiDiscrete([2, 2]))


def make_endless() -> gymnasium.Env:
    env = make_env()
    env.step = lambda action: (np.zeros(3), 0.0, False, False, {})
    return env


def make_number() -> int:
    return 3


def make_with_argument(gravity: float) -> gymnasium.Env:
    return make_env()
