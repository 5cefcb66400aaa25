"""What every side of a comparison needs: a clock that knows when enough was measured, and one line of JSON as the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable


def rate(step: Callable[[], int], seconds: float, warm_up: float = 1.0) -> float:
    """Frames per second of a function that does some work and says how many frames it was."""
    end = time.perf_counter() + warm_up
    while time.perf_counter() < end:
        step()
    frames, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        frames += step()
    return frames / passed


def answer(**values: float) -> None:
    """The last line that a side prints."""
    print(json.dumps(values))
