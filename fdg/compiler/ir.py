"""The compiler's own form of a method: a tree of statements, each with its origin and its effects.

    Statement   one statement: simple, or a head (`for`, `while`, `if`, `with`, `try`, `match`) with blocks below it
    Effects     what running it reads, writes and mutates, which components it calls, why it may not leave the driver

Variables are strings: `td` a local, `self.best` an attribute of the trainer, `self.*` all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fdg.compiler.source import Origin

EVERYTHING = "self.*"


def is_attribute(name: str) -> bool:
    """Whether a variable is an attribute of the trainer."""
    return name.startswith("self.")


@dataclass
class Effects:
    """What running a piece of code does."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    """Variables that are bound anew, on some path at least."""
    strong: set[str] = field(default_factory=set)
    """Variables bound anew on every path; only of simple statements and heads."""
    mutates: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    """Component calls, by operation name; those of called helpers included."""
    helpers: set[Any] = field(default_factory=set)
    """Methods of the trainer that make component calls, called here."""
    pinned: str = ""
    """Why this must stay at the driver; empty when it may move."""
    captured: set[str] = field(default_factory=set)
    """Variables a stored closure refers to."""
    joined: set[str] = field(default_factory=set)
    """Variables read only as arguments of operations that join."""

    def add(self, other: Effects) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.strong |= other.strong
        self.mutates |= other.mutates
        self.calls += other.calls
        self.helpers |= other.helpers
        self.pinned = self.pinned or other.pinned
        self.captured |= other.captured
        self.joined |= other.joined

    def pin(self, reason: str) -> None:
        self.pinned = self.pinned or reason


@dataclass(eq=False)
class Statement:
    """One statement of a method.

    kind        parts (expressions of the head)             blocks
    simple      node                                        –
    if          test                                        body, orelse
    for         target, iter                                body, orelse
    while       test                                        body, orelse
    with        items                                       body
    try         handlers                                    body, handler0…, orelse, finalbody
    match       subject, cases                              case0…
    """

    kind: str
    origin: Origin
    parts: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, list[Statement]] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    head: Effects = field(default_factory=Effects)
    """Effects of the statement itself, without its blocks."""
    whole: Effects = field(default_factory=Effects)
    """Effects with everything below it."""
    varying: bool = False
    """At A > 1: runs once per actor, because it reads varying values (or is controlled by one)."""
    leaves: set[str] = field(default_factory=set)
    """Jumps that leave this statement: break, continue, return, raise."""

    def children(self) -> Iterator[Statement]:
        for block in self.blocks.values():
            yield from block

    def walk(self) -> Iterator[Statement]:
        yield self
        for child in self.children():
            yield from child.walk()


def walk(block: list[Statement]) -> Iterator[Statement]:
    for statement in block:
        yield from statement.walk()
