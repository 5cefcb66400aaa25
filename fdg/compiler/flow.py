"""Liveness and definite assignment over the statement tree.

Backward for what is live (with a fixpoint per loop, and sets for where break, continue, return and exceptions go),
forward for what is certainly bound. An attribute of the trainer is live when the method ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import libcst as cst

from fdg.compiler.ir import EVERYTHING, Effects, Statement, is_attribute

Uses = Callable[[Statement], tuple[set[str], set[str]]]


@dataclass(frozen=True)
class Exits:
    """What is live where control may go other than to the next statement."""

    at_break: frozenset[str] = frozenset()
    at_continue: frozenset[str] = frozenset()
    at_return: frozenset[str] = frozenset()
    at_raise: frozenset[str] = frozenset()


@dataclass
class Liveness:
    """Computes live variables of one method.

    `uses` says, of a statement's head, what it reads and what it certainly overwrites; `record` gets the live-out set.
    """

    universe: set[str]
    uses: Uses
    record: Callable[[Statement, set[str]], None] = field(default=lambda statement, live: None)

    def expand(self, names: set[str]) -> set[str]:
        if EVERYTHING in names:
            return (names - {EVERYTHING}) | {name for name in self.universe if is_attribute(name)}
        return names

    def block(self, body: list[Statement], live: set[str], exits: Exits) -> set[str]:
        for statement in reversed(body):
            live = self.statement(statement, live, exits)
        return live

    def statement(self, statement: Statement, after: set[str], exits: Exits) -> set[str]:
        self.record(statement, after | exits.at_raise)
        reads, kills = self.uses(statement)
        reads = self.expand(reads)
        kind, blocks = statement.kind, statement.blocks
        if kind == "each":
            return self.block(blocks["body"], after, exits)
        if kind in ("simple", "region"):
            node = statement.parts.get("node")
            if isinstance(node, cst.Break):
                return set(exits.at_break)
            if isinstance(node, cst.Continue):
                return set(exits.at_continue)
            if isinstance(node, cst.Return):
                return reads | exits.at_return | exits.at_raise
            if isinstance(node, cst.Raise):
                return reads | exits.at_raise
            return reads | (after - kills) | exits.at_raise
        if kind == "if":
            return reads | (
                (self.block(blocks["body"], set(after), exits) | self.block(blocks["orelse"], set(after), exits))
                - kills
            )
        if kind == "match":
            live = set(after)
            for block in blocks.values():
                live |= self.block(block, set(after), exits)
            return reads | (live - kills)
        if kind == "with":
            return reads | (self.block(blocks["body"], after, exits) - kills)
        if kind in ("for", "while"):
            done = self.block(blocks["orelse"], set(after), exits)
            top: set[str] = set()
            while True:
                inner = replace(exits, at_break=frozenset(after), at_continue=frozenset(top | done | reads))
                body = self.block(blocks["body"], top | done | reads, inner)
                new = body - kills | reads | done
                if new <= top:
                    return top | exits.at_raise
                top |= new
        if kind == "try":
            final = self.block(blocks["finalbody"], set(after), exits)
            leaving = (
                {
                    name: frozenset(self.block(blocks["finalbody"], set(getattr(exits, name)), exits))
                    for name in ("at_break", "at_continue", "at_return", "at_raise")
                }
                if blocks["finalbody"]
                else {}
            )
            outer = replace(exits, **leaving)
            caught = set(outer.at_raise)
            for name, block in blocks.items():
                if name.startswith("handler"):
                    caught |= self.block(block, set(final), outer)
            caught |= final
            orelse = self.block(blocks["orelse"], set(final), outer)
            body = self.block(blocks["body"], orelse, replace(outer, at_raise=frozenset(caught)))
            return reads | body | caught
        raise AssertionError(kind)


def full_uses(statement: Statement) -> tuple[set[str], set[str]]:
    """What a statement's head reads and certainly overwrites. Changing an object that nobody reads later is no use."""
    return statement.head.reads, statement.head.strong


def certainly_bound(body: list[Statement], bound: set[str]) -> tuple[set[str], bool]:
    """What is bound after a block, and whether its end can be reached; notes `bound` on each statement."""
    for statement in body:
        statement.parts["bound"] = set(bound)
        node = statement.parts.get("node")
        if statement.kind == "each":
            bound, _ = certainly_bound(statement.blocks["body"], bound)
            continue
        if statement.kind in ("simple", "region"):
            if isinstance(node, (cst.Break, cst.Continue, cst.Return, cst.Raise)):
                return bound, False
            bound = bound | statement.head.strong
            if isinstance(node, cst.Del):
                bound = bound - statement.head.writes
            continue
        head = bound | statement.head.strong
        blocks = statement.blocks
        if statement.kind == "with":
            # A context may swallow an exception: what the body binds is not certain.
            inner, reach = certainly_bound(blocks["body"], set(head))
            bound = inner if reach else head
        elif statement.kind == "if":
            left, reach_left = certainly_bound(blocks["body"], set(head))
            right, reach_right = certainly_bound(blocks["orelse"], set(head))
            if not reach_left and not reach_right:
                return head, False
            bound = left & right if reach_left and reach_right else left if reach_left else right
        elif statement.kind == "match":
            for block in blocks.values():
                certainly_bound(block, set(head))
            bound = bound | set()
        elif statement.kind in ("for", "while"):
            before = bound if statement.kind == "for" else head
            certainly_bound(blocks["body"], set(head) - _unbinds(blocks["body"]))
            certainly_bound(blocks["orelse"], set(before))
            bound = before - _unbinds(blocks["body"])
        elif statement.kind == "try":
            certainly_bound(blocks["body"], set(bound))
            for name, block in blocks.items():
                if name != "body":
                    certainly_bound(block, set(bound))
            final, _ = certainly_bound(blocks["finalbody"], set(bound))
            bound = final
    return bound, True


def _unbinds(body: list[Statement]) -> set[str]:
    return {
        name
        for statement in body
        for inner in statement.walk()
        if isinstance(inner.parts.get("node"), cst.Del)
        for name in inner.head.writes
    }


def strongly_writes(body: list[Statement]) -> set[str]:
    """What a block certainly binds."""
    kept = [(statement, statement.parts.get("bound")) for statement in body]
    bound, reach = certainly_bound(body, set())
    for statement, before in kept:
        if before is not None:
            statement.parts["bound"] = before
    return bound if reach else set()


def total(body: list[Statement]) -> Effects:
    effects = Effects()
    for statement in body:
        effects.add(statement.whole)
    return effects
