"""What is known of a trainer's methods and attributes, and of the user's functions that they call.

`effects.py` fills this in rounds, until nothing changes any more. What depends on all methods at once is kept twice:

    last round          this round          of
    kinds               found               the trainer's attributes: what is assigned to them anywhere
    aliases             found_aliases       attributes that may share objects: what is one object in one method is in all
    Summary.given       Summary.found       the arguments that callers pass to a method
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from fdg.compiler.bindings import parameter_names
from fdg.compiler.ir import is_attribute
from fdg.compiler.lower import lower, lower_plain
from fdg.compiler.methods import Bearing, Method
from fdg.compiler.source import ClassSource, Module, TrainerSource
from fdg.compiler.tree import find
from fdg.compiler.values import Aliases, Kind, join_kinds


class Analysis:
    """All methods of one trainer that `train` can reach, with their effects."""

    def __init__(self, trainer: TrainerSource, actors: int, spill: frozenset[Any] = frozenset()) -> None:
        self.trainer, self.actors, self.spill = trainer, actors, spill
        self.bearing = Bearing(trainer)
        self.methods: dict[tuple[str, str], Method] = {}
        self.functions: dict[tuple[str, str], Method] = {}
        self.kinds: dict[str, Kind] = {}
        self.found: dict[str, Kind] = {}
        self.aliases = Aliases()
        self.found_aliases = Aliases()
        self.changed = False
        """Whether this round has found what the last did not know."""
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

    def need(self, owner: ClassSource, node: cst.FunctionDef) -> Method:
        """The method, read and lowered; its effects settle as the analysis goes round."""
        method = self.bearing.method(owner, node)
        if method.key not in self.methods:
            self.methods[method.key] = method
            if self.bearing.method_bears(owner, node):
                lower(self.bearing, method, self.actors > 1, self.spill)
            else:
                lower_plain(self.bearing, method)
            self.changed = True
        return method

    def function(self, module: Module, name: str) -> Method:
        """A module-level function of the user's own, summarised like a method."""
        key = (module.file, name)
        if key not in self.functions:
            node = module.functions[name]
            owner = ClassSource(f"<{module.file}>", module, None, {name: node}, set())  # type: ignore[arg-type]
            method = self.functions[key] = Method(owner, node, "", parameter_names(node.params))
            lower_plain(self.bearing, method)
            self.changed = True
        return self.functions[key]

    def rounds(self) -> Iterator[list[Method]]:
        """What there is to evaluate, round by round, until one finds nothing new.

        An ordinary fixpoint: each round is computed from what the round before knew, beginning with nothing.
        """
        for _ in range(100):
            self.changed = False
            self.found, self.found_aliases = {}, Aliases()
            yield [*self.methods.values(), *self.functions.values()]
            for method in [*self.methods.values(), *self.functions.values()]:
                summary = method.summary
                self.changed |= summary.given != summary.found
                summary.given, summary.found = summary.found, {}
            self.changed |= self.kinds != self.found or self.aliases.groups() != self.found_aliases.groups()
            self.kinds, self.aliases = self.found, self.found_aliases
            if not self.changed:
                return

    def attribute_kind(self, name: str) -> Kind:
        if name == "self.config":
            return "config"
        return self.kinds.get(name) if name in self.assigned else "unknown"

    def kind_of(self, name: str, method: Method) -> Kind:
        return self.attribute_kind(name) if is_attribute(name) else method.summary.kinds.get(name)

    def learn_kind(self, name: str, kind: Kind) -> None:
        self.found[name] = join_kinds(self.found.get(name), kind)
