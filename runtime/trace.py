"""A trace of a run: what every place did when, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each process has a recorder while a trace is taken, and none otherwise. A span has the row that it belongs to: the
driver, an instance such as actors[3], or what a worker was asked. Times are the system's monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from fdg.graph import Region

DRIVER_ROW, REQUESTS = "driver", "requests"
PHASE_OF = {
    "env_reset": "collect",
    "env_step": "collect",
    "agent_act": "collect",
    "replay_buffer_insert": "insert",
    "replay_buffer_insert_rows": "insert",
    "replay_buffer_sample": "sample",
    "replay_buffer_update_priority": "sample",
    "agent_learn": "learn",
    "evaluate": "evaluate",
}
"""The component calls that have spans, and their phases."""


class Span(NamedTuple):
    """Something that took time, in one row; start and end are nanoseconds."""

    row: str
    name: str
    phase: str
    start: int
    end: int


class Place(NamedTuple):
    """The spans of one process."""

    pid: int
    name: str
    spans: list[Span]


_spans: list[Span] | None = None
_NOTHING: AbstractContextManager[Any] = nullcontext()


def begin() -> None:
    """Take a trace in this process from now on."""
    global _spans
    _spans = []


def end() -> list[Span]:
    """Stop; the spans of this process."""
    global _spans
    found, _spans = _spans or [], None
    return found


def on() -> bool:
    return _spans is not None


def taken() -> list[Span]:
    """The spans of this process so far."""
    return _spans or []


class _Timed:
    def __init__(self, spans: list[Span], row: str, name: str, phase: str) -> None:
        self.spans, self.what = spans, (row, name, phase)

    def __enter__(self) -> None:
        self.start = perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        self.spans.append(Span(*self.what, self.start, perf_counter_ns()))


def span(row: str, name: str, phase: str) -> AbstractContextManager[Any]:
    """Note how long the body of a `with` takes; nothing where no trace is taken."""
    return _NOTHING if _spans is None else _Timed(_spans, row, name, phase)


def watch(thing: Any, row: str, names: dict[str, str]) -> None:
    """Note how long calls of an object's methods take. `names` are the methods and their phases."""

    def timed(name: str, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(row, name, phase):
                return method(*args, **kwargs)

        return call

    for name, phase in names.items():
        setattr(thing, name, timed(name, phase, getattr(thing, name)))


def row_of(instance: tuple[str, str, int]) -> str:
    """The row of an instance: actors[3], learner."""
    fragment, kind, index = instance
    return f"{fragment}[{index}]" if kind == "actor" else fragment


def label(region: Region) -> str:
    """A region as the user's lines and its name: `dqn.py:131-135 collect`."""
    first, last = region.lines
    lines = f"{first}" if first == last else f"{first}-{last}"
    return f"{os.path.basename(region.file)}:{lines} {region.name}"


def write(path: str | os.PathLike[str], places: Iterable[Place]) -> None:
    """Write the trace, to a file or into a folder: one process row per place, in it one row per instance."""
    file = Path(path)
    file = file / "trace.json" if file.is_dir() else file
    places = [place for place in places if place.spans]
    events: list[dict[str, Any]] = []
    begin = min((span.start for place in places for span in place.spans), default=0)
    for order, place in enumerate(places):
        events.append(_named("process_name", place.pid, 0, name=place.name))
        events.append(_named("process_sort_index", place.pid, 0, sort_index=order))
        rows: dict[str, int] = {}
        for span in sorted(place.spans, key=lambda span: (span.start, -span.end)):
            if span.row not in rows:
                rows[span.row] = len(rows)
                events.append(_named("thread_name", place.pid, rows[span.row], name=span.row))
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.phase,
                    "ts": (span.start - begin) / 1000,
                    "dur": (span.end - span.start) / 1000,
                    "pid": place.pid,
                    "tid": rows[span.row],
                }
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
