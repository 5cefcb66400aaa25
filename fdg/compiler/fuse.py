"""Fuse: the logical actors of one worker act in one batch.

A pass from graph to graph. A fragment's per-actor regions are marked `fused` if each can run once over the rows of
several actors instead of once per actor: if what it does to varying values it does to every row alone, and if nothing
varying decides which statements run. This is read off the generated code. What is not known to treat rows alone is
refused, with its line, and the fragment stays as it was.

Every value in a region is of one kind:

    NUMBER   the same for all actors, without rows: a constant, a setting, what is computed from those
    OBJECT   the same for all actors, perhaps with a row per environment of one actor
    ROWS     a TensorDict or tensor whose first dimension is the environments
    MANY     a list of those, or rows on their way to the buffer
    STACK    steps stacked to one TensorDict, with the environments in its dimension "env"

Not exact: random numbers are drawn for all rows at once, and a batch of another size may differ in the last bits.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence

from fdg.compiler.emit import argument
from fdg.compiler.purity import GRAD_CONTEXTS
from fdg.compiler.source import Module, TrainerSource, qualified_name
from fdg.graph import Fragment, Graph, Region

NUMBER, OBJECT, ROWS, MANY, STACK = "number", "object", "rows", "many", "stack"
ACTS = ("env_reset", "env_step", "agent_act")
CALLS = tuple(f"self.msrl.{name}" for name in ACTS)
STACKS = ("torch.stack", "fdg.stack", "fdg.runtime.environments.stack")
STEP_MDP = ("fdg.step_mdp", "fdg.runtime.environments.step_mdp", "torchrl.envs.utils.step_mdp", "torchrl.envs.step_mdp")
BY_ROW = frozenset(
    "abs ceil clamp clip clone contiguous copy detach double eq exp float floor full_like ge gt half int isfinite isnan le "
    "log log1p logical_and logical_not logical_or logical_xor long lt maximum minimum mul add sub div ne neg ones_like pow "
    "relu round sigmoid sign sqrt square tanh to where zeros_like".split()
)
"""Functions of torch, and methods of tensors and TensorDicts, that compute every row from the same row."""
OF_KEYS = frozenset("get set select exclude update pop rename_key setdefault".split())
"""Methods of a TensorDict that are about its entries."""
SCALARS = tuple(f"builtins.{name}" for name in "range len int float bool str abs min max round divmod".split())


class CannotFuse(Exception):
    """Why a region must run once per actor, and where it says so."""

    def __init__(self, reason: str, node: ast.AST | None = None) -> None:
        super().__init__(reason)
        self.line = getattr(node, "lineno", 0)


def fuse(graph: Graph, source: TrainerSource, workers: int | None = None) -> Graph:
    """Mark what can run fused, in place; `graph.passes` says what became of it."""
    said = []
    for fragment in graph.fragments.values():
        regions = [region for region in fragment.regions if region.per == "actor"]
        if not any(name in region.calls for region in regions for name in ACTS):
            continue
        if graph.actors == 1:
            said.append("there is one actor")
            break
        try:
            check(graph, fragment, regions, source)
        except CannotFuse as why:
            said.append(f"no, `{fragment.name}` runs once per actor: {place(fragment, why.line)}{why}")
        else:
            fragment.fused = True
            together = "the actors of one worker act"
            workers = workers and min(workers, graph.actors)
            if workers:
                where = "one worker" if workers == 1 else f"{workers} workers"
                together = f"{graph.actors} actors on {where} act"
            names = ", ".join(region.name for region in regions)
            said.append(f"{together} in one batch{'' if workers == 1 else ' each'} (`{fragment.name}`: {names})")
    graph.passes.append(f"fuse: {'; '.join(said) or 'no fragment acts'}")
    return graph


def place(fragment: Fragment, line: int) -> str:
    """The user's file and line behind a line of the fragment's code."""
    found = next(((file, theirs) for mine, file, theirs in fragment.line_map if mine == line), None)
    return f"{os.path.basename(found[0])}:{found[1]}: " if found else ""


def check(graph: Graph, fragment: Fragment, regions: Sequence[Region], source: TrainerSource) -> None:
    """Raise CannotFuse unless all per-actor regions of a fragment can run over the rows of several actors."""
    for function in (node for node in ast.walk(ast.parse(graph.driver)) if isinstance(node, ast.FunctionDef)):
        for inner in (
            node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function
        ):
            for called in ast.walk(inner):
                if isinstance(called, ast.Attribute) and dotted(called).startswith(f"self.msrl.{fragment.name}."):
                    line = next((theirs for mine, _, theirs in graph.driver_map if mine == called.lineno), 0)
                    raise CannotFuse(f"line {line} is called in one actor's turn, which the others do not share")
    modules = {owner.module.file: owner.module for owner in source.bases}
    code = ast.parse(fragment.source)
    functions = {node.name: node for node in ast.walk(code) if isinstance(node, ast.FunctionDef)}
    known: dict[str, str] = {}  # of the variables that leave one region and enter another
    for _ in range(2):
        for region in regions:
            reader = Reader(functions[region.name], modules.get(region.file, source.module), region, known)
            known.update({name: kind for name, kind in reader.run().items() if kind not in (NUMBER, OBJECT)})


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


class Reader:
    """Reads one region: the kind of every value in it."""

    def __init__(self, function: ast.FunctionDef, module: Module, region: Region, known: dict[str, str]) -> None:
        self.function, self.module, self.region = function, module, region
        self.kinds: dict[str, str] = {}
        self.returned: list[ast.expr] = []
        for port in region.inputs:
            kind = NUMBER if port.plain == "yes" else OBJECT
            if port.varying:
                if "." in port.name:
                    raise CannotFuse(f"the attribute `{port.name}` is varying", function)
                kind = known.get(port.name, ROWS)
            self.kinds[argument(port.name)] = kind

    def run(self) -> dict[str, str]:
        """The kinds of what leaves, by name."""
        varying = {name for name, kind in self.kinds.items() if kind not in (NUMBER, OBJECT)}
        self.check_control(varying)
        self.block(self.function.body)
        left: dict[str, str] = {}
        for value in self.returned:
            items = value.elts if isinstance(value, ast.Tuple) else [value]
            for port, item in zip(self.region.outputs, items, strict=True):
                kind = self.kind(item)
                if port.varying and kind == OBJECT:
                    raise CannotFuse(f"`{port.name}` is varying, and not known to have a row per environment", item)
                left[port.name] = kind
        return left

    def check_control(self, varying: set[str]) -> None:
        """What may differ from actor to actor must not decide which statements run."""

        def differs(node: ast.expr) -> bool:
            return any(
                (isinstance(part, ast.Name) and part.id in varying)
                or (isinstance(part, ast.Attribute) and dotted(part) in CALLS)
                for part in ast.walk(node)
            )

        bindings = [node for node in ast.walk(self.function) if isinstance(node, (ast.Assign, ast.AugAssign))]
        for _ in bindings:  # as many times as a value can be handed on
            for node in bindings:
                if differs(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = (name for target in targets for name in ast.walk(target))
                    varying |= {name.id for name in names if isinstance(name, ast.Name) and name.id != "self"}
        for branch in ast.walk(self.function):
            if isinstance(branch, (ast.While, ast.If)) and not is_unbound(branch.test) and differs(branch.test):
                word = "while" if isinstance(branch, ast.While) else "if"
                raise CannotFuse(f"`{word} {ast.unparse(branch.test)}` may differ from actor to actor", branch)

    # statements

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            kind = self.kind(node.value)
            for target in node.targets:
                self.assign(target, node.value, kind)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value, self.kind(node.value))
        elif isinstance(node, ast.AugAssign):
            kind = self.combined([self.kind(node.target), self.kind(node.value)], node)
            self.assign(node.target, node.value, kind)
        elif isinstance(node, (ast.For, ast.While, ast.If)):
            self.control(node)
        elif isinstance(node, ast.With):
            for item in node.items:
                call = item.context_expr
                if not isinstance(call, ast.Call) or self.named(call.func) not in GRAD_CONTEXTS:
                    raise CannotFuse(f"`with {ast.unparse(call)}` is not known to treat rows alone", node)
            self.block(node.body)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self.returned.append(node.value)
        elif isinstance(node, ast.Expr):
            self.kind(node.value)
        elif not isinstance(node, (ast.Pass, ast.Break, ast.Continue, ast.Delete)):
            raise CannotFuse(f"`{ast.unparse(node).splitlines()[0]}` is not known to treat rows alone", node)

    def control(self, node: ast.For | ast.While | ast.If) -> None:
        """Loops and branches: the same way for all actors. What they bind may be bound before, too."""
        if isinstance(node, ast.For):
            kind = self.kind(node.iter)
            if kind not in (NUMBER, OBJECT, MANY):
                raise CannotFuse(f"`for … in {ast.unparse(node.iter)}` goes over the rows", node)
            self.assign(node.target, node.iter, {MANY: ROWS}.get(kind, kind))
        before = dict(self.kinds)
        for _ in range(2):
            if not isinstance(node, ast.For):
                self.plain(node.test, {self.kind(node.test)})
            self.block(node.body)
            after, self.kinds = self.kinds, dict(before)
            self.block(node.orelse)
            for name, kind in after.items():
                self.kinds[name] = self.merged(self.kinds.get(name, kind), kind)
            before = dict(self.kinds)

    def merged(self, one: str, other: str) -> str:
        order = (NUMBER, OBJECT, ROWS, MANY, STACK)
        return max(one, other, key=order.index)

    def assign(self, target: ast.expr, value: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            self.kinds[target.id] = kind
        elif isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for index, item in enumerate(target.elts):
                inner = values[index] if values else value
                self.assign(item, inner, self.kind(inner) if values else kind)
        elif isinstance(target, ast.Subscript) and self.kind(target.value) == ROWS and keys(target.slice):
            if kind != ROWS:
                raise CannotFuse(
                    f"`{ast.unparse(target)} = {ast.unparse(value)}`: the value has no row per environment", target
                )
        elif self.kind(target) not in (NUMBER, OBJECT) or kind not in (NUMBER, OBJECT):
            raise CannotFuse(f"`{ast.unparse(target)} = …` is not known to treat rows alone", target)

    # expressions

    def kind(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return NUMBER
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id, OBJECT)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            return self.subscript(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if is_unbound(node):
            return NUMBER
        if isinstance(node, (ast.List, ast.Tuple)):
            inner = {self.kind(item) for item in node.elts}
            return MANY if inner <= {ROWS} else self.plain(node, inner)
        parts = [self.kind(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        rows_alone = isinstance(node, (ast.BinOp, ast.Compare)) or (
            isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not)
        )
        return self.combined(parts, node) if rows_alone else self.plain(node, set(parts))

    def plain(self, node: ast.expr, parts: set[str]) -> str:
        """Of an expression that must have nothing varying in it."""
        inside = {self.kinds.get(name.id) for name in ast.walk(node) if isinstance(name, ast.Name)}
        if (parts | inside) & {ROWS, MANY, STACK}:
            raise CannotFuse(f"`{ast.unparse(node)}` is not known to treat rows alone", node)
        return NUMBER if parts <= {NUMBER} and not isinstance(node, (ast.List, ast.Tuple)) else OBJECT

    def combined(self, parts: Sequence[str], node: ast.AST) -> str:
        """Of an operation on every element."""
        found = set(parts)
        if not found & {ROWS, MANY, STACK}:
            return OBJECT if OBJECT in found else NUMBER
        if found <= {ROWS, NUMBER}:
            return ROWS
        more = "a value that may have as many rows as one actor has environments" if OBJECT in found else "a list"
        raise CannotFuse(f"`{ast.unparse(node)}` joins rows with {more}", node)

    def attribute(self, node: ast.Attribute) -> str:
        name = dotted(node)
        if name.startswith("self.config."):
            return NUMBER
        if self.kind(node.value) in (ROWS, MANY, STACK):
            raise CannotFuse(f"`{ast.unparse(node)}` is not known to treat rows alone", node)
        return OBJECT

    def subscript(self, node: ast.Subscript) -> str:
        kind = self.kind(node.value)
        if kind in (NUMBER, OBJECT):
            return self.plain(node, {kind, OBJECT})
        if (kind == ROWS and (keys(node.slice) or columns(node.slice))) or (kind == MANY and number(node.slice)):
            return ROWS
        raise CannotFuse(f"`{ast.unparse(node)}` takes some rows and not others", node)

    def call(self, node: ast.Call) -> str:
        if dotted(node.func) == "self.msrl.rows":
            return MANY
        parts = [self.kind(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        if dotted(node.func) in CALLS:
            return ROWS
        if dotted(node.func).startswith("self.msrl."):
            raise CannotFuse(f"`{dotted(node.func)}` runs once per actor", node)
        if ast.unparse(node.func) == "locals().get" and isinstance(node.args[0], ast.Constant):
            return self.kinds.get(str(node.args[0].value), NUMBER)
        name = self.named(node.func)
        if name in STEP_MDP and parts == [ROWS]:
            return ROWS
        if name in STACKS and parts == [MANY]:
            return STACK
        if name is not None and name.startswith("torch.") and name[6:] in BY_ROW:
            return self.combined(parts, node)
        if isinstance(node.func, ast.Attribute):
            owner = self.kind(node.func.value) if dotted(node.func.value) != "self" else OBJECT
            if owner not in (NUMBER, OBJECT):
                return self.method(node, node.func.attr, owner, parts)
        if set(parts) <= {NUMBER, OBJECT}:
            return NUMBER if name in SCALARS or (name or "").startswith("math.") else OBJECT
        raise CannotFuse(f"`{ast.unparse(node)}` is not known to treat rows alone", node)

    def method(self, node: ast.Call, name: str, owner: str, parts: list[str]) -> str:
        """A method of something varying."""
        if owner == MANY and name == "append" and parts == [ROWS]:
            return NUMBER
        if owner == ROWS:
            if name in BY_ROW:
                return self.combined([ROWS, *parts], node)
            if name in OF_KEYS and set(parts) <= {ROWS, NUMBER}:
                return ROWS
            if name in ("squeeze", "unsqueeze") and [ast.unparse(value) for value in node.args] == ["-1"]:
                return ROWS
        raise CannotFuse(f"`{ast.unparse(node)}` is not known to treat rows alone", node)

    def named(self, node: ast.expr) -> str | None:
        """What a function is, by its qualified name; None for the user's own."""
        name = dotted(node)
        return qualified_name(name, self.module) if name and name.split(".")[0] not in self.kinds else None


def is_unbound(node: ast.expr) -> bool:
    """`x is None`, `x is not _unbound`: the same for all actors."""
    return isinstance(node, ast.Compare) and all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)


def keys(node: ast.expr) -> bool:
    """A key of a TensorDict: "reward", or "next", "reward"."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return all(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)


def columns(node: ast.expr) -> bool:
    """`[:, …]`: all rows."""
    first = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else node
    return isinstance(first, ast.Slice) and not (first.lower or first.upper or first.step)


def number(node: ast.expr) -> bool:
    try:
        return isinstance(ast.literal_eval(node), int)
    except ValueError:
        return False
