"""A session: what outlasts the attempts at one run. A run that loses a worker is built anew and goes on from here."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fdg.api import Trainer
from fdg.errors import WorkerLost
from fdg.runtime import checkpoint, recovery
from fdg.runtime.boundary import Point
from fdg.runtime.trace import Place

ATTEMPTS = 5
"""How often a run may lose workers without getting any further."""


class Session:
    """Checkpoints of a run, losses so far, and whether it is to stop."""

    def __init__(self, every: int, folder: str | os.PathLike[str] | None, notice: Callable[[str], None]) -> None:
        self.every, self.notice = every, notice
        self.folder = folder
        """Where checkpoints go. It is asked for its path when one is written: a run folder is made when the run starts."""
        self.last: Any = None
        """The newest checkpoint: its state, or where it is."""
        self.number = 0
        """Turns begun, over all loops that have boundaries."""
        self.done = 0
        """Turns done: what checkpoints are called by."""
        self.wanted = bool(every or folder)
        """Whether `train` is to have boundaries."""
        self.why = ""
        """Why there can be no checkpoint, once that is known."""
        self.started = False
        self.reported = 0
        self.stopping = False
        self.places: list[Place] = []
        """What workers noted for the trace."""
        self._losses = 0
        self._lost_at = -1

    def open(self, resume: str | Path | dict[str, Any], trainer_class: type[Trainer]) -> None:
        """Begin with a checkpoint: a file, the newest in a run folder, or a state that was read before."""
        state = resume if isinstance(resume, dict) else recovery.read(resume, trainer_class)
        self.last, self.wanted = state, True
        self.number = state["number"]
        self.reported = len(state["progress"]["history"])

    def state(self) -> dict[str, Any] | None:
        """The state to go on from; None to begin."""
        state = checkpoint.load(self.last) if isinstance(self.last, Path) else self.last
        if state is not None:
            self.number = state["number"]
        return state

    def due(self, point: Point) -> bool:
        """Whether a checkpoint is to be taken at a boundary."""
        if not point.ended:
            self.number += 1
        self.done = self.number if point.ended else self.number - 1
        if self.stopping:
            return True
        if point.ended:  # a run with checkpoints has one of its end
            return bool(self.every) or (self.last is not None and self.folder is not None)
        return bool(self.every) and self.done > 0 and self.done % self.every == 0

    def keep(self, state: dict[str, Any]) -> dict[str, Any]:
        """Keep a state as the newest checkpoint; says how many turns are done, and where it is if it is a file."""
        state["number"], state["done"] = self.number, self.done
        self.last = state if self.folder is None else checkpoint.write(Path(self.folder), self.done, state)
        return {"turns": self.done, "path": self.last if isinstance(self.last, Path) else None}

    def lost(self, error: WorkerLost) -> None:
        """A worker is gone: say so, or give up."""
        at = self.number if self.last is not None else 0
        self._losses = self._losses + 1 if at == self._lost_at else 1
        self._lost_at = at
        if self._losses > ATTEMPTS:
            raise error
        where = "the last checkpoint" if self.last is not None else "the beginning"
        self.notice(f"{error}; the run goes on from {where}")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C once stops at the next boundary, with a checkpoint; twice, at once."""
        if self.folder is None or not self.wanted or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            if self.stopping:
                signal.signal(signal.SIGINT, before)
                if callable(before):
                    before(number, frame)
                raise KeyboardInterrupt
            self.stopping = True
            how = "with its policy alone" if self.why else "with a checkpoint"
            self.notice(f"stopping at the end of this iteration, {how}; Ctrl-C again to stop at once")

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
