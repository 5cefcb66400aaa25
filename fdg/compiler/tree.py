"""Walking libcst trees: quick, read-only, in source order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TypeVar

import libcst as cst

_printer = cst.Module([])


_LAYOUT = ("whitespace", "lpar", "rpar", "comma", "semicolon", "leading_lines", "trailing_whitespace", "header", "footer",
           "lines_", "equal", "colon", "encoding", "default_", "has_", "newline", "indent")  # fmt: skip
_parts: dict[type, list[str]] = {}
Node = TypeVar("Node", bound=cst.CSTNode)


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes directly below, in source order, without layout. (libcst's own way rebuilds the tree to list them.)"""
    names = _parts.get(type(node))
    if names is None:
        names = [item.name for item in fields(node) if not item.name.startswith(_LAYOUT)]  # type: ignore[arg-type]
        _parts[type(node)] = names
    for name in names:
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


def find(node: cst.CSTNode, *kinds: type[Node]) -> Iterator[Node]:
    """All nodes of some kinds in a tree, the root included, in source order."""
    if isinstance(node, kinds):
        yield node
    for child in children(node):
        yield from find(child, *kinds)


def code(node: cst.CSTNode) -> str:
    """A libcst node as text."""
    return _printer.code_for_node(node)


class _Replace(cst.CSTTransformer):
    def __init__(self, new: dict[int, cst.CSTNode]) -> None:
        super().__init__()
        self.new = new

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) not in self.new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self.new.get(id(original_node), updated_node)


def replaced(node: Node, pairs: list[tuple[cst.CSTNode, cst.CSTNode]]) -> Node:
    """A tree with some of its nodes (by identity) replaced, all in one go: each rewrite makes all nodes new."""
    return node.visit(_Replace({id(old): new for old, new in pairs})) if pairs else node  # type: ignore[return-value]
