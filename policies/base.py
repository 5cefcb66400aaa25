"""What a distribution policy is: which components go together, and nothing else.

    class Mine(Policy):
        name = "mine"
        fragments = {"actors": ("env", "actor"), "learner": ("buffer", "learner")}

A fragment of only environments or actors is replicated once per logical actor, a fragment of only the buffer once per
replay shard; every other fragment exists once. `replicated = ("learner",)` gives every worker a learner: each learns from
some rows of every batch, and gradients are summed.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fdg.compiler.operations import COMPONENTS
from fdg.errors import PolicyError, did_you_mean


class Policy:
    """A distribution policy, as a declaration."""

    name: ClassVar[str] = ""
    fragments: ClassVar[dict[str, tuple[str, ...]]] = {}
    replicated: ClassVar[tuple[str, ...]] = ()
    """Components that exist once per worker: the learner can."""
    doc: ClassVar[str] = ""

    @classmethod
    def fragment_of(cls, component: str) -> str:
        """The fragment that holds a component."""
        return next(name for name, components in cls.fragments.items() if component in components)

    @classmethod
    def per(cls, fragment: str) -> Literal["actor", "shard", "worker", "one"]:
        """What a fragment is replicated by."""
        components = set(cls.fragments[fragment])
        if components & set(cls.replicated):
            return "worker"
        if components <= {"env", "actor"}:
            return "actor"
        return "shard" if components == {"buffer"} else "one"

    @classmethod
    def check(cls) -> None:
        """A policy has to place every component exactly once."""
        placed = [component for components in cls.fragments.values() for component in components]
        for component in placed:
            if component not in COMPONENTS:
                raise PolicyError(
                    f"policy {cls.name!r} places an unknown component {component!r}; {did_you_mean(component, COMPONENTS)}"
                )
        for component in COMPONENTS:
            if placed.count(component) != 1:
                raise PolicyError(
                    f"policy {cls.name!r} places component {component!r} {placed.count(component)} times; "
                    f"write it into exactly one entry of `fragments` (seen: {cls.fragments})"
                )
        for component in cls.replicated:
            if component != "learner":
                raise PolicyError(
                    f'policy {cls.name!r} replicates {component!r}; only the learner can be: replicated = ("learner",)'
                )
            if "buffer" in cls.fragments[cls.fragment_of(component)]:
                raise PolicyError(
                    f"policy {cls.name!r} replicates the learner together with the buffer, and a batch is drawn once; give "
                    "the buffer a fragment of its own"
                )
        for fragment in cls.fragments:
            if not fragment.isidentifier() or fragment == "driver":
                raise PolicyError(f"policy {cls.name!r}: {fragment!r} cannot name a fragment; write a plain word")
