"""What the parts of a graph are called, in which order fragments stand, and in which colours."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath

from rich.filesize import decimal

from fdg.graph import DRIVER, Edge, Fragment, Graph, Port, Region

FLOW = ["env", "actor", "buffer", "learner"]
COLOURS = {  # fill, line and text of a fragment, by the last of its components in FLOW
    "env": ("#ecfdf5", "#10b981", "#065f46"),
    "actor": ("#eff6ff", "#3b82f6", "#1e40af"),
    "buffer": ("#fffbeb", "#f59e0b", "#92400e"),
    "learner": ("#f5f3ff", "#8b5cf6", "#5b21b6"),
    "": ("#f8fafc", "#94a3b8", "#334155"),
}


def clean(label: object) -> str:
    """One line, without the characters that a terminal obeys or that XML forbids."""
    line = re.sub(r"\s+", " ", str(label))
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs", "Cn") else c for c in line)


def title(graph: Graph) -> str:
    return clean(f"{graph.trainer} under {graph.policy}")


def scale(graph: Graph) -> str:
    return f"{_plural(graph.actors, 'actor')} · {_plural(graph.replay_shards, 'replay shard')}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def heading(fragment: Fragment) -> str:
    copies = f" ×{fragment.replicas}" if fragment.replicas != 1 else ""
    return clean(f"{fragment.name}{copies}{', fused' if fragment.fused else ''}")


def holds(fragment: Fragment) -> str:
    return clean(" · ".join(filter(None, [" + ".join(fragment.components), fragment.placement])))


def place(region: Region) -> str:
    """Where the region's statements stand in the user's file: `dqn.py:41-46`."""
    first, last = region.lines
    return clean(f"{PurePath(region.file).name}:{first}" + (f"-{last}" if last != first else ""))


def often(per_iteration: str) -> str:
    return "once" if per_iteration == "once" else clean(f"{per_iteration} per iteration")


def pace(edge: Edge) -> str:
    return f"stale ≤ {edge.staleness}" if edge.staleness else "sync"


def carried(edge: Edge) -> str:
    """What stands beside a value's name on an arrow: the operator, and what is out of the ordinary."""
    notes = [edge.operator] + [pace(edge)] * bool(edge.staleness)
    notes += [f"×{edge.per_iteration.removeprefix('config.')}"] * (edge.per_iteration not in ("1", "once"))
    return clean(" · ".join(notes + [decimal(edge.bytes)] * bool(edge.bytes)))


def border(graph: Graph, region: Region) -> dict[str, list[str]]:
    """What enters a region, leaves it, and stays. A resident value that an edge carries counts as moving too."""
    moves = [edge for edge in graph.edges if edge.source != edge.target]
    brought = {edge.value for edge in moves if edge.target == region.fragment}
    taken = {edge.value for edge in moves if edge.source == region.fragment}
    looks = [port for port in region.inputs if port.name not in region.company]
    gives = [port for port in region.outputs if port.name not in region.company]
    enters = [port for port in looks if port.how == "value" or port.name in brought]
    leaves = [port for port in gives if port.how == "value" or port.name in taken]
    held = [port for port in looks if port not in enters] + gives
    stays = {port.name: port for port in held if port.how == "resident"}
    return {
        "enters": [_port(port) for port in enters],
        "leaves": [_port(port) for port in leaves],
        "stays": [_port(port) for port in stays.values()],
    }


def _port(port: Port) -> str:
    notes = ["varying"] * port.varying + ["maybe unbound"] * port.maybe_unbound
    return clean(port.name + (f" ({', '.join(notes)})" if notes else ""))


def in_flow(graph: Graph) -> list[Fragment]:
    """The fragments in the order of data flow; an edge's end that is no fragment is drawn as an empty one."""
    fragments = [*graph.fragments.values()]
    known = {DRIVER, *(fragment.name for fragment in fragments)}
    ends = dict.fromkeys(end for edge in graph.edges for end in (edge.source, edge.target) if end not in known)
    fragments += [Fragment(end, [], placement="") for end in ends]
    return sorted(fragments, key=lambda f: min((FLOW.index(c) for c in f.components if c in FLOW), default=len(FLOW)))


def kind(fragment: Fragment) -> str:
    return max((c for c in fragment.components if c in FLOW), key=FLOW.index, default="")
