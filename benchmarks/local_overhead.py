"""What `local` costs: DQN's loop through FDG against the same loop by hand, on the same objects, in one process.

    python benchmarks/local_overhead.py

`launch` makes the parts and `self.msrl` as in any run of one actor under `local`. The two loops take turns, iteration
by iteration; TURNS iterations of each are one pair, and a pair's result is the difference of their times divided by
the number of component calls. The exit code is 1 if the median over the pairs is above LIMIT.

By hand there are no random streams, no phase times and no checks; `torch.no_grad` around act is in both. Times are CPU
time of the one thread that works, so that other programs on the machine do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median, quantiles
from time import thread_time_ns
from typing import Any

import torch

from fdg import Agent, EnvSpec, Learner, launch, step_mdp
from fdg.algorithms.dqn import DQN, QActor

LIMIT = 5.0
"""µs per component call, in the median."""
PAIRS, TURNS = 30, 20
STEPS, UPDATES, BATCH, EPSILON = 8, 4, 64, 0.1
CALLS = 3 * STEPS + 1 + 2 * UPDATES
"""Component calls of one iteration: act, step, insert; size; sample, learn."""


def through_fdg(msrl: Any, td: Any) -> Any:
    for _ in range(STEPS):
        td = msrl.agent_act(td, EPSILON)
        td = msrl.env_step(td)
        msrl.replay_buffer_insert(td)
        td = step_mdp(td)
    if msrl.replay_buffer_size() >= BATCH:
        for _ in range(UPDATES):
            msrl.agent_learn(msrl.replay_buffer_sample(BATCH))
    return td


def by_hand(env: Any, actor: Any, buffer: Any, learner: Any, td: Any) -> Any:
    for _ in range(STEPS):
        with torch.no_grad():
            td = actor.act(td, EPSILON)
        td = env.step(td)
        buffer.insert(0, td)
        td = step_mdp(td)
    if len(buffer) >= BATCH:
        for _ in range(UPDATES):
            learner.learn(buffer.sample(BATCH)).detach()
    return td


class PlainLearner(Learner):
    """Q-learning in a few lines: the less time it takes, the less its noise hides what is measured."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network, self.optimizer = network, torch.optim.SGD(network.parameters(), lr=1e-3)

    def learn(self, batch: Any) -> torch.Tensor:
        following = batch["next"]
        with torch.no_grad():
            best = self.network(following["observation"]).amax(-1, keepdim=True)
            target = following["reward"] + 0.99 * best * ~following["terminated"]
        loss = (self.network(batch["observation"]).gather(1, batch["action"][:, None]) - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Overhead(DQN):
    """Instead of learning to the end, DQN measures its own loop."""

    def agent(self, spec: EnvSpec) -> Agent:
        network = torch.nn.Sequential(
            torch.nn.Linear(spec.obs_dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, spec.n_actions)
        )
        return Agent(QActor(network, spec.n_actions), PlainLearner(network))

    def train(self) -> None:
        msrl, self.td = self.msrl, self.msrl.env_reset()
        env, actor, buffer, learner = msrl._env, msrl._actor, msrl._buffer, msrl._learner

        def fdg_loop() -> None:
            self.td = through_fdg(msrl, self.td)

        def hand_loop() -> None:
            self.td = by_hand(env, actor, buffer, learner, self.td)

        def hand_act() -> None:
            with torch.no_grad():
                actor.act(td, EPSILON)

        self.compare(fdg_loop, hand_loop)  # to warm up
        self.loops = [[time / CALLS for time in self.compare(fdg_loop, hand_loop)] for _ in range(PAIRS)]
        td, batch = self.td, buffer.sample(BATCH)
        hand_act()
        stepped = env.step(td.copy())
        operations: dict[str, tuple[Callable, Callable]] = {
            "act": (lambda: msrl.agent_act(td, EPSILON), hand_act),
            "step": (lambda: msrl.env_step(td), lambda: env.step(td)),
            "insert": (lambda: msrl.replay_buffer_insert(stepped), lambda: buffer.insert(0, stepped)),
            "sample": (lambda: msrl.replay_buffer_sample(BATCH), lambda: buffer.sample(BATCH)),
            "learn": (lambda: msrl.agent_learn(batch), lambda: learner.learn(batch).detach()),
        }
        self.operations = {
            name: median(fdg - hand for fdg, hand in (self.compare(*both) for _ in range(PAIRS)))
            for name, both in operations.items()
        }

    def compare(self, fdg: Callable, hand: Callable) -> tuple[float, float]:
        """Mean times of the two in turns, µs; who begins alternates."""
        times = {fdg: 0.0, hand: 0.0}
        for turn in range(TURNS):
            for function in (fdg, hand) if turn % 2 else (hand, fdg):
                start = thread_time_ns()
                function()
                times[function] += thread_time_ns() - start
                # `learn` by hand looks to msrl like weights written by somebody else
                self.msrl._marks = [tensor._version for tensor in self.msrl._weights]
        return times[fdg] / TURNS / 1000, times[hand] / TURNS / 1000


def main() -> int:
    torch.set_num_threads(1)
    trainer: Any = launch(Overhead, env="CartPole-v1", envs=16, policy="local").trainer
    extra = [fdg - hand for fdg, hand in trainer.loops]
    low, middle, high = quantiles(extra, n=4)
    print(f"extra µs per component call, {PAIRS} pairs: median {middle:.2f}, quartiles {low:.2f} to {high:.2f}")
    print(f"a call by hand takes {median(hand for _, hand in trainer.loops):.1f} µs")
    print("extra µs by operation:", ", ".join(f"{name} {value:.1f}" for name, value in trainer.operations.items()))
    return middle > LIMIT


if __name__ == "__main__":
    sys.exit(main())
