"""Ports: what enters a region, what leaves it, and what stays there, the driver holding a handle.

input       read by the region before it binds it
output      bound by the region (or changed there, per actor) and read later
resident    an output that the driver only passes on: it stays in the fragment, and the driver's variable is a handle
restore     an input of the driver's that the region changes in place: the driver's object is changed likewise
share       an output that may be the object of an input, or share parts with it
company     an input that the region does not look at: it may change through parts that it shares with another
append      an input that the region does nothing with but append to it
settle      objects that share parts and that a helper changes: brought to the driver together before the call
promote     a global object that becomes each actor's own
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.cut import Cutter, RegionPlan, captured_names
from fdg.compiler.flow import Exits, Liveness, certainly_bound, full_uses
from fdg.compiler.ir import EVERYTHING, Statement, is_attribute, walk
from fdg.compiler.methods import Method, method_call, operation_of, variable
from fdg.compiler.tree import find
from fdg.graph import Port


def universe(analysis: Analysis) -> set[str]:
    names: set[str] = set()
    for method in analysis.methods.values():
        for statement in walk(method.body):
            names |= statement.head.reads | statement.head.writes | statement.head.mutates
    return {name for name in names if is_attribute(name) and name not in (EVERYTHING, "self.config")}


def direct_nodes(statement: Statement, analysis: Analysis, method: Method) -> list[cst.BaseExpression]:
    """The variables (as nodes) that a driver's statement hands on as they are: returned, renamed, given to a helper."""
    if statement.kind != "simple":
        return []
    node = statement.parts["node"]
    values: list[Any] = []
    if isinstance(node, cst.Return) and node.value is not None:
        values = [item.value for item in node.value.elements] if isinstance(node.value, cst.Tuple) else [node.value]
    elif isinstance(node, (cst.Assign, cst.Expr)):
        value = node.value
        if isinstance(node, cst.Assign):
            values = [value] if all(plain_target(target.target) for target in node.targets) else []
        if isinstance(value, cst.Call):
            target = method_call(value, method, analysis.trainer)
            bears = target is not None and analysis.bearing.method_bears(*target)
            if bears or operation_of(value, method) is not None:  # a helper, or one of the driver's own operations
                values = [argument.value for argument in value.args if not argument.star]
    return [value for value in values if variable(value, method)]


def passed_on(statement: Statement, analysis: Analysis, method: Method) -> set[str]:
    """Variables a driver's statement hands on without looking into them anywhere: a handle will do."""
    direct = direct_nodes(statement, analysis, method)
    if not direct:
        return set()
    seen = [variable(node, method) for node in find(statement.parts["node"], cst.Name, cst.Attribute)]
    names = [variable(node, method) for node in direct]
    node = statement.parts["node"]
    bound = [variable(target.target, method) for target in node.targets] if isinstance(node, cst.Assign) else []
    return {name for name in names if seen.count(name) == names.count(name) + bound.count(name)}


def plain_target(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) or (isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name))


class Interfaces:
    """Works out every region's ports."""

    def __init__(self, cutter: Cutter, methods: list[Method]) -> None:
        self.cutter, self.analysis, self.passes = cutter, cutter.analysis, cutter.passes
        self.attributes = universe(self.analysis)
        self.certain = {
            name
            for method in self.analysis.methods.values()
            if method.name == "__init__"
            for statement in method.body
            for name in statement.head.strong
        }
        """Attributes that every trainer has from the start."""
        self.promoted = {
            name
            for name in self.attributes
            if self.analysis.actors > 1
            and self.analysis.attribute_kind(name) != "scalar"
            and any(name in method.body[0].parts["in"] for method in methods if method.body)
            and self.made_before_train(name)
        }
        """Varying attributes that are there when `train` begins: each actor gets its own."""
        self.resident_attributes: set[str] = set(self.promoted)
        self.unsent: dict[tuple[str, str], set[str]] = {}
        """By method: variables that some region does not send although it assigns them, since nobody reads them."""
        self.dropped = 0
        self.kept = 0
        for method in methods:
            self.method(method)

    def method(self, method: Method) -> None:
        names = method.summary.locals | self.attributes
        mutated_parameters = set(method.parameters) & method.summary.mutated
        at_return = frozenset(self.attributes | (mutated_parameters if method.name != "train" else set()))
        live: dict[int, set[str]] = {}
        exits = Exits(at_return=at_return)

        def record(statement: Statement, after: set[str]) -> None:
            live.setdefault(id(statement), set()).update(after)

        Liveness(names, full_uses, record).block(method.body, set(at_return), exits)
        certainly_bound(method.body, set(method.parameters))
        captured = captured_names(method)
        for after in live.values():
            after |= captured  # a stored function may read them whenever it is called
        read_by_driver: dict[int, set[str]] = {}

        def record_driver(statement: Statement, after: set[str]) -> None:
            read_by_driver.setdefault(id(statement), set()).update(after)

        def driver_uses(statement: Statement) -> tuple[set[str], set[str]]:
            if statement.kind == "region":
                return set(), statement.head.strong
            reads, kills = full_uses(statement)
            if statement.head.calls and not statement.head.helpers:  # log, gather, …: the driver wants the value
                return reads, kills
            return reads - passed_on(statement, self.analysis, method) | (reads & captured), kills

        Liveness(names, driver_uses, record_driver).block(method.body, set(), Exits())
        for statement in walk(method.body):
            if statement.kind == "region":
                self.region(method, statement, live[id(statement)], read_by_driver[id(statement)] | captured)
            elif statement.kind == "each":
                self.each(method, statement, live[id(statement)])
            elif statement.kind == "simple" and statement.head.helpers:
                self.helper(method, statement, live[id(statement)])

    def region(self, method: Method, statement: Statement, live: set[str], driver: set[str]) -> None:
        plan: RegionPlan = statement.parts["plan"]
        effects = statement.head
        local = (method.summary.locals | self.attributes) - set(method.summary.imports)
        strict = self.analysis.actors > 1
        written = effects.writes & local
        alive = live if "dead" in self.passes else local
        outputs = written & alive
        self.unsent.setdefault(method.key, set()).update(written - outputs)
        self.dropped += len(written - live) if "dead" in self.passes else 0
        mutated = (effects.mutates & local & live) - written
        varying = statement.parts["in"] | statement.parts["out"] if strict and plan.per == "actor" else set()
        outputs |= mutated & varying  # each actor's own from here on
        # Objects that other methods may know under other names: what is done to them must be seen there.
        mutated |= effects.mutates & (set(method.parameters) | self.attributes) & local
        mutated |= {name for name in effects.mutates & local if self.is_of_module(name, method)} & effects.reads
        mutated -= varying
        # What the region may leave unassigned keeps its old value: at the driver, or, where each actor (or each copy of
        # self) has its own, by travelling through the region.
        weak = outputs - effects.strong
        through = weak if strict and plan.per == "actor" else {name for name in weak if is_attribute(name)}
        needed = Liveness(local, full_uses).block(plan.statements, through & written, Exits())
        for context in plan.contexts:
            needed |= context.head.reads
        if EVERYTHING in effects.reads:
            needed |= self.attributes
        written_somewhere = {name for name in self.attributes if self.is_written(name)}
        inputs = {
            name for name in (needed | mutated | through) & local if not is_attribute(name) or name in written_somewhere
        }
        bound = statement.parts.get("bound", set())
        varying_in, varying_out = statement.parts["in"], statement.parts["out"]
        aliases = method.summary.aliases
        plan.inputs = [
            Port(
                name,
                varying=name in varying_in,
                maybe_unbound=name not in (self.certain if is_attribute(name) else bound),
            )
            for name in sorted(inputs)
        ]
        for name in sorted(outputs):
            same = [other for other in inputs if other != name and aliases.find(other) == aliases.find(name)]
            own = [name] if name in inputs else []
            if same or own:
                plan.shares[name] = sorted(same + own)
        kept = {other for name, others in plan.shares.items() for other in others if other != name}
        outputs |= kept & live & varying  # what got another name here is one object with it, per actor
        mutated |= kept - varying
        company = inputs - needed - written
        plan.company = sorted(company)
        plan.appends = sorted(name for name in inputs - company - written if only_appended(name, plan, method))
        # What company shares with the others comes back with the others.
        others = {name for name in effects.mutates if aliases.find(name) in set(map(aliases.find, company))}
        plan.restores = sorted((mutated | others | effects.mutates & varying) & inputs)
        by_value = {name for name in outputs if name in driver or "resident" not in self.passes}
        # Names of one object travel in one message, the same way.
        by_value |= {name for name in outputs if aliases.classes({name}) & by_value}
        certain = bound | effects.strong
        for name in sorted(outputs):
            how = "value" if name in by_value else "resident"
            self.kept += how == "resident"
            if is_attribute(name) and self.analysis.attribute_kind(name) != "scalar":
                self.resident_attributes.add(name)
            sure = certain | self.certain if name in inputs or is_attribute(name) else effects.strong
            unbound = name not in sure
            kind = self.analysis.kind_of(name, method)
            plain = "yes" if kind == "scalar" else "maybe" if kind in ("unknown", None) else "no"
            port = Port(name, how, name in varying_out, unbound, plain, bound=name in effects.writes)  # type: ignore[arg-type]
            plan.outputs.append(port)

    def helper(self, method: Method, statement: Statement, live: set[str]) -> None:
        """What has to be done before a helper runs that changes objects of the caller's.

        Inside the helper their other names are not known: objects that share parts are brought to the driver, where
        what a region changes is changed in place. Objects that the helper makes varying become each actor's own.
        """
        known = (live - statement.head.strong) | statement.head.reads
        statement.parts["promote"] = statement.parts.get("promote", set()) & known
        aliases = method.summary.aliases
        names = {name for name in statement.head.mutates & known if self.analysis.kind_of(name, method) != "scalar"}
        names &= method.summary.locals | self.attributes
        groups: dict[str, list[str]] = {}
        for name in sorted(names):
            groups.setdefault(aliases.find(name), []).append(name)
        statement.parts["settle"] = [group for group in groups.values() if len(group) > 1]

    def made_before_train(self, name: str) -> bool:
        return any(
            name in statement.head.writes
            for method in self.analysis.methods.values()
            if method.name == "__init__"
            for statement in walk(method.body)
        )

    def is_of_module(self, name: str, method: Method) -> bool:
        """Whether a variable may be an object of the module's."""
        return any(other.startswith("global ") for other in method.summary.aliases.classes({name}))

    def is_written(self, name: str) -> bool:
        for method in self.analysis.methods.values():
            if method.name == "__init__":
                continue
            for statement in walk(method.body):
                head = statement.head
                if name in head.writes or name in head.mutates or EVERYTHING in head.mutates:
                    return True
                plan = statement.parts.get("plan")
                if plan is not None and (name in head.writes or name in head.mutates):
                    return True
        return False

    def each(self, method: Method, statement: Statement, live: set[str]) -> None:
        effects = statement.head
        local = (method.summary.locals | self.attributes) - set(method.summary.imports)
        written = (effects.writes | effects.mutates) & local
        outputs = written & live
        needed = Liveness(local, full_uses).block(statement.blocks["body"], set(outputs), Exits())
        inputs = {name for name in needed & local if name in statement.parts["in"] or name in written}
        bound = statement.parts.get("bound", set())
        outputs |= {name for name in inputs if is_attribute(name)}
        statement.parts["inputs"] = [
            Port(name, maybe_unbound=name not in (self.certain if is_attribute(name) else bound))
            for name in sorted(inputs)
        ]
        certain = bound | effects.strong | self.certain
        statement.parts["outputs"] = [
            Port(name, varying=name in statement.parts["out"], maybe_unbound=name not in certain)
            for name in sorted(outputs)
        ]


def names_shown(statement: Statement, method: Method) -> set[str]:
    """Variables that stand in the statement's own text."""
    nodes: list[Any] = []
    for part in statement.parts.values():
        nodes += [node for node in (part if isinstance(part, list) else [part]) if isinstance(node, cst.CSTNode)]
    return {variable(inner, method) for node in nodes for inner in find(node, cst.Name, cst.Attribute)}


def only_appended(name: str, plan: RegionPlan, method: Method) -> bool:
    """Whether all that a region does with a variable is `name.append(…)`."""
    if any({name, EVERYTHING} & context.head.reads for context in plan.contexts):
        return False
    reading = [s for s in walk(plan.statements) if {name, EVERYTHING} & s.head.reads]
    return bool(reading) and all(appends_to(name, statement, method) for statement in reading)


def appends_to(name: str, statement: Statement, method: Method) -> bool:
    """Whether a statement is `name.append(…)`, with an argument that has nothing to do with the variable."""
    node = statement.parts.get("node")
    if statement.kind != "simple" or not isinstance(node, cst.Expr) or not isinstance(node.value, cst.Call):
        return False
    function, given = node.value.func, [argument.value for argument in node.value.args]
    if not isinstance(function, cst.Attribute) or function.attr.value != "append" or len(given) != 1:
        return False
    # An attribute of the trainer may be reached through anything that is the trainer's.
    own = method.self_name if is_attribute(name) else name
    mentioned = {inner.value for inner in find(given[0], cst.Name)}
    return variable(function.value, method) == name and own not in mentioned and EVERYTHING not in statement.head.reads


class Handles:
    """Which of the driver's variables may be handles, and which of those a statement needs the object of."""

    def __init__(self, analysis: Analysis, interfaces: Interfaces, mixed: list[Method]) -> None:
        self.analysis, self.interfaces = analysis, interfaces
        self.attributes = set(interfaces.resident_attributes)
        self.names: dict[tuple[str, str], set[str]] = {}
        before = -1
        while before != len(self.attributes):  # an attribute that one method gives a handle is one in all
            before = len(self.attributes)
            for method in mixed:
                self.names[method.key] = self.find(method)
                self.attributes |= {name for name in self.names[method.key] if is_attribute(name)}

    def find(self, method: Method) -> set[str]:
        found = set(self.attributes)
        if method is not self.analysis.train:
            found |= set(method.parameters)
        while True:
            before = len(found)
            for statement in walk(method.body):
                if statement.kind == "region":
                    names = {port.name for port in statement.parts["plan"].outputs}
                    found |= {name for name in names if self.analysis.kind_of(name, method) != "scalar"}
                elif statement.kind == "simple":
                    handed = {variable(node, method) for node in direct_nodes(statement, self.analysis, method)}
                    if statement.head.helpers or handed & found:
                        found |= statement.head.strong | statement.parts.get("promote", set())
            if len(found) == before:
                return found

    def taken(self, statement: Statement, method: Method) -> list[str]:
        """Handles whose objects a driver's statement changes, or keeps a second name for: they move to the driver."""
        handles = self.names.get(method.key, set())
        passed = passed_on(statement, self.analysis, method)
        names = statement.head.mutates
        if EVERYTHING in names:
            names = names | {name for name in handles if is_attribute(name)}
        found = names & handles - passed if not statement.head.helpers else set()
        if not statement.head.helpers:
            # A method of the trainer that reads an attribute finds it on self: it has to be the object.
            shown = names_shown(statement, method)
            found = found | {n for n in statement.head.reads & handles if is_attribute(n) and n not in shown}
        aliases = method.summary.aliases
        for name in statement.head.reads & handles - passed - found:
            if any(aliases.find(target) == aliases.find(name) for target in statement.head.strong - {name}):
                found = found | {name}
        return sorted(found)
