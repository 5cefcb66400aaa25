"""`fdg plot`: runs as one picture, returns over frames and over time above, where the time went below.

Runs that differ only in the seed are one line with a band from the least to the most of them; what else differs is in the
legend. Each environment has a row of its own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fdg.errors import UsageError

COLOURS = ("#3566a8", "#d1701f", "#3d8c53", "#a8433f", "#7a5aa6", "#8a6d3b", "#c2588f", "#4f9aa8")
PHASE_COLOURS = {
    "collect": "#5b8fc7",
    "sync": "#b9c4d0",
    "sample": "#e3b15c",
    "learn": "#4d9a6a",
    "evaluate": "#a98bc4",
    "other": "#dedede",
}
INK, FAINT = "#333333", "#e6e6e6"
SUFFIXES = (".png", ".pdf", ".svg")
POINTS = 400
"""Where the runs of a group are compared."""


class NothingToDraw(UsageError):
    """A run in which no episode has ended."""


@dataclass
class Run:
    """What a plot needs of a run."""

    env: str
    name: str
    """Algorithm, policy and what else tells its line from others."""
    seed: int
    frames: list[float]
    seconds: list[float]
    returns: list[float]
    evaluations: list[tuple[float, float, float]] = field(default_factory=list)
    """(frames, seconds, mean return)."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; empty for a run that has not ended."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its config, less the seed."""


def read_run(folder: str | Path) -> Run:
    """A run from its folder; one that is still going on, too.

    Raises:
        UsageError: that is no run folder.
        NothingToDraw: no episode has ended yet.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        what = "is no run folder" if folder.is_dir() else "does not exist"
        raise UsageError(f"{folder} {what}: name folders that fdg train made, such as runs/CartPole-v1__dqn__…")
    config = json.loads((folder / "config.json").read_text())
    rows = []
    if (folder / "metrics.csv").is_file():
        with open(folder / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    with_return = [row for row in rows if row["episodic_return"]]
    if not with_return:
        raise NothingToDraw(f"{folder}: no episode had ended when it last logged: there is no return to draw")
    launched = read_json(folder / "launch.json")
    metrics = read_json(folder / "metrics.json")
    words = folder.name.split("__")
    algorithm = metrics.get("algorithm") or (words[1] if len(words) > 3 else folder.name)
    policy = launched.get("dist_policy") or "local"
    engine = launched.get("engine", "inprocess")
    name = " · ".join([algorithm, Path(policy).name, *([] if engine == "inprocess" else [engine])])
    evaluated = [row for row in rows if row.get("eval/episodic_return")]
    phases = dict(metrics.get("phases") or {})
    if phases:
        phases["other"] = max(0.0, metrics["seconds"] - sum(phases.values()))
    return Run(
        env=Path(str(config["env"])).name,
        name=name,
        seed=config["seed"],
        frames=numbers(with_return, "frames"),
        seconds=numbers(with_return, "seconds"),
        returns=numbers(with_return, "episodic_return"),
        evaluations=[
            (float(row["frames"]), float(row["seconds"]), float(row["eval/episodic_return"])) for row in evaluated
        ],
        phases=phases,
        settings={name: value for name, value in config.items() if name != "seed"},
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs whose names say in which settings they differ from others of that name on their environment."""
    found = []
    for run in runs:
        alike = [other.settings for other in runs if (other.env, other.name) == (run.env, run.name)]
        names = dict.fromkeys(name for settings in alike for name in settings)
        differ = [name for name in names if any(one.get(name) != run.settings.get(name) for one in alike)]
        words = [f"{name} {run.settings[name]}" for name in differ if name in run.settings]
        found.append(replace(run, name=" · ".join([run.name, *words])))
    return found


def read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def numbers(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def draw(runs: Sequence[Run], output: str | Path, title: str = "") -> Path:
    """Draw runs into a file.

    Raises:
        UsageError: the file is of no kind that can be drawn.
    """
    output = Path(output)
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{output}: a plot is written as {', '.join(SUFFIXES)}; give such a name")

    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = told_apart(runs)
    environments = list(dict.fromkeys(run.env for run in runs))
    names = list(dict.fromkeys(run.name for run in runs))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    bars = [(env, name) for env in environments for name in names if phases_of(runs, env, name)]
    heights = [4.0 * len(environments), *([1.0 + 0.35 * len(bars)] if bars else [])]
    figure = Figure(figsize=(10, sum(heights) + (0.3 if title else 0)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
    above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, hspace=0.04, squeeze=False)[:, 0]
    grid = above.add_gridspec(len(environments), 2)
    for index, env in enumerate(environments):
        left = above.add_subplot(grid[index, 0])
        right = above.add_subplot(grid[index, 1], sharey=left)
        groups = {name: [run for run in runs if (run.env, run.name) == (env, name)] for name in names}
        for axes, over in ((left, "frames"), (right, "seconds")):
            for name, group in groups.items():
                if group:
                    draw_group(axes, group, over, colours[name])
            plain(axes)
        left.set_title(env, loc="left", color=INK, fontsize=11, fontweight="bold")
        left.set_ylabel("return", color=INK)
        left.set_xlabel("frames", color=INK)
        right.set_xlabel("time", color=INK)
        left.xaxis.set_major_formatter(lambda value, _: short(value))
        right.xaxis.set_major_formatter(lambda value, _: clock(value))
        right.tick_params(labelleft=False)
        left.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
    if below:
        draw_phases(below[0].add_subplot(), runs, bars, several=len(environments) > 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none"}):  # letters, not outlines
        figure.savefig(output, dpi=150)
    return output


def draw_group(axes: Any, group: list[Run], over: str, colour: str) -> None:
    """The mean of some runs, a band over them, and dots for evaluations."""
    ends = [getattr(run, over) for run in group]
    at = np.linspace(max(end[0] for end in ends), min(end[-1] for end in ends), POINTS)
    several = len(group) > 1 and at[-1] > at[0]
    if several:
        values = np.array([np.interp(at, getattr(run, over), run.returns) for run in group])
        axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
        line = at, values.mean(0)
    else:
        line = getattr(group[0], over), group[0].returns
    what = "seeds" if len({run.seed for run in group}) == len(group) else "runs"
    several_runs = f", {len(group)} {what}" if len(group) > 1 else ""
    marker = "o" if len(line[0]) == 1 else None
    axes.plot(*line, color=colour, linewidth=1.8, marker=marker, label=f"{group[0].name}{several_runs}")
    dots = [
        (frames if over == "frames" else seconds, mean) for run in group for frames, seconds, mean in run.evaluations
    ]
    if dots:
        place, mean = zip(*dots, strict=True)
        axes.scatter(place, mean, s=14, facecolor="white", edgecolor=colour, linewidth=1.1, zorder=3)


def phases_of(runs: Sequence[Run], env: str, name: str) -> dict[str, float]:
    """Mean seconds by phase of the runs of a group that have ended."""
    known = [run.phases for run in runs if (run.env, run.name) == (env, name) and run.phases]
    phases = [phase for phase in PHASE_COLOURS if any(phase in seen for seen in known)]
    return {phase: sum(seen.get(phase, 0.0) for seen in known) / len(known) for phase in phases}


def draw_phases(axes: Any, runs: Sequence[Run], bars: list[tuple[str, str]], several: bool) -> None:
    """A bar for each group: the seconds of each phase, one behind the other."""
    from matplotlib.patches import Patch

    shown: set[str] = set()
    longest = max(sum(phases_of(runs, *bar).values()) for bar in bars)
    for row, bar in enumerate(bars):
        start = 0.0
        for phase, seconds in phases_of(runs, *bar).items():
            shown |= {phase} if seconds > longest / 500 else set()
            axes.barh(row, seconds, left=start, height=0.62, color=PHASE_COLOURS[phase])
            if seconds > longest / 14:
                axes.text(start + seconds / 2, row, clock(seconds), ha="center", va="center", fontsize=8, color=INK)
            start += seconds
    axes.set_yticks(range(len(bars)), [f"{env}  {name}" if several else name for env, name in bars])
    axes.invert_yaxis()
    axes.set_title("where the time went", loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.xaxis.set_major_formatter(lambda value, _: clock(value))
    plain(axes)
    axes.grid(False, axis="y")
    keys = [Patch(color=colour, label=phase) for phase, colour in PHASE_COLOURS.items() if phase in shown]
    axes.legend(handles=keys, frameon=False, fontsize=9, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plain(axes: Any) -> None:
    """No more ink than needed."""
    axes.grid(True, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(color=INK, labelcolor=INK, labelsize=9, length=0)
    axes.margins(x=0.02)


def short(value: float) -> str:
    """Frames in few characters.

    >>> short(0), short(1500), short(200_000), short(1_500_000)
    ('0', '1.5k', '200k', '1.5M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def clock(seconds: float) -> str:
    """A time in few characters.

    >>> clock(0), clock(0.015), clock(0.25), clock(12.34), clock(90), clock(5400)
    ('0', '0.015 s', '0.25 s', '12.3 s', '1:30 min', '1:30 h')
    """
    if seconds < 60:
        return f"{seconds:.{2 if seconds < 1 else 3}g} s" if seconds else "0"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
