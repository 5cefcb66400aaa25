"""Boundaries: the places between two turns of `train`'s outermost loops, where a run can be saved, stopped and resumed.

    Point       where a run stands: which loop, how many turns are done, and the values of the local variables to go on with
    Boundaries  what the code made by `fdg.compiler.resume` calls on `self.msrl`
    Stop        raised by `on_boundary`, it ends the run there

A trainer that is resumed gets a `Boundaries` made from the point: `begins` is false for what was done already, `restored`
gives the local variables back, the loop goes on with the turn that was about to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from fdg.runtime.values import UNBOUND


class Stop(BaseException):
    """Ends a run at a boundary. No `Exception`: a trainer's own `except Exception` lets it pass."""


class Point(NamedTuple):
    """Where a run stands. The values are the trainer's own objects: whoever keeps a point copies them, all at once."""

    label: int
    """Which loop of the program."""
    turns: int
    """How many of its turns are done."""
    ended: bool
    """Whether the loop has ended, because there was no further turn."""
    values: dict[str, Any]
    """Local variables by name, those of a method that `train` called as `method.name`; UNBOUND where there is none."""


class Boundaries:
    """The run's place among its boundaries. `on_boundary` gets each point that is reached; the one it was resumed from not again.

    >>> fresh = Boundaries()
    >>> for i in fresh.turns(1, range(5)):
    ...     fresh.boundary(1, total=10 * i)
    >>> fresh.turn
    5
    >>> resumed = Boundaries(point=Point(1, 3, False, {"total": 30}))
    >>> resumed.begins(1), resumed.restored("total"), list(resumed.turns(1, range(5)))
    (False, 30, [3, 4])
    """

    def __init__(self, on_boundary: Callable[[Point], None] | None = None, point: Point | None = None) -> None:
        self.on_boundary = on_boundary
        self.point = point
        """The point to resume from, until it is reached."""
        self.label = point.label if point is not None else 0
        self.turn = point.turns if point is not None else 0
        """The turns of the loop `label` that have begun."""
        self._method = ""
        self._callers: dict[str, Any] = {}

    def begins(self, label: int) -> bool:
        """Whether what stands before a loop is still to be done: not when the run is resumed there, or further on."""
        return self.point is None or self.point.label < label

    def resumes(self, *labels: int) -> bool:
        """Whether the run is on its way to one of these loops, to go on there."""
        return self.point is not None and self.point.label in labels

    def restored(self, *names: str) -> Any:
        """The local variables of the point, one value or a tuple of them; UNBOUND where there was none."""
        assert self.point is not None
        values = [self.point.values.get(self._method + name, UNBOUND) for name in names]
        return values[0] if len(names) == 1 else tuple(values)

    def turns(self, label: int, items: Iterable[Any]) -> Iterable[Any]:
        """What a `for` has still to go through."""
        self._enter(label)
        if not self.turn:
            return items
        return items[self.turn :] if isinstance(items, range) else islice(items, self.turn, None)

    def again(self, label: int) -> bool:
        """Whether a `while` goes on in the middle of a turn, without asking its condition, which was asked before."""
        return self.point is not None and self.point.label == label and not self.point.ended

    def boundary(self, label: int, /, **values: Any) -> None:
        """A turn is about to begin."""
        self._enter(label)
        self._reach(False, values)
        self.turn += 1

    def ended(self, label: int, /, **values: Any) -> None:
        """There was no further turn. A run that is resumed here goes on if there is one now."""
        self._enter(label)
        self._reach(True, values)

    @contextmanager
    def calling(self, method: str, /, **values: Any) -> Iterator[None]:
        """Around the call of a method with boundaries: what its caller has to go on with."""
        before = self._method, self._callers
        self._callers = self._callers | {self._method + name: value for name, value in values.items()}
        self._method = f"{method}."
        try:
            yield
        finally:
            self._method, self._callers = before

    def _enter(self, label: int) -> None:
        if label != self.label:
            self.label, self.turn = label, 0

    def _reach(self, ended: bool, values: dict[str, Any]) -> None:
        if self.point is not None:
            known = (self.point.turns, self.point.ended) == (self.turn, ended)
            self.point = None
            if known:
                return
        if self.on_boundary is not None:
            if self._method:
                values = self._callers | {self._method + name: value for name, value in values.items()}
            self.on_boundary(Point(self.label, self.turn, ended, values))
