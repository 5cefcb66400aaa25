"""What worker processes bring: the sample phase with two requests in flight, the collect phase with two workers.

    python benchmarks/process_engine.py [sample|collect] [--repeats N]

Both sides of each ratio run alternately, in one go, and the figure is the ratio of the medians; it needs a machine with
two idle cores. The exit code is 1 if a ratio is below its LIMIT, or if the results differ at all.

    sample      DQN, sharded_replay, 4 shards, 4096 rounds of work per sampled row: seconds in the sample phase,
                --sample-parallelism 1 against 2
    collect     REINFORCE on HalfCheetah-v5, single_learner_coarse: frames per second of the collect phase, one worker
                against two
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from statistics import median

from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

LIMITS = {"sample": 1.85, "collect": 1.7}


def sample(parallel: int) -> Result:
    return launch(
        DQN,
        policy="sharded_replay",
        engine="process",
        workers=1,
        sample_parallelism=parallel,
        sample_work=4096,
        actors=4,
        replay_shards=4,
        envs=4,
        iterations=8,
        steps=25,
        updates=4,
        batch_size=256,
        learning_starts=100,
        seed=1,
    )


def collect(workers: int) -> Result:
    return launch(
        REINFORCE,
        policy="single_learner_coarse",
        engine="process",
        workers=workers,
        env="HalfCheetah-v5",
        actors=2,
        envs=4,
        iterations=3,
        episodes_per_iter=8,
        seed=1,
    )


WORKLOADS: dict[str, tuple[Callable[[int], Result], str]] = {
    "sample": (sample, "sample"),
    "collect": (collect, "collect"),
}


def compare(name: str, repeats: int) -> bool:
    """Run a workload with one and with two, in turns; whether the ratio and the results are as they should be."""
    run, phase = WORKLOADS[name]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    hashes = set()
    for turn in range(repeats):
        for number in (1, 2) if turn % 2 else (2, 1):
            result = run(number)
            seconds[number].append(result.metrics["phases"][phase])
            hashes.add(result.params_sha256)
    ratio = median(seconds[1]) / median(seconds[2])
    spread = sorted(one / two for one, two in zip(seconds[1], seconds[2], strict=True))
    print(
        f"{name}: {ratio:.2f}× (at least {LIMITS[name]}; pairs {spread[0]:.2f} to {spread[-1]:.2f}), "
        f"{median(seconds[1]):.2f} s against {median(seconds[2]):.2f} s in the {phase} phase, "
        f"{'one result' if len(hashes) == 1 else 'DIFFERENT RESULTS'}"
    )
    return ratio >= LIMITS[name] and len(hashes) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("workload", nargs="*", metavar="WORKLOAD")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    unknown = set(arguments.workload) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {unknown.pop()!r}: choose from {', '.join(WORKLOADS)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with forkserver():
        return not all([compare(name, arguments.repeats) for name in arguments.workload or WORKLOADS])


if __name__ == "__main__":
    sys.exit(main())
