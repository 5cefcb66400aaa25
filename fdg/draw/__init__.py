"""Drawings of a graph: text for the terminal, mermaid, dot and svg for documents, json for programs.

    print(draw(graph, "text"))

No external program is needed. What a region, a port or an edge is called is decided once, in `labels`, so that all
drawings say the same.
"""

from __future__ import annotations

from fdg.draw.diagrams import dot, mermaid
from fdg.draw.svg import svg
from fdg.draw.text import text
from fdg.errors import UsageError, did_you_mean
from fdg.graph import Graph

FORMATS = {"text": text, "mermaid": mermaid, "dot": dot, "svg": svg, "json": Graph.to_json}

__all__ = ["FORMATS", "draw"]


def draw(graph: Graph, format: str = "text") -> str:
    """The graph as `text`, `mermaid`, `dot`, `svg` or `json`.

    Raises UsageError for another format.

    >>> print(draw(Graph("DQN", "local", "dqn.py", actors=1, replay_shards=1), "dot").splitlines()[0])
    digraph "DQN" {
    """
    if format not in FORMATS:
        raise UsageError(f"unknown graph format {format!r}: {did_you_mean(format, FORMATS)}")
    return FORMATS[format](graph)
