"""The fragmented dataflow graph: what a trainer becomes under a policy, and the object the coordinator executes.

    Graph      fragments + edges + the driver's source
    Fragment   components that run together, their replicas, and the generated class that runs them
    Region     one remote call: a run of the user's statements inside a fragment
    Port       a value at a region's border: what enters, leaves, or stays resident
    Edge       a value from one fragment to another, and the operator that moves it

Everything here is plain data: `to_json` / `from_json` round-trip, and passes are functions from graph to graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import networkx as nx

Operator = Literal["local", "gather", "scatter", "broadcast", "route", "allreduce", "send"]
DRIVER = "driver"


@dataclass
class Port:
    """A value at a region's border.

    `how`: of a `value` the driver gets a copy with the reply, a `resident` one stays where it is. Either way an object
    stays in its fragment and the driver holds a handle to it; what is `plain` (a number, a string) has no handle.
    `bound`: the region may assign it; else an output is what entered, changed in place.
    """

    name: str
    how: Literal["value", "resident"] = "value"
    varying: bool = False
    maybe_unbound: bool = False
    plain: Literal["yes", "maybe", "no"] = "no"
    bound: bool = True


@dataclass
class Region:
    """One call into a fragment: which of the user's lines it runs, what enters and what leaves.

    `calls` are the component calls inside; `per_iteration` says how often the driver calls it in one turn of the
    outermost loop (`"1"`, `"config.steps"`, or `"once"` outside any loop).
    """

    name: str
    fragment: str
    method: str
    file: str
    lines: tuple[int, int]
    calls: list[str]
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    per_iteration: str = "once"
    restores: list[str] = field(default_factory=list)
    """Inputs whose objects the region may change in place, or keep under another name: they stay one object."""
    shares: dict[str, list[str]] = field(default_factory=dict)
    """Outputs that may hold objects of inputs, and which."""
    company: list[str] = field(default_factory=list)
    """Inputs that the region does not look at, but may change through parts that they share with others."""
    appends: list[str] = field(default_factory=list)
    """Inputs that the region does nothing with but append to them."""
    per: Literal["actor", "shard", "one"] = "one"


@dataclass
class Fragment:
    """Components that run together. `replicas` counts logical copies, `per` says of what: actor, shard, worker or one."""

    name: str
    components: list[str]
    per: Literal["actor", "shard", "worker", "one"] = "one"
    replicas: int = 1
    placement: str = "inprocess"
    regions: list[Region] = field(default_factory=list)
    source: str = ""
    line_map: list[tuple[int, str, int]] = field(default_factory=list)
    """(line of `source`, user's file, user's line)."""
    fused: bool = False
    """Whether the actors of one worker run its per-actor regions together, once over the rows of all."""


@dataclass
class Edge:
    """A value that crosses between two fragments.

    `staleness` 0 is synchronous; `bytes` counts what was seen to cross in a run.
    """

    source: str
    target: str
    value: str
    operator: Operator
    staleness: int = 0
    per_iteration: str = "once"
    bytes: int = 0


@dataclass
class Graph:
    """The fragmented dataflow graph of one trainer under one policy."""

    trainer: str
    policy: str
    file: str
    actors: int
    replay_shards: int
    fragments: dict[str, Fragment] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    driver: str = ""
    driver_map: list[tuple[int, str, int]] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    """What each pass did, one sentence a pass."""
    advice: list[str] = field(default_factory=list)
    """What would make this program coarser under this policy, with the line to move."""

    def regions(self) -> Iterator[Region]:
        for fragment in self.fragments.values():
            yield from fragment.regions

    def region(self, name: str) -> Region | None:
        return next((region for region in self.regions() if region.name == name), None)

    def edge(self, source: str, target: str, value: str) -> Edge | None:
        """The edge that carries `value` from `source` to `target`, or None."""
        for edge in self.edges:
            if (edge.source, edge.target, edge.value) == (source, target, value):
                return edge
        return None

    def placed(self, engine: str, workers: int) -> Graph:
        """Say of each fragment where an engine runs it: of no effect on what is computed."""
        here = engine == "inprocess" or self.policy == "local"
        for fragment in self.fragments.values():
            if here:
                fragment.placement = "inprocess"
                continue
            count = {"actor": min(workers, self.actors), "one": 1}.get(fragment.per, fragment.replicas)
            fragment.placement = f"{count} × {'service of Flame' if engine == 'flame' else 'worker process'}"
        return self

    def to_networkx(self) -> nx.MultiDiGraph:
        """Fragments (and the driver) as nodes, one keyed edge per value, for networkx's algorithms."""
        graph = nx.MultiDiGraph(trainer=self.trainer, policy=self.policy)
        graph.add_node(DRIVER)
        for fragment in self.fragments.values():
            graph.add_node(fragment.name, components=tuple(fragment.components), replicas=fragment.replicas)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, key=edge.value, operator=edge.operator, bytes=edge.bytes)
        return graph

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Graph:
        data: dict[str, Any] = json.loads(text)
        fragments = {}
        for name, fragment in data.pop("fragments").items():
            regions = [
                Region(
                    **{
                        **region,
                        "lines": tuple(region["lines"]),
                        "inputs": [Port(**port) for port in region["inputs"]],
                        "outputs": [Port(**port) for port in region["outputs"]],
                    }
                )
                for region in fragment.pop("regions")
            ]
            fragment["line_map"] = [tuple(entry) for entry in fragment["line_map"]]
            fragments[name] = Fragment(**fragment, regions=regions)
        edges = [Edge(**edge) for edge in data.pop("edges")]
        data["driver_map"] = [tuple(entry) for entry in data["driver_map"]]
        return cls(**data, fragments=fragments, edges=edges)

    def hash(self) -> str:
        """Names what is computed: the generated code and the wiring, not what a run has counted."""
        data = asdict(self)
        for edge in data["edges"]:
            edge.pop("bytes")
        for fragment in data["fragments"].values():
            fragment.pop("placement")
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
