"""What a test run says of itself at the end: which engines it really launched, and what it could not test."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections import Counter
from typing import Any

import pytest

import fdg.runtime.run
from fdg.doctor import flame
from fdg.registry import ENGINES

# Generated code of the tests, in a folder of their own: what stands in the user's cache is what would run.
os.environ["FDG_CACHE"] = tempfile.mkdtemp(prefix="fdg-tests-")

runs: Counter[str] = Counter()
"""Finished runs by engine."""
fragmented: Counter[str] = Counter()
"""Those of them in which the engine called regions of fragments; `local` with one actor calls none."""
flame_skips: list[str] = []

LONG = ("test_property", "test_flame", "test_recovery", "test_process")
"""Files that come first: tests run file by file in two processes, and neither should wait for the other in the end."""


def counted(launch: Any) -> Any:
    @functools.wraps(launch)
    def counting(*arguments: Any, **options: Any) -> Any:
        result = launch(*arguments, **options)
        engine = result.metrics["engine"]
        runs[engine] += 1
        fragmented[engine] += bool(result.calls)
        return result

    return counting


# Here, not in a fixture: test modules import `launch` by name, after this file and before any fixture.
fdg.runtime.run.launch = counted(fdg.runtime.run.launch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)
    marked = [item for item in items if item.get_closest_marker("flame")]
    if marked and flame().state != "ok":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no Flame server is installed"))
        flame_skips.extend(item.nodeid for item in marked)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(runs=dict(runs), fragmented=dict(fragmented), flame_skips=flame_skips)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of the processes that run tests side by side has ended: add what it counted."""
    told = getattr(node, "workeroutput", {})
    runs.update(told.get("runs", {}))
    fragmented.update(told.get("fragmented", {}))
    flame_skips[:] = told.get("flame_skips", flame_skips)  # each of them collects all tests


def pytest_terminal_summary(terminalreporter: Any) -> None:
    say = terminalreporter.write_line
    seen = ", ".join(f"{name} ({runs[name]} runs, {fragmented[name]} of them in fragments)" for name in runs)
    missing = ", ".join(name for name in ENGINES if name not in runs)
    say(f"engines exercised: {seen or 'none'}" + (f"; not exercised: {missing}" if missing else ""))
    if flame_skips:
        say(f"!!! FLAME WAS NOT TESTED: {len(flame_skips)} tests skipped, no Flame server is installed", red=True)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["FDG_CACHE"], ignore_errors=True)
