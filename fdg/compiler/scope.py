"""The local variables of a method, on Python's own tree: what is read, bound, live and certainly bound, and where.

Used on code that runs as it stands (the driver's, or the user's `train`); `flow.py` does the like for the compiler's own form.
Liveness errs towards live, binding towards "maybe unbound".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fdg.compiler.flow import Exits

ALL = "*"
"""Read by code that can see every local variable: `locals()`, `eval`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Loop = ast.For | ast.While


def reads(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names that running a piece of code may read, those in functions defined there included."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store) and node.id not in hidden:
            yield node.id
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _sees_locals(node.func.value):
        if node.func.attr == "get" and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)
            for argument in node.args[1:]:
                yield from reads(argument, hidden)
            return
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and _sees_locals(node.comparators[0]):
        yield str(node.left.value)
        return
    if _sees_locals(node):
        yield ALL
    if isinstance(node, Comprehension):
        hidden |= {name for part in node.generators for name in binds(part.target)}
        yield from reads(node.generators[0].iter)
    elif isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from (name for part in outside(node) for name in reads(part, hidden))
        inside = node.body if isinstance(node.body, list) else [node.body]
        own = set(parameters(node)) | {name for part in inside for name in binds(part)}
        free = {
            name for part in inside for item in ast.walk(part) if isinstance(item, ast.Nonlocal) for name in item.names
        }
        yield from free
        yield from (name for part in inside for name in reads(part, hidden | (own - free)))
        return
    for child in ast.iter_child_nodes(node):
        yield from reads(child, hidden)


def yields(node: ast.AST) -> bool:
    """Whether a function with this statement in its body is a generator: what functions inside it yield does not count."""
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return True
    return not isinstance(node, ast.Lambda | Function) and any(map(yields, ast.iter_child_nodes(node)))


def _sees_locals(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    return node.func.id in ("locals", "eval", "exec") or (node.func.id in ("vars", "dir") and not node.args)


def outside(node: ast.Lambda | Function) -> list[ast.expr]:
    """What is evaluated when a function is defined."""
    defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
    return defaults if isinstance(node, ast.Lambda) else [*node.decorator_list, *defaults]


def parameters(node: ast.Lambda | Function) -> list[str]:
    arguments = node.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [item.arg for item in (*found, arguments.vararg, arguments.kwarg) if item is not None]


def binds(node: ast.AST, inner: bool = False) -> Iterator[str]:
    """Names that a piece of code binds or unbinds in its own scope."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load) and not inner:
            yield node.id
        return
    if isinstance(node, ast.NamedExpr):
        yield from binds(node.target)
        yield from binds(node.value, inner)
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        return
    for attribute in ("name", "rest"):  # of an exception handler, of patterns
        value = getattr(node, attribute, None)
        if isinstance(value, str) and isinstance(node, (ast.ExceptHandler, ast.pattern)):
            yield value
    inner = inner or isinstance(node, Comprehension)
    for child in ast.iter_child_nodes(node):
        yield from binds(child, inner)


def surely(node: ast.AST) -> Iterator[str]:
    """Names that evaluating an expression or running a simple statement binds on every path."""
    if isinstance(node, ast.BoolOp):
        yield from surely(node.values[0])
    elif isinstance(node, ast.IfExp):
        yield from surely(node.test)
    elif isinstance(node, ast.Compare):
        yield from surely(node.left)
        yield from surely(node.comparators[0])
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Lambda, Comprehension)):
        return
    elif isinstance(node, ast.AnnAssign) and node.value is None:
        return
    elif isinstance(node, (ast.Name, ast.Import, ast.ImportFrom)):
        yield from binds(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from surely(child)


def pairs(node: ast.Assign) -> Iterator[tuple[ast.Name, ast.expr]]:
    """The names that an assignment binds, with their values, where the two stand opposite each other: `a, b = x, y`."""
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target, node.value
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
            if not any(isinstance(part, ast.Starred) for part in (*target.elts, *node.value.elts)):
                opposite = zip(target.elts, node.value.elts, strict=False)
                yield from ((name, value) for name, value in opposite if isinstance(name, ast.Name))


@dataclass
class Live:
    """Which local variables may be read later, at the places of one method."""

    before: dict[ast.stmt, set[str]] = field(default_factory=dict)
    body: dict[Loop, set[str]] = field(default_factory=dict)
    """When a loop's turn begins."""
    head: dict[Loop, set[str]] = field(default_factory=dict)
    """Between two turns: in the next one, or behind the loop."""

    def block(self, body: Sequence[ast.stmt], live: set[str], exits: Exits) -> set[str]:
        for statement in reversed(body):
            live = self.before[statement] = self.statement(statement, live, exits)
        return live

    def statement(self, node: ast.stmt, after: set[str], exits: Exits) -> set[str]:
        if isinstance(node, ast.Break):
            return set(exits.at_break)
        if isinstance(node, ast.Continue):
            return set(exits.at_continue)
        if isinstance(node, ast.Return):
            return set(reads(node)) | exits.at_return | exits.at_raise
        if isinstance(node, ast.Raise):
            return set(reads(node)) | exits.at_raise
        if isinstance(node, ast.If):
            head, killed = set(reads(node.test)), set(surely(node.test))
            blocks = self.block(node.body, set(after), exits) | self.block(node.orelse, set(after), exits)
            return head | (blocks - killed) | exits.at_raise
        if isinstance(node, Loop):
            return self.loop(node, after, exits)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            # A context may swallow an exception: what stands behind it follows on any statement of the body.
            inner = replace(exits, at_raise=exits.at_raise | after)
            live = self.block(node.body, set(after), inner)
            head = {name for item in node.items for name in reads(item)}
            return head | (live - {name for item in node.items for name in surely(item)}) | exits.at_raise
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self.attempt(node, after, exits)
        if isinstance(node, ast.Match):
            live = set(after) | set(reads(node.subject))
            for case in node.cases:
                live |= self.block(case.body, set(after), exits) | set(reads(case.pattern))
                live |= set(reads(case.guard)) if case.guard is not None else set()
            return live | exits.at_raise
        if isinstance(node, ast.AsyncFor):
            return set(after) | set(reads(node)) | exits.at_raise
        return set(reads(node)) | (after - set(surely(node))) | exits.at_raise

    def loop(self, node: Loop, after: set[str], exits: Exits) -> set[str]:
        done = self.block(node.orelse, set(after), exits)
        if isinstance(node, ast.For):
            again, killed = set(reads(node.target)), set(surely(node.target))
        else:
            again, killed = set(reads(node.test)), set(surely(node.test))
        top = again | (done - killed if isinstance(node, ast.While) else done)
        while True:
            inner = replace(exits, at_break=frozenset(after), at_continue=frozenset(top))
            body = self.block(node.body, set(top), inner)
            new = again | (body - killed) | exits.at_raise
            if new <= top:
                break
            top |= new
        self.body[node], self.head[node] = body, top
        return top | set(reads(node.iter)) if isinstance(node, ast.For) else top

    def attempt(self, node: ast.Try | ast.TryStar, after: set[str], exits: Exits) -> set[str]:
        final = self.block(node.finalbody, set(after), exits)
        if node.finalbody:
            names = ("at_break", "at_continue", "at_return", "at_raise")
            through = {name: self.block(node.finalbody, set(getattr(exits, name)), exits) for name in names}
            exits = replace(exits, **{name: frozenset(live) for name, live in through.items()})
        caught = set(exits.at_raise) | final
        for handler in node.handlers:
            caught |= self.block(handler.body, set(final), exits)
            caught |= set(reads(handler.type)) if handler.type is not None else set()
        orelse = self.block(node.orelse, set(final), exits)
        return self.block(node.body, orelse, replace(exits, at_raise=frozenset(caught))) | caught


@dataclass
class Bound:
    """Which local variables are certainly bound, at the places of one method."""

    before: dict[ast.stmt, set[str]] = field(default_factory=dict)
    body: dict[Loop, set[str]] = field(default_factory=dict)
    ended: dict[Loop, set[str]] = field(default_factory=dict)

    def block(self, body: Sequence[ast.stmt], bound: set[str]) -> set[str] | None:
        """What is bound after a block; None where its end cannot be reached."""
        for statement in body:
            self.before[statement] = set(bound)
            after = self.statement(statement, bound)
            if after is None:
                return None
            bound = after
        return bound

    def statement(self, node: ast.stmt, bound: set[str]) -> set[str] | None:
        if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)):
            return None
        if isinstance(node, ast.Delete):
            return bound - set(binds(node))
        if isinstance(node, ast.If):
            head = bound | set(surely(node.test))
            left, right = self.block(node.body, set(head)), self.block(node.orelse, set(head))
            return right if left is None else left if right is None else left & right
        if isinstance(node, Loop):
            kept = bound - unbound_in(node)
            head = kept | set(surely(node.test)) if isinstance(node, ast.While) else kept
            self.body[node] = head | set(surely(node.target)) if isinstance(node, ast.For) else head
            self.ended[node] = head
            self.block(node.body, set(self.body[node]))
            self.block(node.orelse, set(head))
            return head
        if isinstance(node, (ast.With, ast.AsyncWith)):
            head = bound | {name for item in node.items for name in surely(item)}
            self.block(node.body, set(head))
            return head - unbound_in(node)
        if isinstance(node, (ast.Try, ast.TryStar)):
            body = self.block(node.body, set(bound))
            orelse = self.block(node.orelse, body) if body is not None else None
            kept = bound - unbound_in(node)
            for handler in node.handlers:
                self.block(handler.body, set(kept))
            final = self.block(node.finalbody, set(kept))
            if node.handlers:
                return final
            return None if final is None or orelse is None else orelse | final
        if isinstance(node, (ast.Match, ast.AsyncFor)):
            for case in getattr(node, "cases", ()):
                self.block(case.body, set(bound))
            return bound - unbound_in(node)
        return bound | set(surely(node))


def unbound_in(node: ast.AST) -> set[str]:
    """Names that a piece of code may unbind."""
    found = {name for item in ast.walk(node) if isinstance(item, ast.Delete) for name in binds(item)}
    return found | {item.name for item in ast.walk(node) if isinstance(item, ast.ExceptHandler) and item.name}


class Scope:
    """One method: its local variables, those that functions inside it share, and where they are live and bound."""

    def __init__(self, node: ast.FunctionDef) -> None:
        self.node = node
        self.parameters = parameters(node)
        declared = [item for item in ast.walk(node) if isinstance(item, (ast.Global, ast.Nonlocal))]
        elsewhere = {name for item in declared for name in item.names}
        self.order = list(dict.fromkeys([*self.parameters, *(n for part in node.body for n in binds(part))]))
        """The local variables, in the order in which they are first bound."""
        self.order = [name for name in self.order if name not in elsewhere]
        functions = [
            item
            for item in ast.walk(node)
            if isinstance(item, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)) and item is not node
        ]
        self.captured = {name for function in functions for name in reads(function)} & set(self.order)
        """Local variables that functions defined in the method refer to: when they are read cannot be seen."""
        self.live, self.bound = Live(), Bound()
        self.live.block(node.body, set(), Exits())
        self.bound.block(node.body, set(self.parameters))
        self.bindings = self._bindings()

    def pick(self, live: set[str]) -> list[str]:
        """The local variables among some names, in order."""
        return [name for name in self.order if name in live or name in self.captured or ALL in live]

    def _bindings(self) -> dict[str, list[ast.expr | ast.stmt | None]]:
        """What each local variable is bound to: an expression, the statement that defines it, or None where it is not plain."""
        found: dict[str, list[ast.expr | ast.stmt | None]] = {name: [None] for name in self.parameters}
        plain: set[ast.Name] = set()
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    plain.add(target)
                    found.setdefault(target.id, []).append(value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                plain.add(node.target)
                if node.value is not None:
                    found.setdefault(node.target.id, []).append(node.value)
            elif (
                isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)) and node is not self.node
            ):
                for name in binds(node):
                    found.setdefault(name, []).append(node)
            elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
                for name in binds(node):
                    found.setdefault(name, []).append(None)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node not in plain:
                found.setdefault(node.id, []).append(None)
        return found
