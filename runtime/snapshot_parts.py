"""Small parts of snapshots: which kinds of values there are, what they are called, and where their memory is."""

from __future__ import annotations

import functools
import io
import logging
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn import Module

from fdg.api import Actor, Learner, Trainer
from fdg.config import Config
from fdg.errors import CheckpointError
from fdg.msrl import MSRL
from fdg.runtime.environments import EnvSpec
from fdg.runtime.values import Varying

Data = dict[str, Any]

LIBRARIES = ("torch", "torchrl", "tensordict", "gymnasium", "mujoco", "numpy")
"""What their objects hold beside data (caches, hooks, handles) is made when they are built, and is not looked into."""
FACTORIES = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "deque": deque}
LISTS: dict[type, str] = {list: "list", Varying: "varying", set: "set", tuple: "tuple", frozenset: "frozenset"}
DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
MAKE: dict[str, Callable[..., Any]] = {kind: made for made, kind in (*LISTS.items(), *DICTS.items())}
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
PARTS_OF_MODULES = ("._parameters", "._buffers", "._modules")
CONSTANTS = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, weakref.ref, property,
              functools.partial, np.ufunc, type(threading.Lock()), type(threading.RLock()), logging.Logger, Config,
              EnvSpec, MSRL, torch.jit.ScriptFunction, torch.jit.ScriptModule)  # fmt: skip
"""Part of how an object is built: not saved, and found in the object restored."""

VALUES, OBJECTS, LIBRARY = range(3)
"""What may be met: values only; objects; objects inside one of a library, which may also be opaque."""


class Nothing:
    """Stands for a place at which the object to be restored has nothing."""


NOTHING = Nothing()


class Adapter(NamedTuple):
    """How to save objects of a class that is not Python's own: `get` returns values to encode, `set` takes them.

    A `set` of None says that such objects are part of how their owner is built: they are checked to be equal.
    """

    name: str
    match: Callable[[Any], bool]
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None] | None = None


def refill(container: Any, values: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in values.items():  # a Counter's update would add
            container[key] = value
    else:
        container.update(values) if isinstance(container, set) else container.extend(values)


def compare(saved: Data, here: Data, paths: list[str]) -> None:
    """Refuse a restored state that is not the saved one to the bit."""
    for path, node, other in zip(paths, saved["objects"], here["objects"], strict=False):
        if not equal(node, other):
            raise CheckpointError(
                f"`{path}` cannot be restored: saved was {shortened(node)}, restored is {shortened(other)}"
            )
    for index, (memory, other) in enumerate(zip(saved["storages"], here["storages"], strict=False)):
        if not torch.equal(memory, other):
            owners = [path for path, node in zip(paths, here["objects"], strict=False) if storage_of(node) == index]
            raise CheckpointError(
                f"`{(owners or paths)[0]}` cannot be restored: its numbers are others than those saved"
            )
    if len(saved["objects"]) != len(here["objects"]) or len(saved["storages"]) != len(here["storages"]):
        raise CheckpointError(
            f"`{paths[0]}` cannot be restored: parts of it that were one are now several, or the reverse"
        )


def storage_of(node: list[Any]) -> int | None:
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


def shortened(node: list[Any]) -> str:
    text = str(node)
    return text if len(text) <= 80 else f"{text[:77]}…"


def name_of(component: Any) -> str:
    for kind, name in ((Learner, "learner"), (Actor, "actor"), (Trainer, "self")):
        if isinstance(component, kind):
            return name
    return type(component).__name__


def class_name(value: Any) -> str:
    """What must agree of a class. A trainer's is generated anew for each policy."""
    return "Trainer" if isinstance(value, Trainer) else type(value).__qualname__


def is_kept(owner: Any, name: str) -> bool:
    """Attributes that are no state: what the run gives a trainer; a module's hooks, whose keys are never the same; the
    caches of TensorDictParams."""
    if isinstance(owner, Trainer):
        return name in ("config", "msrl")
    if isinstance(owner, TensorDictBase):
        return name not in ("training", "_param_td", "_parameters", "_buffers", "_modules")
    return isinstance(owner, Module) and "_hooks" in name


def kind_of(value: Any) -> str:
    if value is NOTHING:
        return "missing"
    if value is None:
        return "None"
    return with_article(type(value).__qualname__)


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def said(value: Any) -> str:
    """A value if it is short, else what it is."""
    return repr(value) if isinstance(value, (int, float, str, bool)) and len(repr(value)) < 40 else kind_of(value)


def description(value: Any) -> str:
    """What must agree of something that is not saved."""
    if isinstance(value, (Config, EnvSpec, MSRL)):
        return next(kind.__name__ for kind in (Config, EnvSpec, MSRL) if isinstance(value, kind))
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name}" if isinstance(name, str) else kind_of(value)


def inside(path: str, key: Any) -> str:
    for part in PARTS_OF_MODULES:
        if path.endswith(part):
            return f"{path.removesuffix(part)}.{key}"
    return f"{path}[{key!r}]" if isinstance(key, (str, int, float, tuple)) else f"{path}[…]"


def is_constant(value: Any) -> bool:
    return isinstance(value, CONSTANTS)


def cells_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables that a function closes over, without those that have no value yet."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        found.append((name, cell))
    return found


def has_state_dict(value: Any) -> bool:
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, Module) and all(map(callable, methods))


def load_state(target: Any, state: Any, path: str) -> None:
    groups = getattr(target, "param_groups", None) if isinstance(target, torch.optim.Optimizer) else None
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"`{path}` cannot take its saved state: {type(error).__name__}: {error}") from error
    if groups is not None:  # the same dicts as before: schedulers and users may hold them
        for old, new in zip(groups, target.param_groups, strict=True):
            refill(old, {**{name: new[name] for name in old if name in new}, **new, "params": old["params"]})
        target.param_groups = groups


def slots_of(kind: type) -> list[str]:
    """Names of the attributes that objects of a class keep outside of __dict__."""
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


@functools.cache
def hides_state(kind: type) -> bool:
    """Whether objects of a class have memory that is no attribute: those written in C, such as files and generators."""
    if issubclass(kind, (io.IOBase, BaseException)) or (kind.__dictoffset__ == 0 and not slots_of(kind)):
        return kind is not object and not is_empty(kind)
    while kind is not object:
        base = kind.__base__
        assert base is not None
        members = [member for member in vars(kind).values() if isinstance(member, types.MemberDescriptorType)]
        own = len(members) + ("__dict__" in vars(kind)) + ("__weakref__" in vars(kind))
        if kind.__basicsize__ - base.__basicsize__ > own * object.__basicsize__ // 2:
            return True
        kind = base
    return False


def is_empty(kind: type) -> bool:
    """A class of Python whose objects have no attributes at all."""
    return kind.__basicsize__ == object.__basicsize__ and "__slots__" in vars(kind)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach()
    return (flat.untyped_storage().data_ptr(), flat.storage_offset(), tuple(flat.shape), tuple(flat.stride()))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has tensors of {name!r}, which torch {torch.__version__} does not know")
    return dtype


def owner_of(array: np.ndarray) -> torch.Tensor | None:
    """The bytes of the array that owns an array's memory; None if there is none to write to, or it has gaps."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if not array.size or not array.dtype.itemsize:
        return torch.empty(0, dtype=torch.uint8)
    flat = array if array.flags.c_contiguous else array.T
    if not flat.flags.c_contiguous or not flat.flags.writeable:
        return None
    return torch.from_numpy(flat.reshape(-1).view(np.uint8))


def array_kind(dtype: np.dtype) -> Any:
    """A numpy type as text, or, of records, as a list of fields."""
    return [list(field) for field in dtype.descr] if dtype.names else dtype.str


def array_dtype(kind: Any) -> np.dtype:
    return np.dtype(kind if isinstance(kind, str) else [tuple(field) for field in kind])


def view_of(storage: torch.UntypedStorage, dtype: str, size: list[int], stride: list[int], offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype_of(dtype))
    return empty.set_(storage, offset // empty.itemsize, tuple(size), tuple(stride))


def generator_state(value: Any) -> tuple[str, Any] | None:
    """Kind and state of a random generator; None of what is none."""
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return "torch", value.get_state()
    if type(value) is random.Random:
        return "python", value.getstate()
    if isinstance(value, np.random.Generator):
        name = type(value.bit_generator).__name__
        return (name, value.bit_generator.state) if name in BIT_GENERATORS else None
    if isinstance(value, np.random.RandomState):
        return "RandomState", value.get_state(legacy=False)
    return None


def make_generator(name: str) -> Any:
    if name in BIT_GENERATORS:
        return np.random.Generator(getattr(np.random, name)(0))
    return {"torch": torch.Generator, "python": random.Random, "RandomState": np.random.RandomState}[name]()


def set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
