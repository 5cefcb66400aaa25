"""A graph as one self-contained SVG, laid out by hand so that no label can lie on another.

    ┌───────────────── driver ─────────────────┐     the driver spans the top
    └───┬────────────────────────────────▲─────┘
      [eps]                           [loss]         its values go straight down and up
    ┌───▼──┐         ┌──────┐         ┌──┴────┐      fragments stand in the order of data flow, equally high
    │actors├─[rows]─▶│replay├[batch]─▶│learner│      neighbours: straight arrows in the gap between them
    └───▲──┘         └──────┘         └──┬────┘
        └────[weights]───────────────────┘           others: a lane of their own below, its label below a gap

A box is as wide as its text and the driver's labels above it, a gap as wide as the widest label in it or below it.
Boxes and labels bring their own light ground and the lines are of a middle grey: legible on white and on black.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rich.cells import cell_len

from fdg.draw.labels import COLOURS, border, carried, clean, heading, holds, in_flow, kind, often, place, scale, title
from fdg.graph import DRIVER, Edge, Fragment, Graph

MARGIN, PAD, ROW, HEAD, SHADOW, ARROW = 24, 14, 18, 58, 8, 32
DRIVER_TOP, DRIVER_HEIGHT = 76, 44
LINE, INK, SOFT, SLATE = "#718096", "#0f172a", "#55637a", "#334155"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

Pair = tuple[str, str]


@dataclass
class Label:
    """The values that go from one fragment to another: one arrow, one label with a line per value."""

    edges: list[Edge]

    @property
    def width(self) -> float:
        return max(_mono(edge.value) + 8 + _mono(carried(edge)) for edge in self.edges) + 20

    @property
    def height(self) -> float:
        return len(self.edges) * ROW + 8


@dataclass
class Card:
    """One region inside a fragment's box: its name and place in the head, below them rows of (text, colour)."""

    name: str
    place: str
    rows: list[tuple[str, str]]

    @property
    def width(self) -> float:
        return max([_mono(self.name) + 16 + _mono(self.place), *(_mono(row) for row, _ in self.rows)]) + 2 * PAD

    @property
    def height(self) -> float:
        return (1 + len(self.rows)) * ROW + 14


@dataclass
class Box:
    """A fragment: what stands in its box, and where the box stands."""

    fragment: Fragment
    cards: list[Card]
    notes: list[str]
    width: float = 0
    left: float = 0
    ports: list[Pair] = field(default_factory=list)
    """The lanes that end at the lower side, from left to right."""

    @property
    def shadow(self) -> int:
        """How far the replicas behind it stand out to the right and below."""
        return SHADOW if self.fragment.replicas > 1 else 0

    @property
    def right(self) -> float:
        return self.left + self.width + self.shadow

    @property
    def height(self) -> float:
        return HEAD + sum(card.height + 10 for card in self.cards) + len(self.notes) * ROW + 6

    def port(self, pair: Pair) -> float:
        return self.left + self.width * (self.ports.index(pair) + 1) / (len(self.ports) + 1)


@dataclass
class Layout:
    """Where everything stands: boxes and labels by name, and the heights at which the driver and the boxes end."""

    labels: dict[Pair, Label]
    boxes: dict[str, Box]
    lanes: dict[Pair, int]
    """Arrows between fragments that are no neighbours, uppermost first, and the gap in which the label stands."""
    driver: float = DRIVER_TOP + DRIVER_HEIGHT
    top: float = 0
    bottom: float = 0
    right: float = 0

    def between(self, one: str, other: str) -> list[tuple[Pair, Label]]:
        return [(pair, self.labels[pair]) for pair in ((one, other), (other, one)) if pair in self.labels]


def svg(graph: Graph) -> str:
    """The drawing as SVG source."""
    layout = _layout(graph)
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    _add(root, "title", {}, f"{title(graph)}, {scale(graph)}")
    tip = {"id": "tip", "viewBox": "0 0 10 10", "refX": 9, "refY": 5, "orient": "auto"}
    tip |= {"markerWidth": 7, "markerHeight": 7}
    marker = _add(_add(root, "defs"), "marker", tip)
    _add(marker, "path", {"d": "M 0 0.8 L 10 5 L 0 9.2 z", "fill": LINE})
    arrows, shapes, labels = (_add(root, "g") for _ in range(3))  # arrows run behind boxes and labels
    _text(shapes, MARGIN, 38, title(graph), 20, LINE, weight=700)
    _text(shapes, MARGIN, 60, scale(graph), 13, LINE)
    _rect(shapes, MARGIN, DRIVER_TOP, layout.right - MARGIN, DRIVER_HEIGHT, 12, SLATE, SLATE)
    _text(shapes, MARGIN + PAD, DRIVER_TOP + 27, DRIVER, 15, "#f8fafc", weight=700)
    runs = " ".join([f"runs {graph.trainer}.train", *_loops(layout.labels, DRIVER)])
    _text(shapes, MARGIN + PAD + 66, DRIVER_TOP + 27, runs, 13, "#cbd5e1")
    for box in layout.boxes.values():
        _draw_box(shapes, box, layout.top, layout.bottom)
    _draw_driven(arrows, labels, layout)
    _draw_neighbours(arrows, labels, layout)
    width, height = layout.right + MARGIN, _draw_lanes(arrows, labels, layout) + MARGIN
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return ET.tostring(root, encoding="unicode") + "\n"


def _layout(graph: Graph) -> Layout:
    labels: dict[Pair, Label] = {}
    for edge in graph.edges:
        labels.setdefault((edge.source, edge.target), Label([])).edges.append(edge)
    layout = Layout(labels, {fragment.name: _box(graph, fragment, labels) for fragment in in_flow(graph)}, {})
    column = {name: i for i, name in enumerate(layout.boxes)}
    gaps = [[label for _, label in layout.between(*names)] for names in pairwise(layout.boxes)]
    widths = [max((label.width for label in gap), default=0) for gap in gaps]
    spans = {pair: sorted(column[name] for name in pair) for pair in labels if DRIVER not in pair}
    for pair in sorted(spans, key=lambda pair: len(range(*spans[pair]))):  # short ones above: they cross less
        if len(range(*spans[pair])) > 1:
            layout.lanes[pair] = gap = max(range(*spans[pair]), key=widths.__getitem__)
            widths[gap] = max(widths[gap], labels[pair].width)
    for pair in reversed(layout.lanes):  # at a box the upper lanes end outside, the deeper ones inside
        for name, other in (pair, pair[::-1]):
            ports = layout.boxes[name].ports
            ports.insert(0 if column[other] < column[name] else len(ports), pair)

    left: float = MARGIN
    for box, width in zip(layout.boxes.values(), [*widths, 0], strict=False):
        box.left = left
        left = box.right + width + 2 * ARROW
    layout.right = max([box.right for box in layout.boxes.values()] + [MARGIN + 13.0 * cell_len(title(graph))])

    driven = [label.height for pair, label in labels.items() if DRIVER in pair and pair[0] != pair[1]]
    layout.top = layout.driver + (max(driven) + 2 * ARROW - 10 if driven else ARROW)
    heights = [box.height for box in layout.boxes.values()] + [_stack(gap) + 2 * PAD for gap in gaps]
    layout.bottom = layout.top + max(heights, default=0)
    return layout


def _box(graph: Graph, fragment: Fragment, labels: dict[Pair, Label]) -> Box:
    box = Box(fragment, [], _loops(labels, fragment.name))
    for region in fragment.regions:
        rows = [(often(region.per_iteration), SOFT)] + [(clean(call), INK) for call in region.calls]
        stays = border(graph, region)["stays"]
        rows += [(f"keeps {', '.join(stays)}", SOFT)] * bool(stays)
        box.cards.append(Card(clean(region.name), place(region), rows))
    driven = [labels[pair].width for pair in ((DRIVER, fragment.name), (fragment.name, DRIVER)) if pair in labels]
    texts = [10.5 * cell_len(heading(fragment)), 7.5 * cell_len(holds(fragment)), *(_mono(note) for note in box.notes)]
    widths = [180, sum(driven) + 12, *(width + 2 * PAD for width in texts + [card.width for card in box.cards])]
    box.width = max(widths)
    return box


def _loops(labels: dict[Pair, Label], name: str) -> list[str]:
    """What goes from a fragment's replicas to each other: an all-reduce, say. Told inside the box."""
    own = labels.get((name, name), Label([]))
    return [clean(f"↻ {edge.value} {carried(edge)}") for edge in own.edges]


def _stack(labels: list[Label]) -> float:
    return sum(label.height + 14 for label in labels) - 14


def _draw_driven(arrows: ET.Element, labels: ET.Element, layout: Layout) -> None:
    """The driver's arrows, straight down and up, side by side above each box."""
    for name, box in layout.boxes.items():
        both = layout.between(DRIVER, name)
        x = box.left + (box.width - sum(label.width + 12 for _, label in both) + 12) / 2
        for (source, _), label in both:
            middle = x + label.width / 2
            ends = [(middle, layout.driver), (middle, layout.top)]
            _arrow(arrows, ends if source == DRIVER else ends[::-1], label)
            _draw_label(labels, middle, (layout.driver + layout.top) / 2, label)
            x += label.width + 12


def _draw_neighbours(arrows: ET.Element, labels: ET.Element, layout: Layout) -> None:
    """Arrows between neighbours, there and back, one above the other in the gap."""
    for one, other in pairwise(layout.boxes):
        both = layout.between(one, other)
        left, right = layout.boxes[one].right, layout.boxes[other].left
        y = (layout.top + layout.bottom - _stack([label for _, label in both])) / 2
        for (source, _), label in both:
            middle = y + label.height / 2
            ends = [(left, middle), (right, middle)]
            _arrow(arrows, ends if source == one else ends[::-1], label)
            _draw_label(labels, (left + right) / 2, middle, label)
            y += label.height + 14


def _draw_lanes(arrows: ET.Element, labels: ET.Element, layout: Layout) -> float:
    """Arrows between fragments further apart, each below the last; returns where the drawing ends."""
    boxes = [*layout.boxes.values()]
    y = layout.bottom + SHADOW
    for pair, gap in layout.lanes.items():
        label = layout.labels[pair]
        y += 14 + label.height / 2
        source, target = (layout.boxes[name] for name in pair)
        start, end = source.port(pair), target.port(pair)
        turns = [(start, y), (end, y)]
        _arrow(arrows, [(start, layout.bottom + source.shadow), *turns, (end, layout.bottom + target.shadow)], label)
        _draw_label(labels, (boxes[gap].right + boxes[gap + 1].left) / 2, y, label)
        y += label.height / 2
    return y


def _draw_box(parent: ET.Element, box: Box, top: float, bottom: float) -> None:
    fill, line, ink = COLOURS[kind(box.fragment)]
    for offset in (box.shadow, box.shadow / 2, 0) if box.shadow else (0,):
        _rect(parent, box.left + offset, top + offset, box.width, bottom - top, 12, fill, line)
    _text(parent, box.left + PAD, top + 26, heading(box.fragment), 16, ink, weight=700)
    _text(parent, box.left + PAD, top + 45, holds(box.fragment), 12.5, SOFT)
    y = top + HEAD
    for card in box.cards:
        _rect(parent, box.left + PAD, y, box.width - 2 * PAD, card.height, 8, "#ffffff", "#d5dce6")
        _text(parent, box.left + 2 * PAD, y + 20, card.name, 12, ink, MONO, 700)
        _text(parent, box.left + box.width - 2 * PAD - _mono(card.place), y + 20, card.place, 12, SOFT, MONO)
        for i, (row, colour) in enumerate(card.rows, start=1):
            _text(parent, box.left + 2 * PAD, y + 20 + i * ROW, row, 12, colour, MONO)
        y += card.height + 10
    for note in box.notes:
        _text(parent, box.left + PAD, y + 10, note, 12, ink, MONO)
        y += ROW


def _draw_label(parent: ET.Element, x: float, y: float, label: Label) -> None:
    left, top = x - label.width / 2, y - label.height / 2
    _rect(parent, left, top, label.width, label.height, 8, "#ffffff", "#b6c2d2")
    for i, edge in enumerate(label.edges):
        base = top + 17 + i * ROW
        _text(parent, left + 10, base, edge.value, 12, INK, MONO, 700)
        _text(parent, left + 18 + _mono(edge.value), base, carried(edge), 12, SOFT, MONO)


def _arrow(parent: ET.Element, points: list[tuple[float, float]], label: Label) -> None:
    """A line through the points with rounded corners and a tip; dashed where a value may be stale."""
    route = f"M {points[0][0]:g} {points[0][1]:g}"
    for (xa, ya), (x, y), (xb, yb) in zip(points, points[1:], points[2:], strict=False):
        into, out = ((10 * ((x > u) - (x < u)), 10 * ((y > v) - (y < v))) for u, v in ((xa, ya), (xb, yb)))
        route += f" L {x - into[0]:g} {y - into[1]:g} Q {x:g} {y:g} {x - out[0]:g} {y - out[1]:g}"
    route += f" L {points[-1][0]:g} {points[-1][1]:g}"
    dashes = {"stroke-dasharray": "6 4"} if any(edge.staleness for edge in label.edges) else {}
    style = {"d": route, "fill": "none", "stroke": LINE, "stroke-width": 1.8, "marker-end": "url(#tip)"}
    _add(parent, "path", style | dashes)


def _mono(label: str) -> float:
    """The width of a label at 12 px; monospaced fonts are at most 0.602 em wide."""
    return cell_len(clean(label)) * 12 * 0.602


def _text(
    parent: ET.Element, x: float, y: float, label: str, size: float, fill: str, family: str = SANS, weight: int = 400
) -> None:
    style = {"x": x, "y": y, "font-family": family, "font-size": size, "font-weight": weight, "fill": fill}
    _add(parent, "text", style, clean(label))


def _rect(parent: ET.Element, x: float, y: float, width: float, height: float, rx: float, fill: str, line: str) -> None:
    frame = {"x": x, "y": y, "width": width, "height": height, "rx": rx}
    _add(parent, "rect", frame | {"fill": fill, "stroke": line, "stroke-width": 1.4})


def _add(
    parent: ET.Element, tag: str, attributes: Mapping[str, object] | None = None, text: str | None = None
) -> ET.Element:
    values = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in (attributes or {}).items()}
    child = ET.SubElement(parent, tag, values)
    child.text, child.tail = text, "\n"
    return child
