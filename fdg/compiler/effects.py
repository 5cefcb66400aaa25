"""What each statement reads, writes and mutates, and whether it may leave the driver.

One evaluator walks expressions as Python would and returns, for each, what kind of value it is and which variables'
objects it may share. Methods of the trainer and functions of the user's modules are read once and summarised; anything
that cannot be read may touch everything reachable from its arguments, and keeps its statement at the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.ir import EVERYTHING, Effects, Statement, is_attribute, walk
from fdg.compiler.lower import (
    Bearing,
    Method,
    is_msrl,
    is_super,
    lower,
    may_take,
    method_call,
    operation_of,
    spread,
    subexpressions,
    variable,
)
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import (
    ClassSource,
    Module,
    Origin,
    TrainerSource,
    dotted,
    find_function,
    imported_names,
    qualified_name,
)
from fdg.compiler.tree import children, code, find

Kind = Any  # "scalar" | "data" | "config" | "function" | "unknown" | None | ("container", Kind) | ("defaultdict", Kind)


def join_kinds(left: Kind, right: Kind) -> Kind:
    if left == right or right is None:
        return left
    if left is None:
        return right
    if isinstance(left, tuple) and isinstance(right, tuple):
        return (left[0] if left[0] == right[0] else "container", join_kinds(left[1], right[1]))
    return "data" if {left, right} == {"scalar", "data"} else "unknown"


def element(kind: Kind) -> Kind:
    """The kind of a part of a value."""
    if isinstance(kind, tuple):
        return kind[1]
    return {"data": "data", "scalar": "scalar", "config": "scalar"}.get(kind, "unknown")


@dataclass
class Value:
    """What is known of an expression's value: its kind, and the variables whose objects it may share."""

    kind: Kind = "unknown"
    roots: set[str] = field(default_factory=set)
    parts: tuple[Value, ...] | None = None
    """Of a tuple written out: what is known of each part."""


def join_values(left: Value, right: Value) -> Value:
    parts = None
    if left.kind is None and not left.roots:
        parts = right.parts
    elif left.parts is not None and right.parts is not None and len(left.parts) == len(right.parts):
        parts = tuple(map(join_values, left.parts, right.parts))
    return Value(join_kinds(left.kind, right.kind), left.roots | right.roots, parts)


def annotated_kind(annotation: cst.Annotation | None) -> Kind:
    """What a type hint says of a value; None when it says nothing we use."""
    name = dotted(annotation.annotation) if annotation is not None else None
    last = (name or "").rpartition(".")[2]
    if last in ("int", "float", "bool", "str"):
        return "scalar"
    return "data" if last in ("Tensor", "TensorDict", "TensorDictBase", "ndarray") else None


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


@dataclass
class Summary:
    """What calling a method or function does, as seen by its caller."""

    parameters: list[str]
    effects: Effects = field(default_factory=Effects)
    mutated: set[str] = field(default_factory=set)
    returns: Value = field(default_factory=lambda: Value(None))
    shared: list[set[str]] = field(default_factory=list)
    """Groups of parameters, attributes and the result that may share objects after the call."""
    given: dict[str, Kind] = field(default_factory=dict)
    """Kinds of the arguments that callers pass; `found` collects those of the current round."""
    found: dict[str, Kind] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)
    aliases: Aliases = field(default_factory=Aliases)
    made_global: set[str] = field(default_factory=set)
    """Variables that may hold a global object somewhere, found when values are typed."""

    def fingerprint(self) -> Any:
        effects = self.effects
        return (
            frozenset(effects.reads | effects.writes),
            frozenset(effects.mutates),
            len(set(effects.calls)),
            effects.pinned,
            frozenset(self.mutated),
            str(self.returns.kind),
            frozenset(self.returns.roots),
        )


class Analysis:
    """All methods of one trainer that `train` can reach, with their effects."""

    def __init__(self, trainer: TrainerSource, actors: int, spill: frozenset[Any] = frozenset()) -> None:
        self.trainer, self.actors, self.spill = trainer, actors, spill
        self.bearing = Bearing(trainer)
        self.methods: dict[tuple[str, str], Method] = {}
        self.functions: dict[tuple[str, str], Method] = {}
        self.kinds: dict[str, Kind] = {}
        """Kinds of the trainer's attributes, as far as the last round knew; `found` collects those of this round."""
        self.found: dict[str, Kind] = {}
        self.aliases = Aliases()
        """Attributes that may share objects: what one method makes one object is one in all of them. By rounds too."""
        self.found_aliases = Aliases()
        self.changed = False
        self.assigned = {
            f"self.{target.attr.value}"
            for owner in trainer.bases
            for node in find(owner.node, cst.AssignTarget, cst.AnnAssign, cst.AugAssign)
            for target in find(node.target, cst.Attribute)
            if isinstance(target.value, cst.Name)
        }
        found = trainer.find("train")
        if found is None:
            raise trainer.module.origin(trainer.bases[0].node).error(
                f"{trainer.name} has no `train` method", "def train(self): … the whole algorithm"
            )
        self.train = self.need(*found)
        for owner in trainer.bases:
            if "__init__" in owner.methods:
                self.need(owner, owner.methods["__init__"])
        # Rounds of an ordinary fixpoint: each is computed from what the round before knew, beginning with nothing.
        for _ in range(100):
            self.changed = False
            self.found, self.found_aliases = {}, Aliases()
            for method in [*self.methods.values(), *self.functions.values()]:
                self.analyse(method)
            for method in [*self.methods.values(), *self.functions.values()]:
                summary = method.summary
                self.changed |= summary.given != summary.found
                summary.given, summary.found = summary.found, {}
            self.changed |= self.kinds != self.found or self.aliases.groups() != self.found_aliases.groups()
            self.kinds, self.aliases = self.found, self.found_aliases
            if not self.changed:
                break
        for method in self.methods.values():
            close_over_aliases(method)

    def need(self, owner: ClassSource, node: cst.FunctionDef) -> Method:
        """The method, read and lowered; its effects settle as the analysis goes round."""
        method = self.bearing.method(owner, node)
        if method.key not in self.methods:
            self.methods[method.key] = method
            if self.bearing.method_bears(owner, node):
                lower(self.bearing, method, self.actors > 1, self.spill)
            else:
                method.body = _plain_body(self.bearing, method)
            method.summary = Summary(method.parameters)
            self.changed = True
        return method

    def function(self, module: Module, name: str) -> Method:
        """A module-level function of the user's own, summarised like a method."""
        key = (module.file, name)
        if key not in self.functions:
            owner = ClassSource(f"<{module.file}>", module, None, {name: module.functions[name]}, set())  # type: ignore[arg-type]
            node = module.functions[name]
            names = [
                p.name.value for p in (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
            ]
            for star in (node.params.star_arg, node.params.star_kwarg):
                if isinstance(star, cst.Param):
                    names.append(star.name.value)
            method = Method(owner, node, "", names)
            method.body = _plain_body(self.bearing, method)
            method.summary = Summary(names)
            self.functions[key] = method
            self.changed = True
        return self.functions[key]

    def analyse(self, method: Method) -> None:
        before = method.summary.fingerprint()
        evaluator = Evaluator(self, method)
        evaluator.run()
        if method.summary.fingerprint() != before:
            self.changed = True

    def attribute_kind(self, name: str) -> Kind:
        if name == "self.config":
            return "config"
        return self.kinds.get(name) if name in self.assigned else "unknown"

    def kind_of(self, name: str, method: Method) -> Kind:
        return self.attribute_kind(name) if is_attribute(name) else method.summary.kinds.get(name)

    def learn_kind(self, name: str, kind: Kind) -> None:
        self.found[name] = join_kinds(self.found.get(name), kind)


def _plain_body(bearing: Bearing, method: Method) -> list[Statement]:
    from fdg.compiler.lower import Lowering

    suite = method.node.body
    if next(find(suite, cst.Yield, cst.Await), None) is not None:
        opaque = Statement("simple", method.origin(method.owner.methods[method.name]), {"node": cst.Pass()})
        opaque.parts["opaque"] = "is a generator"
        return [opaque]
    return Lowering(bearing, method, False).block(suite.body)


def close_over_aliases(method: Method) -> None:
    """Mutating an object mutates it under all its names."""
    aliases: Aliases = method.summary.aliases
    for statement in walk(method.body):
        for effects in (statement.head, statement.whole):
            effects.mutates = {name for name in aliases.classes(effects.mutates) if not name.startswith("<")}


def analyse(trainer: TrainerSource, actors: int) -> Analysis:
    """The effects of a trainer's methods.

    Where an argument of a component call has to be computed at the driver, the method is lowered again with that
    argument in a statement of its own, so that the call itself can move.
    """
    spill: frozenset[Any] = frozenset()
    while True:
        analysis = Analysis(trainer, actors, spill)
        pinned = {
            (statement.origin.file, statement.origin.line, statement.origin.column)
            for method in analysis.methods.values()
            for statement in walk(method.body)
            if statement.kind == "simple" and statement.head.calls and statement.head.pinned
        }
        if pinned <= spill:
            return analysis
        spill |= pinned


class Evaluator:
    """Computes the effects of every statement of one method, and its summary."""

    def __init__(self, analysis: Analysis, method: Method) -> None:
        self.analysis, self.method = analysis, method
        self.module = method.owner.module
        self.aliases = Aliases()
        self.kinds: dict[str, Kind] = {}
        if method.bound is None:
            method.bound = _bound_names(method.body)
        self.locals = set(method.parameters) | method.bound
        self.imports: dict[str, str] = {}
        self.globals: set[str] = set()
        self.inner: list[dict[str, Kind]] = []
        """Names bound by enclosing comprehensions and lambdas."""
        self.effects = Effects()
        self.strong = True
        self.calls_open = 0
        self.origin: Origin | None = None
        self.returned = Value(None)

    def run(self) -> None:
        for statement in walk(self.method.body):
            node = statement.parts.get("node")
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                self.imports.update(imported_names(node))
            elif isinstance(node, cst.Global):
                self.globals.update(item.name.value for item in node.names)
            elif isinstance(node, cst.Nonlocal):
                raise statement.origin.error("`nonlocal` cannot be projected", "an attribute of self")
        self.locals -= self.globals | set(self.imports)
        self.kinds = dict(self.method.summary.given)
        params = self.method.node.params
        for parameter in (*params.posonly_params, *params.params, *params.kwonly_params):
            name, told = parameter.name.value, annotated_kind(parameter.annotation)
            if parameter.default is not None:
                self.kinds[name] = join_kinds(self.kinds.get(name), self.quiet(parameter.default).kind)
            if told is not None:
                self.kinds[name] = told
        for star in (params.star_arg, params.star_kwarg):
            if isinstance(star, cst.Param):
                self.kinds[star.name.value] = ("container", "unknown")
        for _ in range(2):  # what a loop assigns below is known when it comes round again
            for statement in self.method.body:
                self.statement(statement)
        self.summarise()

    def summarise(self) -> None:
        total = Effects()
        for statement in self.method.body:
            total.add(statement.whole)
        parameters = set(self.method.parameters)
        summary: Summary = self.method.summary
        summary.returns = self.outside(self.returned, parameters)
        told = annotated_kind(self.method.node.returns)
        if told == "scalar":
            summary.returns = Value("scalar")
        elif told is not None:
            summary.returns.kind = told
        visible = [{n for n in group if is_attribute(n) or n in parameters} for group in self.aliases.groups()]
        summary.shared = [group for group in visible if len(group) > 1]
        # What this method makes one object counts everywhere, and what others do counts here.
        for group in self.aliases.groups():
            self.analysis.found_aliases.unite({name for name in group if is_attribute(name)})
        for group in self.analysis.aliases.groups():
            self.aliases.unite(group)
        mutated = self.aliases.classes(total.mutates)
        summary.mutated = mutated & parameters
        effects = Effects(calls=total.calls, helpers=total.helpers, pinned=total.pinned)
        for name in total.reads | total.writes:
            if name.startswith(("self.", "global ")):
                effects.reads.add(name)
        effects.writes = {name for name in total.writes if name.startswith(("self.", "global "))}
        effects.mutates = {name for name in mutated if name.startswith(("self.", "global "))}
        summary.effects = effects
        summary.aliases = self.aliases
        summary.kinds = self.kinds
        summary.imports = self.imports
        summary.locals = self.locals

    def outside(self, value: Value, parameters: set[str]) -> Value:
        """A value in terms of what a caller knows: parameters and attributes."""
        if value.kind == "scalar":
            return Value("scalar")
        roots = {name for name in self.aliases.classes(value.roots) if name in parameters or is_attribute(name)}
        parts = None if value.parts is None else tuple(self.outside(part, parameters) for part in value.parts)
        return Value(value.kind, roots, parts)

    # statements ------------------------------------------------------------------------------------------------------

    def statement(self, statement: Statement) -> None:
        self.origin = statement.origin
        self.effects, self.strong = Effects(), True
        if "opaque" in statement.parts:
            self.effects.pin(f"`{self.method.name}` {statement.parts['opaque']}")
            self.module_state_in(self.method.node.body)
        elif statement.kind == "simple":
            self.small(statement.parts["node"])
        elif statement.kind in ("if", "while"):
            self.expression(statement.parts["test"])
        elif statement.kind == "for":
            value = self.expression(statement.parts["iter"])
            # A loop over an iterator variable consumes it.
            if value.kind not in ("scalar", "data") and not isinstance(value.kind, tuple):
                self.effects.mutates |= value.roots
            self.bind(statement.parts["target"], Value(element(value.kind), value.roots))
        elif statement.kind == "with":
            for item in statement.parts["items"]:
                self.context(item)
        elif statement.kind == "try":
            for handler in statement.parts["handlers"]:
                if handler.type is not None:
                    self.expression(handler.type)
                if handler.name is not None:
                    self.bind(handler.name.name, Value("unknown"))
            self.effects.strong = set()
        elif statement.kind == "match":
            self.expression(statement.parts["subject"])
            for case in statement.parts["cases"]:
                self.pattern(case)
        statement.head = self.effects
        whole = Effects()
        whole.add(self.effects)
        for child in statement.children():
            self.statement(child)
            whole.add(child.whole)
        statement.whole = whole
        statement.leaves = _jumps_out(statement)

    def module_state_in(self, body: cst.CSTNode) -> None:
        """The module's objects that code names, and the names it may bind anew: it may change them."""
        bound = {item.name.value for node in find(body, cst.Global) for item in node.names}
        for name in {node.value for node in find(body, cst.Name)} - self.locals:
            if name in bound:
                self.effects.writes.add(f"global {name}")
            else:
                self.effects.mutates |= {root for root in self.module_name(name).roots if root.startswith("global ")}

    def pattern(self, case: cst.MatchCase) -> None:
        if case.guard is not None:
            self.expression(case.guard)
        for name in _pattern_names(case.pattern):
            self.effects.writes.add(name)
            self.kinds[name] = "unknown"

    def context(self, item: cst.WithItem) -> None:
        value = self.expression(item.item)
        name = self.resolve(item.item.func if isinstance(item.item, cst.Call) else item.item)
        if name not in purity.GRAD_CONTEXTS:
            self.effects.pin(f"enters `{code(item.item)}`, a context that stays at the driver")
            self.effects.mutates |= value.roots
        if item.asname is not None:
            self.bind(item.asname.name, Value("unknown", value.roots))

    def small(self, node: Any) -> None:
        effects = self.effects
        if isinstance(node, cst.Expr):
            self.expression(node.value)
        elif isinstance(node, cst.Assign):
            if len(node.targets) == 1 and self.is_alias_definition(node):
                return
            value = self.expression(node.value)
            for target in node.targets:
                self.bind(target.target, value, node.value)
            if len(node.targets) > 1 and value.kind != "scalar":  # `a = b = []`: one object with two names
                places = {place for target in node.targets for place in self.places(target.target)}
                self.aliases.unite({place for place in places if self.kind_of(place) != "scalar"})
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self.bind(node.target, self.expression(node.value), node.value)
        elif isinstance(node, cst.AugAssign):
            current = self.expression(node.target)
            value = self.expression(node.value)
            kind = join_kinds(current.kind, value.kind)
            if kind != "scalar":
                effects.mutates |= current.roots
            self.bind(node.target, Value(kind, current.roots | value.roots))
        elif isinstance(node, cst.Return):
            value = self.expression(node.value) if node.value is not None else Value("scalar")
            self.returned = join_values(self.returned, value)
            for index, part in enumerate(value.parts or (value,)):
                if part.roots and part.kind != "scalar":
                    self.aliases.unite(part.roots | {f"<result {index}>"})
        elif isinstance(node, cst.Del):
            doomed = (
                [item.value for item in node.target.elements] if isinstance(node.target, cst.Tuple) else [node.target]
            )
            for place in doomed:
                if isinstance(place, cst.Name):
                    effects.writes.add(place.value)
                    effects.reads.add(place.value)
                    effects.pin("deletes a variable")
                else:
                    effects.mutates |= self.expression(place).roots
                    effects.pin("deletes a part of an object")
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.closure(node)
            self.bind(node.name, Value("function"))
        elif isinstance(node, (cst.Assert, cst.Raise)):
            for inner in subexpressions(node):
                self.expression(inner)
        elif isinstance(node, cst.Global):
            effects.pin("declares names of the module")
        elif isinstance(node, (cst.Import, cst.ImportFrom)):
            if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
                effects.pin("imports *")

    def is_alias_definition(self, node: cst.Assign) -> bool:
        """`m = self.msrl` and `act = self.msrl.agent_act`: uses are written out in full, so this does nothing."""
        target = node.targets[0].target
        return isinstance(target, cst.Name) and target.value in self.method.aliases

    def closure(self, node: cst.CSTNode) -> None:
        """A function or class stored for later: what it refers to must be at the driver whenever it may run."""
        names = {name.value for name in find(node, cst.Name)}
        captured = names & self.locals
        self.effects.captured |= captured
        self.effects.reads |= captured
        if self.method.self_name in names:
            self.effects.reads.add(EVERYTHING)
        if next(find(node, cst.Nonlocal), None) is not None:
            self.effects.mutates |= captured
        self.effects.pin("stores a function")

    def bind(self, target: cst.CSTNode, value: Value, source: cst.BaseExpression | None = None) -> None:
        effects = self.effects
        if isinstance(target, cst.Name):
            name = target.value
            if self.inner and name in self.inner[-1]:
                self.inner[-1][name] = join_kinds(self.inner[-1][name], value.kind)
                return
            if name in self.globals:
                effects.pin(f"writes the module's `{name}`")
                effects.writes.add(f"global {name}")
                self.analysis.learn_kind(f"global {name}", value.kind)
                return
            effects.writes.add(name)
            if self.strong:
                effects.strong.add(name)
            self.kinds[name] = join_kinds(self.kinds.get(name), value.kind)
            if value.kind != "scalar" and value.roots:
                self.aliases.unite({name} | value.roots)
        elif isinstance(target, (cst.Tuple, cst.List)):
            items = source.elements if isinstance(source, (cst.Tuple, cst.List)) else None
            starred = any(isinstance(entry, cst.StarredElement) for entry in target.elements)
            if starred or (items and any(isinstance(item, cst.StarredElement) for item in items)):
                items = None
            for index, entry in enumerate(target.elements):
                inner = entry.value
                if (
                    items is not None
                    and len(items) == len(target.elements)
                    and not isinstance(entry, cst.StarredElement)
                ):
                    self.bind(inner, self.quiet(items[index].value), items[index].value)
                elif value.parts is not None and len(value.parts) == len(target.elements) and not starred:
                    self.bind(inner, value.parts[index])
                elif isinstance(entry, cst.StarredElement):
                    self.bind(inner, Value(("container", element(value.kind)), value.roots))
                else:
                    self.bind(inner, Value(element(value.kind), value.roots))
        elif isinstance(target, cst.Attribute) and self.is_self(target.value):
            name = f"self.{target.attr.value}"
            if target.attr.value == "msrl":
                raise self.where(target).error("`self.msrl` is set by the run and must not be assigned", "another name")
            effects.writes.add(name)
            if self.strong:
                effects.strong.add(name)
            self.analysis.learn_kind(name, value.kind)
            if value.kind != "scalar" and value.roots:
                self.aliases.unite({name} | value.roots)
        elif isinstance(target, (cst.Attribute, cst.Subscript)):
            base = self.expression(target.value)
            if isinstance(target, cst.Subscript):
                for part in target.slice:
                    for inner in subexpressions(part):
                        self.expression(inner)
            effects.mutates |= base.roots
            if value.kind != "scalar" and value.roots and base.roots:
                self.aliases.unite(base.roots | value.roots)
            for root in base.roots:
                if isinstance(self.kinds.get(root), tuple):
                    self.kinds[root] = (self.kinds[root][0], join_kinds(self.kinds[root][1], value.kind))
            if not base.roots:
                self.effects.pin(f"writes into `{code(target)}`, an object that is not a variable")

    def places(self, target: cst.CSTNode) -> set[str]:
        """The variables that an assignment's target binds or writes into."""
        if isinstance(target, (cst.Tuple, cst.List)):
            return {place for entry in target.elements for place in self.places(entry.value)}
        name = variable(target, self.method)
        if not name and isinstance(target, (cst.Attribute, cst.Subscript)):
            return self.places(target.value)
        return {name} - {""}

    def quiet(self, node: cst.BaseExpression) -> Value:
        """A value's kind and roots, its effects being counted already."""
        kept, self.effects = self.effects, Effects()
        value = self.expression(node)
        self.effects = kept
        return value

    # expressions -----------------------------------------------------------------------------------------------------

    def where(self, node: cst.CSTNode) -> Origin:
        try:
            return self.module.origin(node)
        except KeyError:
            assert self.origin is not None
            return self.origin

    def is_self(self, node: cst.CSTNode) -> bool:
        return bool(self.method.self_name) and isinstance(node, cst.Name) and node.value == self.method.self_name

    def is_local(self, name: str) -> bool:
        return name in self.locals or any(name in scope for scope in self.inner)

    def resolve(self, node: cst.CSTNode) -> str | None:
        """The qualified name an expression stands for, when it is not a local value."""
        name = dotted(node)
        if name is None:
            return None
        head, _, rest = name.partition(".")
        if self.is_local(head) or head == self.method.self_name:
            return None
        if head in self.imports:
            return self.imports[head] + (f".{rest}" if rest else "")
        return qualified_name(name, self.module)

    def expression(self, node: cst.CSTNode) -> Value:
        handler = getattr(self, f"on_{type(node).__name__}", None)
        if handler is not None:
            return handler(node)
        kind: Kind = "scalar"
        roots: set[str] = set()
        for part in subexpressions(node):
            value = self.expression(part)
            kind, roots = join_kinds(kind, value.kind), roots | value.roots
        return Value(kind, roots)

    def on_Name(self, node: cst.Name) -> Value:
        name = node.value
        for scope in reversed(self.inner):
            if name in scope:
                return Value(scope[name], set(scope.get(f"roots of {name}", ())))
        if name in self.locals:
            if name in self.method.aliases:
                raise self.where(node).error(
                    f"`{name}` stands for self.msrl and is passed on here: the calls made there cannot be seen",
                    f"call {self.method.self_name}.msrl.<operation>(…) in a method of the trainer",
                )
            self.effects.reads.add(name)
            kind = self.kinds.get(name)
            return Value(kind, set() if kind == "scalar" else {name})
        if self.is_self(node):
            self.effects.reads.add(EVERYTHING)
            self.effects.mutates.add(EVERYTHING)
            self.effects.pin("passes `self` on")
            return Value("unknown", {EVERYTHING})
        return self.module_name(name)

    def module_name(self, name: str) -> Value:
        """A name of the module: free to read where it is a constant, module state otherwise."""
        if name in ("True", "False", "None", "__name__", "NotImplemented", "Ellipsis"):
            return Value("scalar")
        if name in self.imports or self.resolve(cst.Name(name)) is not None:
            return Value("function")
        if name in self.module.functions or name in self.module.classes:
            return Value("function")
        value = self.module.constants.get(name)
        if value is not None and name not in self.module.state and _constant(value):
            return Value("scalar")
        namespace = self.module.namespace
        if (
            value is None
            and namespace is not None
            and isinstance(namespace.get(name), (int, float, str, bool, type(None)))
        ):
            if name not in self.module.state:
                return Value("scalar")
        self.effects.reads.add(f"global {name}")
        self.effects.pin(f"reads the module's `{name}`")
        first = "scalar" if isinstance(value, (cst.BaseNumber, cst.BaseString)) else "unknown"
        kind = join_kinds(first, self.analysis.kinds.get(f"global {name}"))
        return Value(kind, set() if kind == "scalar" else {f"global {name}"})

    def on_Attribute(self, node: cst.Attribute) -> Value:
        if is_msrl(node, self.method):
            raise self.where(node).error(
                "`self.msrl` is passed on here: the calls made there cannot be seen",
                "call self.msrl.<operation>(…) directly in a method of the trainer",
            )
        if is_msrl(node.value, self.method):
            raise self.where(node).error(
                f"`{code(node)}` is passed on here without being called, so the call cannot be seen",
                f"{code(node)}(…) in a method of the trainer",
            )
        if self.is_self(node.value):
            return self.self_attribute(node.attr.value, node)
        if self.resolve(node) is not None:
            return Value("function")
        value = self.expression(node.value)
        if value.kind == "config" and node.attr.value != "config":
            return Value("scalar")
        return Value("data" if value.kind == "data" else "scalar" if value.kind == "scalar" else "unknown", value.roots)

    def self_attribute(self, name: str, node: cst.CSTNode) -> Value:
        found = self.analysis.trainer.find(name)
        if found is not None:
            owner, function = found
            if name in owner.properties:
                method = self.analysis.need(owner, function)
                return self.apply(method.summary, [], f"self.{name}")
            if self.analysis.bearing.method_bears(owner, function):
                raise self.where(node).error(
                    f"`self.{name}` makes component calls and is passed on without being called, so they cannot be seen",
                    f"self.{name}(…) in a method of the trainer",
                )
            self.effects.reads.add(EVERYTHING)
            self.effects.pin(f"passes the method `{name}` on")
            return Value("function", {EVERYTHING})
        self.effects.reads.add(f"self.{name}")
        kind = self.analysis.attribute_kind(f"self.{name}")
        return Value(kind, set() if kind == "scalar" else {f"self.{name}"})

    def on_Subscript(self, node: cst.Subscript) -> Value:
        value = self.expression(node.value)
        for part in node.slice:
            for inner in subexpressions(part):
                self.expression(inner)
        if isinstance(value.kind, tuple) and value.kind[0] == "defaultdict":
            self.effects.mutates |= value.roots  # looking a key up may insert it
        return Value(element(value.kind), value.roots if element(value.kind) != "scalar" else set())

    def on_BinaryOperation(self, node: cst.BinaryOperation) -> Value:
        left, right = self.expression(node.left), self.expression(node.right)
        kind = join_kinds(left.kind, right.kind)
        # Adding, repeating and merging containers keeps their parts; other results are new.
        keeps = isinstance(node.operator, (cst.Add, cst.Multiply, cst.BitOr)) and kind not in ("scalar", "data")
        return Value(kind, left.roots | right.roots if keeps else set())

    def on_UnaryOperation(self, node: cst.UnaryOperation) -> Value:
        value = self.expression(node.expression)
        return Value("scalar" if isinstance(node.operator, cst.Not) else value.kind)

    def on_Comparison(self, node: cst.Comparison) -> Value:
        kinds = [self.expression(part).kind for part in subexpressions(node)]
        kind: Kind = "scalar"
        for other in kinds:
            kind = join_kinds(kind, other)
        return Value("scalar" if isinstance(kind, tuple) else kind)

    def _part_optional(self, node: cst.BaseExpression) -> Value:
        """A part that is not always evaluated: what it binds is bound on some paths only."""
        strong, self.strong = self.strong, False
        value = self.expression(node)
        self.strong = strong
        return value

    def on_BooleanOperation(self, node: cst.BooleanOperation) -> Value:
        left, right = self.expression(node.left), self._part_optional(node.right)
        return Value(join_kinds(left.kind, right.kind), left.roots | right.roots)

    def on_IfExp(self, node: cst.IfExp) -> Value:
        self.expression(node.test)
        left, right = self._part_optional(node.body), self._part_optional(node.orelse)
        return Value(join_kinds(left.kind, right.kind), left.roots | right.roots)

    def on_NamedExpr(self, node: cst.NamedExpr) -> Value:
        value = self.expression(node.value)
        inner, self.inner = self.inner, []
        self.bind(node.target, value)
        self.inner = inner
        return Value(value.kind, value.roots | {cst.ensure_type(node.target, cst.Name).value})

    def _display(self, node: cst.CSTNode) -> Value:
        values = [self.expression(part) for part in subexpressions(node)]
        kind: Kind = None
        roots: set[str] = set()
        for value in values:
            kind = join_kinds(kind, value.kind)
            roots |= value.roots if value.kind != "scalar" else set()
        plain = isinstance(node, cst.Tuple) and not any(isinstance(item, cst.StarredElement) for item in node.elements)
        return Value(("container", kind), roots, tuple(values) if plain else None)

    on_List = on_Tuple = on_Set = on_Dict = _display

    def on_Lambda(self, node: cst.Lambda) -> Value:
        scope: dict[str, Kind] = {}
        for parameter in (*node.params.params, *node.params.kwonly_params, *node.params.posonly_params):
            scope[parameter.name.value] = None
        before = set(self.effects.reads)
        self.inner.append(scope)
        self.expression(node.body)
        self.inner.pop()
        captured = {name for name in self.effects.reads - before if name in self.locals}
        if not self.calls_open:  # not handed to a call that uses it at once: stored for later
            self.effects.captured |= captured
            self.effects.pin("stores a function")
        return Value("function", captured)

    def _comprehension(self, node: Any) -> Value:
        scope: dict[str, Any] = {}
        part = node.for_in
        first = True
        pushed = False
        while part is not None:
            value = self.expression(part.iter)
            if first:
                self.inner.append(scope)
                pushed, first = True, False
            for target in _target_names(part.target):
                scope[target] = None
            self.bind(part.target, Value(element(value.kind), value.roots))
            for target in _target_names(part.target):
                scope[f"roots of {target}"] = value.roots
            for condition in part.ifs:
                self._part_optional(condition.test)
            part = part.inner_for_in
        strong, self.strong = self.strong, False
        elements = [node.key, node.value] if isinstance(node, cst.DictComp) else [node.elt]
        values = [self.expression(item) for item in elements]
        self.strong = strong
        if pushed:
            self.inner.pop()
        kind: Kind = None
        for value in values:
            kind = join_kinds(kind, value.kind)
        roots = set().union(*(value.roots for value in values if value.kind != "scalar"))
        return Value(("container", kind), roots)

    on_ListComp = on_SetComp = on_DictComp = on_GeneratorExp = _comprehension

    def on_FormattedString(self, node: cst.FormattedString) -> Value:
        for part in subexpressions(node):
            self.expression(part)
        return Value("scalar")

    on_ConcatenatedString = on_FormattedString

    def on_Yield(self, node: cst.Yield) -> Value:
        self.effects.pin("yields")
        return Value()

    def on_Await(self, node: cst.Await) -> Value:
        self.effects.pin("awaits")
        return Value()

    # calls -----------------------------------------------------------------------------------------------------------

    def on_Call(self, node: cst.Call) -> Value:
        self.calls_open += 1
        try:
            return self.call(node)
        finally:
            self.calls_open -= 1

    def call(self, node: cst.Call) -> Value:
        operation = operation_of(node, self.method)
        if operation is not None:
            return self.component(node, operation)
        target = method_call(node, self.method, self.analysis.trainer)
        if target is not None:
            method = self.analysis.need(*target)
            skip = 0 if self.is_self(node.func.value) or is_super(node.func.value) else 1  # type: ignore[attr-defined]
            return self.apply(method.summary, list(node.args)[skip:], code(node.func), method)
        qualified = self.resolve(node.func)
        if qualified is not None:
            return self.library(node, qualified)
        name = dotted(node.func)
        if name is not None and not self.is_local(name) and name in self.module.functions:
            return self.own_function(node, self.module, name)
        if isinstance(node.func, cst.Attribute) and not self.is_self(node.func.value):
            return self.method_of_value(node)
        return self.unknown(node, f"calls `{code(node.func)}`, which is not known to be pure")

    def own_function(self, node: cst.Call, module: Module, name: str) -> Value:
        """A function of the user's: declared pure, or read like a method."""
        function = module.functions[name]
        marks = {qualified_name(dotted(d.decorator) or "", module) for d in function.decorators}
        if marks & {"fdg.pure", "fdg.api.pure"}:
            self.arguments(node)
            kept, self.effects = self.effects, Effects()  # declared pure: what its body seems to do does not count
            value = self.apply(self.analysis.function(module, name).summary, list(node.args), name)
            self.effects = kept
            return value
        if marks:
            effects = self.analysis.function(module, name).summary.effects
            for names, own in ((self.effects.writes, effects.writes), (self.effects.mutates, effects.mutates)):
                names |= {changed for changed in own if changed.startswith("global ")}
            return self.unknown(node, f"calls `{name}`, which is decorated")
        return self.apply(self.analysis.function(module, name).summary, list(node.args), name)

    def arguments(self, node: cst.Call) -> tuple[Value, list[Value]]:
        values = [self.expression(argument.value) for argument in node.args]
        kind: Kind = None
        roots: set[str] = set()
        for value in values:
            kind, roots = join_kinds(kind, value.kind), roots | value.roots
        return Value(kind, roots), values

    def unknown(self, node: cst.Call, reason: str) -> Value:
        """Anything may happen to what the call can reach."""
        if isinstance(node.func, cst.Attribute) and not self.is_self(node.func.value):
            roots = self.expression(node.func.value).roots
        elif isinstance(node.func, cst.Attribute):
            roots = self.self_attribute(node.func.attr.value, node.func).roots
        else:
            roots = self.expression(node.func).roots
        total, _ = self.arguments(node)
        touched = {name for name in total.roots | roots if self.may_change(name)}
        self.effects.mutates |= touched
        self.aliases.unite(touched)
        self.effects.captured |= {name for name in total.roots if self.kind_of(name) == "function"}
        self.effects.pin(reason)
        return Value("unknown", touched)

    def kind_of(self, name: str) -> Kind:
        return self.analysis.attribute_kind(name) if is_attribute(name) else self.kinds.get(name)

    def may_change(self, name: str) -> bool:
        return self.kind_of(name) not in ("scalar", "config", "function")

    def component(self, node: cst.Call, name: str) -> Value:
        operation = OPERATIONS[name]
        total, _ = self.arguments(node)
        self.effects.calls.append(name)
        touched = {root for root in total.roots if self.may_change(root)}
        if operation.component in ("env", "actor", "learner"):
            self.effects.mutates |= touched  # the component may write into what it is given
        if operation.joins:
            # The step of a log is no value to join: it has to be the same for all actors.
            for argument in node.args[1:] if name == "log" and node.args and not node.args[0].keyword else node.args:
                if isinstance(argument.value, cst.Name):
                    self.effects.joined.add(argument.value.value)
                elif isinstance(argument.value, cst.Attribute) and self.is_self(argument.value.value):
                    self.effects.joined.add(f"self.{argument.value.attr.value}")
        if operation.returns != "data":
            return Value("scalar")
        # With several actors what is joined is a new value, and so is what comes of it (see MSRL.agent_learn).
        shares = operation.per == "actor" or (operation.joins and self.analysis.actors == 1)
        return Value("data", touched if shares else set())

    def apply(self, summary: Summary, arguments: list[cst.Arg], name: str, method: Method | None = None) -> Value:
        """A call of something we have read: bind arguments to parameters, take over the summary."""
        bound: dict[str, set[str]] = {}
        kinds: dict[str, Kind] = {}
        for index, argument in enumerate(spread(arguments)):
            value = self.expression(argument.value)
            if argument.star or (argument.keyword is None and index >= len(summary.parameters)):
                for parameter in may_take(argument, index, summary.parameters, set(bound)):
                    bound.setdefault(parameter, set()).update(value.roots)
                    kinds[parameter] = "unknown"
            else:
                parameter = argument.keyword.value if argument.keyword else summary.parameters[index]
                bound.setdefault(parameter, set()).update(value.roots)
                kinds[parameter] = value.kind
        for parameter, kind in kinds.items():
            summary.found[parameter] = join_kinds(summary.found.get(parameter), kind)
        effects = summary.effects
        self.effects.reads |= effects.reads
        self.effects.writes |= effects.writes
        self.effects.mutates |= effects.mutates
        self.effects.calls += effects.calls
        if effects.calls and method is not None:
            self.effects.helpers.add(method.key)
        self.effects.helpers |= effects.helpers
        if effects.pinned:
            self.effects.pin(
                effects.pinned if effects.pinned.startswith("calls `") else f"calls `{name}`, which {effects.pinned}"
            )
        for parameter in summary.mutated:
            self.effects.mutates |= {root for root in bound.get(parameter, set()) if self.may_change(root)}
        for group in summary.shared:
            roots: set[str] = set()
            for member in group:
                roots |= bound.get(member, set()) if not is_attribute(member) else {member}
            if len(roots) > 1:
                self.aliases.unite(roots)
        return self.inside(summary.returns, bound)

    def inside(self, value: Value, bound: dict[str, set[str]]) -> Value:
        """A callee's result in terms of the caller's variables."""
        roots: set[str] = set()
        for root in value.roots:
            roots |= {root} if is_attribute(root) else bound.get(root, set())
        parts = None if value.parts is None else tuple(self.inside(part, bound) for part in value.parts)
        return Value(value.kind if value.kind is not None else "scalar", roots, parts)

    def library(self, node: cst.Call, qualified: str) -> Value:
        verdict = purity.judge(qualified)
        if verdict == "unknown":
            found = find_function(qualified, self.module)
            if found is not None:
                return self.own_function(node, *found)
        if verdict != "pure":
            reason = "draws random numbers" if verdict == "draws" else "which is not known to be pure"
            if qualified == "builtins.getattr" or qualified.endswith("setattr"):
                return self.unknown(node, reason)
            self.check_msrl_argument(node)
            value = self.unknown(node, f"calls `{code(node.func)}`, {reason}")
            return Value("scalar") if purity.is_scalar(qualified) else value
        self.check_msrl_argument(node)
        total, values = self.arguments(node)
        last = qualified.rpartition(".")[2]
        if last.endswith("_") and not last.endswith("__") and values:
            self.effects.mutates |= values[0].roots
        for argument in node.args:
            if argument.keyword is not None and argument.keyword.value == "out":
                self.effects.mutates |= self.quiet(argument.value).roots
        if qualified == "builtins.next":
            self.effects.mutates |= values[0].roots if values else set()
        for value in values:
            if value.kind == "function" and value.roots:
                self.effects.reads |= value.roots
        if qualified == "collections.defaultdict":
            return Value(("defaultdict", None), total.roots)
        if purity.is_scalar(qualified):
            return Value("scalar")
        if qualified in ("builtins.sum", "builtins.max", "builtins.min"):
            return Value(element(total.kind) if isinstance(total.kind, tuple) else total.kind, total.roots)
        if purity.is_container(qualified):
            inner = "scalar" if last == "range" else element(total.kind) if total.kind is not None else None
            return Value(("container", inner), set() if last == "range" else total.roots)
        kind = "data" if qualified.startswith(("torch.", "numpy.", "tensordict.", "torchrl.", "fdg.")) else "unknown"
        return Value(kind, set() if purity.is_fresh(qualified) else total.roots)

    def check_msrl_argument(self, node: cst.Call) -> None:
        for argument in node.args:
            if is_msrl(argument.value, self.method) or (
                isinstance(argument.value, cst.Name) and self.method.aliases.get(argument.value.value) == ""
            ):
                if dotted(node.func) == "getattr":
                    raise self.where(node).error(
                        "a component call through `getattr` cannot be found by reading the program",
                        "self.msrl.<operation>(…), with an `if` where the operation depends on a value",
                    )

    def method_of_value(self, node: cst.Call) -> Value:
        """A method of a local value: known by the value's kind, otherwise anything may happen."""
        function = cst.ensure_type(node.func, cst.Attribute)
        name = function.attr.value
        value = self.expression(function.value)
        kind = value.kind
        if kind is None:  # not known yet in this round
            return Value(None, value.roots | self.arguments(node)[0].roots)
        if kind == "unknown" and name in purity.READERS:
            return Value("unknown", value.roots | self.arguments(node)[0].roots)
        if isinstance(kind, tuple) and (name in purity.CONTAINER_MUTATORS or name in purity.CONTAINER_READERS):
            total, _ = self.arguments(node)
            if name in purity.CONTAINER_MUTATORS:
                self.effects.mutates |= value.roots
                if total.kind != "scalar" and total.roots and value.roots:
                    self.aliases.unite(value.roots | total.roots)
                if name in ("append", "add", "appendleft", "insert", "setdefault", "update", "extend"):
                    inner = element(total.kind) if name in ("extend", "update") else total.kind
                    for root in value.roots:
                        if isinstance(self.kinds.get(root), tuple):
                            self.kinds[root] = (kind[0], join_kinds(self.kinds[root][1], inner))
                        elif isinstance(self.analysis.kinds.get(root), tuple):
                            self.analysis.learn_kind(root, (kind[0], inner))
            result = ("container", element(kind)) if name in ("items", "keys", "values", "copy") else element(kind)
            if name == "items":
                result = ("container", ("container", element(kind)))
            return Value(result, value.roots)
        if kind in ("data", "scalar"):
            total, _ = self.arguments(node)
            if name in purity.DATA_READERS:
                inplace = any(a.keyword is not None and a.keyword.value == "inplace" for a in node.args)
                if inplace:
                    self.effects.mutates |= value.roots
                if name in ("apply", "named_apply"):
                    self.effects.pin(f"calls `{code(function)}`, whose function is not known to be pure")
                return Value(kind, set() if name in purity.DATA_FRESH else value.roots | total.roots)
            draws = purity.judge(f"torch.{name.rstrip('_')}") == "draws" or name in (
                "uniform_",
                "normal_",
                "random_",
                "exponential_",
                "cauchy_",
                "log_normal_",
                "geometric_",
            )
            if not draws and (name in purity.DATA_MUTATORS or (name.endswith("_") and not name.startswith("_"))):
                self.effects.mutates |= value.roots
                if total.roots and value.roots:
                    self.aliases.unite(value.roots | total.roots)
                return Value(kind, value.roots)
        return self.unknown(node, f"calls `{code(function)}`, which is not known to be pure")


def _constant(node: cst.BaseExpression) -> bool:
    """Whether a module-level value is one that nobody can change."""
    if isinstance(node, (cst.BaseNumber, cst.BaseString)) or dotted(node) in ("True", "False", "None"):
        return True
    if isinstance(node, (cst.Tuple, cst.UnaryOperation, cst.BinaryOperation)):
        return all(_constant(part) for part in subexpressions(node))
    return isinstance(node, cst.Call) and dotted(node.func) in ("torch.device", "float", "int", "frozenset", "range")


def _target_names(target: cst.CSTNode) -> list[str]:
    if isinstance(target, cst.Name):
        return [target.value]
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for entry in target.elements for name in _target_names(entry.value)]
    return []


def _names_bound_in(node: cst.CSTNode) -> Iterator[str]:
    """Names that code binds in its function's scope."""
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        yield node.name.value
        return
    if isinstance(node, cst.Lambda):
        return
    if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
        yield from _target_names(node.target)
    for child in children(node):
        yield from _names_bound_in(child)


def _bound_names(body: list[Statement]) -> set[str]:
    names: set[str] = set()
    for statement in walk(body):
        for part in statement.parts.values():
            for node in part if isinstance(part, list) else [part]:
                if not isinstance(node, cst.CSTNode):
                    continue
                if isinstance(node, cst.ExceptHandler):
                    if node.name is not None:
                        names.update(_target_names(node.name.name))
                    continue
                if isinstance(node, cst.MatchCase):
                    names.update(_pattern_names(node.pattern))
                    continue
                if isinstance(node, cst.WithItem) and node.asname is not None:
                    names.update(_target_names(node.asname.name))
                names.update(_names_bound_in(node))
        if statement.kind == "for":
            names.update(_target_names(statement.parts["target"]))
    return names


def _pattern_names(node: cst.CSTNode) -> set[str]:
    names: set[str] = set()
    for attribute in ("name", "rest"):
        value = getattr(node, attribute, None)
        if isinstance(value, cst.Name):
            names.add(value.value)
    for child in children(node):
        names |= _pattern_names(child)
    return names


def _jumps_out(statement: Statement) -> set[str]:
    """Which jumps leave a statement: a `break` inside its own loop does not."""
    if statement.kind == "simple":
        node = statement.parts["node"]
        for kind, name in ((cst.Break, "break"), (cst.Continue, "continue"), (cst.Return, "return")):
            if isinstance(node, kind):
                return {name}
        return set()
    out: set[str] = set()
    for name, block in statement.blocks.items():
        inner = set().union(*(child.leaves for child in block)) if block else set()
        if statement.kind in ("for", "while") and name == "body":
            inner -= {"break", "continue"}
        out |= inner
    return out
