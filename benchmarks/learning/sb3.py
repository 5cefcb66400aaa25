"""One run of Stable-Baselines3 with its zoo's settings: python sb3.py ALGORITHM ENV FRAMES SEED OUT.json"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

PPO_NETWORK = dict(
    log_std_init=-2, ortho_init=False, activation_fn=torch.nn.ReLU, net_arch=dict(pi=[256, 256], vf=[256, 256])
)
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "HalfCheetah-v5"): dict(
        n_steps=512, batch_size=64, n_epochs=20, learning_rate=2.0633e-05, gamma=0.98, gae_lambda=0.92, clip_range=0.1,
        ent_coef=0.000401762, vf_coef=0.58096, max_grad_norm=0.8, policy_kwargs=PPO_NETWORK,
    ),
    ("ppo", "Hopper-v5"): dict(
        n_steps=512, batch_size=32, n_epochs=5, learning_rate=9.80828e-05, gamma=0.999, gae_lambda=0.99, clip_range=0.2,
        ent_coef=0.00229519, vf_coef=0.835671, max_grad_norm=0.7, policy_kwargs=PPO_NETWORK,
    ),
    ("sac", "HalfCheetah-v5"): dict(learning_starts=10_000),
    ("sac", "Hopper-v5"): dict(learning_starts=10_000),
    ("td3", "HalfCheetah-v5"): dict(learning_starts=10_000, learning_rate=1e-3, batch_size=256, train_freq=1, gradient_steps=1),
    ("td3", "Hopper-v5"): dict(learning_starts=10_000, learning_rate=1e-3, batch_size=256, train_freq=1, gradient_steps=1),
}  # fmt: skip


class Curve(BaseCallback):
    """Frames, seconds and mean return of the last episodes, every so many frames."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.points, self.start = every, [], time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every == 0 and self.model.ep_info_buffer:
            value = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer]))
            self.points.append((self.num_timesteps, time.perf_counter() - self.start, value))
        return True


def main(algorithm: str, env: str, frames: int, seed: int, out: Path) -> None:
    torch.set_num_threads(1)
    settings = SETTINGS[algorithm, env]
    environment = make_vec_env(env, n_envs=1, seed=seed)
    test = make_vec_env(env, n_envs=1, seed=seed + 10_000)
    if algorithm == "ppo":
        environment = VecNormalize(environment, gamma=settings["gamma"])
        test = VecNormalize(test, training=False, norm_reward=False)
    if algorithm == "td3":
        size = environment.action_space.shape[0]
        settings = {**settings, "action_noise": NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))}
    model = {"ppo": PPO, "sac": SAC, "td3": TD3}[algorithm](
        "MlpPolicy", environment, seed=seed, device="cpu", **settings
    )
    curve = Curve(max(1000, frames // 100))
    model.learn(frames, callback=curve)
    if algorithm == "ppo":
        test.obs_rms = environment.obs_rms
    returns, _ = evaluate_policy(model, test, n_eval_episodes=100, deterministic=True, return_episode_rewards=True)
    result = {"frames": model.num_timesteps, "mean_return": float(np.mean(returns)), "curve": curve.points}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
