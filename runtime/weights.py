"""Weights: the tensors reachable from both actor and learner, and copies of components that keep track of them."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase

from fdg.errors import UsageError
from fdg.runtime.wire import why_stuck


class _Pickler(cloudpickle.Pickler):
    """Pickles an object graph but leaves its tensors out, in the order they are met."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors, self.index = tensors, {}  # type: ignore[var-annotated]

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if id(obj) not in self.index:
                self.index[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return self.index[id(obj)]
        return None


class _Unpickler(cloudpickle.pickle.Unpickler):  # type: ignore[name-defined]
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self.tensors[pid]


def take_apart(value: Any, what: str) -> tuple[bytes, list[torch.Tensor]]:
    """An object graph as bytes and the tensors in it."""
    file, tensors = io.BytesIO(), []  # type: ignore[var-annotated]
    try:
        _Pickler(file, tensors).dump(value)
    except Exception as error:
        why = why_stuck(value, what, error, lambda part: _Pickler(io.BytesIO(), []).dump(part))
        raise UsageError(f"{what} cannot be copied into a fragment: {why}") from error
    return file.getvalue(), tensors


def put_together(data: bytes, tensors: list[torch.Tensor]) -> Any:
    return _Unpickler(io.BytesIO(data), tensors).load()


def clone_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors; those that shared memory still do."""
    storages: dict[int, torch.UntypedStorage] = {}
    out = []
    for tensor in tensors:
        flat = tensor.detach()
        storage = flat.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        new = torch.empty(0, dtype=flat.dtype).set_(
            storages[storage.data_ptr()], flat.storage_offset(), flat.size(), flat.stride()
        )
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        elif isinstance(tensor, torch.nn.Buffer):
            new = torch.nn.Buffer(new, persistent=getattr(tensor, "persistent", True))
        elif tensor.requires_grad and tensor.is_leaf:
            new.requires_grad_(True)
        out.append(new)
    return out


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach()
    return (flat.untyped_storage().data_ptr(), flat.storage_offset(), tuple(flat.size()), tuple(flat.stride()))


def shared_places(actor: Any, learner: Any) -> list[tuple[Any, ...]]:
    """Where the weights are: the memory of every tensor reachable from both, in the actor's order."""
    of_learner = {place_of(tensor) for tensor in take_apart(learner, "the learner")[1] if tensor.numel()}
    places = [place_of(tensor) for tensor in take_apart(actor, "the actor")[1]]
    return list(dict.fromkeys(place for place in places if place in of_learner))


def copy_component(value: Any, places: list[tuple[Any, ...]], what: str) -> tuple[Any, list[torch.Tensor]]:
    """A copy that shares nothing with the original, and its tensors at the given places."""
    data, tensors = take_apart(value, what)
    copies = clone_tensors(tensors)
    found: dict[Any, torch.Tensor] = {}
    for old, new in zip(tensors, copies, strict=True):
        found.setdefault(place_of(old), new)
    return put_together(data, copies), [found[place] for place in places]


def parameters_of(learner: Any) -> dict[str, torch.Tensor]:
    """The learner's parameters by name: those of its modules, of its plain tensors, of its TensorDicts."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def add(name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            for inner, parameter in value.named_parameters():
                add(f"{name}.{inner}", parameter)
        elif isinstance(value, torch.Tensor):
            add(name, value)
        elif isinstance(value, TensorDictBase):
            for key, leaf in value.items(True, True):
                add(f"{name}.{'.'.join(key) if isinstance(key, tuple) else key}", leaf)
        elif isinstance(value, np.ndarray):
            add(name, torch.as_tensor(value))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(f"{name}.{index}", item)
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                visit(f"{name}.{key}", value[key])

    if isinstance(learner, torch.nn.Module):
        visit("learner", learner)
    for name in sorted(vars(learner)) if hasattr(learner, "__dict__") else ():
        if not name.startswith("_") and not isinstance(vars(learner)[name], torch.optim.Optimizer):
            visit(name, vars(learner)[name])
    return found


def sha256(parameters: dict[str, torch.Tensor]) -> str:
    """One hash over parameters, in name order: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        tensor = parameters[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
