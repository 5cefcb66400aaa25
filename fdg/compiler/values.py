"""What is known of values without running anything: their kinds, and which variables may share objects.

kind                    what the value is
scalar                  a number, a string, None: nothing that can be changed in place
data                    a tensor, an array, a TensorDict
vector                  an array of NumPy's with one dimension: its parts are numbers
tensor vector           a tensor with one dimension: its parts are tensors, that share its memory
config                  the trainer's config, whose fields are scalars
function                a function, a class, a module
("container", part)     one of Python's containers; `part` is the kind of what is in it
("defaultdict", part)   the same, but looking a key up may insert it
object                  of a class that we do not know: what its methods do, their names do not tell
unknown                 anything; a method that has the name of a reader is taken for one
None                    not known yet, in this round of the analysis
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fdg.compiler.source import dotted

Kind = Any

DATA = ("data", "vector", "tensor vector")


def join_kinds(left: Kind, right: Kind) -> Kind:
    if left == right or right is None:
        return left
    if left is None:
        return right
    if isinstance(left, tuple) and isinstance(right, tuple):
        return (left[0] if left[0] == right[0] else "container", join_kinds(left[1], right[1]))
    if left not in ("scalar", *DATA) or right not in ("scalar", *DATA):
        return "unknown"
    return right if left == "scalar" else left if right == "scalar" else "data"


def element(kind: Kind) -> Kind:
    """The kind of a part of a value."""
    if isinstance(kind, tuple):
        return kind[1]
    parts = {"data": "data", "tensor vector": "data", "vector": "scalar", "scalar": "scalar", "config": "scalar"}
    return parts.get(kind, "unknown")


def annotated_kind(annotation: cst.Annotation | None) -> Kind:
    """What a type hint says of a value; None when it says nothing we use."""
    name = dotted(annotation.annotation) if annotation is not None else None
    last = (name or "").rpartition(".")[2]
    if last in ("int", "float", "bool", "str"):
        return "scalar"
    return "data" if last in ("Tensor", "TensorDict", "TensorDictBase", "ndarray") else None


@dataclass
class Value:
    """What is known of an expression's value: its kind, and the variables whose objects it may share."""

    kind: Kind = "unknown"
    roots: set[str] = field(default_factory=set)
    parts: tuple[Value, ...] | None = None
    """Of a tuple written out: what is known of each part."""


def join_values(left: Value, right: Value) -> Value:
    """What is known of a value that is one of two."""
    parts = None
    if left.kind is None and not left.roots:
        parts = right.parts
    elif left.parts is not None and right.parts is not None and len(left.parts) == len(right.parts):
        parts = tuple(map(join_values, left.parts, right.parts))
    return Value(join_kinds(left.kind, right.kind), left.roots | right.roots, parts)


def combine(values: Iterable[Value], kind: Kind = None) -> Value:
    """What is known of a value that is made of others; `kind` is its kind if it is made of none."""
    roots: set[str] = set()
    for value in values:
        kind, roots = join_kinds(kind, value.kind), roots | value.roots
    return Value(kind, roots)


def objects(values: Iterable[Value]) -> set[str]:
    """The variables whose objects some values may share, those values left out that share nothing: scalars."""
    return {root for value in values if value.kind != "scalar" for root in value.roots}


class Aliases:
    """Union-find over variables that may share objects."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        while self.parent.get(name, name) != name:
            name = self.parent[name]
        return name

    def unite(self, names: set[str]) -> None:
        roots = {self.find(name) for name in names}
        for name in names | roots:
            self.parent[self.find(name)] = min(roots)

    def groups(self) -> list[set[str]]:
        """The variables that are known, those that may share objects together."""
        groups: dict[str, set[str]] = {}
        for name in self.parent:
            groups.setdefault(self.find(name), set()).add(name)
        return [groups[root] for root in sorted(groups)]

    def classes(self, names: set[str]) -> set[str]:
        """The given variables and all that may share objects with them."""
        roots = {self.find(name) for name in names}
        return names | {name for name in self.parent if self.find(name) in roots}
