"""What Flame costs, and what parallel sampling brings on it; on a loopback cluster that is started for it.

python benchmarks/flame.py [cost|sample] [--repeats N]

cost        a call of a service that does nothing, and a MB through the object cache: put by one process, read by
            another, deleted. The same on the process engine beside it
sample      DQN on CartPole-v1, sharded_replay: 20 iterations of 4 actors × 100 frames, 4 shards, 4096 rounds of work
            per sampled row; one sample request in flight against one per core. Both run alternately, figures are
            medians. The exit code is 1 if the results differ at all
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

import torch

from fdg.algorithms.dqn import DQN
from fdg.runtime.channel import Library
from fdg.runtime.flame import services
from fdg.runtime.flame_cluster import loopback
from fdg.runtime.forkserver import forkserver
from fdg.runtime.process import Processes
from fdg.runtime.run import Result, launch
from fdg.runtime.wire import pack

SIZES = (0.1, 1, 10)
"""MB."""
SMALL: dict[str, Any] = dict(policy="single_learner_coarse", workers=1, iterations=1, steps=1, updates=1)


def timed(action: Any, repeats: int) -> float:
    """The median of some calls, in milliseconds."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        action()
        seconds.append(perf_counter() - start)
    return 1000 * median(seconds)


def measure(engine: Processes) -> dict[str, float]:
    target, remote = next(iter(engine.homes.items()))

    def nothing() -> None:
        remote.ask("put", target, ())
        engine.hear([remote])

    def move(data: torch.Tensor) -> None:
        slot = engine.arena.put(pack(data))
        own = {(0, number): segment for number, segment in enumerate(getattr(engine.arena, "segments", []))}
        reader = Library() if own else engine.library
        reader.segments = own
        reader.read(slot)
        engine.arena.free(slot)

    found = {"no-op call": timed(nothing, 300)}
    for size in SIZES:
        data = torch.zeros(int(size * 250_000))
        found[f"{size} MB"] = timed(lambda data=data: move(data), 20)  # type: ignore[misc]
    return found


def cost() -> int:
    """With the engine of a small run, before its first region."""
    for engine in ("process", "flame"):
        found: dict[str, float] = {}
        call = Processes.call

        def first(self: Processes, tasks: Any, found: Any = found, call: Any = call) -> Any:
            if not found:
                found.update(measure(self))
            return call(self, tasks)

        Processes.call = first  # type: ignore[method-assign]
        try:
            with forkserver() if engine == "process" else contextlib.nullcontext():
                launch(DQN, engine=engine, eval_episodes=0, **SMALL)
        finally:
            Processes.call = call  # type: ignore[method-assign]
        print(f"{engine:<8}" + "   ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()), flush=True)
    return 0


def sampled(parallel: int) -> Result:
    return launch(
        DQN,
        env="CartPole-v1",
        policy="sharded_replay",
        engine="flame",
        workers=1,
        sample_parallelism=parallel,
        sample_work=4096,
        actors=4,
        replay_shards=4,
        envs=1,
        iterations=20,
        steps=100,
        updates=4,
        batch_size=64,
        learning_starts=100,
        seed=1,
        eval_episodes=0,
    )


def sample(repeats: int) -> int:
    cores = len(os.sched_getaffinity(0))
    results = [(sampled(1), sampled(cores)) for _ in range(repeats)]
    one, many = ([pair[side].metrics for pair in results] for side in (0, 1))
    for name, runs in (("1", one), (str(cores), many)):
        phase, total = (
            median(value) for value in zip(*[(r["phases"]["sample"], r["seconds"]) for r in runs], strict=True)
        )
        print(f"--sample-parallelism {name}: sample {phase:.2f} s, total {total:.2f} s")
    for name, get in (("sample", lambda r: r["phases"]["sample"]), ("total", lambda r: r["seconds"])):
        ratios = sorted(get(a) / get(b) for a, b in zip(one, many, strict=True))
        print(f"{name}: {median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return int(len({result.params_sha256 for pair in results for result in pair}) != 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["cost", "sample"])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with contextlib.ExitStack() as stack:
        stack.enter_context(loopback())
        start = perf_counter()
        stack.enter_context(services())
        launch(DQN, engine="flame", eval_episodes=0, **SMALL)
        print(f"first run, with the start of its services: {perf_counter() - start:.1f} s")
        failed = 0 if given.what == "sample" else cost()
        return failed or (0 if given.what == "cost" else sample(given.repeats))


if __name__ == "__main__":
    sys.exit(main())
