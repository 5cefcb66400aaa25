"""Hoist and cut: which fragment runs each statement, and where the driver calls it.

key        (fragment, per) a statement belongs to; NEUTRAL may go anywhere; DRIVER stays
hoist      inserts inside an actor's run of statements leave as one transfer at its end
merge      the largest runs of statements, whole loops included, that one fragment can do in one call

What enters and leaves a region is in `ports.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.analysis import Analysis
from fdg.compiler.flow import Exits, Liveness, full_uses, strongly_writes, total
from fdg.compiler.ir import EVERYTHING, Effects, Statement, walk
from fdg.compiler.methods import Method
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import dotted, qualified_name
from fdg.compiler.tree import code
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
    company: list[str] = field(default_factory=list)
    appends: list[str] = field(default_factory=list)

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
                if statement.kind == "with" and is_grad_context(statement, method):
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


def is_grad_context(statement: Statement, method: Method) -> bool:
    """Whether a `with` only sets grad modes, which a region can enter again in its fragment."""
    for item in statement.parts["items"]:
        name = dotted(item.item.func if isinstance(item.item, cst.Call) else item.item) or ""
        if qualified_name(name, method.owner.module, method.summary.imports) not in purity.GRAD_CONTEXTS:
            return False
    return True


def captured_names(method: Method) -> set[str]:
    """Variables that a stored function refers to."""
    return {name for statement in walk(method.body) for name in statement.whole.captured}


def refuse_captured(method: Method) -> None:
    """Refuse a stored function that refers to a variable of which each actor gets its own later: it has only the one."""
    statements = [statement for statement in walk(method.body) if "in" in statement.parts]
    varying = {name for statement in statements for name in statement.parts["in"] | statement.parts["out"]}
    for statement in statements:
        for name in sorted(statement.head.captured & varying - statement.parts["in"]):
            raise statement.origin.error(
                f"a stored function refers to `{name}`, which is one value here and varies from actor to actor later",
                f"a parameter for it: `{name}` is passed where the function is called",
            )


def pin_captured(method: Method) -> None:
    """What a stored function refers to is assigned at the driver, where the function is."""
    captured = captured_names(method)
    for statement in walk(method.body):
        if not statement.head.calls:
            statement.head.captured |= statement.head.writes & captured
