"""What fusing saves: 16 logical actors on one worker, with one CartPole each, act in one batch or one after the other.

    python benchmarks/fuse.py            # about a minute

DQN under `single_learner_coarse` on the process engine with one worker. Runs with and without `--fuse` take turns.
Frames per second are those of the `collect` region, measured at the driver: what it sends, waits for and takes back is
in it. The exit code is 1 if the median of the ratios is below LIMIT.
"""

from __future__ import annotations

import sys
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from fdg import launch
from fdg.algorithms.dqn import DQN
from fdg.runtime.coordinator import Coordinator
from fdg.runtime.forkserver import forkserver

LIMIT = 3.0
PAIRS = 7
SETTINGS: dict[str, Any] = dict(
    policy="single_learner_coarse",
    engine="process",
    workers=1,
    actors=16,
    envs=1,
    steps=32,
    iterations=12,
    updates=1,
    batch_size=32,
    learning_starts=32,
)


def collecting(fuse: bool) -> tuple[float, float]:
    """Frames per second in `collect` as the driver sees it, and in the component calls alone."""
    seconds = 0.0
    inner = Coordinator.call

    def timed(self: Coordinator, fragment: str, name: str, arguments: dict[str, Any]) -> Any:
        nonlocal seconds
        start = perf_counter()
        result = inner(self, fragment, name, arguments)
        if name == "collect":
            seconds += perf_counter() - start
        return result

    Coordinator.call = timed  # type: ignore[method-assign]
    try:
        metrics = launch(DQN, env="CartPole-v1", seed=1, fuse=fuse, **SETTINGS).metrics
    finally:
        Coordinator.call = inner  # type: ignore[method-assign]
    assert metrics["fused"] is fuse
    return metrics["frames"] / seconds, metrics["frames"] / metrics["phases"]["collect"]


def main() -> int:
    ratios, calls, rates = [], [], []
    with forkserver():
        for pair in range(PAIRS + 1):
            order = (False, True) if pair % 2 else (True, False)
            seen = {fuse: collecting(fuse) for fuse in order}
            if pair:  # the first one warms up
                ratios.append(seen[True][0] / seen[False][0])
                calls.append(seen[True][1] / seen[False][1])
                rates.append((seen[False][0], seen[True][0]))
    low, middle, high = quantiles(ratios, n=4)
    alone, fused = (median(rate) for rate in zip(*rates, strict=True))
    print(f"frames per second while collecting: {alone:,.0f} one after the other, {fused:,.0f} fused")
    print(f"ratio, {PAIRS} pairs: median {middle:.1f}, quartiles {low:.1f} to {high:.1f}")
    print(f"of environments and policy alone: {median(calls):.1f}")
    return middle < LIMIT


if __name__ == "__main__":
    sys.exit(main())
