"""One update of a learner: gradients from zero, the loss, backward, clip and step. What `Learner.update` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from fdg.errors import UsageError

_captures: Any = None
"""Makes the updates, where they are to be compiled: see `fdg/capture/`."""


def update(optimizer: Any, loss_function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Minimise what `loss_function(*args)` returns by one step; returns it, cut from autograd."""
    if _captures is not None:
        return _captures.update(optimizer, loss_function, args)
    return in_python(optimizer, loss_function, args)


@contextlib.contextmanager
def captured(by: Any) -> Iterator[None]:
    """Within, updates are made by these captures; with None, by Python."""
    global _captures
    before, _captures = _captures, by
    try:
        yield
    finally:
        _captures = before


def in_python(optimizer: Any, loss_function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer.zero_grad()
    result = loss_function(*args)
    loss = to_minimise(result, loss_function)
    loss.backward()
    optimizer.step()
    return detached(result)


def to_minimise(result: Any, loss_function: Any) -> torch.Tensor:
    """The loss in what a loss function returned: the tensor, the entry "loss", or the sum of those named "loss_…"."""
    if isinstance(result, torch.Tensor):
        loss: Any = result
    else:
        if not isinstance(result, dict) and not is_tensor_collection(result):
            raise UsageError(f"update: {_name(loss_function)} returned {_a(result)}; {WRITE}")
        loss = result.get("loss", None)
        if loss is None:
            parts = [result[key] for key in result.keys() if isinstance(key, str) and key.startswith("loss_")]  # noqa: SIM118
            if not parts:
                keys = ", ".join(map(repr, result.keys())) or "nothing"
                raise UsageError(f"update: {_name(loss_function)} returned entries for {keys}; {WRITE}")
            loss = sum(parts[1:], parts[0])
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else _a(loss)
        raise UsageError(
            f"update: the loss that {_name(loss_function)} returned is {seen}; reduce it to one number: .mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            f"update: the loss that {_name(loss_function)} returned depends on no parameter that needs a gradient: was it "
            "detached, or computed under torch.no_grad()?"
        )
    return loss


WRITE = 'return the loss, or a dict or TensorDict with an entry "loss", or with entries whose names begin with "loss_"'


def detached(result: Any) -> Any:
    """What a loss function returned, cut from autograd."""
    if isinstance(result, (torch.Tensor, TensorDictBase)) or is_tensor_collection(result):
        return result.detach()
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in result.items()}


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
