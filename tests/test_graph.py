"""The graph as data (json, hash, networkx) and its drawings."""

import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdg.draw import FORMATS, draw
from fdg.errors import UsageError
from fdg.graph import DRIVER, Edge, Fragment, Graph, Port, Region

SVG = "{http://www.w3.org/2000/svg}"


def dqn_coarse() -> Graph:
    """DQN under single_learner_coarse: collecting is one call of the actors, updating one call of the learner."""
    td, rows = Port("td", "resident", varying=True), Port("rows", varying=True)
    steps = ["agent_act", "env_step", "replay_buffer_insert"]
    update = ["replay_buffer_insert", "replay_buffer_sample", "agent_learn"]
    actors = [
        Region("actors.reset", "actors", "reset", "/home/me/dqn.py", (41, 41), ["env_reset"], outputs=[td]),
        Region(
            "actors.collect",
            "actors",
            "collect",
            "/home/me/dqn.py",
            (44, 48),
            steps,
            [Port("eps"), td],
            [td, rows],
            "1",
        ),
    ]
    learner = [
        Region("learner.update", "learner", "update", "/home/me/dqn.py", (49, 50), update, [rows], [Port("loss")], "1"),
    ]
    return Graph(
        "DQN",
        "single_learner_coarse",
        "/home/me/dqn.py",
        actors=2,
        replay_shards=1,
        fragments={
            "actors": Fragment("actors", ["env", "actor"], "actor", 2, regions=actors),
            "learner": Fragment("learner", ["buffer", "learner"], regions=learner),
        },
        edges=[
            Edge(DRIVER, "actors", "eps", "broadcast", per_iteration="1"),
            Edge("actors", "learner", "rows", "gather", per_iteration="1"),
            Edge("learner", "actors", "weights", "broadcast", per_iteration="1"),
            Edge("learner", DRIVER, "loss", "send", per_iteration="1"),
        ],
        driver="for i in range(self.config.iterations):\n    ...\n",
        passes=["hoist: inserts at dqn.py:47 leave actors.collect as one transfer"],
        advice=["dqn.py:50 may move below the loop"],
    )


def dqn_sharded() -> Graph:
    """DQN under sharded_replay, with priorities that come back and weights that may lag."""
    graph, file, often = dqn_coarse(), "/home/me/dqn.py", "config.updates"
    insert = Region(
        "replay.insert", "replay", "insert", file, (47, 47), ["replay_buffer_insert"], [Port("rows")], [], "1"
    )
    sample = Region(
        "replay.sample", "replay", "sample", file, (50, 50), ["replay_buffer_sample"], [], [Port("batch")], often
    )
    learn = Region("learner.learn", "learner", "learn", file, (50, 50), ["agent_learn"], [Port("batch")], [], often)
    graph.policy, graph.replay_shards = "sharded_replay", 2
    graph.fragments["learner"] = Fragment("learner", ["learner"], regions=[learn])
    graph.fragments["replay"] = Fragment("replay", ["buffer"], "shard", 2, regions=[insert, sample])
    graph.edges = [
        Edge(DRIVER, "actors", "eps", "broadcast", per_iteration="1"),
        Edge("actors", "replay", "rows", "route", per_iteration="1", bytes=18_432),
        Edge("replay", "learner", "batch", "gather", per_iteration=often),
        Edge("replay", "learner", "index", "gather", per_iteration=often),
        Edge("learner", "replay", "priority", "route", per_iteration=often),
        Edge("learner", "actors", "weights", "broadcast", staleness=2, per_iteration="1"),
        Edge("learner", DRIVER, "loss", "send", per_iteration=often),
    ]
    return graph


def multi_learner() -> Graph:
    region = Region(
        "workers.step", "workers", "step", "ppo.py", (9, 30), ["agent_act", "agent_learn"], per_iteration="1"
    )
    workers = Fragment("workers", ["env", "actor", "learner"], "actor", 4, "process", [region])
    edges = [Edge("workers", "workers", "gradients", "allreduce"), Edge("workers", DRIVER, "loss", "gather")]
    return Graph("PPO", "multi_learner", "ppo.py", 4, 1, {"workers": workers}, edges)


def empty() -> Graph:
    return Graph("DQN", "local", "dqn.py", 1, 1)


# As data -------------------------------------------------------------------------------------------------------------

names = st.text(max_size=12)
ports = st.builds(
    Port, name=names, how=st.sampled_from(["value", "resident"]), varying=st.booleans(), maybe_unbound=st.booleans()
)
regions = st.builds(
    Region,
    name=names,
    fragment=names,
    method=names,
    file=names,
    lines=st.tuples(st.integers(1, 999), st.integers(1, 999)),
    calls=st.lists(names, max_size=2),
    inputs=st.lists(ports, max_size=2),
    outputs=st.lists(ports, max_size=2),
    per_iteration=st.one_of(st.sampled_from(["once", "1", "config.steps"]), names),
)
components = st.lists(st.sampled_from(["env", "actor", "buffer", "learner", "other"]), unique=True)
operators = st.sampled_from(["local", "gather", "scatter", "broadcast", "route", "allreduce", "send"])


@st.composite
def graphs(draw_from: st.DrawFn) -> Graph:
    """Any graph, whatever its names; an edge may end at the driver or at a fragment that is not there."""
    fragments = {
        name: Fragment(
            name,
            draw_from(components),
            draw_from(st.sampled_from(["actor", "shard", "one"])),
            draw_from(st.integers(1, 3)),
            regions=draw_from(st.lists(regions.map(lambda r, name=name: replace(r, fragment=name)), max_size=2)),
            source=draw_from(names),
        )
        for name in draw_from(st.lists(names.filter(lambda name: name != DRIVER), max_size=4, unique=True))
    }
    ends = st.sampled_from([DRIVER, "elsewhere", *fragments])
    edges = st.builds(
        Edge,
        ends,
        ends,
        names,
        operators,
        st.integers(0, 3),
        st.sampled_from(["once", "1", "n"]),
        st.integers(0, 10**9),
    )
    notes = st.lists(names, max_size=2)
    return Graph(
        *(draw_from(names) for _ in range(3)),
        actors=draw_from(st.integers(1, 9)),
        replay_shards=draw_from(st.integers(1, 9)),
        fragments=fragments,
        edges=draw_from(st.lists(edges, max_size=8)),
        driver=draw_from(names),
        passes=draw_from(notes),
        advice=draw_from(notes),
    )


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_json_round_trip(graph: Graph) -> None:
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert again.hash() == graph.hash()
    assert isinstance(next((region.lines for region in again.regions()), ()), tuple)


def test_hash_names_the_wiring_not_what_a_run_counted() -> None:
    graph, counted, rewired, regenerated = dqn_coarse(), dqn_coarse(), dqn_coarse(), dqn_coarse()
    counted.edges[1].bytes = 4096
    rewired.edges.pop()
    regenerated.fragments["actors"].source = "class Actors: ..."
    assert graph.hash() == counted.hash()
    assert len({graph.hash(), rewired.hash(), regenerated.hash(), dqn_sharded().hash()}) == 4


def test_networkx_view() -> None:
    view = dqn_sharded().to_networkx()
    assert set(view) == {DRIVER, "actors", "replay", "learner"}
    assert view.nodes["replay"] == {"components": ("buffer",), "replicas": 2}
    assert view.edges["actors", "replay", "rows"] == {"operator": "route", "bytes": 18_432}
    assert view.number_of_edges("replay", "learner") == 2
    assert nx.shortest_path(view, "actors", "learner") == ["actors", "replay", "learner"]


def test_lookup() -> None:
    graph = dqn_coarse()
    assert graph.region("actors.collect") is graph.fragments["actors"].regions[1]
    assert graph.region("actors.colect") is None
    assert graph.edge("learner", "actors", "weights") is graph.edges[2]
    assert graph.edge("actors", "learner", "weights") is None


# As drawings ---------------------------------------------------------------------------------------------------------


def words(drawing: str, format: str) -> str:
    """What a reader of the drawing sees, its escapes resolved."""
    if format == "svg":
        return "\n".join(ET.fromstring(drawing).itertext())
    if format == "mermaid":
        return re.sub(r"#(\d+);", lambda found: chr(int(found[1])), drawing)
    if format == "dot":
        return re.sub(r"\\(.)", r"\1", drawing.replace(r"\n", "\n"))
    return drawing


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("example", [dqn_coarse, dqn_sharded, multi_learner, empty])
def test_a_drawing_names_everything(example, format: str) -> None:
    graph = example()
    seen = words(draw(graph, format), format)
    assert graph.trainer in seen and graph.policy in seen and DRIVER in seen
    for fragment in graph.fragments.values():
        assert fragment.name in seen
        assert format == "json" or fragment.replicas == 1 or f"{fragment.name} ×{fragment.replicas}" in seen
    for region in graph.regions():
        assert region.name in seen and all(call in seen for call in region.calls)
        assert format == "json" or re.search(rf"(dqn|ppo)\.py:{region.lines[0]}\b", seen)
    for edge in graph.edges:
        assert re.search(rf"\b{edge.value}\b", seen) and edge.operator in seen
        if edge.staleness and format != "json":
            assert f"stale ≤ {edge.staleness}" in seen


def test_text() -> None:
    assert draw(dqn_coarse()) == textwrap.dedent("""\
        DQN under single_learner_coarse · 2 actors · 1 replay shard
        ╭─ actors ×2 · env + actor · inprocess ────────────────────────────────────────────────────────────╮
        │ actors.reset    dqn.py:41     once                                                               │
        │                 calls         env_reset                                                          │
        │                 stays         td (varying)                                                       │
        │ actors.collect  dqn.py:44-48  1 per iteration                                                    │
        │                 calls         agent_act, env_step, replay_buffer_insert                          │
        │                 enters        eps                                                                │
        │                 leaves        rows (varying)                                                     │
        │                 stays         td (varying)                                                       │
        ╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
        ╭─ learner · buffer + learner · inprocess ─────────────────────────────────────────────────────────╮
        │ learner.update  dqn.py:49-50  1 per iteration                                                    │
        │                 calls         replay_buffer_insert, replay_buffer_sample, agent_learn            │
        │                 enters        rows (varying)                                                     │
        │                 leaves        loss                                                               │
        ╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
        ╭─ driver ─────────────────────────────────────────────────────────────────────────────────────────╮
        │ once             actors.reset                                                                    │
        │ 1 per iteration  actors.collect, learner.update                                                  │
        │ sends            eps                                                                             │
        │ receives         loss                                                                            │
        ╰──────────────────────────────────────────────────────────────────────────────────────────────────╯

         edge               value     operator    pace   per iteration
         ─────────────────────────────────────────────────────────────
         driver → actors    eps       broadcast   sync   1
         actors → learner   rows      gather      sync   1
         learner → actors   weights   broadcast   sync   1
         learner → driver   loss      send        sync   1

        passes
          • hoist: inserts at dqn.py:47 leave actors.collect as one transfer

        advice
          • dqn.py:50 may move below the loop
        """)


def test_text_shows_bytes_once_seen_and_a_resident_value_that_an_edge_carries_as_leaving() -> None:
    assert "bytes" not in draw(dqn_coarse())
    graph = dqn_coarse()
    graph.edges[1].bytes = 18_432
    graph.region("actors.collect").outputs[1].how = "resident"
    assert "18.4 kB" in draw(graph)
    assert re.search(r"leaves +rows", draw(graph))


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "COLUMNS"])
def test_text_does_not_depend_on_the_terminal(variable: str, monkeypatch) -> None:
    expected = draw(dqn_coarse())
    monkeypatch.setenv(variable, "40")
    assert draw(dqn_coarse()) == expected
    assert max(map(len, expected.splitlines())) <= 100 and "\x1b" not in expected


def check_mermaid(drawing: str) -> None:
    label, name = r'"[^"`\\\n]*"', r"(driver|f\d+)(r\d+)?"
    head, body = drawing.split("flowchart LR\n")
    assert head.startswith("---\ntitle: ") and head.endswith("\n---\n")
    known, depth = set(), 0
    for line in body.splitlines():
        if node := re.fullmatch(rf" +(?:subgraph )?({name})\[{label}\]", line):
            known.add(node[1])
            depth += "subgraph " in line
        elif edge := re.fullmatch(rf"    ({name}) (?:-->|-\.->)\|{label}\| ({name})", line):
            assert edge[1] in known and edge[4] in known
        else:
            depth -= line == "    end"
            assert re.fullmatch(rf"    end| +direction TB|    style {name} [\w:#,]+", line), line
    assert depth == 0


def check_dot(drawing: str) -> None:
    bare = re.sub(r'"(\\.|[^"\\])*"', "S", drawing)  # what is left of it without its strings
    assert '"' not in bare and bare.count("{") == bare.count("}") and bare.count("[") == bare.count("]")
    assert bare.startswith("digraph S {") and bare.endswith("}\n")
    nodes = set(re.findall(r"^ +(\w+) \[", bare, re.M))
    clusters = set(re.findall(r"subgraph (\w+) {", bare))
    for source, target, style in re.findall(r"^    (\w+) -> (\w+) \[(.*)\]$", bare, re.M):
        assert {source, target} <= nodes
        assert set(re.findall(r"l(?:head|tail)=(\w+)", style)) <= clusters


def check_svg(drawing: str) -> None:
    """Parses; everything lies inside the view; labels touch neither each other nor a fragment's box."""
    root = ET.fromstring(drawing)
    _, shapes, labels = root.findall(f"{SVG}g")
    _, _, width, height = map(float, root.attrib["viewBox"].split())

    def frames(group: ET.Element, corner: str) -> list[tuple[float, ...]]:
        rects = [rect.attrib for rect in group.iter(f"{SVG}rect") if rect.attrib["rx"] == corner]
        return [tuple(float(rect[key]) for key in ("x", "y", "width", "height")) for rect in rects]

    pills, boxes = frames(labels, "8"), frames(shapes, "12")
    for x, y, w, h in pills + boxes:
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
    for a, b in [*combinations(pills, 2), *((pill, box) for pill in pills for box in boxes)]:
        assert a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1], (a, b)


CHECKS = {"mermaid": check_mermaid, "dot": check_dot, "svg": check_svg}


@pytest.mark.parametrize("format", CHECKS)
@pytest.mark.parametrize("example", [dqn_coarse, dqn_sharded, multi_learner, empty])
def test_a_drawing_is_well_formed(example, format: str) -> None:
    CHECKS[format](draw(example(), format))


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_any_graph_can_be_drawn(graph: Graph) -> None:
    for format, check in CHECKS.items():
        check(draw(graph, format))
    text = draw(graph, "text")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_labels_are_escaped() -> None:
    graph = dqn_coarse()
    hostile = 'a "b" <c> & [d] `e` #35; \\n\nf'
    flat = hostile.replace("\n", " ")
    graph.fragments["actors"].regions[0].name = hostile
    graph.edges[0].value = hostile
    for format, check in CHECKS.items():
        drawing = draw(graph, format)
        check(drawing)
        assert "<c>" not in drawing or format == "dot"
    assert flat in words(draw(graph, "svg"), "svg")
    assert flat in words(draw(graph, "mermaid"), "mermaid")
    assert flat.replace("\\", "\\\\").replace('"', '\\"') in draw(graph, "dot")
    assert flat in draw(graph, "text")


def test_svg_merges_parallel_edges_and_dashes_stale_ones() -> None:
    arrows = ET.fromstring(draw(dqn_sharded(), "svg")).findall(f"{SVG}g")[0].findall(f"{SVG}path")
    assert len(arrows) == 6  # of 7 edges, batch and index go the same way
    assert sum("stroke-dasharray" in arrow.attrib for arrow in arrows) == 1


def test_unknown_format() -> None:
    with pytest.raises(UsageError, match="unknown graph format 'mermade': did you mean 'mermaid'"):
        draw(empty(), "mermade")


def test_drawing_does_not_import_torch() -> None:
    code = "import sys, fdg.draw; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_graph_is_the_same_in_every_process() -> None:
    """The cache of generated code goes by the graph's hash: it must not depend on the order of Python's sets."""
    code = textwrap.dedent("""
        from fdg import registry
        from fdg.compiler import project

        target = registry.find_algorithm("reinforce")
        policy = registry.find_policy("single_learner_fine")
        print(project(file=target.file, class_name=target.class_name, policy=policy).hash())
    """)
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("0", "3")
    }
    assert len(hashes) == 1
