"""Arguments and results of a loss function: what they look like, and how to make them again of other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

assert_size_stride: Any = torch._C._dynamo.guards.assert_size_stride
SCALARS = (bool, int, float, str, type(None))


class NotCaptured(Exception):
    """Why an update cannot be compiled."""


class Leaf(NamedTuple):
    """A tensor: what the code takes for granted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Branch(NamedTuple):
    """A TensorDict, a dict, a list or a tuple, and what is in it."""

    kind: type
    entries: dict[Any, Any]
    batch_size: Any = None
    names: Any = None


class Same(NamedTuple):
    """A number or a word; anything else by identity."""

    value: Any


def template_of(value: Any) -> Any:
    """What arguments look like: all that a trace may depend on but the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise NotCaptured("an argument of the loss function needs gradients; give it x.detach()")
        if value.device.type != "cpu" or value.layout is not torch.strided or type(value) not in PLAIN_TENSORS:
            raise NotCaptured(
                f"an argument is a {type(value).__name__} on {value.device}; plain tensors on the CPU are compiled"
            )
        return Leaf(tuple(value.shape), value.stride(), value.dtype)
    if type(value) is TensorDict:
        entries = {key: template_of(item) for key, item in value._tensordict.items()}
        return Branch(TensorDict, entries, value.batch_size, list(value.names) if value._has_names() else None)
    if type(value) is dict:
        return Branch(dict, {key: template_of(item) for key, item in value.items()})
    if type(value) in (tuple, list):
        return Branch(type(value), {index: template_of(item) for index, item in enumerate(value)})
    return Same(value)


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def matches(value: Any, template: Any, leaves: list[torch.Tensor]) -> bool:
    """Whether a value looks like the template; its tensors are put into `leaves`."""
    kind = type(template)
    if kind is Leaf:
        shape, stride, dtype = template
        if type(value) not in PLAIN_TENSORS or value.dtype is not dtype or value.requires_grad:
            return False
        try:
            assert_size_stride(value, shape, stride)
        except AssertionError:
            return False
        leaves.append(value)
        return True
    if kind is Branch:
        if type(value) is not template.kind:
            return False
        if template.kind is TensorDict:
            value = value._tensordict
        entries = template.entries
        if type(value) is dict:
            if value.keys() != entries.keys():
                return False
        elif len(value) != len(entries):
            return False
        for key, inner in entries.items():  # noqa: SIM110  (a generator takes longer)
            if not matches(value[key], inner, leaves):
                return False
        return True
    known = template.value
    return value is known or (type(value) is type(known) and type(value) in SCALARS and value == known)


def rebuilt(template: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """Arguments that look like the template, of other tensors."""
    if isinstance(template, Leaf):
        return next(leaves)
    if isinstance(template, Same):
        return template.value
    entries = {key: rebuilt(inner, leaves) for key, inner in template.entries.items()}
    if template.kind is TensorDict:
        return TensorDict(entries, template.batch_size, names=template.names)
    return entries if template.kind is dict else template.kind(entries.values())


def written(args: Any, template: Any, leaves: Iterator[torch.Tensor], path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """What a loss function put into its arguments: (path to the container, key, tensor)."""
    if isinstance(template, Leaf):
        next(leaves)
        return
    if isinstance(template, Same):
        return
    items = dict(args.items()) if template.kind in (TensorDict, dict) else dict(enumerate(args))
    for key, inner in template.entries.items():
        if key not in items:
            raise NotCaptured(f"it removes {key!r} from its argument")
        if isinstance(inner, Leaf):
            if items[key] is not next(leaves):
                yield path, key, items[key]
        elif isinstance(inner, Branch):
            yield from written(items[key], inner, leaves, (*path, key))
    for key in items.keys() - template.entries.keys():
        if not isinstance(items[key], torch.Tensor):
            raise NotCaptured(
                f"it puts {type(items[key]).__name__} {key!r} into its argument; only tensors can be put there"
            )
        yield path, key, items[key]


def outline(result: Any, outputs: list[torch.Tensor]) -> Any:
    """How to make a result again: tensors are numbers of outputs."""
    if isinstance(result, torch.Tensor):
        outputs.append(result)
        return len(outputs) - 1
    if type(result) is TensorDict:
        return TensorDict, {key: outline(item, outputs) for key, item in result.items()}, result.batch_size
    if type(result) is dict:
        return dict, {key: outline(item, outputs) for key, item in result.items()}, None
    if isinstance(result, SCALARS):
        return Same(result)
    raise NotCaptured(f"its result holds a {type(result).__name__}; return tensors, or a dict or TensorDict of tensors")


def made(results: Any, outputs: list[torch.Tensor]) -> Any:
    if type(results) is int:
        return outputs[results]
    if type(results) is Same:
        return results.value
    kind, entries, batch_size = results
    items = {key: made(item, outputs) for key, item in entries.items()}
    return items if kind is dict else TensorDict._new_unsafe(items, batch_size)


def names(result: Any) -> list[str]:
    """Where each tensor or number of a result is, for messages."""
    if isinstance(result, (TensorDict, dict)):
        return [f"[{key!r}]{inner}" for key, item in result.items() for inner in names(item)]
    return [""]


def tensors(result: Any) -> list[Any]:
    if isinstance(result, (TensorDict, dict)):
        return [leaf for item in result.values() for leaf in tensors(item)]
    return [result]
