"""Type values: varying (one per actor) or global.

What comes from `env_*` and `agent_act`, and what is computed from it, is varying; so is what is assigned under a varying
condition. Varying becomes global at the operations that join. With A > 1, a varying value where a global one is needed
and a global call under a varying condition are refused; with A = 1 the types only guide placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.ir import EVERYTHING, Statement, is_attribute, walk
from fdg.compiler.methods import Method, match_arguments, method_call, operation_of, variable
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import Origin
from fdg.compiler.tree import children, find

RESULT = "<result>"


@dataclass
class Cause:
    """Why a variable is varying: what a line made of it, and from which variable."""

    origin: Origin
    source: tuple[tuple[str, str], str] | None
    """The variable it stems from: (method, name); None where a component call made it."""
    direct: bool = True
    """Whether the line names the variable; else it changes the object under another name."""
    given: str = ""
    """The name under which a component call gets it, where that call may change it."""


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
        self.causes: dict[tuple[tuple[str, str], str], Cause] = {}
        self.conditions: list[tuple[tuple[str, str], str]] = []
        """Varying variables that the enclosing conditions read, the innermost last."""
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
                method.summary.made_global = self.made_global()

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
        if not varying:
            return state - head.strong - {f"?{name}" for name in head.strong}
        names = {name for name in head.writes | head.mutates if name != EVERYTHING and not name.startswith("global ")}
        self.explain(names, statement, state)
        self.attributes |= {name for name in names if is_attribute(name)}
        own = {name for name in names if not is_attribute(name)}
        weak = {name for name in statement.parts.get("weak", set()) | own if self.is_weak(name, statement, state)}
        return (state | own) - {f"?{name}" for name in own} | {f"?{name}" for name in weak & own}

    def is_weak(self, name: str, statement: Statement, state: set[str]) -> bool:
        """Whether a variable is varying only because a varying object may hold its object (`?name` in a state)."""
        if name in statement.parts.get("weak", set()):
            return True
        sources = statement.head.reads & (state | self.attributes)
        return bool(sources) and not self.conditions and all(f"?{source}" in state for source in sources)

    def key(self, name: str) -> tuple[tuple[str, str], str]:
        return (("", "") if is_attribute(name) else self.method.key), name

    def source(self, reads: set[str], state: set[str]) -> tuple[tuple[str, str], str] | None:
        """The varying variable that something reads; else the one that a condition around it reads."""
        found = sorted(reads & (state | self.attributes), key=lambda name: (is_attribute(name), name))
        return self.key(found[0]) if found else self.conditions[-1] if self.conditions else None

    def explain(self, names: set[str], statement: Statement, state: set[str]) -> None:
        origin, reads = statement.origin, statement.head.reads
        direct_names = statement.head.writes | reads
        for name in names:
            known, direct = self.causes.get(self.key(name)), name in direct_names
            if known is None or (direct and not known.direct):
                given = self.given(name, statement, state)
                self.causes[self.key(name)] = Cause(origin, self.source(reads - {name}, state), direct, given)

    def given(self, name: str, statement: Statement, state: set[str]) -> str:
        """The name under which a component call gets a global object that it may change; else nothing."""
        head = statement.head
        if not head.calls or name in head.writes or name not in head.mutates:
            return ""
        names = self.method.summary.aliases.classes({name}) & head.reads & head.mutates - state
        return name if name in names else min(names, default="")

    def chain(self, name: str) -> list[str]:
        """The steps that made a variable varying, the last one first."""
        lines: list[str] = []
        key: tuple[tuple[str, str], str] | None = self.key(name)
        seen = set()
        while key in self.causes and key not in seen and len(lines) < 8:
            seen.add(key)
            cause = self.causes[key]
            source = self.shown(cause.source, cause.origin)
            what = "the result" if key[1] == RESULT else f"`{key[1]}`"
            origin = f", from `{source[1]}`" if source is not None and source[1] != RESULT else ""
            lines.append(f"{what} is varying: line {cause.origin.line}: {cause.origin.text.strip()}{origin}")
            key = source
        return lines

    def shown(self, key: tuple[tuple[str, str], str] | None, origin: Origin) -> tuple[tuple[str, str], str] | None:
        """A variable that stands in the user's line: what is the compiler's own stems from one there."""
        for _ in range(8):
            if key not in self.causes or key[1] == RESULT or key[1] in origin.text:
                break
            key = self.causes[key].source
        return key

    def not_to_change(self, name: str) -> str:
        """What to write where a variable is varying only because a component may change it; else nothing."""
        key: tuple[tuple[str, str], str] | None = self.key(name)
        seen = set()
        while key in self.causes and key not in seen:
            seen.add(key)
            cause = self.causes[key]
            if cause.given:
                return (
                    f"float({cause.given}) or {cause.given}.clone() in line {cause.origin.line}: an actor may change in "
                    f"place what it is given, so that `{key[1]}` would be each actor's own from there on"
                )
            key = cause.source
        return ""

    def hint(self, name: str, lines: list[str]) -> str:
        if instead := self.not_to_change(name):
            return instead
        told = f"self.msrl.gather({name}), or mean, sum, all, any"
        if any("len(" in line for line in lines):
            told += "; the length of a varying list is varying too: self.msrl.all(len(x) == n)"
        return told

    def statement(self, statement: Statement, state: set[str], control: bool) -> set[str]:
        statement.parts["in"] = set(state) | self.attributes
        head = statement.head
        reads = head.reads
        depth = len(self.conditions)
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
            else:
                self.enter(statement, state)
                state = self.assign(statement, state, varying)
                after = set().union(*(self.block(block, set(state), varying) for block in statement.blocks.values()))
                if statement.kind == "match":
                    after |= state
                self.conditions = self.conditions[:depth]
            if self.report and varying:
                self.check_controlled(statement)
        statement.parts["out"] = set(after) | self.attributes
        return after

    def enter(self, statement: Statement, state: set[str]) -> None:
        """Note the varying variable that a condition reads."""
        found = self.source(statement.head.reads, state)
        if found is not None:
            self.conditions.append(found)

    def check_controlled(self, statement: Statement) -> None:
        if statement.kind == "try":
            return
        for inner in statement.children():
            for below in inner.walk():
                name = next((name for name in below.head.calls if OPERATIONS[name].per == "one"), None)
                if name is not None:
                    raise place_of(below, name, self.method).error(
                        f"`{name}` is a global call, but line {statement.origin.line} makes it depend on a varying value: "
                        f"with {self.analysis.actors} actors each would come here a different number of times",
                        self.way_out(statement),
                        self.chain_of(statement),
                    )

    def way_out(self, statement: Statement) -> str:
        found = self.source(statement.head.reads, statement.parts["in"])
        if found is not None and (instead := self.not_to_change(found[1])):
            return instead
        if statement.kind == "for" and self.is_varying(statement.head.reads, statement.parts["in"]):
            return (
                "a loop that is the same for all actors: `for n in range(…):` up to a global number, with x[n] in it; the "
                "length of a varying list is varying too"
            )
        return "a condition that is the same for all actors, such as self.msrl.all(…), self.msrl.any(…) or self.msrl.mean(…)"

    def chain_of(self, statement: Statement) -> list[str]:
        """Why a condition is varying."""
        found = self.source(statement.head.reads, statement.parts["in"])
        return self.chain(found[1]) if found is not None and found[0] in (self.method.key, ("", "")) else []

    def loop(self, statement: Statement, state: set[str], varying: bool) -> set[str]:
        loop = _Loop(varying)
        self.loops.append(loop)
        while True:
            before = (set(state), loop.varying)
            depth = len(self.conditions)
            if loop.varying:
                self.enter(statement, state)
            state = self.assign(statement, state, loop.varying)
            body = self.block(statement.blocks["body"], set(state), loop.varying)
            state = state | body | loop.after
            self.conditions = self.conditions[:depth]
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
            self.returned(statement, state, control)
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
        statement.varying = control or self.is_varying(reads, state) or self.touches_varying(statement, state)
        if self.strict and statement.varying:
            self.promote(statement, self.method.summary.aliases.classes(self.objects(head.writes)), state)
        return self.assign(statement, state, statement.varying)

    def objects(self, names: set[str]) -> set[str]:
        """Of some variables, those that may be more than a number."""
        return {name for name in names if self.analysis.kind_of(name, self.method) != "scalar"}

    def made_global(self) -> set[str]:
        """Variables that may hold a global object somewhere in this method."""
        made = set(self.method.parameters)
        for method in self.analysis.methods.values():
            for below in walk(method.body):
                if not below.varying and (not below.head.helpers or "global" in below.parts):
                    made |= {name for name in below.head.writes if is_attribute(name) or method is self.method}
        return made

    def touches_varying(self, statement: Statement, state: set[str]) -> bool:
        """Whether a statement changes an object that the actors have their own of, or gives it another name."""
        if not self.strict or any(name.startswith("global ") for name in statement.head.mutates):
            return False  # the module's state is the driver's
        bound = {name for name in statement.head.writes if is_attribute(name)}
        return self.is_varying(self.objects(statement.head.mutates | bound), state)

    def promote(self, statement: Statement, names: set[str], state: set[str]) -> None:
        """A global object that gets a varying name is each actor's own from here on, under all its names."""
        if statement.head.reads & names - state - self.attributes:
            found = {name for name in names if not name.startswith(("<", "global "))}
            if not self.is_renaming(statement):
                statement.parts["weak"] = found - state - statement.head.writes | statement.parts.get("weak", set())
            statement.head.mutates = statement.head.mutates | found
            statement.whole.mutates = statement.whole.mutates | found

    def is_renaming(self, statement: Statement) -> bool:
        """Whether a statement only gives an object another name."""
        node = statement.parts["node"]
        return isinstance(node, cst.Assign) and variable(node.value, self.method) != ""

    def returned(self, statement: Statement, state: set[str], control: bool) -> None:
        """Note what a method returns."""
        value = statement.parts["node"].value
        found = self.source(statement.head.reads, state)
        if found is not None:
            self.causes.setdefault(self.key(RESULT), Cause(statement.origin, found))
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

    def bind_result(self, statement: Statement, state: set[str], parts: list[bool], called: Method) -> set[str]:
        """Give a helper's results to the variables that take them."""
        node = statement.parts["node"]
        targets = node.targets if isinstance(node, cst.Assign) else []
        attributes = {n for target in targets for n in names_in(target.target, self.method) if is_attribute(n)}
        for target in targets:
            inner = target.target
            if isinstance(inner, cst.Tuple) and len(inner.elements) == len(parts) and isinstance(node.value, cst.Call):
                pairs = [(entry.value, part) for entry, part in zip(inner.elements, parts, strict=True)]
            else:
                pairs = [(inner, any(parts))]
            for place, part in pairs:
                names = names_in(place, self.method)
                if not part:
                    statement.parts["global"] = True
                    # A global object that goes by a varying attribute too will be each actor's own.
                    part = self.strict and self.is_varying(self.objects(attributes), state)
                if part:
                    source = (called.key, RESULT)
                    for name in names - state - self.attributes:
                        self.causes.setdefault(self.key(name), Cause(statement.origin, source))
                    self.attributes |= {name for name in names if is_attribute(name)}
                    state = state | {name for name in names if not is_attribute(name)}
                else:
                    state = state - names
        return state

    def global_call(self, statement: Statement, state: set[str], control: bool, reads: set[str]) -> set[str]:
        head = statement.head
        varying = state | self.attributes
        misused = sorted((reads - head.joined) & varying)
        if self.report and misused:
            found = self.shown(self.key(misused[0]), statement.origin)
            name = found[1] if found is not None and found[1] != RESULT else misused[0]
            lines = self.chain(name)
            raise place_of(statement, misused[0], self.method).error(
                f"`{name}` is varying (one value per actor), but `{head.calls[0]}` needs a global one",
                self.hint(name, lines),
                lines,
            )
        shared = sorted(name for name in head.joined if f"?{name}" in state)
        if self.report and shared:
            raise place_of(statement, shared[0], self.method).error(
                f"`{shared[0]}` is one value, but a varying object may hold it: each actor has its own copy, and "
                f"`{head.calls[0]}` would join them",
                "a copy of it in the varying object, such as x.clone()",
                self.chain(shared[0]),
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
                    self.causes.setdefault((method.key, parameter), Cause(statement.origin, self.source(names, state)))
            if control:
                self.controlled.add(method.key)
            result = self.result.get(method.key, [False])
            touched = self.parameters_out.get(method.key, set())
            grown = {name for parameter in touched for name in arguments.get(parameter, set())} & statement.head.mutates
            operations = [OPERATIONS[name] for name in statement.head.calls]
            statement.varying = control or not any(operation.per == "one" for operation in operations)
            grown = self.method.summary.aliases.classes(grown) & statement.head.mutates
            if self.strict:
                attributes = self.method.summary.aliases.classes(statement.head.mutates & self.attributes)
                statement.parts["promote"] = self.objects(grown | attributes) & self.made_global()
            state = state | {name for name in grown if not is_attribute(name)}
            self.attributes |= {name for name in grown if is_attribute(name)}
            return self.bind_result(statement, state, [True] if control else result, method)
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
        for value, parameters, _ in match_arguments(call.args, called.parameters):
            for parameter in parameters:
                arguments.setdefault(parameter, set()).update(names_in(value, method))
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
