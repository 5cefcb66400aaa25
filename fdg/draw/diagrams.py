"""A graph as mermaid or dot: fragments as boxes, regions as nodes in them, one arrow per value."""

from __future__ import annotations

import json
import re

from fdg.draw.labels import COLOURS, carried, clean, heading, holds, in_flow, kind, often, place, scale, title
from fdg.graph import DRIVER, Edge, Graph, Region


def mermaid(graph: Graph) -> str:
    """A mermaid flowchart, as GitHub and many other readers of Markdown draw it."""
    header = json.dumps(f"{title(graph)} · {scale(graph)}", ensure_ascii=False)
    lines = ["---", f"title: {header}", "---", "flowchart LR"]
    fragments = in_flow(graph)
    ids = {DRIVER: DRIVER} | {fragment.name: f"f{i}" for i, fragment in enumerate(fragments)}
    for fragment in reversed(fragments):  # mermaid begins its layout, at the left, with the subgraph it read last
        name = ids[fragment.name]
        label = _quote_mermaid(" · ".join(filter(None, [heading(fragment), holds(fragment)])))
        nodes = [f"        {name}r{i}[{_quote_mermaid(*_node(r))}]" for i, r in enumerate(fragment.regions)]
        if nodes:
            lines += [f"    subgraph {name}[{label}]", "        direction TB", *nodes, "    end"]
        else:
            lines.append(f"    {name}[{label}]")
        fill, line, ink = COLOURS[kind(fragment)]
        lines.append(f"    style {name} fill:{fill},stroke:{line},color:{ink}")
    train = _quote_mermaid(clean(f"{graph.trainer}.train"))
    lines += [f'    subgraph {DRIVER}["{DRIVER}"]', f"        {DRIVER}r0[{train}]", "    end"]
    lines.append(f"    style {DRIVER} fill:#e2e8f0,stroke:#334155,color:#334155")
    whole = {DRIVER, *(fragment.name for fragment in fragments if fragment.regions)}
    for edge in graph.edges:
        source, target = ids[edge.source], ids[edge.target]
        if source == target and edge.source in whole:  # mermaid cannot draw an arrow from a subgraph to itself
            source = target = f"{source}r0"
        arrow = "-.->" if edge.staleness else "-->"
        lines.append(f"    {source} {arrow}|{_quote_mermaid(_label(edge))}| {target}")
    return "\n".join(lines) + "\n"


def dot(graph: Graph) -> str:
    """Graphviz source: `fdg graph … --format dot | dot -Tpdf`."""
    lines = [
        f"digraph {_quote_dot(graph.trainer)} {{",
        f'    graph [label={_quote_dot(title(graph), scale(graph))} labelloc=t fontname="Helvetica" rankdir=LR '
        "compound=true ranksep=1]",
        '    node [fontname="Helvetica" fontsize=11 shape=box style="rounded,filled" fillcolor=white color="#94a3b8"]',
        '    edge [fontname="Helvetica" fontsize=10 color="#64748b"]',
        f'    {DRIVER} [label="{DRIVER}"]',
    ]
    for i, fragment in enumerate(in_flow(graph)):
        fill, line, ink = COLOURS[kind(fragment)]
        lines += [
            f"    subgraph cluster_f{i} {{",
            f"        label={_quote_dot(heading(fragment), holds(fragment))}",
            f'        style="rounded,filled" fillcolor="{fill}" color="{line}" fontcolor="{ink}"',
            # Graphviz has no arrows to clusters: such an arrow goes to this point and is clipped at the border.
            f"        f{i} [shape=point style=invis]",
            *(f"        f{i}r{j} [label={_quote_dot(*_node(region))}]" for j, region in enumerate(fragment.regions)),
            "    }",
        ]
    order = [DRIVER, *(fragment.name for fragment in in_flow(graph))]
    for source, target, edge in _arrows(graph):
        style = [f"label={_quote_dot(_label(edge))}"] + ["style=dashed"] * bool(edge.staleness)
        # What flows back does not decide who stands left of whom.
        style += ["constraint=false"] * (order.index(edge.target) <= order.index(edge.source))
        for clip, end in (("ltail", source), ("lhead", target)):
            style += [f"{clip}=cluster_{end}"] * (end[1:].isdigit() and source != target)
        lines.append(f"    {source} -> {target} [{' '.join(style)}]")
    return "\n".join([*lines, "}"]) + "\n"


def _node(region: Region) -> list[str]:
    return [clean(region.name), f"{place(region)}, {often(region.per_iteration)}", *map(clean, region.calls)]


def _label(edge: Edge) -> str:
    return clean(f"{edge.value} ({carried(edge)})")


def _arrows(graph: Graph) -> list[tuple[str, str, Edge]]:
    """Each edge between ids of nodes: the one region that has the value as a port, else the whole fragment."""
    order = {fragment.name: i for i, fragment in enumerate(in_flow(graph))}
    arrows = []
    for edge in graph.edges:
        ends = []
        for name, side in ((edge.source, "outputs"), (edge.target, "inputs")):
            regions = graph.fragments[name].regions if name in graph.fragments else []
            users = [j for j, r in enumerate(regions) if edge.value in [port.name for port in getattr(r, side)]]
            if edge.source == edge.target and regions:
                users = users[:1] or [0]  # an arrow from a cluster to itself cannot be clipped at its border
            ends.append(DRIVER if name == DRIVER else f"f{order[name]}" + (f"r{users[0]}" if len(users) == 1 else ""))
        arrows.append((ends[0], ends[1], edge))
    return arrows


def _quote_mermaid(*lines: str) -> str:
    """A quoted mermaid label; whatever mermaid might read as markup becomes an entity."""
    escaped = [re.sub(r"[^\w .,:()/+×·≤-]", lambda found: f"#{ord(found[0])};", line) for line in lines if line]
    return '"' + ("<br/>".join(escaped) or " ") + '"'


def _quote_dot(*lines: str) -> str:
    return '"' + r"\n".join(clean(line).replace("\\", r"\\").replace('"', r"\"") for line in lines if line) + '"'
