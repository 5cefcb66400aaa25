"""What a run shows: a live table on a terminal, plain aligned lines when piped, and a summary at the end.

A RunConsole is an observer of a run (`fdg.runtime.runfolder.Observer`).
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from fdg.capacity import Needs
    from fdg.config import Config
    from fdg.graph import Graph
    from fdg.runtime.runfolder import RunFolder

FIXED = ("iteration", "frames", "frames/s", "return")
ROWS_SHOWN = 12
VALUES_SHOWN = 4
REFRESH_SECONDS = 0.25
DAY = 24 * 3600
FIRST_LINES, LINE_SECONDS = 10, 2.0
"""Piped: the first lines all, then one every so many seconds, so that thousands of iterations do not flood a log."""


class RunConsole:
    """Shows one run. Use it in a `with`, so that the terminal is given back when the run fails."""

    def __init__(
        self, console: Console | None = None, folder: RunFolder | None = None, evaluates: bool = False
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.folder = folder
        self.iterations = 0
        self.values: list[str] = []
        self.evaluates = evaluates
        """Whether there is a column for evaluations."""
        self._path: Path | None = None
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS_SHOWN)
        self._live: Live | None = None
        self._shown = 0.0
        self._lines = 0
        self._header: list[str] = []
        self._pending = False

    def on_needs(self, needs: Needs) -> None:
        for line in needs.lines():
            self.console.print(line, markup=False)

    def on_start(self, config: Config, graph: Graph | None) -> None:
        self.iterations = config.iterations
        if self.console.is_terminal:
            # No refresh thread of its own: a run's time belongs to the run.
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()

    def on_log(self, row: dict[str, Any]) -> None:
        self._name_folder()
        shown = (*self.values, "episodic_return")  # the latter as `return`
        new = [name for name in row["values"] if name not in shown]  # a loss may come after a warm-up
        self.values = (self.values + new)[:VALUES_SHOWN]
        self._rows.append(row)
        self._pending = True
        every = REFRESH_SECONDS if self._live else LINE_SECONDS if self._lines >= FIRST_LINES else 0.0
        if time.monotonic() - self._shown >= every or "evaluation" in row:
            self._show()

    def on_final_evaluation(self, episodes: int) -> None:
        if self.console.is_terminal:
            self.console.print(f"evaluating the policy over {episodes} episodes …", markup=False)

    def on_end(self, metrics: dict[str, Any]) -> None:
        self._name_folder()
        self.close()
        for line in summary(metrics):
            self.console.print(line, markup=False)
        if self._path is not None and (written := worker_logs(self._path, metrics)):
            self.console.print(f"  workers wrote  {', '.join(written)} in {self._path / 'logs'}", markup=False)

    def _name_folder(self) -> None:
        """Say once where the run is kept, when there is something in it: one that fails before leaves no folder."""
        if self.folder is not None:
            self._path = self.folder.path
            self.console.print(f"run folder {self._path}", markup=False)
            self.folder = None

    def close(self) -> None:
        """Show the last row if it is not yet, and give the terminal back."""
        if self._pending:
            self._show()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def columns(self) -> list[str]:
        return [*FIXED, *(["eval"] if self.evaluates else []), *self.values, "time left"]

    def _cells(self, row: dict[str, Any]) -> list[str]:
        done = row["iteration"] + 1
        left = ""
        if 0 < done <= self.iterations:  # a trainer may count its log in something else than iterations
            left = duration(row["seconds"] / done * (self.iterations - done))
        return [
            f"{row['iteration']:,}",
            f"{row['frames']:,}",
            f"{row['frames_per_second']:,.0f}",
            number(row["episodic_return"]),
            *([number(row.get("evaluation"))] if self.evaluates else []),
            *(number(row["values"].get(name)) for name in self.values),
            left,
        ]

    def _show(self) -> None:
        self._pending, self._shown = False, time.monotonic()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        widths = [max(11, len(name)) for name in self.columns]
        if self._header != self.columns:
            self._header = self.columns
            self._line(self._header, widths)
        self._line(self._cells(self._rows[-1]), widths)
        self._lines += 1

    def _line(self, cells: list[str], widths: list[int]) -> None:
        text = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        self.console.print(text.rstrip(), markup=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
        for name in self.columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*self._cells(row))
        return table


def number(value: Any) -> str:
    """A logged number in few characters; nothing for None.

    >>> number(0.01234567), number(498.25), number(None)
    ('0.01235', '498.2', '')
    """
    return "" if value is None else f"{float(value):.4g}"


def duration(seconds: float) -> str:
    """A time as a person says it.

    >>> duration(8.4), duration(75), duration(7500), duration(1e6), duration(1e12)
    ('8 s', '1 min 15 s', '2 h 05 min', '11 days', 'years')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 3 * DAY:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // DAY} days" if whole < 1000 * DAY else "years"


def worker_logs(folder: Path, metrics: dict[str, Any]) -> list[str]:
    """The logs to which user code in workers wrote something; a fragment's own lines begin with its name."""
    if metrics.get("engine") != "process":
        return []
    logs = sorted((folder / "logs").glob("*.log"))
    return [log.name for log in logs if log.stat().st_size and not log.read_text().startswith(f"{log.stem}: ")]


def summary(metrics: dict[str, Any]) -> list[str]:
    """The lines that close a run: what ran, how fast, how good, where the time went, which parameters came out."""
    get = metrics.get
    lines = [
        "",
        f"{get('algorithm')} on {get('env')}  policy {get('policy')}  engine {get('engine')}"
        f"  actors {get('actors')}  seed {get('seed')}",
        f"  {get('frames', 0):,} frames, {get('episodes', 0):,} episodes in {get('seconds', 0.0):.1f} s"
        f"  ({get('frames_per_second', 0.0):,.0f} frames/s)",
    ]
    if get("mean_reward") is not None:
        lines.append(f"  mean_reward    {metrics['mean_reward']:.1f}")
    if get("not_finite"):
        lines.append(f"  not finite     {metrics['not_finite']}")
    phases, total = get("phases") or {}, get("seconds") or 0.0
    if phases and total > 0:
        shares = {**phases, "other": max(0.0, total - sum(phases.values()))}
        parts = [f"{name} {spent:.1f} s ({100 * spent / total:.0f} %)" for name, spent in shares.items()]
        lines.append(f"  phases         {', '.join(parts)}")
    if get("params_sha256"):
        lines.append(f"  params_sha256  {metrics['params_sha256'][:16]}")
    return lines
