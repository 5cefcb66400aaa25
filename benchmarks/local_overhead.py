"""What `local` costs: DQN's loop through FDG against the same loop by hand, on the same objects, in one process.

    python benchmarks/local_overhead.py            # instructions and times, about three minutes
    python benchmarks/local_overhead.py times      # only these

`launch` makes the parts and `self.msrl` as in any run of one actor under `local`. The two loops take turns, iteration
by iteration. By hand there are no random streams, no phase times and no checks; `torch.no_grad` around act is in both.

Instructions are callgrind's (on x86-64, where valgrind is installed), over all turns. They hardly change from run to
run. Times are CPU time of the one thread that works. TURNS iterations of each loop are one pair, and a pair's result is
the difference of their times divided by the number of component calls. What else runs on the machine changes them: most
of the extra time is spent waiting for memory, because torch fills the caches between two component calls.

The exit code is 1 if both the extra instructions and the median of the extra times are above their limits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import thread_time_ns
from typing import Any

import torch

from fdg import Agent, EnvSpec, Learner, launch, step_mdp
from fdg.algorithms.dqn import DQN, QActor

LIMIT_TIME, LIMIT_INSTRUCTIONS = 5.0, 3.0
"""µs per component call, in the median; percent."""
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
        return Agent(QActor(network), PlainLearner(network))

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
        if counting():
            return self.count(fdg_loop, hand_loop)
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
                self.accept_weights()
        return times[fdg] / TURNS / 1000, times[hand] / TURNS / 1000

    def accept_weights(self) -> None:
        """`learn` by hand looks to msrl like weights written by somebody else."""
        self.msrl._marks = self.msrl._versions()

    def count(self, fdg: Callable, hand: Callable) -> None:
        """Under callgrind: write down the instructions of each turn."""
        callgrind(START)
        for turn in range(TURNS):
            for function in (fdg, hand) if turn % 2 else (hand, fdg):
                callgrind(ZERO)
                function()
                callgrind(DUMP)
                self.accept_weights()
        callgrind(STOP)


ZERO, DUMP, START, STOP = 0x43540001, 0x43540000, 0x43540004, 0x43540005
"""Requests of a program to callgrind."""


def counting() -> bool:
    return "count" in sys.argv[1:]


def callgrind(request: int) -> None:
    """Ask valgrind for something: a sequence of instructions that does nothing on a real CPU (valgrind.h)."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db c3"))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    arguments = (ctypes.c_uint64 * 6)(request)
    function(ctypes.addressof(arguments))


def instructions() -> tuple[int, int] | None:
    """What callgrind counts of the two loops, each TURNS times; None where it does not run."""
    valgrind = shutil.which("valgrind")
    if valgrind is None or os.uname().machine != "x86_64":
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        subprocess.run([*command, sys.executable, __file__, "count"], check=True, capture_output=True, timeout=1800)
        parts = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        counts = [int(line.split()[1]) for path in parts for line in path.open() if line.startswith("totals:")]
    assert len(counts) == 2 * TURNS, counts
    hand = sum(counts[0::4]) + sum(counts[3::4])  # who begins alternates
    return sum(counts) - hand, hand


def main() -> int:
    torch.set_num_threads(1)
    trainer: Any = launch(Overhead, env="CartPole-v1", envs=16, policy="local").trainer
    if counting():
        return 0
    extra = [fdg - hand for fdg, hand in trainer.loops]
    low, middle, high = quantiles(extra, n=4)
    print(f"extra µs per component call, {PAIRS} pairs: median {middle:.2f}, quartiles {low:.2f} to {high:.2f}")
    print(f"a call by hand takes {median(hand for _, hand in trainer.loops):.1f} µs")
    print("extra µs by operation:", ", ".join(f"{name} {value:.1f}" for name, value in trainer.operations.items()))
    good = middle <= LIMIT_TIME
    if "times" not in sys.argv[1:] and (counts := instructions()):
        fdg, hand = (count / TURNS / CALLS for count in counts)
        percent = 100 * (fdg - hand) / hand
        print(f"instructions per component call: {fdg:,.0f} through FDG, {hand:,.0f} by hand: {percent:.2f} % more")
        good = good or percent <= LIMIT_INSTRUCTIONS
    return not good


if __name__ == "__main__":
    sys.exit(main())
