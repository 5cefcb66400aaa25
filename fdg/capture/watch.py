"""What Python would do differently next time: attributes that change, branches, and how to undo what a trial did."""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fdg.capture.arguments import SCALARS, NotCaptured


def same_scalar(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, SCALARS) and a == b


def attributes_of(loss_function: Any) -> dict[str, Any]:
    """The attributes of a loss function's object, if it is the user's; those of libraries make some when first asked."""
    owner = getattr(loss_function, "__self__", loss_function)
    library = type(owner).__module__.partition(".")[0] in ("torch", "torchrl", "tensordict")
    return {} if library else getattr(owner, "__dict__", {})


class Guard:
    """Watches the attributes that a loss function reads of its object."""

    def __init__(self, loss_function: Any) -> None:
        self.owner = getattr(loss_function, "__self__", loss_function)
        self.attributes = attributes_of(loss_function)
        self.read: set[str] = set()
        self.watched: list[tuple[str, Any, bool]] = []

    def __enter__(self) -> None:
        """Within, note what is read."""
        self.kind = kind = type(self.owner)
        if kind is types.FunctionType:
            return
        read = self.read.add

        def noting(this: Any, name: str) -> Any:
            read(name)
            return super(noted, this).__getattribute__(name)

        try:
            noted: Any = type(kind.__name__, (kind,), {"__getattribute__": noting, "__module__": kind.__module__})
            self.owner.__class__ = noted
        except TypeError:  # a class of C, or with slots: the comparison with Python has to do
            return

    def __exit__(self, *_: Any) -> None:
        if type(self.owner) is not self.kind:
            self.owner.__class__ = self.kind
        found = [(name, self.attributes[name]) for name in sorted(self.read & self.attributes.keys())]
        self.watched = [(name, value, isinstance(value, SCALARS)) for name, value in found]

    def holds(self) -> bool:
        """Whether they are as they were."""
        now = self.attributes
        for name, value, scalar in self.watched:
            seen = now.get(name)
            if seen is not value and not (scalar and same_scalar(seen, value)):
                if isinstance(seen, (int, float)) and not isinstance(seen, bool):
                    raise NotCaptured(
                        f"it reads self.{name}, a number that changes between updates ({value}, then {seen}) and would be part "
                        f"of the code; make it a tensor, changed in place: self.{name} = torch.tensor(…), "
                        f"self.{name}.fill_(…), or pass it as an argument that is one"
                    )
                return False
        return True


class undone:
    """Within, what is done to tensors, random generators and numbers of the loss function's object is undone at the end."""

    def __init__(self, state: list[torch.Tensor], loss_function: Any) -> None:
        self.state = state  # written by the fused Adam, which does not count it as a version
        self.others = reachable(loss_function)
        self.attributes = attributes_of(loss_function)

    def __enter__(self) -> None:
        self.before = [(tensor, -1, tensor.clone()) for tensor in self.state]
        self.before += [(tensor, tensor._version, tensor.detach().clone()) for tensor in self.others]
        self.numbers = {name: value for name, value in self.attributes.items() if isinstance(value, SCALARS)}
        self.random = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def __exit__(self, *_: Any) -> None:
        for tensor, version, copy in self.before:
            if tensor._version != version:
                tensor.detach().copy_(copy)
        self.attributes.update(self.numbers)
        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])
        random.setstate(self.random[2])


def reachable(loss_function: Any) -> list[torch.Tensor]:
    """The tensors of a loss function and its object."""
    from fdg.errors import UsageError
    from fdg.runtime.weights import take_apart

    try:
        found = take_apart(getattr(loss_function, "__self__", loss_function), "it")[1]
    except UsageError as error:
        raise NotCaptured(str(error)) from None
    return [tensor for tensor in found if tensor.layout is torch.strided and tensor.numel()]


class Branches(TorchFunctionMode):
    """Within, conditions that depend on tensors are noted, with what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__bool__:
            with _disable_current_modes():  # the tensor itself: tracing would refuse to look
                value = bool(args[0])
            self.found.append((args[0], value))
            return value
        return function(*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        return bool(self.found)

    def same(self) -> torch.Tensor:
        """Whether all of them are what they were."""
        each = [tensor.detach().reshape(()).bool() == value for tensor, value in self.found]
        return torch.stack(each).all()
