"""Statistics over all rows of a batch, for `Learner.mean`, `std` and `sum`: plain ones, unless the rows are shared out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Sharing(Protocol):
    """Knows the rows that others have."""

    def across(self, total: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        """A sum over rows and a count of them, over everybody's rows."""
        ...


_sharing: Sharing | None = None


@contextlib.contextmanager
def shared(with_: Sharing | None) -> Iterator[None]:
    """Within, statistics are over everybody's rows; with None, over those at hand."""
    global _sharing
    before, _sharing = _sharing, with_
    try:
        yield
    finally:
        _sharing = before


def total(x: Any) -> torch.Tensor:
    x = torch.as_tensor(x)
    return x.sum() if _sharing is None else _sharing.across(x.sum(), x.numel())[0]


def mean(x: torch.Tensor) -> torch.Tensor:
    if _sharing is None:
        return x.mean()
    whole, count = _sharing.across(x.sum(), x.numel())
    return whole / count


def std(x: torch.Tensor) -> torch.Tensor:
    if _sharing is None:
        return x.std()
    whole, count = _sharing.across(x.sum(), x.numel())
    squares, _ = _sharing.across(((x - whole / count) ** 2).sum(), x.numel())
    return (squares / max(count - 1, 0)).sqrt()
