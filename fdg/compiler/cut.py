"""Colour, hoist and cut: which fragment runs each statement, and where the driver calls it.

key        (fragment, per) a statement belongs to; NEUTRAL may go anywhere; DRIVER stays
hoist      inserts inside an actor's run of statements leave as one transfer at its end
merge      the largest runs of statements, whole loops included, that one fragment can do in one call
interface  live variables at a cut: what enters, what leaves, what stays resident
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.effects import Analysis
from fdg.compiler.flow import Exits, Liveness, certainly_bound, full_uses, strongly_writes, total
from fdg.compiler.ir import EVERYTHING, Effects, Statement, is_attribute, walk
from fdg.compiler.lower import Method, method_call, operation_of, variable
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import dotted
from fdg.compiler.tree import code, find
from fdg.graph import Port

NEUTRAL = "neutral"
DRIVER = "driver"
Key = Any  # NEUTRAL | DRIVER | (fragment, "actor" | "one" | "shard")
PASSES = ("hoist", "merge", "dead", "resident")


@dataclass(eq=False)
class RegionPlan:
    """One region while it is being made."""

    fragment: str
    per: str
    method: Method
    statements: list[Statement]
    contexts: list[Any] = field(default_factory=list)
    name: str = ""
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    restores: list[str] = field(default_factory=list)
    """Inputs whose objects the region may change in place."""
    shares: dict[str, list[str]] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[int, int]:
        origins = [statement.origin for top in self.statements for statement in top.walk()]
        return min(origin.line for origin in origins), max(origin.line for origin in origins)

    @property
    def calls(self) -> list[str]:
        return [name for statement in self.statements for name in statement.whole.calls]


class Cutter:
    """Cuts all component-bearing methods of a trainer for one policy."""

    def __init__(self, analysis: Analysis, policy: Any, passes: frozenset[str]) -> None:
        self.analysis, self.policy, self.passes = analysis, policy, passes
        self.strict = analysis.actors > 1
        self.regions: list[RegionPlan] = []
        self.hoisted = 0
        self.keys: dict[int, tuple[Statement, Key]] = {}
        self.home: Key = (policy.fragment_of("env"), "actor")
        self.counter = 0

    # colour ----------------------------------------------------------------------------------------------------------

    def key_of_operation(self, name: str, hoisting: bool = False) -> Key:
        operation = OPERATIONS[name]
        if operation.component == "driver":
            return DRIVER
        if hoisting and name == "replay_buffer_insert":
            return NEUTRAL
        fragment = self.policy.fragment_of(operation.component)
        per = "shard" if self.policy.per(fragment) == "shard" else operation.per
        return (fragment, per)

    def key(self, statement: Statement, hoisting: bool = False) -> Key:
        if hoisting:
            return self._key(statement, True)
        known = self.keys.get(id(statement))
        if known is None or known[0] is not statement:
            known = self.keys[id(statement)] = (statement, self._key(statement, False))
        return known[1]

    def _key(self, statement: Statement, hoisting: bool) -> Key:
        if statement.kind in ("region", "each"):
            return DRIVER
        if statement.leaves:
            return DRIVER
        if statement.head.pinned or statement.head.captured:
            return DRIVER
        if statement.kind == "simple":
            return self.simple_key(statement, hoisting)
        keys = set()
        for child in statement.children():
            inner = (
                NEUTRAL
                if is_jump(child)
                else self._key(child, hoisting)
                if not child.leaves
                else self.loose_key(child, hoisting)
            )
            if inner != NEUTRAL:
                keys.add(inner)
        if statement.varying:
            keys.add(self.home if not keys or keys == {self.home} else next(iter(keys)))
        if not keys:
            return NEUTRAL
        if len(keys) > 1:
            return DRIVER
        key = keys.pop()
        return DRIVER if key != DRIVER and key[1] == "shard" else key

    def loose_key(self, statement: Statement, hoisting: bool) -> Key:
        """The key of a statement inside a loop, whose own breaks do not matter to the loop's surroundings."""
        if statement.head.pinned or statement.head.captured or statement.kind == "simple":
            return DRIVER if statement.kind != "simple" or statement.head.pinned else NEUTRAL
        kept = statement.leaves
        statement.leaves = set()
        try:
            return self._key(statement, hoisting)
        finally:
            statement.leaves = kept

    def simple_key(self, statement: Statement, hoisting: bool) -> Key:
        if hoisting and statement.head.helpers and "replay_buffer_insert" in statement.whole.calls:
            return DRIVER
        keys = {self.key_of_operation(name, hoisting) for name in statement.whole.calls}
        if hoisting and keys == {NEUTRAL}:
            return self.home if self.is_plain_insert(statement) else DRIVER
        keys.discard(NEUTRAL)
        if len(keys) > 1 or DRIVER in keys:
            return DRIVER
        if keys:
            key = keys.pop()
            if statement.head.helpers and key[1] == "shard":
                return DRIVER
            return key
        return self.home if statement.varying else NEUTRAL

    def is_plain_insert(self, statement: Statement) -> bool:
        node = statement.parts["node"]
        return (
            not statement.head.helpers
            and isinstance(node, cst.Expr)
            and isinstance(node.value, cst.Call)
            and len(node.value.args) == 1
            and not node.value.args[0].star
            and node.value.args[0].keyword is None
            and (statement.head.reads & statement.parts["in"] or not self.strict)
            and bool(statement.head.reads & statement.parts["in"])
        )

    # hoist -----------------------------------------------------------------------------------------------------------

    def hoist(self, method: Method, body: list[Statement]) -> list[Statement]:
        """Collect inserts inside a run of actor statements into rows, inserted once at the run's end."""
        out: list[Statement] = []
        index = 0
        while index < len(body):
            end = self.actor_run(body, index)
            run = body[index:end]
            if end > index and any("replay_buffer_insert" in statement.whole.calls for statement in run):
                out.extend(self.collect_rows(method, run))
                index = end
                continue
            statement = body[index]
            for name, block in statement.blocks.items():
                if statement.kind != "try":
                    statement.blocks[name] = self.hoist(method, block)
            if statement.blocks:
                renew(statement)
            out.append(statement)
            index += 1
        return out

    def actor_run(self, body: list[Statement], start: int) -> int:
        """Where the run of actor statements that starts here ends (== start when there is none)."""
        end = start
        for index in range(start, len(body)):
            key = self.key(body[index], hoisting=True)
            if key == self.home:
                end = index + 1
            elif key != NEUTRAL:
                break
        return end if end > start and self.key(body[start], hoisting=True) == self.home else start

    def collect_rows(self, method: Method, run: list[Statement]) -> list[Statement]:
        self.hoisted += 1
        rows = f"rows{self.hoisted}" if f"rows{self.hoisted}" not in method.summary.locals else f"_rows{self.hoisted}"
        method.summary.locals.add(rows)
        method.summary.kinds[rows] = ("container", "data")
        first = last = None
        for statement in walk(run):
            if statement.kind == "simple" and statement.head.calls == ["replay_buffer_insert"]:
                call = statement.parts["node"].value
                statement.parts["node"] = cst.Expr(cst.parse_expression(f"{rows}.append({code(call.args[0].value)})"))
                statement.head.calls = []
                statement.head.reads = statement.head.reads | {rows}
                statement.head.mutates = {rows}
                statement.head.joined = set()
                statement.varying = True
                first, last = first or statement, statement
        for statement in run:
            renew(statement)
        assert first is not None and last is not None
        make = written(f"{rows} = {method.self_name}.msrl.rows()", first, writes={rows})
        make.varying = True
        send = written(
            f"{method.self_name}.msrl.replay_buffer_insert_rows({rows})",
            last,
            reads={rows},
            calls=["replay_buffer_insert_rows"],
            joined={rows},
        )
        for statement in walk([make, *run, send]):
            statement.parts["in"].add(rows)
            statement.parts["out"].add(rows)
        return [make, *run, send]

    # merge -----------------------------------------------------------------------------------------------------------

    def cut(
        self, method: Method, body: list[Statement], contexts: list[Any], merge: bool, once: bool = False
    ) -> list[Statement]:
        """Replace runs of statements by regions; what stays is the driver's. `once`: already inside one actor's turn."""
        out: list[Statement] = []
        index = 0
        while index < len(body):
            statement = body[index]
            key = self.key(statement)
            if isinstance(key, tuple) and (merge or statement.kind == "simple"):
                run, index = self.run_of(body, index, key) if merge and key[1] != "shard" else ([statement], index + 1)
                if merge and key[1] != "shard":
                    self.absorb_leading(out, run)
                out.append(self.make_region(method, key, run, contexts))
                continue
            index += 1
            each = self.strict and statement.varying and not once and not is_jump(statement) and key != NEUTRAL
            if each and "draws random numbers" in statement.whole.pinned:
                raise statement.origin.error(
                    f"random numbers are drawn here once per actor, at the driver ({statement.whole.pinned})",
                    "draw in Actor.act, or before, into a value that does not depend on environments or actors",
                )
            state = sorted(n for n in statement.whole.writes | statement.whole.mutates if n.startswith("global "))
            if each and state:
                raise statement.origin.error(
                    f"the module's `{state[0][7:]}` is changed here once per actor",
                    "an attribute of self, or a value that does not depend on environments or actors",
                )
            if each and statement.leaves:
                raise statement.origin.error(
                    "a jump that depends on a varying value stands among statements that stay at the driver",
                    "self.msrl.all(…) or self.msrl.any(…) in the condition",
                )
            if key != NEUTRAL and statement.blocks:
                inner = contexts
                if statement.kind == "with" and is_grad_context(statement, self.analysis, method):
                    inner = [*contexts, statement]
                for name, block in statement.blocks.items():
                    inside_try = statement.kind == "try" and name == "body"
                    statement.blocks[name] = self.cut(method, block, inner, merge and not inside_try, once or each)
                renew(statement)
            out.append(self.each_actor(statement) if each else statement)
        return out

    def run_of(self, body: list[Statement], start: int, key: Key) -> tuple[list[Statement], int]:
        run, index = [body[start]], start + 1
        pending: list[Statement] = []
        end = index
        while index < len(body):
            other = self.key(body[index])
            if other == key:
                run += [*pending, body[index]]
                pending, end = [], index + 1
            elif other == NEUTRAL and not is_jump(body[index]):
                pending.append(body[index])
            else:
                break
            index += 1
        return run, end

    def absorb_leading(self, out: list[Statement], run: list[Statement]) -> None:
        """`rows = []` right before a run that fills it belongs to the run: the list is made where it is filled."""
        while out:
            before = out[-1]
            if before.kind != "simple" or self.key(before) != NEUTRAL or is_jump(before):
                return
            if not before.head.strong & total(run).mutates:
                return
            run.insert(0, out.pop())

    def make_region(self, method: Method, key: Key, run: list[Statement], contexts: list[Any]) -> Statement:
        plan = RegionPlan(key[0], key[1], method, run, list(contexts))
        self.regions.append(plan)
        region = Statement("region", run[0].origin, {"plan": plan}, {})
        effects = atomic(run)
        for context in contexts:
            effects.reads |= context.head.reads
        region.head = region.whole = effects
        region.parts["in"], region.parts["out"] = run[0].parts.get("in", set()), run[-1].parts.get("out", set())
        region.varying = key[1] == "actor"
        return region

    def each_actor(self, statement: Statement) -> Statement:
        """A statement that runs once per actor, but at the driver."""
        each = Statement("each", statement.origin, {"in": statement.parts["in"], "out": statement.parts["out"]})
        each.blocks["body"] = [statement]
        each.head = atomic([statement])
        each.whole = each.head
        each.varying = True
        return each


def atomic(run: list[Statement]) -> Effects:
    """The effects of a run of statements taken as one: it reads what it does not write itself before."""
    effects = total(run)
    exposed = Liveness(set(), full_uses).block(run, set(), Exits())
    effects.reads = exposed | (effects.reads & {EVERYTHING})
    effects.strong = strongly_writes(run)
    return effects


def is_jump(statement: Statement) -> bool:
    return statement.kind == "simple" and isinstance(statement.parts["node"], (cst.Break, cst.Continue, cst.Return))


def renew(statement: Statement) -> None:
    """Bring a statement's total effects up to date after its blocks changed."""
    for child in statement.children():
        renew(child)
    whole = Effects()
    whole.add(statement.head)
    for child in statement.children():
        whole.add(child.whole)
    statement.whole = whole


def written(text: str, near: Statement, **effects: Any) -> Statement:
    """A statement of the compiler's own, at the place of the user's."""
    line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
    statement = Statement("simple", near.origin, {"node": line.body[0]})
    head = Effects(**{name: value for name, value in effects.items()})
    head.strong = set(head.writes)
    statement.head, statement.whole = head, Effects()
    statement.whole.add(head)
    statement.parts["in"], statement.parts["out"] = set(near.parts["in"]), set(near.parts["out"])
    return statement


def is_grad_context(statement: Statement, analysis: Analysis, method: Method) -> bool:
    from fdg.compiler.source import qualified_name

    for item in statement.parts["items"]:
        function = item.item.func if isinstance(item.item, cst.Call) else item.item
        name = dotted(function) or ""
        imports = getattr(method.summary, "imports", {})
        head, _, rest = name.partition(".")
        full = f"{imports[head]}.{rest}" if head in imports and rest else imports.get(name)
        if (full or qualified_name(name, method.owner.module)) not in purity.GRAD_CONTEXTS:
            return False
    return True


# interface -----------------------------------------------------------------------------------------------------------


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


def captured_names(method: Method) -> set[str]:
    """Variables that a stored function refers to."""
    return {name for statement in walk(method.body) for name in statement.whole.captured}


def pin_captured(method: Method) -> None:
    """What a stored function refers to is assigned at the driver, where the function is."""
    captured = captured_names(method)
    for statement in walk(method.body):
        if not statement.head.calls:
            statement.head.captured |= statement.head.writes & captured


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
        needed = Liveness(local, full_uses).block(plan.statements, set(through), Exits())
        for context in plan.contexts:
            needed |= context.head.reads
        if EVERYTHING in effects.reads:
            needed |= self.attributes
        written_somewhere = {name for name in self.attributes if self.is_written(name)}
        inputs = {name for name in (needed | mutated) & local if not is_attribute(name) or name in written_somewhere}
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
        plan.restores = sorted((mutated | effects.mutates & varying) & inputs)
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
