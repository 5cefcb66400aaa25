"""Snapshots: values and the state of objects as plain data, and back, with identity and shared memory kept.

    encode(values) / decode(data)             values: what a program holds in its variables; decoding makes new ones
    state_of(object) / restore(object, data)  objects: their state, written into one that was built the same way, in
                                              place, so that what shares memory with it (weights, optimizers) sees it

The data consists of dict, list, tuple, str, int, float, bool, None and tensors of bytes alone, so that reading it never
runs code:

    {"root": item, "objects": [node, …], "storages": [uint8 tensor, …]}
    item    None, bool, int (64 bits), float, str, or (i,): the i-th node
    node    [kind, …]; see `Encoder`. An object met twice is one node; tensors that share memory name one storage

Classes and functions are not in it. They are what the program is made of, so objects of the user's own classes can be
restored, where a built one says what class to use, but not decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdg.runtime.snapshot_decoder import Decoder
from fdg.runtime.snapshot_encoder import Encoder
from fdg.runtime.snapshot_parts import NOTHING, OBJECTS, VALUES, Adapter, Data, compare, equal, name_of

__all__ = ["Adapter", "Data", "decode", "encode", "equal", "restore", "state_of"]


def encode(values: dict[str, Any], *, copy: bool = True) -> Data:
    """A program's values, by name, as plain data. Without `copy` it has their memory, to be written out at once.

    >>> steps = [1, 2]
    >>> values = decode(encode({"steps": steps, "again": steps, "mean": torch.ones(2)}))
    >>> values["again"] is values["steps"], values["mean"]
    (True, tensor([1., 1.]))

    Raises:
        CheckpointError: a value is none that can be made again from data.
    """
    encoder = Encoder(copy=copy)
    root = {name: encoder.item(value, str(name), VALUES) for name, value in values.items()}
    return encoder.finish(root)


def decode(data: Data, *, copy: bool = True) -> dict[str, Any]:
    """The values that were encoded. Without `copy` their memory is that of `data`, which is then of no other use."""
    decoder = Decoder(data, copy=copy)
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
    encoder = Encoder(shared=shared, adapters=adapters, strict=strict)
    return encoder.finish(encoder.item(component, name or name_of(component), OBJECTS))


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
    name = name or name_of(component)
    decoder = Decoder(data, shared=shared, adapters=adapters)
    decoder.put(data["root"], component, name)
    decoder.finish()
    again = Encoder(shared=shared, adapters=adapters, copy=False, strict=strict)
    compare(data, again.finish(again.item(component, name, OBJECTS)), again.paths)
