"""The compiler: a trainer and a policy in, a fragmented dataflow graph out.

find       source.py     classes, names, where they stand
normalise  lower.py      every component call its own statement (methods.py: what is a component call)
colour     effects.py    what each statement reads, writes, calls; may it move
type       vary.py       varying or global
cut        cut.py        regions, hoisted inserts
ports      ports.py      what enters a region, leaves it, and stays there
connect    connect.py    edges, rates, advice
emit       emit.py       the Python that runs
fuse       fuse.py       the actors of one worker in one batch, where it is asked for
resume     resume.py     the same with boundaries, where a run can be saved and resumed; on its own, after the others
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fdg.compiler.connect import Connect, Rates, edge_rates, name_regions
from fdg.compiler.cut import DRIVER, PASSES, Cutter, pin_captured, refuse_captured
from fdg.compiler.effects import analyse
from fdg.compiler.emit import Emitter
from fdg.compiler.flow import total
from fdg.compiler.fuse import fuse
from fdg.compiler.ir import walk
from fdg.compiler.methods import Method
from fdg.compiler.ports import Handles, Interfaces
from fdg.compiler.source import TrainerSource, from_class, from_file
from fdg.compiler.vary import Typing, find_helper_call
from fdg.errors import UsageError, did_you_mean
from fdg.graph import Fragment, Graph, Region


def project(
    trainer: type | None = None,
    *,
    file: str = "",
    class_name: str = "",
    policy: Any,
    actors: int = 1,
    replay_shards: int = 1,
    workers: int | None = None,
    passes: Iterable[str] = PASSES,
    fused: bool = False,
) -> Graph:
    """Project a trainer (a class, or a file and a class name) onto a policy's fragments.

    `passes` are the optimizations to apply: hoist, merge, dead, resident. The program means the same without them.
    `workers` is how many copies there are of what exists once per worker; by default one per actor.
    `fused` lets the actors of one worker act in one batch where they can.
    """
    chosen = frozenset(passes)
    for name in chosen - set(PASSES):
        raise UsageError(f"unknown pass {name!r}; {did_you_mean(name, PASSES)}")
    policy.check()
    source = from_class(trainer) if trainer is not None else from_file(file, class_name)
    graph = Projection(source, policy, actors, replay_shards, chosen, workers or actors).graph
    return fuse(graph, source, workers) if fused else graph


class Projection:
    """One run of the compiler."""

    def __init__(
        self, source: TrainerSource, policy: Any, actors: int, shards: int, passes: frozenset[str], workers: int = 1
    ) -> None:
        self.source, self.policy, self.passes = source, policy, passes
        self.analysis = analyse(source, actors)
        Typing(self.analysis)
        for method in self.analysis.methods.values():
            if actors > 1:
                refuse_captured(method)
            pin_captured(method)
        self.cutter = Cutter(self.analysis, policy, passes)
        self.mixed = self.find_mixed()
        if "hoist" in passes:
            for method in self.mixed:
                method.body = self.cutter.hoist(method, method.body)
            self.mixed = self.find_mixed()
        for method in self.mixed:
            method.body = self.cutter.cut(method, method.body, [], "merge" in passes)
        self.interfaces = Interfaces(self.cutter, self.mixed)
        name_regions(self.cutter)
        handles = Handles(self.analysis, self.interfaces, self.mixed)
        connect = Connect(self.analysis, self.cutter, handles, self.mixed)
        rates = Rates(self.analysis, self.mixed)
        edge_rates(connect.edges, self.cutter.regions, rates)
        self.graph = Graph(source.name, policy.name, source.module.file, actors, shards)
        emitter = Emitter(self.analysis, self.cutter, handles, self.mixed)
        driver = emitter.driver()
        self.graph.driver, self.graph.driver_map = str(driver), driver.origins
        for name, components in policy.fragments.items():
            plans = [plan for plan in self.cutter.regions if plan.fragment == name]
            text = emitter.fragment(name, plans)
            per = policy.per(name)
            replicas = {"actor": actors, "shard": shards, "worker": workers, "one": 1}[per]
            regions = [
                Region(
                    plan.name,
                    name,
                    plan.method.name,
                    plan.statements[0].origin.file,
                    plan.lines,
                    plan.calls,
                    plan.inputs,
                    plan.outputs,
                    rates.of(plan),
                    plan.restores,
                    plan.shares,
                    plan.company,
                    plan.appends,
                    plan.per,  # type: ignore[arg-type]
                )
                for plan in plans
            ]
            self.graph.fragments[name] = Fragment(
                name, list(components), per, replicas, "inprocess", regions, str(text), text.origins
            )
        self.graph.edges = list(connect.edges.values())
        self.graph.advice = rates.advice
        self.graph.passes = self.report()

    def find_mixed(self) -> list[Method]:
        """`train`, and the helpers whose work is spread over several fragments: those the driver runs itself."""
        found: list[Method] = []

        def visit(method: Method) -> None:
            if method in found:
                return
            found.append(method)
            for statement in walk(method.body):
                if statement.kind == "simple" and statement.head.helpers and self.cutter.key(statement) == DRIVER:
                    call = find_helper_call(statement, self.analysis, method)
                    if call is not None:
                        visit(call[0])

        visit(self.analysis.train)
        return found

    def report(self) -> list[str]:
        regions = self.cutter.regions
        statements = sum(1 for plan in regions for _ in walk(plan.statements))
        said = {
            "hoist": f"{self.cutter.hoisted} run(s) of inserts leave as one transfer each",
            "merge": f"{statements} statements in {len(regions)} region(s)",
            "dead": f"{self.interfaces.dropped} value(s) nobody reads are not sent",
            "resident": f"{self.interfaces.kept} value(s) stay where they are made",
        }
        return [f"{name}: {said[name]}" if name in self.passes else f"{name}: off" for name in PASSES]


__all__ = ["PASSES", "Projection", "project", "total"]
