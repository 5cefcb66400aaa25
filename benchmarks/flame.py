"""What Flame costs, and what it brings; on a loopback cluster that is started for it.

python benchmarks/flame.py [cost|sample|engines|reinforce] [--repeats N] [--env ID] [--upstream DIR]

cost        a call of a service that does nothing, and a MB through the object cache: put by one process, read by
            another, deleted. The same on the process engine beside it
sample      DQN on CartPole-v1, sharded_replay: 20 iterations of 4 actors × 100 frames, 4 shards, 4096 rounds of work
            per sampled row; one sample request in flight against one per core, with rows in memory and in Flame's
            object cache. Both run alternately, figures are medians. The exit code is 1 if the results differ at all
engines     REINFORCE on HalfCheetah-v5 as it is by default: seconds per iteration on Flame against those on the process
            engine, in alternating pairs; the exit code is 1 if Flame is more than 15 % slower, or the results differ
reinforce   REINFORCE on --env (Ant-v5 or CartPole-v1) with 100 episodes per iteration: frames per second on Flame, in one
            process, and, with --upstream, of examples/rl/basic in that checkout of Flame, on the same cluster, with
            one process per core; all in turns. The first iteration of each is left out: it starts things. The exit
            code is 1 if Flame's own example is not as much slower as LIMITS says
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
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


def sampled(parallel: int, storage: str) -> Result:
    return launch(
        DQN,
        env="CartPole-v1",
        policy="sharded_replay",
        engine="flame",
        workers=1,
        sample_parallelism=parallel,
        sample_work=4096,
        replay_storage=storage,
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
        tuned=False,
    )


def sample(repeats: int) -> int:
    cores, hashes = len(os.sched_getaffinity(0)), set()
    for storage in ("memory", "flame"):
        results = [(sampled(1, storage), sampled(cores, storage)) for _ in range(repeats)]
        hashes |= {result.params_sha256 for pair in results for result in pair}
        one, many = ([pair[side].metrics for pair in results] for side in (0, 1))
        for name, runs in (("1", one), (str(cores), many)):
            phase, total = (
                median(value) for value in zip(*[(r["phases"]["sample"], r["seconds"]) for r in runs], strict=True)
            )
            print(f"rows in {storage}, --sample-parallelism {name}: sample {phase:.2f} s, total {total:.2f} s")
        for name, get in (("sample", lambda r: r["phases"]["sample"]), ("total", lambda r: r["seconds"])):
            ratios = [get(a) / get(b) for a, b in zip(one, many, strict=True)]
            print(f"rows in {storage}, {name}: {spread(ratios)} times as fast", flush=True)
    return int(len(hashes) != 1)


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def per_iteration(result: Result) -> float:
    """Seconds per iteration, without the first."""
    seconds = [row["seconds"] for row in result.history]
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1)


def engines(repeats: int) -> int:
    """Both engines keep what they have imported between runs, so that what is measured is the run."""
    ratios, starts, hashes = [], {}, set()
    with forkserver():
        for turn in range(repeats + 1):
            found = {}
            for engine in ("process", "flame") if turn % 2 else ("flame", "process"):
                start = perf_counter()
                result = launch(
                    REINFORCE, env="HalfCheetah-v5", policy="single_learner_coarse", engine=engine, iterations=4
                )
                starts[engine] = perf_counter() - start - result.metrics["seconds"]
                found[engine] = per_iteration(result)
                hashes.add(result.params_sha256)
            said = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.items())
            print(f"{'to warm up: ' if not turn else ''}{said} per iteration", flush=True)
            ratios += [found["flame"] / found["process"]] * bool(turn)
    print(
        f"Flame takes {spread(ratios)} times as long; start-up flame {starts['flame']:.1f} s, process {starts['process']:.1f} s"
    )
    return int(median(ratios) > 1.15 or len(hashes) != 1)


# REINFORCE as published -----------------------------------------------------------------------------------------------

LIMITS = {"Ant-v5": 4.0, "CartPole-v1": 20.0}
"""How many times as many frames per second as Flame's own example."""
NETWORKS: dict[str, dict[str, Any]] = {
    "Ant-v5": dict(hidden_dim=256, hidden_layers=2, lr=3e-4, envs=25),
    "CartPole-v1": dict(hidden_dim=128, hidden_layers=1, lr=1e-2, envs=50),
}
"""Networks and step sizes of the example, and how many environments an actor steps side by side."""


def published(env: str, iterations: int, episodes: int, **options: Any) -> Result:
    settings = {**NETWORKS[env], **options}
    return launch(
        REINFORCE, env=env, iterations=iterations, episodes_per_iter=episodes, seed=1, tuned=False, **settings
    )


def ours(env: str, iterations: int, **options: Any) -> float:
    """Frames per second. All of them are learned from: environments that have finished their episodes wait."""
    first, *_, last = published(env, iterations, 100, **options).history
    return (last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"])


EXAMPLE = """
import json, runpy, sys, time
from flamepy.runner import Runner
from flamepy.runner.types import RunnerContext

limit, prepare, put, get = int(sys.argv.pop(1)), RunnerContext.__post_init__, Runner.put_object, Runner.get
begun, frames = [], []

def prepared(self):
    prepare(self)
    self.max_instances = self.max_instances or limit

def putting(self, value):
    begun.append(time.perf_counter())
    return put(self, value)

def got(self, futures):
    episodes = get(self, futures)
    frames.append(sum(len(episode["rewards"]) for episode in episodes))
    return episodes

RunnerContext.__post_init__, Runner.put_object, Runner.get = prepared, putting, got
sys.path.insert(0, ".")
runpy.run_path("main.py", run_name="__main__")
print(json.dumps([sum(frames[1:-1]), begun[-1] - begun[1]]))
"""
"""Runs Flame's example with at most so many instances, and says how many frames its inner iterations had in how long."""


def upstream(checkout: Path, env: str, iterations: int) -> float:
    """Frames per second of Flame's own example. It is run in a copy, since it writes into its folder."""
    import flamepy

    with tempfile.TemporaryDirectory() as folder:
        place, home = Path(folder, "basic"), Path(folder, "home")
        shutil.copytree(checkout / "examples" / "rl" / "basic", place)
        (home / ".flame").mkdir(parents=True)
        name = f"example-{uuid.uuid4().hex[:8]}"
        cluster = {"name": "it", "cluster": {"endpoint": os.environ["FLAME_ENDPOINT"]}, "runner": {"template": name}}
        cluster["cache"] = {"endpoint": os.environ["FLAME_CACHE_ENDPOINT"]}
        (home / ".flame" / "flame.yaml").write_text(json.dumps({"current-context": "it", "contexts": [cluster]}))
        one = {"OMP_NUM_THREADS": "1"}
        command = ["-m", "flamepy.runner.runpy"]
        attributes = flamepy.ApplicationAttributes(
            command=sys.executable, arguments=command, delay_release=600, environments={**one, "PYTHONPATH": str(place)}
        )
        flamepy.register_application(name, attributes)
        cores, known = len(os.sched_getaffinity(0)), {"Ant-v5": "ant", "CartPole-v1": "cartpole"}
        words = [str(cores), "--env", known[env], "--iterations", str(iterations), "--episodes-per-iter", "100"]
        environment = {**os.environ, **one, "HOME": str(home)}
        seen = subprocess.run(
            [sys.executable, "-c", EXAMPLE, *words],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        if seen.returncode:
            raise RuntimeError(f"the example failed:\n{seen.stderr[-2000:]}")
        frames, seconds = json.loads(seen.stdout.splitlines()[-1])
        return frames / seconds


def reinforce(env: str, iterations: int, repeats: int, checkout: Path | None) -> int:
    """In turns, so that a machine that is slower for a while is slower for both."""
    cores = len(os.sched_getaffinity(0))
    many = dict(policy="single_learner_coarse", engine="flame", actors=cores, workers=cores)
    published(env, 1, cores, **many)  # to start the services
    ratios = []
    for _ in range(repeats):
        speeds = {"Flame": ours(env, iterations, **many), "local": ours(env, iterations, policy="local", envs=100)}
        if checkout is not None:
            speeds["Flame's example"] = upstream(checkout, env, max(iterations, 3))
            ratios.append(speeds["Flame"] / speeds["Flame's example"])
        print(f"{env}: " + ", ".join(f"{name} {frames:,.0f} frames/s" for name, frames in speeds.items()), flush=True)
    if not ratios:
        return 0
    print(f"{spread(ratios)} times as many frames as Flame's example (at least {LIMITS[env]:.0f})")
    return int(median(ratios) < LIMITS[env])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["cost", "sample", "engines", "reinforce"], default="cost")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--env", choices=list(LIMITS), default="CartPole-v1")
    parser.add_argument("--iterations", type=int, default=6, help="of reinforce")
    parser.add_argument("--upstream", type=Path, metavar="DIR", help="a checkout of Flame v0.6.0")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with contextlib.ExitStack() as stack:
        stack.enter_context(loopback())
        start = perf_counter()
        stack.enter_context(services())
        launch(DQN, engine="flame", eval_episodes=0, **SMALL)
        print(f"first run, with the start of its services: {perf_counter() - start:.1f} s")
        return {
            "cost": cost,
            "sample": lambda: sample(given.repeats),
            "engines": lambda: engines(given.repeats),
            "reinforce": lambda: reinforce(given.env, given.iterations, given.repeats, given.upstream),
        }[given.what]()


if __name__ == "__main__":
    sys.exit(main())
