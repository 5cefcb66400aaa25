"""Values between fragments: varying values, handles to resident ones, copies, what comes back, and joining.

Varying   one value per actor, in actor order
Handle    an object that stays in a fragment; the driver passes it on without looking inside
Shelf     the handles to the objects of one instance
copied    a deep copy for a crossing: tensors cloned and cut from autograd, identity inside one message kept
restore   call-by-copy-restore: what a region changed in its copy is changed in the driver's object too
Tail      the end of a list of the driver's: what a region appends to it, without having the list
join      varying to global: along the environments, in actor order
"""

from __future__ import annotations

import copy
import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from fdg.errors import RunError
from fdg.graph import DRIVER
from fdg.runtime.rows import Rows
from fdg.runtime.wire import like

ATOMS = (int, float, complex, bool, str, bytes, type(None), type, types.FunctionType, types.BuiltinFunctionType,
         types.ModuleType, range, torch.device, torch.dtype, torch.Size)  # fmt: skip


SMALL = 2**20
"""Bytes of memory that are copied whole, so that views of it stay views."""


def plain(value: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> bool:
    """Whether a tensor lies in memory as numbers of this kind, one after the other, so that compiled code can read it."""
    if type(value) is not torch.Tensor or value.dtype is not dtype or (shape is not None and value.shape != shape):
        return False
    if value.layout is not torch.strided or not value.is_contiguous() or not value.is_cpu:
        return False
    return not value.is_neg() and not value._is_zerotensor()


class Unbound:
    """Stands for a variable that has no value (yet)."""

    def __repr__(self) -> str:
        return "<unbound>"

    def __deepcopy__(self, memo: Any) -> Unbound:
        return self

    def __reduce__(self) -> Any:
        return "UNBOUND"


UNBOUND = Unbound()


class Varying(list):
    """One value per actor, in actor order."""

    def __repr__(self) -> str:
        return f"Varying({super().__repr__()})"


class Shelf:
    """What the driver knows of the objects that stay in one instance: which of them it still has a name for."""

    def __init__(self, owner: str, fetch: Callable[[tuple[int, ...]], tuple[Any, ...]]) -> None:
        self.owner, self.fetch = owner, fetch
        self.epoch = 0
        """Counts region calls: copies made before the last one may be out of date."""
        self.released: list[int] = []
        """Objects that no handle stands for any more; the instance has yet to hear of it."""
        self._held: dict[int, int] = {}
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()

    def handle(self, key: int) -> Handle:
        """The handle to an object; the same object always has the same handle."""
        handle = self._handles.get(key)
        return Handle(self, key) if handle is None else handle

    def hold(self, key: int, handle: Handle) -> None:
        """Note that a handle stands for an object; the newest one is what `handle` returns from now on."""
        self._held[key] = self._held.get(key, 0) + 1
        self._handles[key] = handle

    def release(self, key: int) -> None:
        """Forget an object when its last handle is gone."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            self.forget(key)

    def forget(self, key: int) -> None:
        self.released.append(key)

    def take_released(self) -> tuple[int, ...]:
        released, self.released = tuple(self.released), []
        return released


class Home(Shelf):
    """Objects that the driver has itself."""

    def __init__(self) -> None:
        super().__init__(DRIVER, lambda keys: tuple(self.objects[key] for key in keys))
        self.objects: dict[int, Any] = {}
        self._keys: dict[int, int] = {}
        self._counter = itertools.count(1)

    def keep(self, value: Any) -> Handle:
        key = self._keys.get(id(value))
        if key is None:
            key = next(self._counter)
            self.objects[key], self._keys[id(value)] = value, key
        return self.handle(key)

    def forget(self, key: int) -> None:
        self._keys.pop(id(self.objects.pop(key)), None)


class Handle:
    """An object that stays in a fragment. All the driver's names for the object share one handle, which can move."""

    def __init__(self, shelf: Shelf, key: int) -> None:
        self.shelf, self.key = shelf, key
        self.cached: Any = None
        """(epoch, copy): what the driver may read without asking, until the fragment runs again."""
        shelf.hold(key, self)

    @property
    def at_driver(self) -> bool:
        return self.shelf.owner == DRIVER

    def read(self) -> Any:
        """A copy to read; of an object that is at the driver, the object."""
        if self.at_driver:
            return self.shelf.fetch((self.key,))[0]
        if self.cached is None or self.cached[0] != self.shelf.epoch:
            self.cached = (self.shelf.epoch, self.shelf.fetch((self.key,))[0])
        return self.cached[1]

    def move(self, other: Handle) -> None:
        """From now on stand for the object that `other` stands for."""
        self.cached = None
        other.shelf.hold(other.key, self)
        self.shelf.release(self.key)
        self.shelf, self.key = other.shelf, other.key

    def __del__(self) -> None:
        self.shelf.release(self.key)

    def __repr__(self) -> str:
        return f"<handle to an object in {self.shelf.owner}>"


class Tail:
    """Stands for a list of the driver's of which a region gets an empty one: what it appends there comes at the end."""

    def __init__(self, whole: list[Any]) -> None:
        self.whole = whole


def transparent(value: Any) -> bool:
    """Whether `reach` finds all that can be changed through an object."""
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return isinstance(value, torch.Tensor) or keeps_entries(value) or type(value) in (Varying, list, deque, set, dict)


def keeps_entries(value: Any) -> bool:
    """Whether a value is a TensorDict that has its entries itself: then TensorDicts among them are objects of their own."""
    return type(value) is TensorDict and not value.is_locked


def reach(value: Any, found: dict[int, Any]) -> None:
    """The objects that `copied` copies one by one, in the order it meets them."""
    if isinstance(value, (*ATOMS, Unbound)) or id(value) in found:
        return
    if type(value) is tuple:
        for item in value:
            reach(item, found)
        return
    found[id(value)] = value
    if keeps_entries(value):
        for item in value.values():
            reach(item, found)
    elif isinstance(value, TensorDictBase):
        for leaf in value.values(True, True):
            reach(leaf, found)
    elif isinstance(value, Varying) or type(value) in (list, deque, set):
        for item in value:
            reach(item, found)
    elif type(value) is dict:
        for key, item in value.items():
            reach(key, found)
            reach(item, found)


def copied(value: Any, memo: dict[Any, Any]) -> Any:
    """A deep copy for a crossing. `memo` maps ids of originals to (original, copy); use one memo per message."""
    if isinstance(value, (*ATOMS, Unbound)):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    new: Any
    if isinstance(value, torch.Tensor):
        new = copied_tensor(value, memo)
        if isinstance(value, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=value.requires_grad)
    elif keeps_entries(value):
        new = like(value, {key: copied(item, memo) for key, item in value.items()})
    elif isinstance(value, TensorDictBase):
        new = value.apply(lambda leaf: copied(leaf, memo))
    elif isinstance(value, np.ndarray):
        new = value.copy()
    elif type(value) is tuple:
        return tuple(copied(item, memo) for item in value)
    elif isinstance(value, Varying):
        new = Varying()
        memo[id(value)] = (value, new)
        new.extend(copied(item, memo) for item in value)
        return new
    elif type(value) in (list, deque, set):
        new = copy.copy(value)
        new.clear()
        memo[id(value)] = (value, new)
        items = [copied(item, memo) for item in value]
        new.update(items) if type(value) is set else new.extend(items)
        return new
    elif type(value) is dict:
        new = {}
        memo[id(value)] = (value, new)
        for key, item in value.items():
            new[copied(key, memo)] = copied(item, memo)
        return new
    elif isinstance(value, Rows):
        new = copy.deepcopy(value)
    else:
        new = copied_object(value, memo)
    memo[id(value)] = (value, new)
    return new


def copied_object(value: Any, memo: dict[Any, Any]) -> Any:
    """The copy of an object that hides what is in it. What is in there and elsewhere in the message is copied once,
    whichever is met first."""
    for tensor in tensors_in(value):
        copied(tensor, memo)
    inner: dict[Any, Any] = {key: new for key, (_, new) in memo.items()}
    try:
        new = copy.deepcopy(value, inner)
    except Exception as error:
        raise RunError(f"a {type(value).__name__} cannot cross between fragments: {error}") from error
    for old in inner.get(id(inner), ()):  # all that was copied
        if id(old) in inner:
            memo.setdefault(id(old), (old, inner[id(old)]))
    return new


def tensors_in(value: Any) -> Iterator[Any]:
    """Tensors and TensorDicts in an object, as far as its attributes and Python's containers lead to them."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if type(item) in (torch.Tensor, torch.nn.Parameter) or isinstance(item, TensorDictBase):
            yield item
        elif isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            rest += item
        else:
            rest += getattr(item, "__dict__", {}).values()
            slots = [getattr(kind, "__slots__", ()) for kind in type(item).__mro__]
            names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
            rest += [getattr(item, name) for name in names if name != "__dict__" and hasattr(item, name)]


def copied_tensor(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A tensor's copy, cut from autograd, in the same layout: torch adds up strided memory in another order.

    Tensors of one message that share memory still do. Only a small view of much memory becomes a tensor of its own.
    """
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    if not tensor.numel() or storage.nbytes() > max(16 * tensor.nbytes, SMALL):
        return tensor.clone()
    key = f"storage {storage.data_ptr()}"
    if key not in memo:
        memo[key] = (storage, storage.clone())
    return torch.empty(0, dtype=tensor.dtype).set_(
        memo[key][1], tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class Return:
    """Brings a region's results back: objects that are copies of the driver's become the driver's own again."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.originals = {id(new): (old, new) for old, new in pairs}
        self.storages = {
            new.untyped_storage().data_ptr(): (old, new)
            for old, new in self.originals.values()
            if isinstance(new, torch.Tensor) and new.numel()
        }
        self.done: dict[int, Any] = {}
        self.memo: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        """The driver's form of a fragment's object."""
        if isinstance(value, (*ATOMS, Unbound)):
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        pair = self.originals.get(id(value))
        if pair is not None:
            return self.restore(*pair)
        if type(value) is tuple:
            return tuple(self.value(item) for item in value)
        if type(value) in (list, deque):
            new: Any = copy.copy(value)
            new.clear()
            self.done[id(value)] = new
            new.extend(self.value(item) for item in value)
            return new
        if type(value) is dict:
            new = self.done[id(value)] = {}
            new.update({self.value(key): self.value(item) for key, item in value.items()})
            return new
        if keeps_entries(value):
            new = self.done[id(value)] = like(value, {key: self.value(item) for key, item in value.items()})
            return new
        if isinstance(value, TensorDictBase):
            new = self.done[id(value)] = value.apply(self.value)
            return new
        if isinstance(value, torch.Tensor):
            known = self.storages.get(value.untyped_storage().data_ptr())
            view = None if known is None else self.view(value, *known)
            if view is not None:
                self.done[id(value)] = view
                return view
        new = self.done[id(value)] = copied(value, self.memo)
        return new

    def view(self, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """What was a view of a tensor's copy, as a view of the tensor; None where their layouts differ."""
        storage = old.untyped_storage()
        if storage.nbytes() != new.untyped_storage().nbytes() or (
            (old.storage_offset(), old.stride(), old.dtype) != (new.storage_offset(), new.stride(), new.dtype)
        ):
            return None
        self.value(new)
        return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.size(), value.stride())

    def restore(self, old: Any, new: Any) -> Any:
        """Make the driver's object what the fragment made of its copy."""
        if isinstance(old, Tail):
            self.done[id(new)] = old.whole
            old.whole += [self.value(item) for item in new]
            return old.whole
        self.done[id(new)] = old
        if isinstance(old, torch.Tensor):
            if old.shape == new.shape and old.dtype == new.dtype:
                with torch.no_grad():
                    if not torch.equal(old, new):
                        old.copy_(new)
            else:
                old.data = new.detach().clone()
        elif keeps_entries(old) and keeps_entries(new):
            parts = {key: self.value(item) for key, item in new.items()}
            for key in list(old.keys()):
                del old[key]
            if old.batch_size != new.batch_size:
                old.batch_size = new.batch_size
            for key, item in parts.items():
                old._set_str(key, item, validated=True, inplace=False, non_blocking=False)
        elif isinstance(old, TensorDictBase):
            leaves = {key: self.value(leaf) for key, leaf in new.items(True, True)}
            for key in list(old.keys(True, True)):
                if key not in leaves:
                    del old[key]
            if old.batch_size != new.batch_size:
                old.batch_size = new.batch_size
            for key, leaf in leaves.items():
                old.set(key, leaf)
        elif isinstance(old, np.ndarray):
            if old.shape != new.shape:
                old.resize(new.shape, refcheck=False)
            old[...] = new
        elif isinstance(old, (list, deque)):
            items = [self.value(item) for item in new]
            old.clear()
            old.extend(items)
        elif isinstance(old, dict):
            entries = {self.value(key): self.value(item) for key, item in new.items()}
            old.clear()
            old.update(entries)
        elif isinstance(old, set):
            members = {self.value(item) for item in new}
            old.clear()
            old.update(members)
        elif hasattr(old, "__dict__"):
            state = {name: self.value(item) for name, item in vars(new).items()}
            vars(old).clear()
            vars(old).update(state)
        return old


def nbytes(value: Any) -> int:
    """Bytes that a value takes on its way."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, TensorDictBase):
        return sum(leaf.nbytes for leaf in value.values(True, True) if isinstance(leaf, torch.Tensor))
    if isinstance(value, Rows):
        return nbytes(value.pack()) if len(value) else 0
    if isinstance(value, dict):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return sum(nbytes(item) for item in value)
    return len(value) if isinstance(value, (str, bytes)) else 8


# varying to global ----------------------------------------------------------------------------------------------------


def join(values: list[Any], envs: int, what: str = "value") -> Any:
    """One global value from one value per actor: joined along the environments, in actor order.

    TensorDicts join along the dimension named "env" (rows of one dimension just follow each other; ragged ones become
    flat rows with an actor and an episode index), tensors along dimension 0, numbers become a tensor with an entry per
    actor, containers join part by part, lists of whole episodes follow each other.
    """
    first = values[0]
    if isinstance(first, TensorDictBase):
        return _join_tensordicts(values, what)
    if isinstance(first, torch.Tensor):
        return _join_tensors(values, envs, what)
    if isinstance(first, np.ndarray):
        return _join_tensors([torch.as_tensor(value) for value in values], envs, what).numpy()
    if isinstance(first, (bool, int, float)):
        return torch.tensor(values)
    if isinstance(first, dict):
        return {key: join([value[key] for value in values], envs, f"{what}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        return tuple(join(list(items), envs, what) for items in zip(*values, strict=True))
    if isinstance(first, (list, deque)):
        return _join_lists(values, envs, what)
    if all(value is first or value == first for value in values):
        return first
    raise RunError(f"{what}: a {type(first).__name__} per actor cannot be joined; write a tensor or a TensorDict")


def _join_tensors(values: list[torch.Tensor], envs: int, what: str) -> torch.Tensor:
    if all(value.dim() == 0 for value in values):
        return torch.stack(values)
    for value in values:
        if value.shape[0] != envs:
            raise RunError(
                f"{what}: dimension 0 of a varying tensor is the environments, but its shape is {tuple(value.shape)} and "
                f"there are {envs} environments per actor; put them first, or pass a TensorDict with a dimension named 'env'"
            )
    return torch.cat(values, 0)


def _join_tensordicts(values: list[TensorDictBase], what: str) -> TensorDictBase:
    first = values[0]
    names = list(first.names) if first._has_names() else [None] * first.batch_dims
    if "env" in names:
        axis = names.index("env")
        rest = {tuple(size for index, size in enumerate(value.batch_size) if index != axis) for value in values}
        if len(rest) == 1:
            return torch.cat(list(values), axis)
        return torch.cat([_flat(value, actor) for actor, value in enumerate(values)], 0)
    if first.batch_dims == 1:
        return torch.cat(list(values), 0)
    if first.batch_dims == 0:
        return torch.stack(list(values), 0)
    raise RunError(
        f"{what}: which of the dimensions {tuple(first.batch_size)} is the environments? Give it its name back, "
        "td.names = [None, 'env'], or flatten the TensorDict to rows"
    )


def _flat(value: TensorDictBase, actor: int) -> TensorDictBase:
    """Ragged data as rows, each with its actor and the number of its episode (per environment, in that actor)."""
    axis, last = list(value.names).index("env"), value.batch_dims - 1
    time_first = value if axis == last else value.permute(*(d for d in range(last + 1) if d != axis), axis)
    episode = torch.zeros(time_first.batch_size, dtype=torch.long)
    done = time_first.get(("next", "done"), None)
    if done is not None:
        ended = done.reshape(time_first.batch_size).long()
        episode = ended.cumsum(0) - ended
    rows = TensorDict({}, [time_first.numel()]).update(time_first.reshape(-1))
    rows["actor"] = torch.full((rows.numel(),), actor)
    rows["episode"] = episode.reshape(-1)
    return rows


def _join_lists(values: list[Any], envs: int, what: str) -> list[Any]:
    items = [item for value in values for item in value]
    along = items and all(
        (isinstance(item, TensorDictBase) and item._has_names() and "env" in item.names)
        or (isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape[0] == envs)
        for item in items
    )
    if not along:
        return items
    lengths = {len(value) for value in values}
    if len(lengths) > 1:
        raise RunError(
            f"{what}: the actors' lists have different lengths {[len(value) for value in values]} and their items are steps "
            "of all environments; stack each list into one TensorDict (torch.stack) to join it as flat rows"
        )
    return [join(list(parts), envs, what) for parts in zip(*values, strict=True)]
