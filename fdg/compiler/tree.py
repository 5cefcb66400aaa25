"""Walking libcst trees: quick, read-only, in source order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import libcst as cst

_printer = cst.Module([])


_LAYOUT = ("whitespace", "lpar", "rpar", "comma", "semicolon", "leading_lines", "trailing_whitespace", "header", "footer",
           "lines_", "equal", "colon", "encoding", "default_", "has_", "newline", "indent")  # fmt: skip
_parts: dict[type, list[str]] = {}
Node = TypeVar("Node", bound=cst.CSTNode)


def _is_node(kind: type, known: dict[type, bool] = {}) -> bool:  # noqa: B006 (a cache: libcst's classes answer slowly)
    if kind not in known:
        known[kind] = issubclass(kind, cst.CSTNode)
    return known[kind]


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes directly below, in source order, without layout. (libcst's own way rebuilds the tree to list them.)"""
    names = _parts.get(type(node))
    if names is None:
        names = [item.name for item in fields(node) if not item.name.startswith(_LAYOUT)]  # type: ignore[arg-type]
        _parts[type(node)] = names
    for name in names:
        value = getattr(node, name)
        kind = type(value)
        if kind is tuple or kind is list:
            yield from (item for item in value if _is_node(type(item)))
        elif _is_node(kind):
            yield value


def find(node: cst.CSTNode, *kinds: type[Node]) -> Iterator[Any]:
    """All nodes of some (concrete) kinds in a tree, the root included, in source order."""
    if type(node) in kinds:
        yield node
    for child in children(node):
        yield from find(child, *kinds)


def subexpressions(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The expressions directly inside an expression, in the order Python evaluates them."""
    found: list[cst.BaseExpression] = []
    for child in children(node):
        if (isinstance(node, cst.Attribute) and child is node.attr) or (
            isinstance(node, cst.Arg) and child is node.keyword
        ):
            continue
        if isinstance(child, (cst.StarredElement, cst.StarredDictElement)):
            found.append(child.value)
        elif isinstance(child, cst.BaseExpression):
            found.append(child)
        else:
            found.extend(subexpressions(child))
    return found


def yields(node: cst.CSTNode) -> bool:
    """Whether a function with this body is a generator: what functions inside it yield does not count."""
    if type(node) is cst.Yield:
        return True
    return type(node) not in (cst.FunctionDef, cst.Lambda) and any(map(yields, children(node)))


def code(node: cst.CSTNode) -> str:
    """A libcst node as text."""
    return _printer.code_for_node(node)


def replaced(node: Node, pairs: Sequence[tuple[cst.CSTNode, cst.CSTNode]]) -> Node:
    """A tree with some of its nodes (by identity) replaced; what is not on the way to them stays the same node."""
    new = {id(old): other for old, other in pairs}

    def rebuild(here: cst.CSTNode) -> cst.CSTNode:
        if id(here) in new:
            return new[id(here)]
        changes: dict[str, Any] = {}
        for item in fields(here):  # type: ignore[arg-type]
            value = getattr(here, item.name)
            if isinstance(value, cst.CSTNode):
                other: Any = rebuild(value)
                if other is not value:
                    changes[item.name] = other
            elif isinstance(value, (list, tuple)):
                other = [rebuild(part) if isinstance(part, cst.CSTNode) else part for part in value]
                if any(left is not right for left, right in zip(other, value, strict=True)):
                    changes[item.name] = other
        return here.with_changes(**changes) if changes else here

    return rebuild(node) if pairs else node  # type: ignore[return-value]


def is_name(node: cst.CSTNode, name: str) -> bool:
    """Whether an expression is just this name. (libcst's matchers would say it too, and take 0.2 s to import.)"""
    return isinstance(node, cst.Name) and node.value == name
