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

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This one's rows of a value for all rows."""
        ...

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A value for all rows, from everybody's for their own."""
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


def moments(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many rows there are (dimension 0), and the mean and variance of each column over them."""
    x = x.to(torch.float64, memory_format=torch.contiguous_format)
    whole, count = x.sum(0), len(x)
    if _sharing is not None:
        whole, count = _sharing.across(whole, count)
    mean = whole / count
    squares = (x - mean).square().sum(0)
    if _sharing is not None:
        squares, _ = _sharing.across(squares, len(x))
    return count, mean, squares / count


def own_rows(x: torch.Tensor) -> torch.Tensor:
    """Of a tensor with an entry for each row of the batch, those for the rows at hand."""
    return x if _sharing is None else _sharing.own_rows(x)


def all_rows(x: torch.Tensor) -> torch.Tensor:
    """From entries for the rows at hand, a tensor with those for all rows of the batch."""
    return x if _sharing is None else _sharing.all_rows(x)
