"""A graph as text: what a user reads in a terminal before a run."""

from __future__ import annotations

import io
import textwrap

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fdg.draw.labels import border, clean, heading, holds, in_flow, often, pace, place, scale, title
from fdg.graph import DRIVER, Fragment, Graph

WIDTH = 100


def text(graph: Graph) -> str:
    """A box per fragment and one for the driver, the edges as a table, what the passes did, advice."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(Text(f"{title(graph)} · {scale(graph)}"))
    for fragment in in_flow(graph):
        name = " · ".join(filter(None, [heading(fragment), holds(fragment)]))
        console.print(_panel(name, _regions(graph, fragment)))
    console.print(_panel(DRIVER, _driver(graph)))
    if graph.edges:
        console.print(_edges(graph))
    for name, notes in (("passes", graph.passes), ("advice", graph.advice)):
        if notes:
            console.print(Text(name))
            for note in notes:
                console.print(Text(textwrap.fill(clean(note), WIDTH, initial_indent="  • ", subsequent_indent="    ")))
            console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip() + "\n"


def _panel(name: str, rows: list[tuple[str, ...]]) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*(Text(clean(cell), overflow="fold") for cell in row))
    return Panel(grid, title=Text(name), title_align="left", width=WIDTH)


def _regions(graph: Graph, fragment: Fragment) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for region in fragment.regions:
        rows.append((region.name, place(region), often(region.per_iteration)))
        facts = {"calls": region.calls, **border(graph, region)}
        rows += [("", fact, ", ".join(values)) for fact, values in facts.items() if values]
    return rows


def _driver(graph: Graph) -> list[tuple[str, ...]]:
    """What the driver calls and how often, and which values pass through it."""
    rates = dict.fromkeys(region.per_iteration for region in graph.regions())
    facts = [(often(rate), [r.name for r in graph.regions() if r.per_iteration == rate]) for rate in rates]
    facts.append(("sends", [edge.value for edge in graph.edges if edge.source == DRIVER]))
    facts.append(("receives", [edge.value for edge in graph.edges if edge.target == DRIVER]))
    return [(fact, ", ".join(dict.fromkeys(values))) for fact, values in facts if values]


def _edges(graph: Graph) -> Table:
    seen = any(edge.bytes for edge in graph.edges)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ["edge", "value", "operator", "pace", "per iteration"] + ["bytes"] * seen:
        table.add_column(column, overflow="fold", justify="right" if column == "bytes" else "left")
    for edge in graph.edges:
        cells = [f"{edge.source} → {edge.target}", edge.value, edge.operator, pace(edge), edge.per_iteration]
        table.add_row(*(Text(clean(cell)) for cell in cells + [decimal(edge.bytes)] * seen))
    return table
