"""Loops written by hand, each as one would write it in a single file: python plain.py WORKLOAD SECONDS

They use torch and Gymnasium alone and no part of FDG. `one_by_one` loops are the shape in which REINFORCE and DQN are
usually published: one environment, one observation at a time.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import gymnasium
import numpy as np
import torch
from measure import answer, rate
from torch import nn
from torch.distributions import Categorical, Normal


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


# REINFORCE ------------------------------------------------------------------------------------------------------------


def reinforce_one_by_one(env_id: str, hidden: tuple[int, ...], episodes: int, seconds: float) -> None:
    env = gymnasium.make(env_id)
    discrete = hasattr(env.action_space, "n")
    inputs = env.observation_space.shape[0]  # type: ignore[index]
    outputs = int(env.action_space.n) if discrete else env.action_space.shape[0]  # type: ignore[attr-defined,index]
    policy = mlp(inputs, *hidden, outputs)
    log_std = torch.zeros(outputs, requires_grad=not discrete)
    optimizer = torch.optim.Adam([*policy.parameters(), *([] if discrete else [log_std])], lr=1e-3)
    frames, start, seed = 0, time.perf_counter(), 1
    while time.perf_counter() - start < seconds:
        losses = []
        for _ in range(episodes):
            observation, _ = env.reset(seed=seed)
            seed, done, log_probs, rewards = seed + 1, False, [], []
            while not done:
                output = policy(torch.as_tensor(observation, dtype=torch.float32))
                distribution = Categorical(logits=output) if discrete else Normal(output, log_std.exp())
                action = distribution.sample()
                log_probs.append(distribution.log_prob(action).sum())
                observation, reward, terminated, truncated, _ = env.step(
                    action.item() if discrete else action.numpy().clip(-1, 1)
                )
                rewards.append(float(reward))
                done = terminated or truncated
                frames += 1
            returns, following = [], 0.0
            for reward in reversed(rewards):
                following = reward + 0.99 * following
                returns.append(following)
            target = torch.tensor(returns[::-1])
            losses.append(-(torch.stack(log_probs) * (target - target.mean()) / (target.std() + 1e-8)).sum())
            if time.perf_counter() - start > seconds:
                break
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    answer(rate=frames / (time.perf_counter() - start))


def reinforce_cartpole(seconds: float) -> None:
    reinforce_one_by_one("CartPole-v1", (128,), 100, seconds)


def reinforce_ant(seconds: float) -> None:
    reinforce_one_by_one("Ant-v5", (256, 256), 10, seconds)


def random_ant(seconds: float) -> None:
    """Two processes that step random actions: what this machine can do at most, if Gymnasium steps."""
    context = get_context("spawn")
    with context.Pool(2) as pool:
        pool.map(_random, [("Ant-v5", 1.0)] * 2)  # processes are there and have imported all
        answer(rate=sum(pool.map(_random, [("Ant-v5", seconds)] * 2)))


def _random(what: tuple[str, float]) -> float:
    env = gymnasium.make(what[0])
    env.action_space.seed(1)
    env.reset(seed=1)
    actions = [env.action_space.sample() for _ in range(1000)]
    frames = 0

    def step() -> int:
        nonlocal frames
        frames += 1
        _, _, terminated, truncated, _ = env.step(actions[frames % 1000])
        if terminated or truncated:
            env.reset()
        return 1

    return rate(step, what[1], warm_up=0.2)


# DQN ------------------------------------------------------------------------------------------------------------------


class Replay:
    """A ring of arrays."""

    def __init__(self, size: int, observation: int) -> None:
        self.observation = np.empty((size, observation), np.float32)
        self.following = np.empty((size, observation), np.float32)
        self.action, self.reward = np.empty(size, np.int64), np.empty(size, np.float32)
        self.terminated, self.count = np.empty(size, np.float32), 0

    def add(self, *row: Any) -> None:
        at = self.count % len(self.action)
        self.observation[at], self.action[at], self.reward[at], self.following[at], self.terminated[at] = row
        self.count += 1

    def sample(self, n: int) -> list[torch.Tensor]:
        rows = np.random.randint(min(self.count, len(self.action)), size=n)
        columns = (self.observation, self.action, self.reward, self.following, self.terminated)
        return [torch.from_numpy(column[rows]) for column in columns]


def dqn_update_per_4(seconds: float) -> None:
    env = gymnasium.make("CartPole-v1")
    network, target = (mlp(4, 64, 64, 2, activation=nn.ReLU) for _ in range(2))
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    replay, random = Replay(100_000, 4), np.random.default_rng(1)
    observation, _ = env.reset(seed=1)
    frames = 0

    def step() -> int:
        nonlocal observation, frames
        for _ in range(4):
            frames += 1
            if random.random() < 0.1:
                action = int(random.integers(2))
            else:
                with torch.no_grad():
                    action = int(network(torch.from_numpy(observation)).argmax())
            following, reward, terminated, truncated, _ = env.step(action)
            replay.add(observation, action, reward, following, terminated)
            observation = env.reset()[0] if terminated or truncated else following
        if frames >= 500:
            obs, actions, rewards, nexts, ends = replay.sample(64)
            with torch.no_grad():
                wanted = rewards + 0.99 * (1 - ends) * target(nexts).max(1).values
            value = network(obs).gather(1, actions[:, None]).squeeze(1)
            loss = nn.functional.mse_loss(value, wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
            if frames % 1000 == 0:
                target.load_state_dict(network.state_dict())
        return 4

    answer(rate=rate(step, seconds, warm_up=2.0))


# PPO ------------------------------------------------------------------------------------------------------------------


def ppo_cheetah(seconds: float) -> None:
    envs_n, steps, epochs, batch = 8, 256, 10, 64
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("HalfCheetah-v5")] * envs_n)
    actor, critic, log_std = mlp(17, 64, 64, 6), mlp(17, 64, 64, 1), nn.Parameter(torch.zeros(6))
    parameters = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, fused=True)
    observation = torch.as_tensor(envs.reset(seed=1)[0], dtype=torch.float32)
    done = torch.zeros(envs_n)

    def step() -> int:
        nonlocal observation, done
        obs, actions = torch.zeros(steps, envs_n, 17), torch.zeros(steps, envs_n, 6)
        log_probs, rewards, dones, values = (torch.zeros(steps, envs_n) for _ in range(4))
        for t in range(steps):
            obs[t], dones[t] = observation, done
            with torch.no_grad():
                distribution = Normal(actor(observation), log_std.exp(), validate_args=False)
                action = distribution.sample()
                log_probs[t] = distribution.log_prob(action).sum(-1)
                values[t] = critic(observation).squeeze(-1)
            actions[t] = action
            found, reward, terminated, truncated, _ = envs.step(action.numpy().clip(-1, 1))
            observation = torch.as_tensor(found, dtype=torch.float32)
            rewards[t] = torch.as_tensor(reward)
            done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        with torch.no_grad():
            last, advantages = critic(observation).squeeze(-1), torch.zeros(steps, envs_n)
            running, following, goes_on = torch.zeros(envs_n), last, 1 - done
            for t in reversed(range(steps)):
                delta = rewards[t] + 0.99 * following * goes_on - values[t]
                running = delta + 0.99 * 0.95 * goes_on * running
                advantages[t], following, goes_on = running, values[t], 1 - dones[t]
        flat = [
            x.reshape(steps * envs_n, *x.shape[2:]) for x in (obs, actions, log_probs, advantages, advantages + values)
        ]
        for _ in range(epochs):
            for rows in torch.randperm(steps * envs_n).split(batch):
                b_obs, b_actions, b_log_probs, b_advantages, b_returns = (x[rows] for x in flat)
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                distribution = Normal(actor(b_obs), log_std.exp(), validate_args=False)
                ratio = (distribution.log_prob(b_actions).sum(-1) - b_log_probs).exp()
                objective = torch.min(ratio * b_advantages, ratio.clamp(0.8, 1.2) * b_advantages).mean()
                error = (critic(b_obs).squeeze(-1) - b_returns).square().mean()
                loss = -objective + 0.5 * error
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        return steps * envs_n

    answer(rate=rate(step, seconds, warm_up=2.0))


WORKLOADS = (reinforce_cartpole, reinforce_ant, random_ant, dqn_update_per_4, ppo_cheetah)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    {function.__name__: function for function in WORKLOADS}[sys.argv[1]](float(sys.argv[2]))
