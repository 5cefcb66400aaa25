"""Objects as bytes, for values that go to another process: pickle, with tensors and arrays beside it.

    message = pack(value)                    Message(head, buffers): the structure, and the memory of its tensors
    value = unpack(message.head, buffers)    the same object graph; tensors in fresh, aligned memory

As with `copied`, which this is the other form of: tensors are cut from autograd and keep their layout, those that share
memory still do, and what is one object in the message is one object on the other side. Classes and functions that the
other side cannot import (of a script, a notebook, a test) travel by value.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict

from fdg.errors import RunError

SMALL = 2**20
"""Bytes of memory that travel whole, so that views of it stay views."""


class Message(NamedTuple):
    """A packed value."""

    head: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._memory: dict[int, Any] = {}
        """Storages by address, kept alive so that an address means one storage during the whole message."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
            if obj.layout is torch.strided and obj.device.type == "cpu" and not obj.is_quantized:
                return self._tensor(obj)
        elif kind is TensorDict and not obj.is_locked:
            return tensordict, (dict(obj.items()), tuple(obj.batch_size), _names(obj), obj.device)
        return super().reducer_override(obj)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        flat = tensor.detach()
        storage = flat.untyped_storage()
        if not flat.numel() or storage.nbytes() > max(16 * flat.nbytes, SMALL):
            flat = flat.clone()
            storage = flat.untyped_storage()
        memory = self._memory.get(storage.data_ptr()) if flat.numel() else _Memory(storage)
        if memory is None:
            memory = self._memory[storage.data_ptr()] = _Memory(storage)
        kind = (
            "parameter" if type(tensor) is torch.nn.Parameter else "buffer" if type(tensor) is torch.nn.Buffer else ""
        )
        leaf = tensor.requires_grad and tensor.is_leaf
        place = (flat.storage_offset(), tuple(flat.size()), flat.stride())
        return _rebuild, (memory, flat.dtype, place, kind, leaf)


class _Memory:
    """The memory of one or more tensors."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        if not self.storage.nbytes():
            return _empty, ()
        array = torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy()  # type: ignore[call-overload]
        return _storage, (pickle.PickleBuffer(memoryview(array)),)  # type: ignore[arg-type]


def _empty() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild(memory: torch.UntypedStorage, dtype: torch.dtype, place: Any, kind: str, leaf: bool) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(memory, *place)  # type: ignore[call-overload]
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=leaf)
    if kind == "buffer":
        return torch.nn.Buffer(tensor)
    return tensor.requires_grad_(True) if leaf else tensor


def _names(td: TensorDict) -> list[str | None] | None:
    return list(td.names) if td._has_names() else None


def like(td: TensorDict, items: dict[str, Any]) -> TensorDict:
    """A TensorDict with other entries, and all else as in `td`."""
    return tensordict(items, tuple(td.batch_size), _names(td), td.device)


def tensordict(items: dict[str, Any], batch: tuple[int, ...], names: Any, device: Any) -> TensorDict:
    """A TensorDict whose entries are these very objects."""
    td = TensorDict({}, batch_size=batch, device=device, names=names)
    for key, value in items.items():
        td._set_str(key, value, validated=True, inplace=False, non_blocking=False)
    return td


def pack(value: Any, what: str = "a value") -> Message:
    """A value as a message. The buffers are views of the value's own memory: send them before it changes."""
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    try:
        _Packer(file, buffers).dump(value)
    except RunError:
        raise
    except Exception as error:
        why = why_stuck(value, what, error, lambda part: _Packer(io.BytesIO(), []).dump(part))
        raise RunError(f"{what} cannot go to another process: {why}") from error
    return Message(file.getvalue(), [buffer.raw() for buffer in buffers])


def why_stuck(value: Any, what: str, error: Exception, dump: Callable[[Any], Any]) -> str:
    """Why a value cannot be dumped: the part of it that cannot, and what to write instead."""
    path = what.split("`")[1] if "`" in what else what.split()[-1]
    seen: set[int] = set()
    inner: tuple[str, Any] | None = ("", value)
    while inner is not None and id(inner[1]) not in seen:
        path, value = path + inner[0], inner[1]
        seen.add(id(value))
        inner = next((part for part in parts_of(value) if not _works(dump, part[1])), None)
    return (
        f"`{path}` is a {type(value).__name__} ({error}). Keep locks, files, generators and open environments out of it; "
        "or write None in __init__, and make it when it is first used"
    )


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of when it is dumped, each part with the way to it: `.file`, `[0]`."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, type):
        if isinstance(value, torch.nn.Module):
            yield from ((f".{name}", part) for name, part in value.named_children())
        try:
            state = value.__getstate__()
        except Exception:  # it is this one that cannot be dumped
            return
        for attributes in state if isinstance(state, tuple) else (state,):
            if isinstance(attributes, dict):
                yield from ((f".{name}", part) for name, part in attributes.items())


def _works(dump: Callable[[Any], Any], part: Any) -> bool:
    try:
        dump(part)
    except Exception:
        return False
    return True


def unpack(head: bytes | memoryview, buffers: Sequence[Any], *, copy: bool = True) -> Any:
    """The value of a message. Without `copy` its arrays are views of the buffers, and last as long as these do."""
    return pickle.loads(head, buffers=[aligned(buffer) for buffer in buffers] if copy else buffers)


def aligned(buffer: Any) -> np.ndarray:
    """A copy in memory of torch's own alignment: products of matrices may differ in the last bit without it."""
    source = np.frombuffer(buffer, np.uint8)
    target = torch.empty(source.nbytes, dtype=torch.uint8).numpy()
    target[:] = source
    return target


class Packed:
    """A message within a message: opened, it is an object graph of its own, which shares nothing with its surroundings."""

    def __init__(self, value: Any) -> None:
        self.message = pack(value)

    def open(self) -> Any:
        return unpack(self.message.head, self.message.buffers, copy=False)

    def __reduce__(self) -> Any:
        return _packed, (self.message.head, *map(pickle.PickleBuffer, self.message.buffers))


def _packed(head: bytes, *buffers: Any) -> Packed:
    packed = Packed.__new__(Packed)
    packed.message = Message(head, [memoryview(buffer) for buffer in buffers])
    return packed
