"""Stable-Baselines3's side: python sb3.py WORKLOAD SECONDS. It runs in an environment of its own (build/sb3)."""

from __future__ import annotations

import sys
import time

import torch
from measure import answer, rate
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import obs_as_tensor


class Clock(BaseCallback):
    """Frames per second after a warm-up, until time is over."""

    def __init__(self, seconds: float, warm_up: float = 2.0) -> None:
        super().__init__()
        self.seconds, self.warm_up = seconds, warm_up
        self.begun = self.start = self.frames = 0.0

    def _on_step(self) -> bool:
        now = time.perf_counter()
        self.begun = self.begun or now
        if not self.start and now - self.begun > self.warm_up:
            self.start, self.frames = now, self.num_timesteps
        self.rate = (self.num_timesteps - self.frames) / (now - self.start) if self.start and now > self.start else 0.0
        return not self.start or now - self.start < self.seconds


class Rollouts(Clock):
    """The same over whole rollouts and their updates: counted where a rollout begins."""

    def _on_step(self) -> bool:
        return self.go_on

    def _on_rollout_start(self) -> None:
        self.go_on = super()._on_step()


def dqn_update_per_4(seconds: float) -> None:
    model = DQN(
        "MlpPolicy", "CartPole-v1", batch_size=64, train_freq=4, gradient_steps=1, buffer_size=100_000, learning_starts=500,
        target_update_interval=250, learning_rate=1e-3, device="cpu", policy_kwargs={"net_arch": [64, 64]}, seed=1,
    )  # fmt: skip
    clock = Clock(seconds)
    model.learn(10**9, callback=clock)
    answer(rate=clock.rate)


def ppo_cheetah(seconds: float) -> None:
    envs = make_vec_env("HalfCheetah-v5", n_envs=8, seed=1)
    model = PPO("MlpPolicy", envs, n_steps=256, batch_size=64, n_epochs=10, device="cpu", seed=1)
    clock = Rollouts(seconds)
    model.learn(10**9, callback=clock)
    answer(rate=clock.rate)


def collect_cheetah(seconds: float) -> None:
    """What `collect_rollouts` does, without the update, with as many environments as served it best."""
    best = 0.0
    for count in (8, 32):
        envs = make_vec_env("HalfCheetah-v5", n_envs=count, seed=1)
        model = PPO("MlpPolicy", envs, n_steps=256, device="cpu", seed=1)
        model._last_obs = envs.reset()

        def step(model: PPO = model, envs: object = envs, count: int = count) -> int:
            with torch.no_grad():
                actions, _, _ = model.policy(obs_as_tensor(model._last_obs, "cpu"))
            model._last_obs, *_ = envs.step(actions.numpy().clip(-1, 1))  # type: ignore[attr-defined]
            return count

        best = max(best, rate(step, seconds / 2))
    answer(rate=best)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {function.__name__: function for function in (dqn_update_per_4, ppo_cheetah, collect_cheetah)}[sys.argv[1]](
        float(sys.argv[2])
    )
