"""Type values: varying (one per actor) or global.

What comes from `env_*` and `agent_act`, and what is computed from it, is varying; so is what is assigned under a varying
condition. Varying becomes global at the operations that join. With A > 1, a varying value where a global one is needed
and a global call under a varying condition are refused; with A = 1 the types only guide placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from fdg.compiler.effects import Analysis
from fdg.compiler.ir import EVERYTHING, Statement
from fdg.compiler.lower import Method, may_take, method_call, operation_of, spread
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import Origin
from fdg.compiler.tree import children, find


@dataclass
class _Loop:
    varying: bool = False
    after: set[str] = field(default_factory=set)
    """What is varying where a `break` or `continue` jumps."""


class Typing:
    """Marks every statement of every component-bearing method with what is varying before and after it."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.strict = analysis.actors > 1
        self.attributes: set[str] = set()
        """Attributes of the trainer that are varying anywhere."""
        self.entry: dict[tuple[str, str], set[str]] = {}
        self.result: dict[tuple[str, str], list[bool]] = {}
        """Of each method: is what it returns varying; part by part where it returns tuples of one length."""
        self.parameters_out: dict[tuple[str, str], set[str]] = {}
        self.returns_early: dict[tuple[str, str], bool] = {}
        self.controlled: set[tuple[str, str]] = set()
        self.report = False
        previous = None
        for _ in range(20):
            for method in analysis.methods.values():
                if method.name != "__init__":
                    self.run(method)
            current = (
                len(self.attributes),
                str(self.entry),
                str(self.result),
                str(self.parameters_out),
                len(self.controlled),
            )
            if current == previous:
                break
            previous = current
        self.report = self.strict
        for method in analysis.methods.values():
            if method.name != "__init__":
                self.run(method)

    def run(self, method: Method) -> None:
        self.method = method
        self.loops: list[_Loop] = []
        state = set(self.entry.get(method.key, set()))
        control = method.key in self.controlled or self.returns_early.get(method.key, False)
        state = self.block(method.body, state, control)
        self.parameters_out[method.key] = state & set(method.parameters)

    def block(self, body: list[Statement], state: set[str], control: bool) -> set[str]:
        for statement in body:
            state = self.statement(statement, state, control)
        return state

    def is_varying(self, names: set[str], state: set[str]) -> bool:
        if EVERYTHING in names and self.attributes:
            return True
        return bool(names & (state | self.attributes))

    def assign(self, statement: Statement, state: set[str], varying: bool) -> set[str]:
        head = statement.head
        attributes = {name for name in head.writes | head.mutates if name.startswith("self.") and name != EVERYTHING}
        if varying:
            self.attributes |= attributes
            return state | {name for name in head.writes | head.mutates if not name.startswith(("self.", "global "))}
        return state - head.strong

    def statement(self, statement: Statement, state: set[str], control: bool) -> set[str]:
        statement.parts["in"] = set(state) | self.attributes
        head = statement.head
        reads = head.reads
        if statement.kind == "simple":
            after = self.simple(statement, state, control, reads)
        else:
            varying = control or self.is_varying(reads, state)
            statement.varying = varying
            if statement.kind in ("for", "while"):
                after = self.loop(statement, state, varying)
            elif statement.kind == "try":
                state = self.assign(statement, state, varying)
                merged = self.block(statement.blocks["body"], set(state), control) | state
                merged |= self.block(statement.blocks["orelse"], set(merged), control)
                for name, block in statement.blocks.items():
                    if name.startswith("handler"):
                        merged |= self.block(block, set(merged), control)
                after = self.block(statement.blocks["finalbody"], merged, control)
            elif statement.kind == "with":
                after = self.block(statement.blocks["body"], self.assign(statement, state, varying), control)
            else:
                state = self.assign(statement, state, varying)
                after = set().union(*(self.block(block, set(state), varying) for block in statement.blocks.values()))
                if statement.kind == "match":
                    after |= state
            if self.report and varying:
                self.check_controlled(statement)
        statement.parts["out"] = set(after) | self.attributes
        return after

    def check_controlled(self, statement: Statement) -> None:
        if statement.kind not in ("for", "while", "if", "match"):
            return
        for inner in statement.children():
            for below in inner.walk():
                name = next((name for name in below.head.calls if OPERATIONS[name].per == "one"), None)
                if name is not None:
                    raise place_of(below, name, self.method).error(
                        f"`{name}` is a global call, but line {statement.origin.line} makes it depend on a varying value: "
                        f"with {self.analysis.actors} actors each would come here a different number of times",
                        "a condition that is the same for all actors, such as self.msrl.all(…), self.msrl.any(…) or "
                        "self.msrl.mean(…)",
                    )

    def loop(self, statement: Statement, state: set[str], varying: bool) -> set[str]:
        loop = _Loop(varying)
        self.loops.append(loop)
        while True:
            before = (set(state), loop.varying)
            state = self.assign(statement, state, loop.varying)
            body = self.block(statement.blocks["body"], set(state), loop.varying)
            state = state | body | loop.after
            # The condition is read again on each turn.
            if self.is_varying(statement.head.reads, state):
                loop.varying = True
            if (set(state), loop.varying) == before:
                break
        self.loops.pop()
        statement.varying = loop.varying
        if self.report and loop.varying:
            self.check_controlled(statement)
        return state | self.block(statement.blocks["orelse"], set(state), loop.varying)

    def simple(self, statement: Statement, state: set[str], control: bool, reads: set[str]) -> set[str]:
        node = statement.parts["node"]
        head = statement.head
        if isinstance(node, (cst.Break, cst.Continue)) and self.loops:
            self.loops[-1].after |= state
            if control and not self.loops[-1].varying:
                self.loops[-1].varying = True
        elif isinstance(node, cst.Return):
            self.returned(node, state, control)
            if control and not self.returns_early.get(self.method.key):
                self.returns_early[self.method.key] = True
                for loop in self.loops:
                    loop.varying = True
        operations = [OPERATIONS[name] for name in head.calls]
        if head.helpers:
            return self.helper_call(statement, state, control, reads)
        if any(operation.per == "actor" for operation in operations):
            statement.varying = True
            return self.assign(statement, state, True)
        if operations:
            statement.varying = False
            return self.global_call(statement, state, control, reads)
        statement.varying = control or self.is_varying(reads, state)
        return self.assign(statement, state, statement.varying)

    def returned(self, node: cst.Return, state: set[str], control: bool) -> None:
        """Note what a method returns."""
        value = node.value
        items = [item.value for item in value.elements] if isinstance(value, cst.Tuple) else [value]
        if any(
            isinstance(item, cst.StarredElement) for item in (value.elements if isinstance(value, cst.Tuple) else ())
        ):
            items = [value]
        parts = [
            control or (item is not None and self.is_varying(names_in(item, self.method), state)) for item in items
        ]
        known = self.result.get(self.method.key)
        if known is None:
            self.result[self.method.key] = parts
        elif len(known) == len(parts):
            self.result[self.method.key] = [old or new for old, new in zip(known, parts, strict=True)]
        else:
            self.result[self.method.key] = [any(known) or any(parts)]

    def bind_result(self, statement: Statement, state: set[str], parts: list[bool]) -> set[str]:
        """Give a helper's results to the variables that take them."""
        node = statement.parts["node"]
        targets = node.targets if isinstance(node, cst.Assign) else []
        for target in targets:
            inner = target.target
            if isinstance(inner, cst.Tuple) and len(inner.elements) == len(parts) and isinstance(node.value, cst.Call):
                pairs = [(entry.value, part) for entry, part in zip(inner.elements, parts, strict=True)]
            else:
                pairs = [(inner, any(parts))]
            for place, part in pairs:
                names = names_in(place, self.method)
                if part:
                    self.attributes |= {name for name in names if name.startswith("self.")}
                    state = state | {name for name in names if not name.startswith("self.")}
                else:
                    state = state - names
        return state

    def global_call(self, statement: Statement, state: set[str], control: bool, reads: set[str]) -> set[str]:
        head = statement.head
        varying = state | self.attributes
        misused = sorted((reads - head.joined) & varying)
        if self.report and misused:
            raise place_of(statement, misused[0], self.method).error(
                f"`{misused[0]}` is varying (one value per actor), but `{head.calls[0]}` needs a global one",
                f"self.msrl.gather({misused[0]}), or mean, sum, all, any",
            )
        if self.strict:
            # What is joined is a new value: the call cannot write into the actors' own.
            joined = head.joined & varying
            head.mutates -= joined
            statement.whole.mutates -= joined
        return self.assign(statement, state, control)

    def helper_call(self, statement: Statement, state: set[str], control: bool, reads: set[str]) -> set[str]:
        call = find_helper_call(statement, self.analysis, self.method)
        varying = control or self.is_varying(reads, state)
        if call is not None:
            method, arguments = call
            known = self.entry.setdefault(method.key, set())
            for parameter, names in arguments.items():
                if control or self.is_varying(names, state):
                    known.add(parameter)
            if control:
                self.controlled.add(method.key)
            result = self.result.get(method.key, [False])
            touched = self.parameters_out.get(method.key, set())
            grown = {name for parameter in touched for name in arguments.get(parameter, set())} & statement.head.mutates
            operations = [OPERATIONS[name] for name in statement.head.calls]
            statement.varying = control or not any(operation.per == "one" for operation in operations)
            if (
                self.report
                and any(operation.per == "one" for operation in operations)
                and grown - state - self.attributes
            ):
                name = sorted(grown - state)[0]
                raise statement.origin.error(
                    f"`{method.name}` fills `{name}` with varying values, but `{name}` is global here",
                    f"let `{method.name}` make and return it",
                )
            state = state | {name for name in grown if not name.startswith("self.")}
            self.attributes |= {name for name in grown if name.startswith("self.")}
            return self.bind_result(statement, state, [True] if control else result)
        statement.varying = varying
        return self.assign(statement, state, varying)


def find_helper_call(
    statement: Statement, analysis: Analysis, method: Method
) -> tuple[Method, dict[str, set[str]]] | None:
    """The component-bearing method a statement calls, and the variables each parameter gets."""
    for call in find(statement.parts["node"], cst.Call):
        target = method_call(call, method, analysis.trainer)
        if target is None or not analysis.bearing.method_bears(*target):
            continue
        called = analysis.need(*target)
        arguments: dict[str, set[str]] = {}
        for index, argument in enumerate(spread(call.args)):
            names = names_in(argument.value, method)
            if argument.star or (argument.keyword is None and index >= len(called.parameters)):
                for parameter in may_take(argument, index, called.parameters, set(arguments)):
                    arguments.setdefault(parameter, set()).update(names)
            else:
                key = argument.keyword.value if argument.keyword else called.parameters[index]
                arguments.setdefault(key, set()).update(names)
        return called, arguments
    return None


def names_in(node: cst.CSTNode, method: Method) -> set[str]:
    """Variables that occur in an expression."""
    if isinstance(node, cst.Name):
        return {node.value} - {method.self_name}
    if isinstance(node, cst.Attribute):
        if isinstance(node.value, cst.Name) and node.value.value == method.self_name:
            return {f"self.{node.attr.value}"}
        return names_in(node.value, method)
    return set().union(*(names_in(child, method) for child in children(node)), set())


def place_of(statement: Statement, name: str, method: Method) -> Origin:
    """Where a variable or an operation stands in a statement."""
    for node in find(statement.parts["node"], cst.Name, cst.Attribute, cst.Call):
        if name in (operation_of(node, method) or "", names_in(node, method) == {name} and name):
            for candidate in (node, *children(node)):  # a call whose arguments were lifted is a new node
                try:
                    return method.origin(candidate)
                except KeyError:
                    continue
    return statement.origin
