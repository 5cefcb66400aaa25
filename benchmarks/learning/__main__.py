"""Does it learn? Every bundled algorithm on its environments, over several seeds, beside Stable-Baselines3.

    python benchmarks/learning                      # what is still missing, two runs at a time; hours in all
    python benchmarks/learning --only ppo/Hopper    # studies, by part of their name
    python benchmarks/learning --list               # what there is and what has been run
    python benchmarks/learning --report             # the table and the curves anew, without running anything

Each run is one `fdg train` with the settings that ship with the package, the long ones with `--compile-update`. Its result is added to results.jsonl as soon as
it is there, so that the command can be stopped at any time and goes on with the next run. Stable-Baselines3 runs in an
environment of its own (build/sb3) with the settings that its zoo publishes. Returns are of 100 episodes after training,
without exploration. Table and curves are written to docs/learning.md and docs/learning.png.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.jsonl"
sys.path.append(str(HERE.parent / "peers"))

from sb3_environment import sb3_python  # noqa: E402

EPISODES = 100


@dataclass(frozen=True)
class Study:
    """An algorithm on an environment."""

    algorithm: str
    env: str
    seeds: int
    goal: float | None = None
    """The mean return that each seed is to reach; without one, Stable-Baselines3's is the measure."""
    frames: int | None = None
    """Frames of a run; by default as many as the settings that ship with the package make."""
    published: float | None = None
    """What Stable-Baselines3's zoo publishes for these frames (one run, version 3 of the environment)."""
    compiled: bool = False
    """Whether updates are compiled, which saves hours."""

    @property
    def name(self) -> str:
        return f"{self.algorithm}/{self.env}"


STUDIES = [
    *(Study(algorithm, "CartPole-v1", 5, 475.0) for algorithm in ("reinforce", "dqn", "a2c", "ppo")),
    *(Study(algorithm, "Acrobot-v1", 5, -100.0) for algorithm in ("dqn", "ppo")),
    Study("ppo", "HalfCheetah-v5", 3, frames=1_000_000, published=5819.1, compiled=True),
    Study("ppo", "Hopper-v5", 3, frames=1_000_000, published=2410.4, compiled=True),
    *(
        Study(algorithm, env, 3, frames=100_000, compiled=True)
        for env in ("HalfCheetah-v5", "Hopper-v5")
        for algorithm in ("sac", "td3")
    ),
]


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    study: Study
    who: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.who, self.study.algorithm, self.study.env, self.seed

    def run(self) -> dict[str, Any]:
        """Train and evaluate in a process of its own; what came of it."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = self.ours(out) if self.who == "fdg" else self.theirs(out)
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=one_thread(), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
            seconds = time.perf_counter() - start
            found = json.loads(out.read_text())
        who, algorithm, env, seed = self.key
        result = dict(who=who, algorithm=algorithm, env=env, seed=seed, seconds=round(seconds, 1))
        if who == "fdg":
            rows = [row for row in found["iterations"] if row["episodic_return"] is not None]
            found = {
                "version": found.get("version"),
                "frames": found["frames"],
                "mean_return": found["mean_reward"],
                "curve": [(row["frames"], row["seconds"], row["episodic_return"]) for row in rows],
            }
        found["curve"] = [
            (frames, round(at, 2), round(value, 2)) for frames, at, value in thinned(found["curve"], points=100)
        ]
        return {**result, **found}

    def ours(self, out: Path) -> list[str]:
        study = self.study
        frames = [] if study.frames is None else ["--total-timesteps", str(study.frames)]
        command = [sys.executable, "-m", "fdg", "train", study.algorithm, "--env", study.env, "--seed", str(self.seed)]
        compiled = ["--compile-update"] if study.compiled else []
        return [*command, *frames, *compiled, "--eval-episodes", str(EPISODES), "--metrics-json", str(out), "-q"]

    def theirs(self, out: Path) -> list[str]:
        frames = str(self.study.frames)
        return [
            str(sb3_python()),
            str(HERE / "sb3.py"),
            self.study.algorithm,
            self.study.env,
            frames,
            str(self.seed),
            str(out),
        ]


def thinned(rows: list[Any], points: int) -> list[Any]:
    """At most so many rows, evenly chosen, the last one among them."""
    step = max(1, -(-len(rows) // points))
    return rows[::-1][::step][::-1]


def one_thread() -> dict[str, str]:
    """The environment of a run: one thread each, since several run side by side."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def jobs(studies: list[Study]) -> list[Job]:
    """All runs: ours, and those of Stable-Baselines3 where it is the measure."""
    ours = [Job(study, "fdg", seed) for study in studies for seed in range(1, study.seeds + 1)]
    theirs = [Job(study, "sb3", 1) for study in studies if study.goal is None]
    return [*ours, *theirs]


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(result: dict[str, Any]) -> None:
    with RESULTS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(result) + "\n")


def key(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["who"], result["algorithm"], result["env"], result["seed"]


# report ---------------------------------------------------------------------------------------------------------------


def returns(found: list[dict[str, Any]], who: str, study: Study) -> list[float]:
    return [
        result["mean_return"]
        for result in found
        if (result["who"], result["algorithm"], result["env"]) == (who, study.algorithm, study.env)
    ]


def spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{mean(values):,.1f}" + (f" ± {stdev(values):,.1f}" if len(values) > 1 else "")


def verdict(study: Study, ours: list[float], theirs: list[float]) -> str:
    if len(ours) < study.seeds:
        return f"{len(ours)} of {study.seeds} runs"
    if study.goal is not None:
        return (
            "reached"
            if min(ours) >= study.goal
            else f"{sum(value >= study.goal for value in ours)} of {len(ours)} seeds"
        )
    measures = [*([mean(theirs)] if theirs else []), *([] if study.published is None else [study.published])]
    if not measures:
        return ""
    return f"{mean(ours) / max(measures):.3f} × the better one"


def table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| algorithm | environment | frames | mean return, over seeds | goal | Stable-Baselines3 (runs) | its zoo publishes | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for study in STUDIES:
        ours, theirs = returns(found, "fdg", study), returns(found, "sb3", study)
        frames = next((r["frames"] for r in found if key(r)[:3] == ("fdg", study.algorithm, study.env)), study.frames)
        cells = (
            study.algorithm,
            study.env,
            f"{frames:,}" if frames else "",
            f"{spread(ours)} ({len(ours)})" if ours else "",
            "" if study.goal is None else f"≥ {study.goal:g} each",
            f"{spread(theirs)} ({len(theirs)})" if theirs else "",
            "" if study.published is None else f"{study.published:,.1f}",
            verdict(study, ours, theirs),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """A curve for each study: return over frames, mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    columns = 3
    studies = [study for study in STUDIES if any(key(r)[1:3] == (study.algorithm, study.env) for r in found)]
    rows = -(-len(studies) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(12, 2.7 * rows), constrained_layout=True, squeeze=False)
    for axis, study in zip(axes.flat, studies, strict=False):
        for who, colour, label in (("sb3", "0.55", "Stable-Baselines3"), ("fdg", "C0", "FDG")):
            curves = [r["curve"] for r in found if key(r)[:3] == (who, study.algorithm, study.env) and r["curve"]]
            if not curves:
                continue
            grid = np.linspace(0, min(curve[-1][0] for curve in curves), 200)
            lines = [np.interp(grid, [p[0] for p in curve], [p[2] for p in curve]) for curve in curves]
            axis.plot(grid, np.mean(lines, 0), color=colour, label=label)
            axis.fill_between(grid, np.min(lines, 0), np.max(lines, 0), color=colour, alpha=0.2, linewidth=0)
        measure = study.goal if study.goal is not None else study.published
        if measure is not None:
            axis.axhline(measure, color="C3", linewidth=0.8, linestyle="--")
        axis.set_title(f"{study.algorithm.upper()}, {study.env}", fontsize=10)
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        axis.grid(alpha=0.2)
        axis.legend(fontsize=7, loc="lower right")
    for axis in axes.flat[len(studies) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        axis.set_xlabel("frames")
    for axis in axes[:, 0]:
        axis.set_ylabel("return")
    figure.savefig(file, dpi=110)


def report() -> None:
    """Write the page and the curves."""
    found = results()
    page = [
        "# What the algorithms learn",
        "",
        "Written by `python benchmarks/learning`, which runs what is missing and stores each result as it finishes",
        "(benchmarks/learning/results.jsonl). Each run is `fdg train ALGORITHM --env ENV` with the settings that ship with the",
        f"package, on MuJoCo's environments with `--compile-update`. Returns are means of {EPISODES} episodes after training, without exploration; ± is the spread over seeds. "
        "Stable-Baselines3",
        "has the settings of its zoo and the same number of frames, with one run where nothing else is said; the zoo's own figures are of one run each, on version 3 of the",
        "environments. Its two runs of TD3 on HalfCheetah came to 6,638 and 5,601; its other measured runs are one each, and one says little where runs differ by their",
        "seed alone.",
        "Runs were made on several kinds of CPU (Xeon, AMD EPYC), which differ in the last bits, and so in what a seed learns.",
        "",
        *table(found),
        "",
        "Returns during training, with exploration: mean and range over seeds. Dashed: the goal, or what the zoo publishes.",
        "",
        "![Learning curves](learning.png)",
    ]
    (ROOT / "docs" / "learning.md").write_text("\n".join(page) + "\n")
    draw(found, ROOT / "docs" / "learning.png")
    print("\n".join(table(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="studies whose name has this part")
    parser.add_argument("--who", choices=["fdg", "sb3"], help="only these runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--list", action="store_true", help="say what has been run")
    parser.add_argument("--report", action="store_true", help="write the page and the curves, run nothing")
    options = parser.parse_args()
    studies = [study for study in STUDIES if not options.only or any(part in study.name for part in options.only)]
    done = {key(result) for result in results()}
    wanted = [job for job in jobs(studies) if options.who in (None, job.who)]
    missing = [job for job in wanted if job.key not in done]
    if options.list:
        for job in wanted:
            print("missing" if job in missing else "done   ", *job.key)
        return 0
    failed = [] if options.report else run_all(missing, options.jobs)
    report()
    return bool(failed)


def run_all(missing: list[Job], side_by_side: int) -> list[Job]:
    """Run jobs, keep their results; those that failed."""
    failed = []

    def run(job: Job) -> None:
        try:
            result = job.run()
        except Exception as error:
            failed.append(job)
            print(f"{job.study.name} seed {job.seed} ({job.who}) failed: {error}", file=sys.stderr)
            return
        keep(result)
        print(
            f"{job.study.name} seed {job.seed} ({job.who}): mean return {result['mean_return']:,.1f} "
            f"after {result['frames']:,} frames, {result['seconds']:,.0f} s",
            flush=True,
        )

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(run, missing))
    return failed


if __name__ == "__main__":
    sys.exit(main())
