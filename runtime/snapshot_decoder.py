"""From data to objects: the reading half of a snapshot."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch.nn import Module, Parameter

from fdg.errors import CheckpointError
from fdg.runtime.rows import Column, Rows, Table
from fdg.runtime.snapshot_parts import (
    DICTS,
    FACTORIES,
    LISTS,
    MAKE,
    NOTHING,
    Adapter,
    Data,
    array_dtype,
    attributes_of,
    cells_of,
    class_name,
    description,
    dtype_name,
    dtype_of,
    generator_state,
    inside,
    is_kept,
    kind_of,
    load_state,
    make_generator,
    place_of,
    refill,
    said,
    set_generator,
    slots_of,
    view_of,
    with_article,
)
from fdg.runtime.values import UNBOUND, Varying


class Decoder:
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
            tensor.data = view_of(storage, dtype, size, stride, offset + shift)
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
        if target is NOTHING or (description(target) != node[0] and not node[0].endswith("without memory")):
            self.differ(path, node[0], "missing" if target is NOTHING else description(target))
        return target

    def _function(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self._same(index, node, target, path)
        self.made[index] = target
        if node[1]:
            for (name, cell), item in zip(cells_of(target), node[1], strict=True):
                cell.cell_contents = self.put(item, cell.cell_contents, f"{path}: {name}")
        return target

    def _method(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        self._same(index, node, target, path)
        self.put(node[1], target.__self__, f"{path}.__self__")
        return target

    def _enum(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        if type(target).__qualname__ != node[0]:
            self.differ(path, f"{node[0]}.{node[1]}", kind_of(target))
        return type(target)[node[1]]

    def _shared(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        if node[0] >= len(self.shared):
            self.differ(path, f"weight {node[0]}", f"one of {len(self.shared)} weights")
        here = self.shared[node[0]]
        if not isinstance(target, torch.Tensor) or place_of(target) != place_of(here):
            self.differ(path, f"weight {node[0]}", "no weight: actor and learner do not share it")
        return target

    def _adapter(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        adapter = self.adapters[node[0]]
        if target is NOTHING or not adapter.match(target):
            self.differ(path, f"a {node[0]}", kind_of(target))
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
        dtype = array_dtype(kind)

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
        state = generator_state(target)
        if state is None or state[0] != name or not self.claim(target, index):
            target = make_generator(name)
        value = self.put(item, NOTHING, path)
        self.last.append(lambda: set_generator(target, value))
        return target

    def _rows(self, index: int, node: list[Any], target: Any, path: str) -> Rows:
        count, width, columns, arrays = node
        rows = target if type(target) is Rows and self.claim(target, index) else Rows()
        rows._table, rows._count, rows._width = Table(count), count, width
        rows._table.columns = [
            Column(tuple(key), tuple(shape), dtype_of(dtype), dtype_of(stored), self.put(array, NOTHING, path))
            for (key, shape, dtype, stored), array in zip(columns, arrays, strict=True)
        ]
        return rows

    def _tensor(self, index: int, node: list[Any], target: Any, path: str) -> torch.Tensor:
        storage, dtype, size, stride, offset, parameter, needs_grad, grad, _ = node
        made: torch.Tensor
        if self.fits(index, node, target, path):
            made = target
            saved = view_of(self.storages[storage].untyped_storage(), dtype, size, stride, offset)
            with torch.no_grad():
                target.detach().copy_(saved)
            if target.is_leaf and target.requires_grad != needs_grad:
                target.requires_grad_(needs_grad)
        else:
            made = torch.empty(0, dtype=dtype_of(dtype))
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
        alike = isinstance(target, torch.Tensor) and [dtype_name(target.dtype), list(target.shape)] == [dtype, size]
        if parameter or isinstance(target, Parameter):
            if not alike or isinstance(target, Parameter) != parameter:
                here = (
                    f"{dtype_name(target.dtype)} {list(target.shape)}"
                    if isinstance(target, torch.Tensor)
                    else kind_of(target)
                )
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
            made = MAKE[kind](values())
            same = type(target) is tuple and len(target) == len(made) and all(map(operator.is_, target, made))
            return target if same else made
        new: Any = deque(maxlen=node[1]) if kind == "deque" else MAKE[kind]()
        if type(target) is type(new) and getattr(target, "maxlen", None) == getattr(new, "maxlen", None):
            new = target if self.claim(target, index) else new
        self.todo.append(lambda: refill(new, values()))
        return new

    def _dict(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        kind, factory = self.nodes[index][0], node[1] if len(node) > 1 else None
        if factory == "" and not isinstance(target, defaultdict):
            self.differ(path, "a defaultdict", kind_of(target))
        if kind == "defaultdict":
            new: Any = defaultdict(target.default_factory if factory == "" else FACTORIES.get(factory or ""))
        else:
            new = MAKE[kind]()
        if type(target) is type(new) and self.claim(target, index):
            new = target
        self.todo.append(lambda: self.fill_dict(new, node[0], target, path))
        return new

    def fill_dict(self, new: dict[Any, Any], pairs: list[Any], target: Any, path: str) -> None:
        here = dict(target) if isinstance(target, dict) else {}
        entries: dict[Any, Any] = {}
        for key_item, item in pairs:
            key = self.put(key_item, NOTHING, f"a key of {path}")
            entries[key] = self.put(item, here.get(key, NOTHING), inside(path, key))
        for key, value in here.items():
            if key not in entries and isinstance(value, (Parameter, Module)):
                self.differ(inside(path, key), "missing", kind_of(value))
        refill(new, entries)

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
            entries = {key: self.put(item, here.get(key, NOTHING), inside(path, key)) for key, item in pairs}
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
        self.last.append(lambda: load_state(target, state, path))
        return target

    def _object(self, index: int, node: list[Any], target: Any, path: str) -> Any:
        name, attributes, contents = node
        self.expect(name, target, path, index)
        self.todo.append(lambda: self.fill_object(attributes, contents, target, path))
        return target

    def expect(self, name: str, target: Any, path: str, index: int | None = None) -> None:
        """The object here must be of the class that was saved; data alone does not make one."""
        if target is NOTHING or class_name(target) != name:
            self.differ(
                path,
                with_article(name),
                kind_of(target),
                "make it in __init__, so that it is there when the state comes" if target in (NOTHING, None) else "",
            )
        if index is not None and not self.claim(target, index):
            self.differ(path, f"{with_article(name)} of its own", "one that stands in two places")

    def fill_object(self, attributes: dict[str, Any], contents: Any, target: Any, path: str) -> None:
        here = attributes_of(target)
        kept = {name: here.pop(name) for name in list(here) if is_kept(target, name)}
        for name in here.keys() - attributes.keys():
            self.differ(f"{path}.{name}", "missing", said(here[name]))
        new = {name: self.put(item, here.get(name, NOTHING), f"{path}.{name}") for name, item in attributes.items()}
        if contents is not None:
            old = dict(target) if isinstance(target, dict) else list(target)
            value = self.put(contents, old, path)
            self.todo.append(lambda: refill(target, value))
        own = getattr(target, "__dict__", {})
        own.clear()
        own.update(kept)
        for name, value in new.items():
            if name in slots_of(type(target)):
                object.__setattr__(target, name, value)
            else:
                own[name] = value

    kinds: dict[str, Callable[[Decoder, int, list[Any], Any, str], Any]] = {
        "int": lambda self, index, node, target, path: int(node[0], 16),
        "complex": lambda self, index, node, target, path: complex(*node),
        "bytes": _bytes,
        "bytearray": lambda self, index, node, target, path: bytearray(self._bytes(index, node, target, path)),
        "range": _range,
        "slice": _slice,
        "size": lambda self, index, node, target, path: torch.Size(node[0]),
        "dtype": lambda self, index, node, target, path: dtype_of(node[0]),
        "device": lambda self, index, node, target, path: torch.device(node[0]),
        "unbound": lambda self, index, node, target, path: UNBOUND,
        "array": _array,
        "array_dtype": lambda self, index, node, target, path: array_dtype(node[0]),
        "scalar": _scalar,
        "generator": _generator,
        "rows": _rows,
        "tensor": _tensor,
        **dict.fromkeys((*LISTS.values(), "deque"), _sequence),
        **dict.fromkeys((*DICTS.values(), "defaultdict"), _dict),
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
