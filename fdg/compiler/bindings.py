"""Which names a piece of code binds, in the scope it stands in."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from fdg.compiler.ir import Statement, walk
from fdg.compiler.tree import children


def target_names(target: cst.CSTNode) -> list[str]:
    """Names that an assignment's target binds: `a, (b, c.d) = …` binds a and b."""
    if isinstance(target, cst.Name):
        return [target.value]
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for entry in target.elements for name in target_names(entry.value)]
    return []


def pattern_names(node: cst.CSTNode) -> set[str]:
    """Names that a pattern of `match` binds."""
    values = (getattr(node, attribute, None) for attribute in ("name", "rest"))
    names = {value.value for value in values if isinstance(value, cst.Name)}
    return names.union(*(pattern_names(child) for child in children(node)))


def parameter_names(parameters: cst.Parameters) -> list[str]:
    """Names of parameters: those that go by position first, then those by keyword, then `*args` and `**kwargs`."""
    named = (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)
    starred = (star for star in (parameters.star_arg, parameters.star_kwarg) if isinstance(star, cst.Param))
    return [parameter.name.value for parameter in (*named, *starred)]


def bound_names(body: list[Statement]) -> set[str]:
    """Names that a method's statements bind."""
    names: set[str] = set()
    for statement in walk(body):
        for part in statement.parts.values():
            for node in part if isinstance(part, list) else [part]:
                if isinstance(node, cst.CSTNode):
                    names.update(_bound_in_part(node))
        if statement.kind == "for":
            names.update(target_names(statement.parts["target"]))
    return names


def _bound_in_part(node: cst.CSTNode) -> Iterator[str]:
    """Names that a part of a statement's head binds. Handlers and cases hold their blocks: these are statements."""
    if isinstance(node, cst.ExceptHandler):
        if node.name is not None:
            yield from target_names(node.name.name)
    elif isinstance(node, cst.MatchCase):
        yield from pattern_names(node.pattern)
    else:
        if isinstance(node, cst.WithItem) and node.asname is not None:
            yield from target_names(node.asname.name)
        yield from _bound_in(node)


def _bound_in(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        yield node.name.value
        return
    if isinstance(node, cst.Lambda):
        return
    if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
        yield from target_names(node.target)
    for child in children(node):
        yield from _bound_in(child)
