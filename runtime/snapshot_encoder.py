"""From objects to data: the writing half of a snapshot."""

from __future__ import annotations

import enum
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from fdg.errors import CheckpointError
from fdg.runtime.rows import Rows
from fdg.runtime.snapshot_parts import (
    DICTS,
    FACTORIES,
    LIBRARIES,
    LIBRARY,
    LISTS,
    OBJECTS,
    VALUES,
    Adapter,
    Data,
    array_kind,
    attributes_of,
    cells_of,
    class_name,
    description,
    dtype_name,
    generator_state,
    has_state_dict,
    hides_state,
    inside,
    is_constant,
    is_kept,
    kind_of,
    owner_of,
    place_of,
)
from fdg.runtime.values import Unbound


class Encoder:
    """Walks from object to object and notes each once. No recursion: a long chain of objects is no problem."""

    def __init__(
        self,
        *,
        shared: Sequence[torch.Tensor] = (),
        adapters: Sequence[Adapter] = (),
        copy: bool = True,
        strict: bool = False,
    ) -> None:
        self.nodes: list[list[Any]] = []
        self.paths: list[str] = []
        self.copy, self.strict, self.adapters = copy, strict, adapters
        self.shared = {place_of(tensor): index for index, tensor in enumerate(shared)}
        self.index: dict[int, int] = {}
        self.alive: list[Any] = []  # ids stay those of the objects met
        self.todo: deque[tuple[int, Any, str, int]] = deque()
        self.memory: dict[int, Memory] = {}

    def item(self, value: Any, path: str, mode: int) -> Any:
        """A value as it stands in a node."""
        if value is None or type(value) in (bool, float, str) or (type(value) is int and -(2**63) <= value < 2**63):
            return value
        known = self.index.get(id(value))
        if known is None:
            known = self.index[id(value)] = len(self.nodes)
            self.alive.append(value)
            self.nodes.append([])
            self.paths.append(path)
            self.todo.append((known, value, path, mode))
        return (known,)

    def finish(self, root: Any) -> Data:
        while self.todo:
            index, value, path, mode = self.todo.popleft()
            self.nodes[index] = self.node(value, path, mode)
        storages = [memory.bytes(self.copy) for memory in self.memory.values()]
        return {"root": root, "objects": self.nodes, "storages": storages}

    def node(self, value: Any, path: str, mode: int) -> list[Any]:
        for adapter in self.adapters:
            if adapter.match(value):
                return ["adapter", adapter.name, self.item(adapter.get(value), path, VALUES)]
        kind = type(value)
        if kind in (set, frozenset):  # in an order that does not depend on hashes or on what was in it before
            value = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        if kind in LISTS:
            return [LISTS[kind], self.items(value, path, mode)]
        if kind in DICTS:
            return [DICTS[kind], self.pairs(value, path, mode)]
        if kind is deque:
            return ["deque", self.items(value, path, mode), value.maxlen]
        if kind is defaultdict:
            factory = getattr(value.default_factory, "__name__", None)
            if value.default_factory in (None, *FACTORIES.values()):
                return ["defaultdict", self.pairs(value, path, mode), factory]
            if mode == VALUES:
                self.refuse(path, f"a defaultdict of {factory}", "make it a dict and use setdefault")
            return ["defaultdict", self.pairs(value, path, mode), ""]
        for types_, method in self.simple:
            if isinstance(value, types_):
                return method(self, value, path, mode)
        if mode == VALUES:
            self.refuse(path, kind_of(value))
        return self.object(value, path, mode)

    def refuse(self, path: str, what: str, write: str = "") -> NoReturn:
        write = write or (
            "keep it as an attribute that __init__ makes (it is then restored in place), or give it state_dict() and "
            "load_state_dict(), or keep numbers, tensors, lists and dicts instead"
        )
        raise CheckpointError(f"`{path}` is {what}, which a checkpoint cannot hold: {write}")

    def items(self, values: Any, path: str, mode: int) -> list[Any]:
        return [self.item(value, f"{path}[{index}]", mode) for index, value in enumerate(values)]

    def pairs(self, values: dict[Any, Any], path: str, mode: int) -> list[Any]:
        return [
            [self.item(key, f"a key of {path}", mode), self.item(value, inside(path, key), mode)]
            for key, value in values.items()
        ]

    # values

    def _int(self, value: Any, path: str, mode: int) -> list[Any]:
        return ["int", hex(value)] if type(value) is int else self.object(value, path, mode)

    def _text(self, value: Any, path: str, mode: int) -> list[Any]:
        """A subclass of str or float."""
        return self.object(value, path, mode)

    def _complex(self, value: complex, path: str, mode: int) -> list[Any]:
        return ["complex", value.real, value.imag]

    def _bytes(self, value: Any, path: str, mode: int) -> list[Any]:
        return [type(value).__name__, self.item(np.frombuffer(value, np.uint8).copy(), path, mode)]

    def _range(self, value: range, path: str, mode: int) -> list[Any]:
        return ["range", *(self.item(number, path, mode) for number in (value.start, value.stop, value.step))]

    def _slice(self, value: slice, path: str, mode: int) -> list[Any]:
        return ["slice", *(self.item(number, path, mode) for number in (value.start, value.stop, value.step))]

    def _size(self, value: torch.Size, path: str, mode: int) -> list[Any]:
        return ["size", list(value)]

    def _dtype(self, value: torch.dtype, path: str, mode: int) -> list[Any]:
        return ["dtype", dtype_name(value)]

    def _device(self, value: torch.device, path: str, mode: int) -> list[Any]:
        return ["device", str(value)]

    def _unbound(self, value: Unbound, path: str, mode: int) -> list[Any]:
        return ["unbound"]

    def _enum(self, value: enum.Enum, path: str, mode: int) -> list[Any]:
        if mode == VALUES:
            self.refuse(path, kind_of(value), "keep its name or its value")
        return ["enum", type(value).__qualname__, value.name]

    def _array(self, value: np.ndarray, path: str, mode: int) -> list[Any]:
        if value.dtype.hasobject or type(value) is not np.ndarray:
            self.refuse(path, f"a {type(value).__name__} of {value.dtype}", "make it a list, or an array of numbers")
        owner = owner_of(value)
        if owner is None:
            value = value.copy(order="K")
            owner = owner_of(value)
            assert owner is not None
        low, high = np.lib.array_utils.byte_bounds(value)
        memory = self.remember(owner, low - owner.data_ptr(), high - owner.data_ptr() if value.size else 0)
        offset = value.__array_interface__["data"][0] - owner.data_ptr() if value.size else 0
        node = ["array", memory.index, array_kind(value.dtype), list(value.shape), list(value.strides), offset]
        memory.nodes.append(node)
        return node

    def _array_dtype(self, value: np.dtype, path: str, mode: int) -> list[Any]:
        return ["array_dtype", array_kind(value)]

    def _scalar(self, value: np.generic, path: str, mode: int) -> list[Any]:
        return ["scalar", self.item(np.asarray(value), path, mode)]

    def _generator(self, value: Any, path: str, mode: int) -> list[Any]:
        state = generator_state(value)
        if state is None:
            self.refuse(
                path, kind_of(value), "make it with np.random.default_rng(seed), random.Random(seed), torch.Generator()"
            )
        return ["generator", state[0], self.item(state[1], path, VALUES)]

    def _rows(self, value: Rows, path: str, mode: int) -> list[Any]:
        state = value.__getstate__()
        columns = [
            [list(column.key), list(column.shape), dtype_name(column.dtype), dtype_name(column.stored)]
            for column in state["columns"]
        ]
        arrays = [self.item(column.array, path, VALUES) for column in state["columns"]]
        return ["rows", state["count"], state["width"], columns, arrays]

    def _tensor(self, value: torch.Tensor, path: str, mode: int) -> list[Any]:
        if isinstance(value, UninitializedParameter) or value.is_meta:
            return ["same", f"{kind_of(value)} without memory"]
        if value.layout is not torch.strided or value.is_quantized or type(value) not in (torch.Tensor, Parameter):
            what = f"a {value.layout} tensor" if value.layout is not torch.strided else f"a {type(value).__name__}"
            self.refuse(path, what, "keep a plain tensor: to_dense(), dequantize(), as_subclass(torch.Tensor)")
        place = self.shared.get(place_of(value))
        if place is not None:
            return ["shared", place]
        flat = value.detach().resolve_conj().resolve_neg().cpu()
        start, reach = (
            int(flat.storage_offset()),
            sum((n - 1) * step for n, step in zip(flat.shape, flat.stride(), strict=True)),
        )
        stop = (start + reach + 1) * flat.itemsize if flat.numel() else 0
        memory = self.remember(flat, start * flat.itemsize, stop)
        grad = self.item(value.grad, f"{path}.grad", mode) if value.is_leaf and mode != VALUES else None
        node = ["tensor", memory.index, dtype_name(flat.dtype), list(flat.shape), list(flat.stride()),
                flat.storage_offset() * flat.itemsize, isinstance(value, Parameter),
                value.requires_grad and value.is_leaf, grad, str(value.device)]  # fmt: skip
        memory.nodes.append(node)
        return node

    def _tensordict(self, value: TensorDictBase, path: str, mode: int) -> list[Any]:
        if isinstance(value, Module):  # TensorDictParams
            return self.object(value, path, mode)
        if isinstance(value, NonTensorData):
            return ["nontensor", self.item(value.data, path, mode), list(value.batch_size)]
        if isinstance(value, LazyStackedTensorDict):
            if type(value) is not LazyStackedTensorDict:
                self.refuse(path, kind_of(value), "keep a TensorDict of tensors")
            return ["lazystack", self.items(value.tensordicts, path, mode), value.stack_dim]
        if type(value) is not TensorDict:
            self.refuse(path, kind_of(value), "keep a plain TensorDict")
        names = list(value.names) if value._has_names() else None
        device = None if value.device is None else str(value.device)
        return ["tensordict", self.pairs(dict(value.items()), path, mode), list(value.batch_size), names, device]

    # objects

    def object(self, value: Any, path: str, mode: int) -> list[Any]:
        if mode == VALUES:
            self.refuse(path, kind_of(value))
        module = (value if isinstance(value, types.FunctionType) else type(value)).__module__
        library = str(module).partition(".")[0] in LIBRARIES
        inner = LIBRARY if library and not self.strict else OBJECTS
        if isinstance(value, types.FunctionType):
            cells = [] if mode == LIBRARY or inner == LIBRARY else cells_of(value)
            cells_ = [self.item(cell.cell_contents, f"{path}: {name}", mode) for name, cell in cells]
            return ["function", description(value), cells_]
        if isinstance(value, types.MethodType):
            return ["method", description(value), self.item(value.__self__, f"{path}.__self__", mode)]
        if is_constant(value):
            return ["same", description(value)]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return ["namedtuple", type(value).__qualname__, self.items(value, path, mode)]
        if has_state_dict(value):
            return [
                "state_dict",
                type(value).__qualname__,
                self.item(value.state_dict(), f"{path}.state_dict()", VALUES),
            ]
        contents = None
        if isinstance(value, dict):
            contents = self.item(dict(value), path, inner)
        elif isinstance(value, (list, set, deque)):
            contents = self.item(list(value), path, inner)
        elif hides_state(type(value)):  # type: ignore[arg-type]
            if mode == LIBRARY:
                return ["same", description(value)]
            self.refuse(
                path,
                f"{kind_of(value)} with a state that cannot be read",
                "make it where it is used, or give its owner state_dict() and load_state_dict()",
            )
        attributes = {
            name: self.item(item, f"{path}.{name}", inner)
            for name, item in attributes_of(value).items()
            if not is_kept(value, name)
        }
        return ["object", class_name(value), attributes, contents]

    simple: Sequence[tuple[Any, Callable[[Encoder, Any, str, int], list[Any]]]] = (
        (torch.Tensor, _tensor),
        (TensorDictBase, _tensordict),
        (NonTensorData, _tensordict),
        (np.ndarray, _array),
        (np.generic, _scalar),
        (np.dtype, _array_dtype),
        (enum.Enum, _enum),
        (int, _int),
        ((str, float), _text),
        (complex, _complex),
        ((bytes, bytearray), _bytes),
        (range, _range),
        (slice, _slice),
        (torch.Size, _size),
        (torch.dtype, _dtype),
        (torch.device, _device),
        (Unbound, _unbound),
        (Rows, _rows),
        ((np.random.Generator, np.random.RandomState, random.Random, torch.Generator), _generator),
    )

    # memory

    def remember(self, tensor: torch.Tensor, start: int, stop: int) -> Memory:
        """The memory a tensor is in, with the part from start to stop in use."""
        key = tensor.untyped_storage().data_ptr() if start < stop else -len(self.memory) - 1
        memory = self.memory.get(key)
        if memory is None:
            memory = self.memory[key] = Memory(len(self.memory), tensor, start, max(start, stop))
        memory.start, memory.stop = min(memory.start, start), max(memory.stop, stop)
        return memory


class Memory:
    """Part of a storage, and the nodes of the tensors and arrays in it."""

    def __init__(self, index: int, tensor: torch.Tensor, start: int, stop: int) -> None:
        self.index, self.tensor, self.start, self.stop = index, tensor, start, stop
        self.nodes: list[list[Any]] = []

    def bytes(self, copy: bool) -> torch.Tensor:
        """Its bytes; offsets in the nodes are from now on those into it."""
        start = self.start // 16 * 16  # a multiple of every item's size
        for node in self.nodes:
            node[5] -= start
        if self.stop <= self.start:
            return torch.empty(0, dtype=torch.uint8)
        storage = self.tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        part = torch.from_numpy(whole.numpy()[start : self.stop])  # a storage of its own, of just this part
        return part.clone() if copy else part
