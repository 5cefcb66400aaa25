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
    marked = [item for item in items if item.get_closest_marker("flame")]
    if marked and flame().state != "ok":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no Flame server is installed"))
        flame_skips.extend(item.nodeid for item in marked)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    say = terminalreporter.write_line
    seen = ", ".join(f"{name} ({runs[name]} runs, {fragmented[name]} of them in fragments)" for name in runs)
    missing = ", ".join(name for name in ENGINES if name not in runs)
    say(f"engines exercised: {seen or 'none'}" + (f"; not exercised: {missing}" if missing else ""))
    if flame_skips:
        say(f"!!! FLAME WAS NOT TESTED: {len(flame_skips)} tests skipped, no Flame server is installed", red=True)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["FDG_CACHE"], ignore_errors=True)
