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

from fdg import launch, step_mdp
from fdg.algorithms.dqn import DQN

LIMIT = 5.0
"""µs per component call, in the median."""
PAIRS, TURNS, WARM_UP = 30, 20, 20
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


def microseconds(function: Callable, *args: Any) -> tuple[float, Any]:
    start = thread_time_ns()
    result = function(*args)
    return (thread_time_ns() - start) / 1000, result


class Overhead(DQN):
    """Instead of learning to the end, DQN measures its own loop."""

    def train(self) -> None:
        msrl = self.msrl
        parts = msrl._env, msrl._actor, msrl._buffer, msrl._learner
        td = msrl.env_reset()
        self.pairs: list[tuple[float, float]] = []
        """µs per call of each pair: through FDG, by hand."""
        for pair in range(-1, PAIRS):  # the first one is to warm up
            fdg = hand = 0.0
            for turn in range(TURNS):
                for first in (True, False) if turn % 2 else (False, True):
                    if first:
                        time, td = microseconds(through_fdg, msrl, td)
                        fdg += time
                    else:
                        time, td = microseconds(by_hand, *parts, td)
                        msrl._marks = [tensor._version for tensor in msrl._weights]  # learned past msrl, on purpose
                        hand += time
            if pair >= 0:
                self.pairs.append((fdg / TURNS / CALLS, hand / TURNS / CALLS))
        self.operations = {name: self.extra(*both) for name, both in self.each(msrl, *parts, td).items()}

    def each(self, msrl: Any, env: Any, actor: Any, buffer: Any, learner: Any, td: Any) -> dict[str, Any]:
        """Each operation through FDG and by hand."""
        acted = actor.act(td, EPSILON)
        stepped = env.step(acted.copy())
        batch = buffer.sample(BATCH)

        def act() -> None:
            with torch.no_grad():
                actor.act(td, EPSILON)

        def learn() -> None:
            learner.learn(batch).detach()
            msrl._marks = [tensor._version for tensor in msrl._weights]

        return {
            "act": (lambda: msrl.agent_act(td, EPSILON), act),
            "step": (lambda: msrl.env_step(acted), lambda: env.step(acted)),
            "insert": (lambda: msrl.replay_buffer_insert(stepped), lambda: buffer.insert(0, stepped)),
            "sample": (lambda: msrl.replay_buffer_sample(BATCH), lambda: buffer.sample(BATCH)),
            "learn": (lambda: msrl.agent_learn(batch), learn),
        }

    def extra(self, fdg: Callable, hand: Callable) -> float:
        return median(microseconds(fdg)[0] - microseconds(hand)[0] for _ in range(PAIRS * TURNS))


def main() -> int:
    torch.set_num_threads(1)
    trainer: Any = launch(Overhead, env="CartPole-v1", envs=16, hidden_dim=64, policy="local").trainer
    extra = [fdg - hand for fdg, hand in trainer.pairs]
    low, middle, high = quantiles(extra, n=4)
    print(f"extra µs per component call, {PAIRS} pairs: median {middle:.2f}, quartiles {low:.2f} to {high:.2f}")
    print(f"a call by hand takes {median(hand for _, hand in trainer.pairs):.1f} µs")
    print("extra µs by operation:", ", ".join(f"{name} {value:.1f}" for name, value in trainer.operations.items()))
    return middle > LIMIT


if __name__ == "__main__":
    sys.exit(main())
