"""Colour: what each statement reads, writes and mutates, and whether it may leave the driver.

One evaluator walks each method as Python would run it. Methods of the trainer and functions of the user's modules are summarised
for their callers; anything that cannot be read may touch everything reachable from its arguments, and keeps its statement at the
driver. The evaluator is built up in layers:

    Names           names.py            what the names of a method stand for
    Expressions     expressions.py      what evaluating and assigning does
    Calls           calls.py            what calling does
    Evaluator       here                what running statements does, and so calling the method
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.analysis import Analysis
from fdg.compiler.bindings import pattern_names
from fdg.compiler.calls import Calls
from fdg.compiler.ir import EVERYTHING, Effects, Statement, is_attribute, walk
from fdg.compiler.methods import Method
from fdg.compiler.source import TrainerSource
from fdg.compiler.tree import code, find, subexpressions
from fdg.compiler.values import DATA, Value, annotated_kind, join_kinds, join_values


def analyse(trainer: TrainerSource, actors: int) -> Analysis:
    """The effects of a trainer's methods.

    Where an argument of a component call has to be computed at the driver, the method is lowered again with that
    argument in a statement of its own, so that the call itself can move.
    """
    spill: frozenset[Any] = frozenset()
    while True:
        analysis = Analysis(trainer, actors, spill)
        for methods in analysis.rounds():
            for method in methods:
                before = method.summary.fingerprint()
                Evaluator(analysis, method).run()
                analysis.changed |= method.summary.fingerprint() != before
        for method in analysis.methods.values():
            close_over_aliases(method)
        pinned = {
            (statement.origin.file, statement.origin.line, statement.origin.column)
            for method in analysis.methods.values()
            for statement in walk(method.body)
            if statement.kind == "simple" and statement.head.calls and statement.head.pinned
        }
        if pinned <= spill:
            return analysis
        spill |= pinned


def close_over_aliases(method: Method) -> None:
    """Mutating an object mutates it under all its names."""
    aliases = method.summary.aliases
    for statement in walk(method.body):
        for effects in (statement.head, statement.whole):
            effects.mutates = {name for name in aliases.classes(effects.mutates) if not name.startswith("<")}


class Evaluator(Calls):
    """Computes the effects of every statement of one method, and its summary."""

    def __init__(self, analysis: Analysis, method: Method) -> None:
        super().__init__(analysis, method)
        self.returned = Value(None)

    def run(self) -> None:
        self.parameters()
        for _ in range(2):  # what a loop assigns below is known when it comes round again
            for statement in self.method.body:
                self.statement(statement)
        self.summarise()

    def parameters(self) -> None:
        """What is known of the parameters: by their annotations, else by what callers pass and by defaults."""
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

    def summarise(self) -> None:
        total = Effects()
        for statement in self.method.body:
            total.add(statement.whole)
        parameters = set(self.method.parameters)
        summary = self.method.summary
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
        summary.effects = Effects(
            reads=_lasting(total.reads | total.writes),
            writes=_lasting(total.writes),
            mutates=_lasting(mutated),
            calls=total.calls,
            helpers=total.helpers,
            pinned=total.pinned,
        )
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
        else:
            self.head(statement)
        statement.head = self.effects
        whole = Effects()
        whole.add(self.effects)
        for child in statement.children():
            self.statement(child)
            whole.add(child.whole)
        statement.whole = whole
        statement.leaves = _jumps_out(statement)

    def head(self, statement: Statement) -> None:
        parts = statement.parts
        if statement.kind in ("if", "while"):
            self.expression(parts["test"])
        elif statement.kind == "for":
            value = self.quiet(parts["iter"])
            # A loop over an iterator variable consumes it.
            if value.kind not in ("scalar", *DATA) and not isinstance(value.kind, tuple):
                self.effects.mutates |= value.roots
            self.bind(parts["target"], self.part(parts["iter"]))
        elif statement.kind == "with":
            for item in parts["items"]:
                self.context(item)
        elif statement.kind == "try":
            for handler in parts["handlers"]:
                if handler.type is not None:
                    self.expression(handler.type)
                if handler.name is not None:
                    self.bind(handler.name.name, Value("unknown"))
            self.effects.strong = set()
        elif statement.kind == "match":
            self.expression(parts["subject"])
            for case in parts["cases"]:
                self.case(case)

    def case(self, case: cst.MatchCase) -> None:
        if case.guard is not None:
            self.expression(case.guard)
        for name in pattern_names(case.pattern):
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

    def module_state_in(self, body: cst.CSTNode) -> None:
        """The module's objects that code names, and the names it may bind anew: it may change them."""
        bound = {item.name.value for node in find(body, cst.Global) for item in node.names}
        for name in {node.value for node in find(body, cst.Name)} - self.locals:
            if name in bound:
                self.effects.writes.add(f"global {name}")
            else:
                self.effects.mutates |= {root for root in self.module_name(name).roots if root.startswith("global ")}

    # simple statements -----------------------------------------------------------------------------------------------

    def small(self, node: Any) -> None:
        if isinstance(node, cst.Expr):
            self.expression(node.value)
        elif isinstance(node, cst.Assign):
            self.assign(node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self.bind(node.target, self.expression(node.value), node.value)
        elif isinstance(node, cst.AugAssign):
            current = self.expression(node.target)
            value = self.expression(node.value)
            kind = join_kinds(current.kind, value.kind)
            if kind != "scalar":
                self.effects.mutates |= current.roots
            self.bind(node.target, Value(kind, current.roots | value.roots))
        elif isinstance(node, cst.Return):
            value = self.expression(node.value) if node.value is not None else Value("scalar")
            self.returned = join_values(self.returned, value)
            for index, part in enumerate(value.parts or (value,)):
                if part.roots and part.kind != "scalar":
                    self.aliases.unite(part.roots | {f"<result {index}>"})
        elif isinstance(node, cst.Del):
            self.delete(node)
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.closure(node)
            self.closures.setdefault(node.name.value, set()).update(self.changed_in(node))
            self.bind(node.name, Value("function"))
        elif isinstance(node, (cst.Assert, cst.Raise)):
            for inner in subexpressions(node):
                self.expression(inner)
        elif isinstance(node, cst.Global):
            self.effects.pin("declares names of the module")
        elif isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            self.effects.pin("imports *")

    def assign(self, node: cst.Assign) -> None:
        targets = [target.target for target in node.targets]
        if len(targets) == 1 and isinstance(targets[0], cst.Name) and targets[0].value in self.method.aliases:
            return  # `m = self.msrl`, `act = self.msrl.agent_act`: uses are written out in full
        value = self.expression(node.value)
        for target in targets:
            self.bind(target, value, node.value)
            if isinstance(target, cst.Name) and isinstance(node.value, cst.Lambda):
                self.closures.setdefault(target.value, set()).update(self.changed_in(node.value))
        if len(targets) > 1 and value.kind != "scalar":  # `a = b = []`: one object with two names
            places = {place for target in targets for place in self.places(target)}
            self.aliases.unite({place for place in places if self.kind_of(place) != "scalar"})

    def delete(self, node: cst.Del) -> None:
        whole = node.target
        for place in [item.value for item in whole.elements] if isinstance(whole, cst.Tuple) else [whole]:
            if isinstance(place, cst.Name):
                self.effects.writes.add(place.value)
                self.effects.reads.add(place.value)
                self.effects.pin("deletes a variable")
            else:
                self.effects.mutates |= self.expression(place).roots
                self.effects.pin("deletes a part of an object")

    def changed_in(self, node: cst.CSTNode) -> set[str]:
        """Variables of the method that a function stored for later may change, by what stands in it."""
        places: list[Any] = []
        for call in find(node, cst.Call):
            name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if name and name not in purity.READERS:
                places.append(call.func.value)
            if not (name in purity.READERS or purity.changes_data(name)) and not self.is_pure(call.func):
                places += [argument.value for argument in call.args]
        for kind in (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del):
            places += [inner.target for inner in find(node, kind)]
        places += [inner.value for kind in (cst.Assign, cst.Return) for inner in find(node, kind)]  # a second name
        while any(isinstance(place, (cst.Attribute, cst.Subscript)) for place in places):
            places = [place.value if isinstance(place, (cst.Attribute, cst.Subscript)) else place for place in places]
        return {place.value for place in places if isinstance(place, cst.Name)} & self.locals

    def is_pure(self, function: cst.BaseExpression) -> bool:
        return purity.judge(self.resolve(function) or "") == "pure"

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


def _lasting(names: set[str]) -> set[str]:
    """The variables that are there when a method has ended: attributes, and names of the module."""
    return {name for name in names if name.startswith(("self.", "global "))}


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
        inner = set().union(*(child.leaves for child in block))
        if statement.kind in ("for", "while") and name == "body":
            inner -= {"break", "continue"}
        out |= inner
    return out
