"""Edges: which values cross between fragments, found by following who made each variable to where it is used.

Also what the graph tells a reader: how often each region is called in one turn of the outermost loop, and which line
keeps a program from being coarser.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.cut import Cutter, RegionPlan
from fdg.compiler.ir import EVERYTHING, Statement, is_attribute, walk
from fdg.compiler.methods import Method
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.ports import Handles, appends_to, passed_on
from fdg.compiler.tree import code
from fdg.compiler.vary import find_helper_call
from fdg.graph import DRIVER, Edge, Operator

Makers = dict[str, frozenset[str]]
HERE = frozenset({DRIVER})


class Connect:
    """Follows values through the driver and collects the edges."""

    def __init__(self, analysis: Analysis, cutter: Cutter, handles: Handles, mixed: list[Method]) -> None:
        self.analysis, self.cutter, self.handles = analysis, cutter, handles
        self.mixed = {method.key: method for method in mixed}
        self.edges: dict[tuple[str, str, str], Edge] = {}
        self.attributes: Makers = {}
        self.entry: dict[tuple[str, str], Makers] = defaultdict(dict)
        self.result: dict[tuple[str, str], frozenset[str]] = {}
        for method in mixed:
            self.entry[method.key] = dict.fromkeys(method.parameters, HERE)
        for name in sorted(handles.interfaces.promoted):
            self.promote({}, name)
        for _ in range(8):
            before = (len(self.edges), str(self.attributes), str(dict(self.entry)), str(self.result))
            for method in mixed:
                self.method = method
                self.jumps: list[Makers] = []
                self.block(method.body, dict(self.entry[method.key]))
            if before == (len(self.edges), str(self.attributes), str(dict(self.entry)), str(self.result)):
                break
        self.weights()

    def promote(self, state: Makers, name: str) -> Makers:
        """A global object becomes each actor's own, where the environments are."""
        home = self.cutter.home[0]
        self.read(state, name)
        self.add(DRIVER, home, name)
        return self.give(state, name, self.made(state, name) | HERE | {home})

    def weights(self) -> None:
        learner = self.cutter.policy.fragment_of("learner")
        actor = self.cutter.policy.fragment_of("actor")
        calls = {name for plan in self.cutter.regions for name in plan.calls}
        if learner != actor and "agent_act" in calls and "agent_learn" in calls:
            self.add(learner, actor, "weights")
        if self.per(learner) == "worker" and "agent_learn" in calls:
            self.edges[learner, learner, "gradients"] = Edge(learner, learner, "gradients", "allreduce")

    def per(self, fragment: str) -> str:
        return "one" if fragment == DRIVER else self.cutter.policy.per(fragment)

    def add(self, source: str, target: str, value: str, varying: bool = False) -> None:
        key = (source, target, value)
        if key not in self.edges:
            self.edges[key] = Edge(source, target, value, self.operator(source, target, varying))

    def operator(self, source: str, target: str, varying: bool) -> Operator:
        here, there = self.per(source), self.per(target)
        if "shard" in (here, there):
            return "gather" if here == "shard" else "route"
        if source == target:
            return "gather"
        if here == "actor":
            return "gather" if there != "actor" else "local"
        if there in ("actor", "worker"):
            return "scatter" if varying else "broadcast"
        return "send"

    def merge(self, left: Makers, right: Makers) -> Makers:
        return {name: left.get(name, frozenset()) | right.get(name, frozenset()) for name in left.keys() | right.keys()}

    def made(self, state: Makers, name: str) -> frozenset[str]:
        if is_attribute(name):
            return self.attributes.get(name, HERE) | HERE
        return state.get(name, HERE)

    def give(self, state: Makers, name: str, makers: frozenset[str]) -> Makers:
        if is_attribute(name):
            self.attributes[name] = self.attributes.get(name, frozenset()) | makers
            return state
        return {**state, name: makers}

    def block(self, body: list[Statement], state: Makers) -> Makers:
        for statement in body:
            state = self.statement(statement, state)
        return state

    def statement(self, statement: Statement, state: Makers) -> Makers:
        if statement.kind == "region":
            return self.region(statement.parts["plan"], state)
        if statement.kind == "each":
            return self.each(statement, state)
        passed = passed_on(statement, self.analysis, self.method)
        reads = statement.head.reads | statement.head.mutates
        if EVERYTHING in reads:
            reads = reads | set(self.attributes)
        wanted = reads if statement.head.calls and not statement.head.helpers else reads - passed
        for name in sorted(wanted):
            self.read(state, name)
        for name in self.handles.taken(statement, self.method):
            # The object is the driver's from here on, under all its names.
            for other in self.method.summary.aliases.classes({name}):
                if other == name or other in state or other in self.attributes:
                    state = self.give(state, other, self.made(state, other) | HERE)
        if statement.kind == "simple":
            return self.simple(statement, state, passed)
        state = self.assign(statement, state, HERE)
        blocks = statement.blocks
        if statement.kind in ("for", "while"):
            self.jumps.append({})
            while True:
                before = dict(state)
                state = self.merge(state, self.block(blocks["body"], dict(state)))
                state = self.merge(state, self.jumps[-1])
                for name in sorted(reads - passed):
                    self.read(state, name)
                if state == before:
                    break
            self.jumps.pop()
            return self.merge(state, self.block(blocks["orelse"], dict(state)))
        merged = dict(state)
        for block in blocks.values():
            after = self.block(block, dict(merged if statement.kind == "try" else state))
            merged = self.merge(merged, after)
        return merged

    def read(self, state: Makers, name: str) -> None:
        for maker in sorted(self.made(state, name) - HERE):
            self.add(maker, DRIVER, name)

    def assign(self, statement: Statement, state: Makers, makers: frozenset[str]) -> Makers:
        for name in statement.head.writes:
            old = self.made(state, name) if name not in statement.head.strong else frozenset()
            state = self.give(state, name, makers | old)
        return state

    def simple(self, statement: Statement, state: Makers, passed: set[str]) -> Makers:
        node = statement.parts["node"]
        makers = HERE
        for name in passed:
            makers |= self.made(state, name)
        if statement.head.helpers:
            return self.helper(statement, state)
        if isinstance(node, cst.Return):
            self.result[self.method.key] = self.result.get(self.method.key, frozenset()) | makers
            if self.method.name == "train":
                for name in sorted(passed):
                    self.read(state, name)
        if isinstance(node, (cst.Break, cst.Continue)) and self.jumps:
            self.jumps[-1] = self.merge(self.jumps[-1], state)
        return self.assign(statement, state, makers)

    def helper(self, statement: Statement, state: Makers) -> Makers:
        call = find_helper_call(statement, self.analysis, self.method)
        if call is None or call[0].key not in self.mixed:
            return self.assign(statement, state, HERE)
        method, arguments = call
        for name in sorted(statement.parts.get("promote", ())):
            state = self.promote(state, name)
        for name in sorted({name for group in statement.parts["settle"] for name in group}):
            self.read(state, name)
            state = self.give(state, name, self.made(state, name) | HERE)
        for parameter, names in arguments.items():
            known = self.entry[method.key].get(parameter, frozenset())
            for name in names:
                known |= self.made(state, name)
            self.entry[method.key][parameter] = known
        everywhere = HERE | {plan.fragment for plan in self.cutter.regions if plan.method is method}
        for name in statement.head.mutates:
            state = self.give(state, name, self.made(state, name) | everywhere)
        return self.assign(statement, state, HERE | self.result.get(method.key, frozenset()))

    def region(self, plan: RegionPlan, state: Makers) -> Makers:
        aliases = plan.method.summary.aliases
        lent: set[str] = set()
        if self.analysis.actors > 1 and plan.per == "actor":
            own = self.handles.interfaces.promoted
            for name in sorted(plan.method.summary.made_global.intersection(plan.restores) - own):
                # What is global is the driver's before all actors change it alike.
                self.read(state, name)
                state = self.give(state, name, self.made(state, name) | HERE)
        if plan.per == "actor" and self.company_elsewhere(plan, state):
            for name in plan.restores:
                self.read(state, name)
                state = self.give(state, name, self.made(state, name) | HERE)
        for port in plan.inputs:
            for maker in sorted(self.made(state, port.name)):
                among = self.per(maker) == "worker" and plan.per == "one" and port.varying  # from all workers to each
                if maker != plan.fragment or among:
                    self.add(maker, plan.fragment, port.name, port.varying)
                if maker == DRIVER and self.analysis.kind_of(port.name, plan.method) != "scalar":
                    lent.add(aliases.find(port.name))
        for name in [*state, *self.attributes]:  # what shares parts with an object of the driver's may come to it
            if aliases.find(name) in lent:
                state = self.give(state, name, self.made(state, name) | HERE)
        here = any(DRIVER in self.made(state, name) for name in plan.restores)
        for name in plan.restores:
            if here:  # objects that share parts come to the driver together
                self.add(plan.fragment, DRIVER, name)
                lent.add(aliases.find(name))
            state = self.give(state, name, self.made(state, name) | {plan.fragment} | (HERE if here else frozenset()))
        for port in plan.outputs:
            # What the region returns may be the driver's own object again.
            back = aliases.find(port.name) in lent
            if port.how == "value" or back:
                self.add(plan.fragment, DRIVER, port.name)
            # A number, and a value that may be one, comes to the driver; an object stays, the driver has a handle.
            if port.plain != "no":
                self.add(plan.fragment, DRIVER, port.name)
            makers = HERE if back or port.plain != "no" else frozenset()
            state = self.give(state, port.name, makers | (frozenset() if port.plain == "yes" else {plan.fragment}))
        return state

    def company_elsewhere(self, plan: RegionPlan, state: Makers) -> bool:
        """Whether another fragment may have objects that share parts and of which the region changes one."""
        makers: list[set[str]] = [set(), set()]
        for name in plan.restores:
            makers[name in plan.company] |= self.made(state, name) - {plan.fragment, DRIVER}
        return bool(makers[0] & makers[1])

    def each(self, statement: Statement, state: Makers) -> Makers:
        for port in statement.parts["inputs"]:
            self.read(state, port.name)
            state = self.give(state, port.name, self.made(state, port.name) | HERE)
        state = self.block(statement.blocks["body"], state)
        for port in statement.parts["outputs"]:
            state = self.give(state, port.name, self.made(state, port.name) | HERE)
        return state


def name_regions(cutter: Cutter) -> None:
    """Call a region by what it does: reset, collect, act, update, …; numbered where two would share a name."""
    taken: dict[tuple[str, str], int] = {}
    reserved = {name for owner in cutter.analysis.trainer.bases for name in owner.methods}
    for plan in cutter.regions:
        calls = set(plan.calls)
        if {"agent_act", "env_step"} <= calls:
            verb = "collect"
        elif "agent_learn" in calls:
            verb = "update" if len(calls) > 1 or len(plan.calls) > 1 else "learn"
        elif plan.calls:
            verb = OPERATIONS[plan.calls[0]].verb
        else:
            verb = "compute"
        if verb in reserved:
            verb = f"{verb}_region"
        count = taken[(plan.fragment, verb)] = taken.get((plan.fragment, verb), 0) + 1
        plan.name = verb if count == 1 else f"{verb}_{count}"


class Rates:
    """How often the driver calls each region in one turn of its outermost loop."""

    def __init__(self, analysis: Analysis, mixed: list[Method]) -> None:
        self.analysis = analysis
        self.mixed = {method.key: method for method in mixed}
        self.rates: dict[int, list[str]] = {}
        self.advice: list[str] = []
        self.seen: list[tuple[str, str]] = []
        self.inside: dict[int, list[Statement]] = {}
        """What each loop does, with what the helpers do that it calls."""
        self.repeated: list[tuple[Method, RegionPlan, list[tuple[str, Statement]]]] = []
        """The calls in loops within the outermost one."""
        self.walk(analysis.train, analysis.train.body, [])
        for method, plan, loops in self.repeated:
            self.advise(plan, loops)
            self.advise_on_company(method, plan, loops)

    def walk(self, method: Method, body: list[Statement], loops: list[tuple[str, Statement]]) -> None:
        for statement in body:
            for _, loop in loops:
                self.inside.setdefault(id(loop), []).append(statement)
            if statement.kind == "region":
                plan: RegionPlan = statement.parts["plan"]
                self.rates.setdefault(id(plan), []).append(self.rate([text for text, _ in loops]))
                if sum(text not in ("?",) for text, _ in loops) > 1:
                    self.repeated.append((method, plan, loops))
            elif statement.kind == "each":
                self.walk(method, statement.blocks["body"], loops)
            elif statement.kind == "simple" and statement.head.helpers:
                call = find_helper_call(statement, self.analysis, method)
                if call is not None and call[0].key in self.mixed and call[0].key not in self.seen:
                    self.seen.append(call[0].key)
                    self.walk(call[0], call[0].body, loops)
                    self.seen.pop()
            elif statement.blocks:
                inner = loops
                if statement.kind in ("for", "while"):
                    inner = [*loops, (self.turns(statement, method), statement)]
                elif statement.kind in ("if", "match", "try") and loops:
                    inner = [*loops, ("?", statement)]
                for block in statement.blocks.values():
                    self.walk(method, block, inner)

    def turns(self, statement: Statement, method: Method) -> str:
        if statement.kind == "while":
            return "n"
        node = statement.parts["iter"]
        text = code(node).strip()
        if text.startswith("range(") and isinstance(node, cst.Call) and len(node.args) == 1:
            text = code(node.args[0].value)
        return text.replace(f"{method.self_name}.config.", "config.").replace(f"{method.self_name}.", "")

    def rate(self, loops: list[str]) -> str:
        if not any(loop != "?" for loop in loops):
            return "once"
        inner = loops[1:]
        factors = [loop for loop in inner if loop != "?"]
        text = " × ".join(factors) or "1"
        return f"≤ {text}" if "?" in inner else text

    def advise(self, plan: RegionPlan, loops: list[tuple[str, Statement]]) -> None:
        """Why a fragment is called at every turn: what to move, if there would be one call without it."""
        loop = next(statement for text, statement in reversed(loops) if text != "?")
        times = " × ".join(text for text, _ in loops[1:] if text != "?")
        inside = [loop, *self.inside[id(loop)]]
        plans: list[RegionPlan] = [s.parts["plan"] for s in inside if s.kind == "region"]
        others = [other for other in plans if (other.fragment, other.per) != (plan.fragment, plan.per)]
        at_driver = [
            (s.origin.line, call)
            for s in inside
            for call in s.head.calls
            if OPERATIONS[call].component == DRIVER and not s.head.helpers
        ]
        pinned = [s for s in inside if s.kind == "simple" and s.head.pinned and not s.head.calls]
        turns = [other for other in plans if other.per == "actor"] if plan.per == "actor" else []
        if len({other.fragment for other in turns}) > 1:
            fragments = " and ".join(dict.fromkeys(f"`{other.fragment}`" for other in turns))
            lines = " and ".join(dict.fromkeys(f"line {other.lines[0]} ({calls_of(other)})" for other in turns))
            self.note(
                f"line {loop.origin.line}: {fragments} are called {times} times per iteration, because {lines} take turns; "
                f"a policy with both in one fragment does without (single_learner_coarse)."
            )
            return
        if any(OPERATIONS[call].returns != "none" for _, call in at_driver) or (plan.per != "actor" and others):
            return
        why = [f"line {s.origin.line} stays at the driver ({s.head.pinned})" for s in pinned]
        why += [f"line {line} ({call}) stays at the driver" for line, call in at_driver]
        why += [
            f"line {other.lines[0]} ({calls_of(other)}, on `{other.fragment}`) is in the same loop" for other in others
        ]
        if why := list(dict.fromkeys(why)):
            self.note(
                f"line {loop.origin.line}: `{plan.fragment}` is called {times} times per iteration, because "
                f"{' and '.join(why)}: move {'it' if len(why) == 1 else 'them'} out of the loop."
            )

    def advise_on_company(self, method: Method, plan: RegionPlan, loops: list[tuple[str, Statement]]) -> None:
        """Lists that go along whole at every step: the region looks into them, and they share parts with what others change."""
        loop = next(statement for text, statement in reversed(loops) if text != "?")
        aliases = method.summary.aliases
        elsewhere = {
            aliases.find(name)
            for statement in walk([loop])
            if statement.kind == "region" and statement.parts["plan"].fragment != plan.fragment
            for name in statement.parts["plan"].restores
        }
        times = " × ".join(text for text, _ in loops[1:] if text != "?")
        for name in plan.restores:
            if name in plan.company or name in plan.appends or aliases.find(name) not in elsewhere:
                continue
            reading = [s for s in walk(plan.statements) if name in s.head.reads and not appends_to(name, s, method)]
            if reading and isinstance(self.analysis.kind_of(name, method), tuple):
                self.note(
                    f"line {reading[0].origin.line}: `{name}` goes to `{plan.fragment}` and back {times} times per iteration, whole: "
                    f"slow where it grows. A list stays where it is if all that this loop does with it is to append; a policy with "
                    f"all of the loop's calls in one fragment does without (single_learner_coarse)."
                )

    def note(self, text: str) -> None:
        if text not in self.advice:
            self.advice.append(text)

    def of(self, plan: RegionPlan) -> str:
        rates = self.rates.get(id(plan), [])
        return " + ".join(dict.fromkeys(rates)) if rates else "never"


def calls_of(plan: RegionPlan) -> str:
    """A region's component calls, by the names that the user wrote."""
    names = (call.removesuffix("_rows") for call in plan.calls)
    return ", ".join(dict.fromkeys(names)) or "code of another fragment"


def edge_rates(edges: dict[Any, Edge], plans: list[RegionPlan], rates: Rates) -> None:
    """An edge is used as often as the region that receives (or, towards the driver, sends) its value is called."""
    for edge in edges.values():
        found = []
        for plan in plans:
            company = set(plan.company)
            inputs = {port.name for port in plan.inputs} - company
            outputs = {port.name for port in plan.outputs} - company
            if edge.value == "weights":
                hit = plan.fragment == edge.target and "agent_act" in plan.calls
            elif edge.operator == "allreduce":
                hit = plan.fragment == edge.target and "agent_learn" in plan.calls
            elif edge.target == DRIVER:
                hit = plan.fragment == edge.source and edge.value in outputs | set(plan.restores) - company
            else:
                hit = plan.fragment == edge.target and edge.value in inputs
            if hit:
                found.append(rates.of(plan))
        order = [rate for rate in dict.fromkeys(found) if rate != "once"] or (["once"] if found else [])
        edge.per_iteration = " + ".join(order) or "on demand"
