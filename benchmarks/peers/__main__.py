"""How fast, beside others: each workload by FDG and by its peers in turns, on this machine, in one go.

    python benchmarks/peers                      # what has not been measured yet; about 20 minutes in all
    python benchmarks/peers --only dqn,replay    # workloads, by part of their name
    python benchmarks/peers --again              # forget what was measured before (of these workloads)
    python benchmarks/peers --report             # table and picture anew, without measuring

Every measurement is a process of its own, and all sides of a workload take turns, so that a machine that is slower for a
while is slower for all. A result is added to results.jsonl as soon as it is there: the command can be stopped at any time
and goes on with what is missing. Networks, batch sizes and updates per frame are the same on all sides; what else a side
may choose (how many environments, how many processes) it chooses as serves it best. One torch thread in each process.
A measurement during which other programs took more than some percent of the CPUs does not count and is made again.

    ours.py            FDG
    sb3.py             Stable-Baselines3, in an environment of its own (build/sb3) that shares torch with ours
    torchrl_side.py    TorchRL's collectors, losses and replay buffers
    plain.py           single-file loops with torch and Gymnasium alone

Medians of the repeats go to docs/performance.md, with a picture of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sb3_environment import sb3_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.jsonl"
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.png"
BEGIN, END = "<!-- peers: written by benchmarks/peers -->", "<!-- end of peers -->"
SIDES = {"fdg": "ours.py", "sb3": "sb3.py", "torchrl": "torchrl_side.py", "plain": "plain.py"}
NAMES = {"sb3": "Stable-Baselines3", "torchrl": "TorchRL", "plain": "plain loop"}


@dataclass(frozen=True)
class Row:
    """One comparison: what of ours against what of theirs, and how many times as fast it is to be."""

    what: str
    ours: str
    side: str
    theirs: str
    goal: float
    key: str = "rate"
    """What of our answer is compared; `seconds` and `megabytes` are to be at most `goal` times theirs (or MB more)."""


ROWS = [
    Row("REINFORCE CartPole-v1, start to solved", "reinforce_cartpole", "plain", "reinforce_cartpole", 60),
    Row("REINFORCE Ant-v5, 256-256", "reinforce_ant", "plain", "reinforce_ant", 7),
    Row("… collect phase, against random actions in two processes", "reinforce_ant", "plain", "random_ant", 0.85, "collect"),
    Row("DQN CartPole-v1, 400 frames per update", "dqn_published", "torchrl", "dqn_published", 10),
    Row("… number of environments free", "dqn_published_free", "torchrl", "dqn_published", 40),
    Row("DQN CartPole-v1, 4 frames per update", "dqn_update_per_4", "sb3", "dqn_update_per_4", 2.5),
    Row("", "dqn_update_per_4", "plain", "dqn_update_per_4", 1.2),
    Row("… compiled update", "dqn_update_per_4_compiled", "sb3", "dqn_update_per_4", 5),
    Row("", "dqn_update_per_4_compiled", "plain", "dqn_update_per_4", 2.5),
    Row("PPO HalfCheetah-v5, 8 × 256 steps, 10 epochs, batch 64", "ppo_cheetah", "sb3", "ppo_cheetah", 2),
    Row("", "ppo_cheetah", "plain", "ppo_cheetah", 1.2),
    Row("… compiled update, TorchRL's loss", "ppo_cheetah_compiled", "sb3", "ppo_cheetah", 5),
    Row("", "ppo_cheetah_compiled", "plain", "ppo_cheetah", 3),
    Row("… and collected by two workers", "ppo_cheetah_workers", "sb3", "ppo_cheetah", 5),
    Row("", "ppo_cheetah_workers", "plain", "ppo_cheetah", 3),
    Row("collection alone, HalfCheetah-v5, 64-64", "collect_cheetah", "torchrl", "collect_cheetah", 10),
    Row("", "collect_cheetah", "sb3", "collect_cheetah", 3),
    Row("collection alone, CartPole-v1, 64-64", "collect_cartpole", "torchrl", "collect_cartpole", 100),
    Row("replay, 100 k rows: insert 16, sample 256", "replay_uniform", "torchrl", "replay_uniform", 2),
    Row("… prioritized: sample and update 256", "replay_prioritized", "torchrl", "replay_prioritized", 1),
    Row("`fdg train` of one iteration, against `import torchrl`: seconds", "start_up", "torchrl", "start_up", 1.5, "seconds"),
    Row("… memory: MB", "start_up", "torchrl", "start_up", 200, "megabytes"),
]  # fmt: skip


DISTURBED = 0.06
"""Share of the CPUs that others may take during a measurement."""


def undisturbed(side: str, workload: str, seconds: float, patience: float) -> dict[str, Any]:
    """Measure while nobody else works; after so many seconds of waiting, with somebody else working."""
    end = time.perf_counter() + patience
    while True:
        watch = Others()
        time.sleep(0.5)
        if watch.share() > DISTURBED and time.perf_counter() < end:
            continue
        watch = Others()
        found = measure(side, workload, seconds)
        share = watch.share()
        if share <= DISTURBED or time.perf_counter() > end:
            return {**found, "others": round(share, 3)}


class Others:
    """What programs that are not ours take of the CPUs, from now on."""

    def __init__(self) -> None:
        self.busy, self.own, self.start = self._busy(), self._own(), time.perf_counter()

    def share(self) -> float:
        passed = (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        return max(0.0, self._busy() - self.busy - (self._own() - self.own)) / passed

    @staticmethod
    def _busy() -> float:
        """Seconds in which CPUs worked; where the system does not tell, nobody is ever disturbed."""
        try:
            user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        except OSError:
            return 0.0
        return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _own() -> float:
        return sum(os.times()[:4])


def measure(side: str, workload: str, seconds: float) -> dict[str, Any]:
    """Run one side of a workload; what it answered."""
    python = sb3_python() if side == "sb3" else Path(sys.executable)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, HERE / SIDES[side], workload, str(seconds)],
        cwd=ROOT / "build",
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
        timeout=30 * seconds + 300,
    )
    if done.returncode:
        raise RuntimeError(f"{SIDES[side]} {workload} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def groups(only: list[str]) -> list[list[tuple[str, str]]]:
    """Which measurements take turns: those that are compared with one another."""
    found: list[list[tuple[str, str]]] = []
    for row in ROWS:
        if only and not any(part in row.ours or part in row.theirs for part in only):
            continue
        pair = [("fdg", row.ours), (row.side, row.theirs)]
        home = next((group for group in found if any(item in group for item in pair)), None)
        if home is None:
            found.append(home := [])
        home += [item for item in pair if item not in home]
    return found


def run(only: list[str], repeats: int, seconds: float, patience: float) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    for group in groups(only):
        if any(known(item, repeat) is None for item in group for repeat in range(repeats)):
            forget([item for item in group if known(item, 0) != here()])  # sides are compared on one machine
        for repeat in range(repeats):
            have = {(result["side"], result["workload"], result["repeat"]) for result in results()}
            for side, workload in group if repeat % 2 else group[::-1]:
                if (side, workload, repeat) in have:
                    continue
                try:
                    found = undisturbed(side, workload, seconds, patience)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{side:8} {workload:28} {error}", file=sys.stderr, flush=True)
                    continue
                print(f"{side:8} {workload:28} {repeat}  {found}", flush=True)
                with RESULTS.open("a") as file:
                    what = {"side": side, "workload": workload, "repeat": repeat, "where": here()}
                    file.write(json.dumps({**what, **found}) + "\n")


def known(item: tuple[str, str], repeat: int) -> str | None:
    """Where a measurement was made; None if it was not."""
    return next(
        (at["where"] for at in results() if (at["side"], at["workload"], at["repeat"]) == (*item, repeat)), None
    )


def forget(gone: list[tuple[str, str]]) -> None:
    kept = [result for result in results() if (result["side"], result["workload"]) not in gone]
    RESULTS.write_text("".join(json.dumps(result) + "\n" for result in kept))


# report ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A row with its numbers."""

    row: Row
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        if self.row.key == "megabytes":
            return median(self.ours) - median(self.theirs)
        return median(self.ours) / median(self.theirs)

    @property
    def low(self) -> bool:
        """Whether less is better."""
        return self.row.key in ("seconds", "megabytes")

    @property
    def met(self) -> bool:
        return self.ratio <= self.row.goal if self.low else self.ratio >= self.row.goal

    def cells(self) -> list[str]:
        unit = " MB more" if self.row.key == "megabytes" else "×"
        goal = f"{'at most ' if self.low else ''}{self.row.goal:g}{unit}"
        ratio = (
            f"{self.ratio:,.0f}"
            if self.ratio >= 100
            else f"{self.ratio:.2g}"
            if self.ratio < 10
            else f"{self.ratio:.0f}"
        )
        who = NAMES[self.row.side]
        return [
            self.row.what,
            who,
            spread(self.ours),
            spread(self.theirs),
            ratio + unit,
            goal,
            "yes" if self.met else "no",
        ]


def spread(values: list[float]) -> str:
    """The median, and how far the repeats lie from it at most, in percent."""
    middle = median(values)
    off = max(abs(value - middle) for value in values) / middle
    return f"{short(middle)} ± {100 * off:.0f} %"


def short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e3 else f"{value:.3g}"


def lines() -> list[Line]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for result in results():
        for key in ("rate", "collect", "seconds", "megabytes"):
            if key in result:
                found.setdefault((result["side"], result["workload"], key), []).append(result[key])
    out = []
    for row in ROWS:
        theirs = found.get((row.side, row.theirs, "rate" if row.key == "collect" else row.key))
        ours = found.get(("fdg", row.ours, row.key))
        if ours and theirs:
            out.append(Line(row, ours, theirs))
    return out


def report() -> None:
    """Write the table into the page, and the picture beside it."""
    found = lines()
    head = ["workload", "against", "FDG", "the other", "ratio", "goal", "met"]
    table = [head, ["---"] * len(head), *(line.cells() for line in found)]
    where = " and ".join(dict.fromkeys(result["where"] for result in results()))
    text = (
        f"{BEGIN}\nFrames (or calls) per second, {where}; medians, with the largest distance of a repeat from it.\n\n"
    )
    text += "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    text += f"\n\n![how many times as fast, beside the goals](performance.png)\n{END}"
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2])
    draw([line for line in found if not line.low])
    for line in found:
        print("  ".join(line.cells()))


def draw(found: list[Line]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.38 * len(found) + 1))
    places = range(len(found))[::-1]
    axes.barh(places, [line.ratio for line in found], color=["#2b7a4b" if line.met else "#b5523b" for line in found])
    goals = [line.row.goal for line in found]
    axes.scatter(goals, places, marker="|", s=220, color="black", zorder=3, label="goal")
    axes.set_xscale("log")
    names, last = [], ""
    for line in found:
        what = line.row.what or last
        last = what
        names.append(f"{what.replace('`', '')[:52]} / {NAMES[line.row.side]}")
    axes.set_yticks(places, names, fontsize=7)
    axes.axvline(1, color="grey", linewidth=0.7)
    axes.set_xlabel("times as fast as the other")
    axes.legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def here() -> str:
    """This machine."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{os.cpu_count()} CPUs ({processor}), Python {platform.python_version()}, torch {version('torch')}"


def version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="workloads, by parts of their names: dqn,replay")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement, after its warm-up")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for others to be done")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--report", action="store_true", help="only write table and picture anew")
    given = parser.parse_args()
    only = [part for part in given.only.split(",") if part]
    if given.again:
        forget([item for group in groups(only) for item in group])
    if not given.report:
        run(only, given.repeats, given.seconds, given.patience)
    report()


if __name__ == "__main__":
    main()
