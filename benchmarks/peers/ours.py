"""FDG's side: python ours.py WORKLOAD SECONDS. Programs as users write them, launched as users launch them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import answer, rate
from torch import nn

from fdg import Actor, Agent, Config, EnvSpec, ReplayBuffer, Trainer, fast, launch, sample_categorical, step_mdp
from fdg.algorithms.dqn import DQN
from fdg.algorithms.ppo import PPO
from fdg.algorithms.reinforce import REINFORCE, PolicyActor, PolicyLearner
from fdg.algorithms.reinforce import Policy as ReinforcePolicy
from fdg.networks import MLP

FOREVER = 10**9


class Over(Exception):
    """Enough was measured."""


class Watch:
    """Sees each row of a run's log, and ends the run when time is over, or when it is solved."""

    def __init__(self, seconds: float, warm_up: float = 1.5, solved: float = float("inf")) -> None:
        self.seconds, self.warm_up, self.solved = seconds, warm_up, solved
        self.begun = self.start = self.frames = self.rate = 0.0

    def on_start(self, config: Any, graph: Any) -> None:
        pass

    def on_log(self, row: dict[str, Any]) -> None:
        now = time.perf_counter()
        self.begun = self.begun or now
        if not self.start:
            if now - self.begun >= self.warm_up:
                self.start, self.frames = now, row["frames"]
            return
        self.rate = (row["frames"] - self.frames) / (now - self.start)
        if now - self.start > self.seconds or (row["episodic_return"] or 0.0) >= self.solved:
            raise Over


def run(trainer: type, watch: Watch, **settings: Any) -> float:
    """Frames per second of a run, from the first row of its log after the warm-up on."""
    settings = {"iterations": FOREVER, "tuned": False, **settings}
    try:
        launch(trainer, observers=[watch], **settings)
    except Over:
        pass
    return watch.rate


# REINFORCE ------------------------------------------------------------------------------------------------------------


class OneLayer(REINFORCE):
    """REINFORCE with one hidden layer, as published."""

    def agent(self, spec: EnvSpec) -> Agent:
        policy = ReinforcePolicy(spec, self.config.hidden_dim)
        policy.network = MLP(spec.obs_dim, spec.n_actions, num_cells=[self.config.hidden_dim], activation_class=nn.Tanh)
        return Agent(PolicyActor(policy), PolicyLearner(policy, self.config))


def reinforce_cartpole(seconds: float) -> None:
    """From start to solved: a mean return of 475 over an iteration's 100 episodes."""
    watch = Watch(10 * seconds, warm_up=0.0, solved=475.0)
    rate = run(
        OneLayer, watch, env="CartPole-v1", envs=100, episodes_per_iter=100, hidden_dim=128, iterations=200, lr=2e-2
    )
    answer(rate=rate, seconds=time.perf_counter() - watch.begun)


def reinforce_ant(seconds: float) -> None:
    """On two workers, from the end of the first iteration on; the collect phase beside it."""
    settings: dict[str, Any] = dict(env="Ant-v5", envs=32, actors=2, hidden_dim=256, episodes_per_iter=400, threads=1)
    settings.update(policy="single_learner_coarse", engine="process", workers=2)
    result = launch(REINFORCE, iterations=max(2, int(seconds)), **settings)
    first, *_, last = result.history
    answer(
        rate=(last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"]),
        collect=result.metrics["frames"] / result.metrics["phases"]["collect"],
    )


# DQN ------------------------------------------------------------------------------------------------------------------


def dqn(seconds: float, **settings: Any) -> None:
    common: dict[str, Any] = dict(env="CartPole-v1", batch_size=64, hidden_dim=64, buffer_size=100_000, lr=1e-3)
    answer(rate=run(DQN, Watch(seconds), **{**common, **settings}))


def dqn_published(seconds: float) -> None:
    """4 environments, 100 steps each, one update."""
    dqn(seconds, envs=4, steps=100, updates=1)


def dqn_published_free(seconds: float) -> None:
    """As many frames to an update, from 400 environments."""
    dqn(seconds, envs=400, steps=1, updates=1)


def dqn_update_per_4(seconds: float) -> None:
    dqn(seconds, envs=64, steps=1, updates=16)


def dqn_update_per_4_compiled(seconds: float) -> None:
    dqn(seconds, envs=64, steps=1, updates=16, compile_update=True)


# PPO ------------------------------------------------------------------------------------------------------------------


def ppo(seconds: float, **settings: Any) -> None:
    common: dict[str, Any] = dict(env="HalfCheetah-v5", steps=256, update_epochs=10, num_minibatches=32, hidden_dim=64)
    answer(rate=run(PPO, Watch(seconds), **{**common, **settings}))


def ppo_cheetah(seconds: float) -> None:
    ppo(seconds, envs=8)


def ppo_cheetah_compiled(seconds: float) -> None:
    ppo(seconds, envs=8, loss="torchrl", compile_update=True)


def ppo_cheetah_workers(seconds: float) -> None:
    """The same 8 environments, on two workers."""
    workers: dict[str, Any] = dict(policy="single_learner_coarse", engine="process", actors=2, envs=4, workers=2)
    ppo(seconds, loss="torchrl", compile_update=True, **workers)


# collection -----------------------------------------------------------------------------------------------------------


class Sampling(Actor):
    """A 64-64 policy that samples: categorical, or normal."""

    def __init__(self, spec: EnvSpec) -> None:
        outputs = spec.n_actions if spec.discrete else spec.action_dim
        self.discrete = spec.discrete
        self.network = MLP(spec.obs_dim, outputs, num_cells=[64, 64], activation_class=nn.Tanh)

    def act(self, td: Any) -> Any:
        output = fast(self.network, td["observation"])
        td["action"] = sample_categorical(output) if self.discrete else output + torch.randn_like(output)
        return td


class Collect(Trainer):
    """Steps, and puts each rollout together as a learner would get it."""

    config: Config

    def agent(self, spec: EnvSpec) -> Agent:
        return Agent(Sampling(spec))

    def train(self) -> None:
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(32):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = step_mdp(td)
            self.rollout = torch.stack(steps)
            self.msrl.log(i)


def collect_cheetah(seconds: float) -> None:
    answer(rate=run(Collect, Watch(seconds), env="HalfCheetah-v5", envs=256))


def collect_cartpole(seconds: float) -> None:
    answer(rate=run(Collect, Watch(seconds), env="CartPole-v1", envs=1024))


# replay ---------------------------------------------------------------------------------------------------------------


def replay_uniform(seconds: float) -> None:
    from torchrl_side import rows

    buffer, new = ReplayBuffer(100_000), rows(16)
    buffer.insert(0, rows(100_000))

    def step() -> int:
        buffer.insert(0, new)
        buffer.sample(256)
        return 1

    answer(rate=rate(step, seconds))


def replay_prioritized(seconds: float) -> None:
    from torchrl_side import rows

    buffer, priority = ReplayBuffer(100_000, prioritized=True, alpha=0.6, beta=0.4), torch.rand(256)
    buffer.insert(0, rows(100_000))

    def step() -> int:
        batch = buffer.sample(256)
        buffer.update_priority(batch, priority)
        return 1

    answer(rate=rate(step, seconds))


# start ----------------------------------------------------------------------------------------------------------------


def start_up(seconds: float) -> None:
    """Seconds of a whole `fdg train` of one iteration, from a new process to its end, and the memory it needs."""
    command = [sys.executable, "-m", "fdg", "train", "dqn", "--iterations", "1", "--eval-episodes", "0", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([*command, "--log-dir", folder], check=True, cwd=folder, env={**os.environ, "FDG_CACHE": folder})
        taken = time.perf_counter() - start
    answer(seconds=taken, megabytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    globals()[sys.argv[1]](float(sys.argv[2]))
