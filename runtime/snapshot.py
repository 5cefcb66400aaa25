"""Snapshots: values and the state of objects as plain data, and back, with identity and shared memory kept.

    encode(values) / decode(data)             values: what a program holds in its variables; decoding makes new ones
    state_of(object) / restore(object, data)  objects: their state, written into one that was built the same way, in
                                              place, so that what shares memory with it (weights, optimizers) sees it

The data consists of dict, list, tuple, str, int, float, bool, None and tensors of bytes alone, so that reading it never
runs code:

    {"root": item, "objects": [node, …], "storages": [uint8 tensor, …]}
    item    None, bool, int (64 bits), float, str, or (i,): the i-th node
    node    [kind, …]; see `_Encoder`. An object met twice is one node; tensors that share memory name one storage

Classes and functions are not in it. They are what the program is made of, so objects of the user's own classes can be
restored, where a built one says what class to use, but not decoded.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import operator
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from fdg.api import Actor, Learner, Trainer
from fdg.config import Config
from fdg.errors import CheckpointError
from fdg.msrl import MSRL
from fdg.runtime.environments import EnvSpec
from fdg.runtime.rows import Column, Rows, Table
from fdg.runtime.values import UNBOUND, Unbound, Varying

Data = dict[str, Any]

_LIBRARIES = ("torch", "torchrl", "tensordict", "gymnasium", "mujoco", "numpy")
"""What their objects hold beside data (caches, hooks, handles) is made when they are built, and is not looked into."""
_FACTORIES = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "deque": deque}
_LISTS: dict[type, str] = {list: "list", Varying: "varying", set: "set", tuple: "tuple", frozenset: "frozenset"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKE: dict[str, Callable[..., Any]] = {kind: made for made, kind in (*_LISTS.items(), *_DICTS.items())}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_PARTS_OF_MODULES = ("._parameters", "._buffers", "._modules")
_CONSTANTS = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, weakref.ref, property,
              functools.partial, np.ufunc, type(threading.Lock()), type(threading.RLock()), logging.Logger, Config,
              EnvSpec, MSRL, torch.jit.ScriptFunction, torch.jit.ScriptModule)  # fmt: skip
"""Part of how an object is built: not saved, and found in the object restored."""


class _Nothing:
    """Stands for a place at which the object to be restored has nothing."""


NOTHING = _Nothing()


class Adapter(NamedTuple):
    """How to save objects of a class that is not Python's own: `get` returns values to encode, `set` takes them.

    A `set` of None says that such objects are part of how their owner is built: they are checked to be equal.
    """

    name: str
    match: Callable[[Any], bool]
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None] | None = None


def encode(values: dict[str, Any], *, copy: bool = True) -> Data:
    """A program's values, by name, as plain data. Without `copy` it has their memory, to be written out at once.

    >>> steps = [1, 2]
    >>> values = decode(encode({"steps": steps, "again": steps, "mean": torch.ones(2)}))
    >>> values["again"] is values["steps"], values["mean"]
    (True, tensor([1., 1.]))

    Raises:
        CheckpointError: a value is none that can be made again from data.
    """
    encoder = _Encoder(copy=copy)
    root = {name: encoder.item(value, str(name), _VALUES) for name, value in values.items()}
    return encoder.finish(root)


def decode(data: Data, *, copy: bool = True) -> dict[str, Any]:
    """The values that were encoded. Without `copy` their memory is that of `data`, which is then of no other use."""
    decoder = _Decoder(data, copy=copy)
    values = {name: decoder.put(item, NOTHING, str(name)) for name, item in data["root"].items()}
    decoder.finish()
    return values


def state_of(
    component: Any,
    name: str | None = None,
    *,
    shared: Sequence[torch.Tensor] = (),
    adapters: Sequence[Adapter] = (),
    strict: bool = False,
) -> Data:
    """The state of an actor, a learner or any other object, as plain data.

    `name` is what errors call it. `shared` are tensors that are saved elsewhere (the weights, with the learner): only
    their place is noted. Objects with `state_dict` and `load_state_dict` are saved by these; all others attribute by
    attribute. Functions, classes, configs and the like are taken to be the same in the object that is restored; so is
    what objects of libraries hide, unless `strict`.

    Raises:
        CheckpointError: something in it has a state that cannot be read.
    """
    encoder = _Encoder(shared=shared, adapters=adapters, strict=strict)
    return encoder.finish(encoder.item(component, name or _name_of(component), _OBJECTS))


def restore(
    component: Any,
    data: Data,
    name: str | None = None,
    *,
    shared: Sequence[torch.Tensor] = (),
    adapters: Sequence[Adapter] = (),
    strict: bool = False,
) -> None:
    """Write a state into an object that was built like the one it is of; in place, then compared to the bit.

    Raises:
        CheckpointError: the two differ in a class, a shape or an attribute; the object may be half restored.
    """
    name = name or _name_of(component)
    decoder = _Decoder(data, shared=shared, adapters=adapters)
    decoder.put(data["root"], component, name)
    decoder.finish()
    again = _Encoder(shared=shared, adapters=adapters, copy=False, strict=strict)
    _compare(data, again.finish(again.item(component, name, _OBJECTS)), again.paths)


# to data --------------------------------------------------------------------------------------------------------------

_VALUES, _OBJECTS, _LIBRARY = range(3)
"""What may be met: values only; objects; objects inside one of a library, which may also be opaque."""


class _Encoder:
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
        self.shared = {_place(tensor): index for index, tensor in enumerate(shared)}
        self.index: dict[int, int] = {}
        self.alive: list[Any] = []  # ids stay those of the objects met
        self.todo: deque[tuple[int, Any, str, int]] = deque()
        self.memory: dict[int, _Memory] = {}

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
                return ["adapter", adapter.name, self.item(adapter.get(value), path, _VALUES)]
        kind = type(value)
        if kind in (set, frozenset):  # in an order that does not depend on hashes or on what was in it before
            value = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        if kind in _LISTS:
            return [_LISTS[kind], self.items(value, path, mode)]
        if kind in _DICTS:
            return [_DICTS[kind], self.pairs(value, path, mode)]
        if kind is deque:
            return ["deque", self.items(value, path, mode), value.maxlen]
        if kind is defaultdict:
            factory = getattr(value.default_factory, "__name__", None)
            if value.default_factory in (None, *_FACTORIES.values()):
                return ["defaultdict", self.pairs(value, path, mode), factory]
            if mode == _VALUES:
                self.refuse(path, f"a defaultdict of {factory}", "make it a dict and use setdefault")
            return ["defaultdict", self.pairs(value, path, mode), ""]
        for types_, method in self.simple:
            if isinstance(value, types_):
                return method(self, value, path, mode)
        if mode == _VALUES:
            self.refuse(path, _a(value))
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
            [self.item(key, f"a key of {path}", mode), self.item(value, _inside(path, key), mode)]
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
        return ["dtype", _name(value)]

    def _device(self, value: torch.device, path: str, mode: int) -> list[Any]:
        return ["device", str(value)]

    def _unbound(self, value: Unbound, path: str, mode: int) -> list[Any]:
        return ["unbound"]

    def _enum(self, value: enum.Enum, path: str, mode: int) -> list[Any]:
        if mode == _VALUES:
            self.refuse(path, _a(value), "keep its name or its value")
        return ["enum", type(value).__qualname__, value.name]

    def _array(self, value: np.ndarray, path: str, mode: int) -> list[Any]:
        if value.dtype.hasobject or type(value) is not np.ndarray:
            self.refuse(path, f"a {type(value).__name__} of {value.dtype}", "make it a list, or an array of numbers")
        owner = _owner(value)
        if owner is None:
            value = value.copy(order="K")
            owner = _owner(value)
            assert owner is not None
        low, high = np.lib.array_utils.byte_bounds(value)
        memory = self.remember(owner, low - owner.data_ptr(), high - owner.data_ptr() if value.size else 0)
        offset = value.__array_interface__["data"][0] - owner.data_ptr() if value.size else 0
        node = ["array", memory.index, _array_kind(value.dtype), list(value.shape), list(value.strides), offset]
        memory.nodes.append(node)
        return node

    def _array_dtype(self, value: np.dtype, path: str, mode: int) -> list[Any]:
        return ["array_dtype", _array_kind(value)]

    def _scalar(self, value: np.generic, path: str, mode: int) -> list[Any]:
        return ["scalar", self.item(np.asarray(value), path, mode)]

    def _generator(self, value: Any, path: str, mode: int) -> list[Any]:
        state = _generator_state(value)
        if state is None:
            self.refuse(
                path, _a(value), "make it with np.random.default_rng(seed), random.Random(seed), torch.Generator()"
            )
        return ["generator", state[0], self.item(state[1], path, _VALUES)]

    def _rows(self, value: Rows, path: str, mode: int) -> list[Any]:
        state = value.__getstate__()
        columns = [
            [list(column.key), list(column.shape), _name(column.dtype), _name(column.stored)]
            for column in state["columns"]
        ]
        arrays = [self.item(column.array, path, _VALUES) for column in state["columns"]]
        return ["rows", state["count"], state["width"], columns, arrays]

    def _tensor(self, value: torch.Tensor, path: str, mode: int) -> list[Any]:
        if isinstance(value, UninitializedParameter) or value.is_meta:
            return ["same", f"{_a(value)} without memory"]
        if value.layout is not torch.strided or value.is_quantized or type(value) not in (torch.Tensor, Parameter):
            what = f"a {value.layout} tensor" if value.layout is not torch.strided else f"a {type(value).__name__}"
            self.refuse(path, what, "keep a plain tensor: to_dense(), dequantize(), as_subclass(torch.Tensor)")
        place = self.shared.get(_place(value))
        if place is not None:
            return ["shared", place]
        flat = value.detach().resolve_conj().resolve_neg().cpu()
        start, reach = (
            int(flat.storage_offset()),
            sum((n - 1) * step for n, step in zip(flat.shape, flat.stride(), strict=True)),
        )
        stop = (start + reach + 1) * flat.itemsize if flat.numel() else 0
        memory = self.remember(flat, start * flat.itemsize, stop)
        grad = self.item(value.grad, f"{path}.grad", mode) if value.is_leaf and mode != _VALUES else None
        node = ["tensor", memory.index, _name(flat.dtype), list(flat.shape), list(flat.stride()),
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
                self.refuse(path, _a(value), "keep a TensorDict of tensors")
            return ["lazystack", self.items(value.tensordicts, path, mode), value.stack_dim]
        if type(value) is not TensorDict:
            self.refuse(path, _a(value), "keep a plain TensorDict")
        names = list(value.names) if value._has_names() else None
        device = None if value.device is None else str(value.device)
        return ["tensordict", self.pairs(dict(value.items()), path, mode), list(value.batch_size), names, device]

    # objects

    def object(self, value: Any, path: str, mode: int) -> list[Any]:
        if mode == _VALUES:
            self.refuse(path, _a(value))
        module = (value if isinstance(value, types.FunctionType) else type(value)).__module__
        library = str(module).partition(".")[0] in _LIBRARIES
        inner = _LIBRARY if library and not self.strict else _OBJECTS
        if isinstance(value, types.FunctionType):
            cells = [] if mode == _LIBRARY or inner == _LIBRARY else _cells(value)
            cells_ = [self.item(cell.cell_contents, f"{path}: {name}", mode) for name, cell in cells]
            return ["function", _describe(value), cells_]
        if isinstance(value, types.MethodType):
            return ["method", _describe(value), self.item(value.__self__, f"{path}.__self__", mode)]
        if _constant(value):
            return ["same", _describe(value)]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return ["namedtuple", type(value).__qualname__, self.items(value, path, mode)]
        if _has_state_dict(value):
            return [
                "state_dict",
                type(value).__qualname__,
                self.item(value.state_dict(), f"{path}.state_dict()", _VALUES),
            ]
        contents = None
        if isinstance(value, dict):
            contents = self.item(dict(value), path, inner)
        elif isinstance(value, (list, set, deque)):
            contents = self.item(list(value), path, inner)
        elif _hides(type(value)):  # type: ignore[arg-type]
            if mode == _LIBRARY:
                return ["same", _describe(value)]
            self.refuse(
                path,
                f"{_a(value)} with a state that cannot be read",
                "make it where it is used, or give its owner state_dict() and load_state_dict()",
            )
        attributes = {
            name: self.item(item, f"{path}.{name}", inner)
            for name, item in _attributes(value).items()
            if not _kept(value, name)
        }
        return ["object", _class_name(value), attributes, contents]

    simple: Sequence[tuple[Any, Callable[[_Encoder, Any, str, int], list[Any]]]] = (
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

    def remember(self, tensor: torch.Tensor, start: int, stop: int) -> _Memory:
        """The memory a tensor is in, with the part from start to stop in use."""
        key = tensor.untyped_storage().data_ptr() if start < stop else -len(self.memory) - 1
        memory = self.memory.get(key)
        if memory is None:
            memory = self.memory[key] = _Memory(len(self.memory), tensor, start, max(start, stop))
        memory.start, memory.stop = min(memory.start, start), max(memory.stop, stop)
        return memory


class _Memory:
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


# from data ------------------------------------------------------------------------------------------------------------


class _Decoder:
    """Makes values from nodes, or fills objects that are there. Containers are made empty first and filled in turn."""

    def __init__(
        self, data: Data, *, shared: Sequence[torch.Tensor] = (), adapters: Sequence[Adapter] = (), copy: bool = True
    ) -> None:
        self.nodes, self.storages = data["objects"], data["storages"]
        self.shared, self.copy = shared, copy
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.made: dict[int, Any] = {}
        self.claimed: dict[int, tuple[int, Any]] = {}
        self.todo: deque[Callable[[], None]] = deque()
        self.last: list[Callable[[], None]] = []
        self.homes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storage here: that of the object, and the shift
        self.guests: dict[int, tuple[int, int]] = {}  # and back
        self.tensors: list[tuple[torch.Tensor, list[Any]]] = []
        self.memory: dict[int, torch.Tensor] = {}

    def put(self, item: Any, target: Any, path: str) -> Any:
        """What belongs at a place at which the object to be restored has `target`: that itself, filled, if it can be."""
        if not isinstance(item, tuple):
            return item
        index = item[0]
        if index not in self.made:
            kind, *rest = self.nodes[index]
            made = self.kinds[kind](self, index, rest, target, path)
            self.made.setdefault(index, made)
        return self.made[index]

    def finish(self) -> None:
        while self.todo:
            self.todo.popleft()()
        for tensor, (_, index, dtype, size, stride, offset, _, needs_grad, _, device) in self.tensors:
            storage, shift = self.homes.get(index, (None, 0))
            if storage is None or not 0 <= offset + shift <= storage.nbytes() - self.storages[index].numel() + offset:
                storage, shift = self.own(index).untyped_storage(), 0
            tensor.data = _view(storage, dtype, size, stride, offset + shift)
            if device != "cpu":
                tensor.data = tensor.data.to(device)
            tensor.requires_grad_(needs_grad)
        for action in self.last:
            action()

    def own(self, storage: int) -> torch.Tensor:
        """The memory of what is made, not found here."""
        if storage not in self.memory:
            self.memory[storage] = self.storages[storage].clone() if self.copy else self.storages[storage]
        return self.memory[storage]

    def claim(self, target: Any, index: int) -> bool:
        """Whether an object here can stand for that node: each for one only."""
        return self.claimed.setdefault(id(target), (index, target))[0] == index

    def differ(self, path: str, saved: str, here: str, write: str = "") -> NoReturn:
        write = write or "resume with the program and the settings of the run that wrote the checkpoint"
        raise CheckpointError(f"`{path}` was {saved} when the checkpoint was written, and is {here} here: {write}")

    # values

    def _same(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        if target is NOTHING or (_describe(target) != node[0] and not node[0].endswith("without memory")):
            self.differ(path, node[0], "missing" if target is NOTHING else _describe(target))
        return target

    def _function(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self._same(index, node, target, path)
        self.made[index] = target
        if node[1]:
            for (name, cell), item in zip(_cells(target), node[1], strict=True):
                cell.cell_contents = self.put(item, cell.cell_contents, f"{path}: {name}")
        return target

    def _method(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self._same(index, node, target, path)
        self.put(node[1], target.__self__, f"{path}.__self__")
        return target

    def _enum(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        if type(target).__qualname__ != node[0]:
            self.differ(path, f"{node[0]}.{node[1]}", _a(target))
        return type(target)[node[1]]

    def _shared(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        if node[0] >= len(self.shared):
            self.differ(path, f"weight {node[0]}", f"one of {len(self.shared)} weights")
        here = self.shared[node[0]]
        if not isinstance(target, torch.Tensor) or _place(target) != _place(here):
            self.differ(path, f"weight {node[0]}", "no weight: actor and learner do not share it")
        return target

    def _adapter(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        adapter = self.adapters[node[0]]
        if target is NOTHING or not adapter.match(target):
            self.differ(path, f"a {node[0]}", _a(target))
        if adapter.set is not None:
            value = self.put(node[1], NOTHING, path)
            self.last.append(lambda: adapter.set(target, value))  # type: ignore[misc]
        return target

    def _bytes(self, index: int, node: list[Any], target: Any, path: str) -> bytes:
        return self.put(node[0], NOTHING, path).tobytes()

    def _range(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        return range(*(self.put(number, NOTHING, path) for number in node))

    def _slice(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        return slice(*(self.put(number, NOTHING, path) for number in node))

    def _array(self, index: int, node: list[Any], target: Any, path: str) -> np.ndarray:
        storage, kind, shape, strides, offset = node
        dtype = _array_dtype(kind)

        def view(memory: torch.Tensor) -> np.ndarray:
            if 0 in shape:
                return np.empty(shape, dtype)
            return np.ndarray(shape, dtype, memory.numpy(), offset, strides)  # type: ignore[arg-type]

        alike = isinstance(target, np.ndarray) and [*target.shape, target.dtype] == [*shape, dtype]
        overlaps = any(not step and n > 1 for step, n in zip(strides, shape, strict=True))
        if alike and list(target.strides) == strides and target.flags.writeable and not overlaps:
            if self.claim(target, index):
                target[...] = view(self.storages[storage])
                return target
        return view(self.own(storage))

    def _scalar(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        return self.put(node[0], NOTHING, path)[()]

    def _generator(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        name, item = node
        state = _generator_state(target)
        if state is None or state[0] != name or not self.claim(target, index):
            target = _make_generator(name)
        value = self.put(item, NOTHING, path)
        self.last.append(lambda: _set_generator(target, value))
        return target

    def _rows(self, index: int, node: list[Any], target: Any, path: str) -> Rows:
        count, width, columns, arrays = node
        rows = target if type(target) is Rows and self.claim(target, index) else Rows()
        rows._table, rows._count, rows._width = Table(count), count, width
        rows._table.columns = [
            Column(tuple(key), tuple(shape), _dtype(dtype), _dtype(stored), self.put(array, NOTHING, path))
            for (key, shape, dtype, stored), array in zip(columns, arrays, strict=True)
        ]
        return rows

    def _tensor(self, index: int, node: list[Any], target: Any, path: str) -> torch.Tensor:
        storage, dtype, size, stride, offset, parameter, needs_grad, grad, _ = node
        made: torch.Tensor
        if self.fits(index, node, target, path):
            made = target
            saved = _view(self.storages[storage].untyped_storage(), dtype, size, stride, offset)
            with torch.no_grad():
                target.detach().copy_(saved)
            if target.is_leaf and target.requires_grad != needs_grad:
                target.requires_grad_(needs_grad)
        else:
            made = torch.empty(0, dtype=_dtype(dtype))
            made = Parameter(made, requires_grad=False) if parameter else made
            self.tensors.append((made, ["tensor", *node]))
        self.made[index] = made
        if grad is not None or (made is target and target.is_leaf and target.grad is not None):
            value = self.put(grad, NOTHING, f"{path}.grad")
            self.last.append(lambda: setattr(made, "grad", value))
        return made

    def fits(self, index: int, node: list[Any], target: Any, path: str) -> bool:
        """Whether a tensor here can take the saved one's numbers in place, and nothing else changes by that."""
        storage, dtype, size, stride, offset, parameter, *_ = node
        alike = isinstance(target, torch.Tensor) and [_name(target.dtype), list(target.shape)] == [dtype, size]
        if parameter or isinstance(target, Parameter):
            if not alike or isinstance(target, Parameter) != parameter:
                here = f"{_name(target.dtype)} {list(target.shape)}" if isinstance(target, torch.Tensor) else _a(target)
                if target is not NOTHING or not parameter:
                    self.differ(path, f"{dtype} {size}", here)
                return False
            if not self.claim(target, index):
                self.differ(path, "a parameter of its own", "one that stands in two places")
            self.place(storage, offset, target)
            return True
        if (
            not alike
            or list(target.stride()) != stride
            or any(not step and n > 1 for step, n in zip(stride, size, strict=True))
        ):
            return False
        return self.claim(target, index) and self.place(storage, offset, target)

    def place(self, storage: int, offset: int, target: torch.Tensor) -> bool:
        """Note which memory here is that of a saved storage; False if one of them already belongs to another."""
        memory = target.untyped_storage()
        shift = int(target.storage_offset()) * target.itemsize - offset
        if not target.numel():
            return True
        home = self.homes.get(storage, (memory, shift))
        guest = self.guests.get(memory.data_ptr(), (storage, shift))
        if home[0].data_ptr() != memory.data_ptr() or home[1] != shift or guest != (storage, shift):
            return False
        self.homes[storage], self.guests[memory.data_ptr()] = home, guest
        return True

    # containers

    def _sequence(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        kind = self.nodes[index][0]
        here = list(target) if type(target) in (list, tuple, deque, Varying) else []
        here += [NOTHING] * (len(node[0]) - len(here))

        def values() -> list[Any]:
            return [self.put(item, here[at], f"{path}[{at}]") for at, item in enumerate(node[0])]

        if kind in ("tuple", "frozenset"):
            made = _MAKE[kind](values())
            same = type(target) is tuple and len(target) == len(made) and all(map(operator.is_, target, made))
            return target if same else made
        new: Any = deque(maxlen=node[1]) if kind == "deque" else _MAKE[kind]()
        if type(target) is type(new) and getattr(target, "maxlen", None) == getattr(new, "maxlen", None):
            new = target if self.claim(target, index) else new
        self.todo.append(lambda: _fill(new, values()))
        return new

    def _dict(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        kind, factory = self.nodes[index][0], node[1] if len(node) > 1 else None
        if factory == "" and not isinstance(target, defaultdict):
            self.differ(path, "a defaultdict", _a(target))
        if kind == "defaultdict":
            new: Any = defaultdict(target.default_factory if factory == "" else _FACTORIES.get(factory or ""))
        else:
            new = _MAKE[kind]()
        if type(target) is type(new) and self.claim(target, index):
            new = target
        self.todo.append(lambda: self.fill_dict(new, node[0], target, path))
        return new

    def fill_dict(self, new: dict[Any, Any], pairs: list[Any], target: Any, path: str) -> None:
        here = dict(target) if isinstance(target, dict) else {}
        entries: dict[Any, Any] = {}
        for key_item, item in pairs:
            key = self.put(key_item, NOTHING, f"a key of {path}")
            entries[key] = self.put(item, here.get(key, NOTHING), _inside(path, key))
        for key, value in here.items():
            if key not in entries and isinstance(value, (Parameter, Module)):
                self.differ(_inside(path, key), "missing", _a(value))
        _fill(new, entries)

    def _tensordict(self, index: int, node: list[Any], target: Any, path: str) -> TensorDict:
        pairs, batch, names, device = node
        size = torch.Size(batch)
        if type(target) is TensorDict and self.claim(target, index):
            made = target
        else:
            made = TensorDict._new_unsafe({}, batch_size=size, names=names, device=device)
            target = NOTHING

        def fill() -> None:
            here = {} if target is NOTHING else dict(target.items())
            entries = {key: self.put(item, here.get(key, NOTHING), _inside(path, key)) for key, item in pairs}
            if here.keys() != entries.keys() or any(here[key] is not entries[key] for key in here):
                made._tensordict.clear()
                made._tensordict.update(entries)
            if made.batch_size != size:
                made.batch_size = size
            if (list(made.names) if made._has_names() else None) != names:
                made.names = names

        self.todo.append(fill)
        return made

    def _lazystack(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        here = target.tensordicts if type(target) is LazyStackedTensorDict and target.stack_dim == node[1] else []
        here = here if len(here) == len(node[0]) else [NOTHING] * len(node[0])
        parts = [self.put(item, part, path) for item, part in zip(node[0], here, strict=True)]
        if all(part is old for part, old in zip(parts, here, strict=True)):
            return target
        made = LazyStackedTensorDict.__new__(LazyStackedTensorDict)
        self.last.append(lambda: made.__init__(*parts, stack_dim=node[1]))  # type: ignore[misc]
        return made

    def _nontensor(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        return NonTensorData(self.put(node[0], NOTHING, path), batch_size=node[1])

    # objects

    def _namedtuple(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self.expect(node[0], target, path)
        here = [*target, *[NOTHING] * len(node[1])]
        return type(target)._make(self.put(item, here[at], f"{path}[{at}]") for at, item in enumerate(node[1]))

    def _state_dict(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self.expect(node[0], target, path, index)
        state = self.put(node[1], NOTHING, f"{path}.state_dict()")
        self.last.append(lambda: _load_state_dict(target, state, path))
        return target

    def _object(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        name, attributes, contents = node
        self.expect(name, target, path, index)
        self.todo.append(lambda: self.fill_object(attributes, contents, target, path))
        return target

    def expect(self, name: str, target: Any, path: str, index: int | None = None) -> None:
        """The object here must be of the class that was saved; data alone does not make one."""
        if target is NOTHING or _class_name(target) != name:
            self.differ(
                path,
                _article(name),
                _a(target),
                "make it in __init__, so that it is there when the state comes" if target in (NOTHING, None) else "",
            )
        if index is not None and not self.claim(target, index):
            self.differ(path, f"{_article(name)} of its own", "one that stands in two places")

    def fill_object(self, attributes: dict[str, Any], contents: Any, target: Any, path: str) -> None:
        here = _attributes(target)
        kept = {name: here.pop(name) for name in list(here) if _kept(target, name)}
        for name in here.keys() - attributes.keys():
            self.differ(f"{path}.{name}", "missing", _say(here[name]))
        new = {name: self.put(item, here.get(name, NOTHING), f"{path}.{name}") for name, item in attributes.items()}
        if contents is not None:
            old = dict(target) if isinstance(target, dict) else list(target)
            value = self.put(contents, old, path)
            self.todo.append(lambda: _fill(target, value))
        own = getattr(target, "__dict__", {})
        own.clear()
        own.update(kept)
        for name, value in new.items():
            if name in _slots(type(target)):
                object.__setattr__(target, name, value)
            else:
                own[name] = value

    kinds: dict[str, Callable[[_Decoder, int, list[Any], Any, str], Any]] = {
        "int": lambda self, index, node, target, path: int(node[0], 16),
        "complex": lambda self, index, node, target, path: complex(*node),
        "bytes": _bytes,
        "bytearray": lambda self, index, node, target, path: bytearray(self._bytes(index, node, target, path)),
        "range": _range,
        "slice": _slice,
        "size": lambda self, index, node, target, path: torch.Size(node[0]),
        "dtype": lambda self, index, node, target, path: _dtype(node[0]),
        "device": lambda self, index, node, target, path: torch.device(node[0]),
        "unbound": lambda self, index, node, target, path: UNBOUND,
        "array": _array,
        "array_dtype": lambda self, index, node, target, path: _array_dtype(node[0]),
        "scalar": _scalar,
        "generator": _generator,
        "rows": _rows,
        "tensor": _tensor,
        **dict.fromkeys((*_LISTS.values(), "deque"), _sequence),
        **dict.fromkeys((*_DICTS.values(), "defaultdict"), _dict),
        "tensordict": _tensordict,
        "lazystack": _lazystack,
        "nontensor": _nontensor,
        "same": _same,
        "function": _function,
        "method": _method,
        "enum": _enum,
        "shared": _shared,
        "adapter": _adapter,
        "namedtuple": _namedtuple,
        "state_dict": _state_dict,
        "object": _object,
    }


# the small parts ------------------------------------------------------------------------------------------------------


def _fill(container: Any, values: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in values.items():  # a Counter's update would add
            container[key] = value
    else:
        container.update(values) if isinstance(container, set) else container.extend(values)


def _compare(saved: Data, here: Data, paths: list[str]) -> None:
    """Refuse a restored state that is not the saved one to the bit."""
    for path, node, other in zip(paths, saved["objects"], here["objects"], strict=False):
        if not equal(node, other):
            raise CheckpointError(f"`{path}` cannot be restored: saved was {_short(node)}, restored is {_short(other)}")
    for index, (memory, other) in enumerate(zip(saved["storages"], here["storages"], strict=False)):
        if not torch.equal(memory, other):
            owners = [path for path, node in zip(paths, here["objects"], strict=False) if _storage_of(node) == index]
            raise CheckpointError(
                f"`{(owners or paths)[0]}` cannot be restored: its numbers are others than those saved"
            )
    if len(saved["objects"]) != len(here["objects"]) or len(saved["storages"]) != len(here["storages"]):
        raise CheckpointError(
            f"`{paths[0]}` cannot be restored: parts of it that were one are now several, or the reverse"
        )


def _storage_of(node: list[Any]) -> int | None:
    return node[1] if node[0] in ("tensor", "array") else None


def equal(one: Any, other: Any) -> bool:
    """Whether two data are the same, to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _short(node: list[Any]) -> str:
    text = str(node)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _name_of(component: Any) -> str:
    for kind, name in ((Learner, "learner"), (Actor, "actor"), (Trainer, "self")):
        if isinstance(component, kind):
            return name
    return type(component).__name__


def _class_name(value: Any) -> str:
    """What must agree of a class. A trainer's is generated anew for each policy."""
    return "Trainer" if isinstance(value, Trainer) else type(value).__qualname__


def _kept(owner: Any, name: str) -> bool:
    """Attributes that are no state: what the run gives a trainer; a module's hooks, whose keys are never the same; the
    caches of TensorDictParams."""
    if isinstance(owner, Trainer):
        return name in ("config", "msrl")
    if isinstance(owner, TensorDictBase):
        return name not in ("training", "_param_td", "_parameters", "_buffers", "_modules")
    return isinstance(owner, Module) and "_hooks" in name


def _a(value: Any) -> str:
    if value is NOTHING:
        return "missing"
    if value is None:
        return "None"
    return _article(type(value).__qualname__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _say(value: Any) -> str:
    """A value if it is short, else what it is."""
    return repr(value) if isinstance(value, (int, float, str, bool)) and len(repr(value)) < 40 else _a(value)


def _describe(value: Any) -> str:
    """What must agree of something that is not saved."""
    if isinstance(value, (Config, EnvSpec, MSRL)):
        return next(kind.__name__ for kind in (Config, EnvSpec, MSRL) if isinstance(value, kind))
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name}" if isinstance(name, str) else _a(value)


def _inside(path: str, key: Any) -> str:
    for part in _PARTS_OF_MODULES:
        if path.endswith(part):
            return f"{path.removesuffix(part)}.{key}"
    return f"{path}[{key!r}]" if isinstance(key, (str, int, float, tuple)) else f"{path}[…]"


def _constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS)


def _cells(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables that a function closes over, without those that have no value yet."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        found.append((name, cell))
    return found


def _has_state_dict(value: Any) -> bool:
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, Module) and all(map(callable, methods))


def _load_state_dict(target: Any, state: Any, path: str) -> None:
    groups = getattr(target, "param_groups", None) if isinstance(target, torch.optim.Optimizer) else None
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"`{path}` cannot take its saved state: {type(error).__name__}: {error}") from error
    if groups is not None:  # the same dicts as before: schedulers and users may hold them
        for old, new in zip(groups, target.param_groups, strict=True):
            _fill(old, {**{name: new[name] for name in old if name in new}, **new, "params": old["params"]})
        target.param_groups = groups


def _slots(kind: type) -> list[str]:
    """Names of the attributes that objects of a class keep outside of __dict__."""
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


@functools.cache
def _hides(kind: type) -> bool:
    """Whether objects of a class have memory that is no attribute: those written in C, such as files and generators."""
    if issubclass(kind, (io.IOBase, BaseException)) or (kind.__dictoffset__ == 0 and not _slots(kind)):
        return kind is not object and not _empty(kind)
    while kind is not object:
        base = kind.__base__
        assert base is not None
        members = [member for member in vars(kind).values() if isinstance(member, types.MemberDescriptorType)]
        own = len(members) + ("__dict__" in vars(kind)) + ("__weakref__" in vars(kind))
        if kind.__basicsize__ - base.__basicsize__ > own * object.__basicsize__ // 2:
            return True
        kind = base
    return False


def _empty(kind: type) -> bool:
    """A class of Python whose objects have no attributes at all."""
    return kind.__basicsize__ == object.__basicsize__ and "__slots__" in vars(kind)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach()
    return (flat.untyped_storage().data_ptr(), flat.storage_offset(), tuple(flat.shape), tuple(flat.stride()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has tensors of {name!r}, which torch {torch.__version__} does not know")
    return dtype


def _owner(array: np.ndarray) -> torch.Tensor | None:
    """The bytes of the array that owns an array's memory; None if there is none to write to, or it has gaps."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if not array.size or not array.dtype.itemsize:
        return torch.empty(0, dtype=torch.uint8)
    flat = array if array.flags.c_contiguous else array.T
    if not flat.flags.c_contiguous or not flat.flags.writeable:
        return None
    return torch.from_numpy(flat.reshape(-1).view(np.uint8))


def _array_kind(dtype: np.dtype) -> Any:
    """A numpy type as text, or, of records, as a list of fields."""
    return [list(field) for field in dtype.descr] if dtype.names else dtype.str


def _array_dtype(kind: Any) -> np.dtype:
    return np.dtype(kind if isinstance(kind, str) else [tuple(field) for field in kind])


def _view(storage: torch.UntypedStorage, dtype: str, size: list[int], stride: list[int], offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=_dtype(dtype))
    return empty.set_(storage, offset // empty.itemsize, tuple(size), tuple(stride))


def _generator_state(value: Any) -> tuple[str, Any] | None:
    """Kind and state of a random generator; None of what is none."""
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return "torch", value.get_state()
    if type(value) is random.Random:
        return "python", value.getstate()
    if isinstance(value, np.random.Generator):
        name = type(value.bit_generator).__name__
        return (name, value.bit_generator.state) if name in _BIT_GENERATORS else None
    if isinstance(value, np.random.RandomState):
        return "RandomState", value.get_state(legacy=False)
    return None


def _make_generator(name: str) -> Any:
    if name in _BIT_GENERATORS:
        return np.random.Generator(getattr(np.random, name)(0))
    return {"torch": torch.Generator, "python": random.Random, "RandomState": np.random.RandomState}[name]()


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
