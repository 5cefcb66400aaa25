"""Traces: every region call is in it, spans nest, and every worker has its rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_execution import QLike
from typer.testing import CliRunner

from fdg.algorithms.dqn import DQN
from fdg.cli import app
from fdg.errors import UsageError
from fdg.runtime import trace
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import launch

COARSE, SHARDED = "single_learner_coarse", "sharded_replay"
SMALL: dict[str, Any] = dict(
    actors=4, envs=2, iterations=3, steps=4, updates=2, batch_size=8, learning_starts=8, hidden_dim=8, replay_shards=2
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


class Seen:
    """A trace as it was written."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text())["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
        self.processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
        self.rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for event in events:
            if event["ph"] == "X":
                row = self.processes[event["pid"]], names["thread_name", event["pid"], event["tid"]]
                self.rows.setdefault(row, []).append(event)

    def count(self, process: str, row: str, phase: str) -> Counter[str]:
        return Counter(event["name"] for event in self.rows[process, row] if event["cat"] == phase)

    def check_nesting(self) -> None:
        """In one row, of two spans one is inside the other or they do not meet."""
        for events in self.rows.values():
            open_until: list[float] = []
            for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
                start, stop = event["ts"], event["ts"] + event["dur"]
                while open_until and open_until[-1] <= start + 1e-3:
                    open_until.pop()
                assert not open_until or stop <= open_until[-1] + 1e-3, event
                open_until.append(stop)


def labels(result: Any) -> Counter[str]:
    """How often each region was called, by the name that its spans have."""
    assert result.graph is not None
    found: Counter[str] = Counter()
    for region in result.graph.regions():
        found[trace.label(region)] += result.calls.get(f"{region.fragment}.{region.name}", 0)
    return found


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("policy, engine", [(COARSE, "inprocess"), (COARSE, "process"), (SHARDED, "process")])
def test_a_trace_has_every_region_call(policy: str, engine: str, fuse: bool, tmp_path: Path) -> None:
    workers = {"workers": 2} if engine == "process" else {}
    result = launch(DQN, policy=policy, engine=engine, fuse=fuse, trace=tmp_path / "trace.json", **SMALL, **workers)
    seen = Seen(tmp_path / "trace.json")
    seen.check_nesting()
    assert seen.count("driver", "driver", "region") == labels(result)
    assert seen.count("driver", "driver", "train") == {"DQN.train": 1}
    inside = next(name for name in labels(result) if name.endswith(" collect"))
    homes = ["driver"] * 4 if engine == "inprocess" else ["actors[0]", "actors[0]", "actors[1]", "actors[1]"]
    acting = [actor for actor in range(4) if not fuse or actor == 0 or homes[actor] != homes[actor - 1]]
    for actor in acting:
        row = homes[actor], f"actors[{actor}]"
        assert seen.count(*row, "region")[inside] == result.calls["actors.collect"]
        assert seen.count(*row, "collect")["agent_act"] == 3 * 4
        assert seen.count(*row, "sync")
    if engine == "process":
        shards = {"replay[0]", "replay[1]"} if policy == SHARDED else set()
        assert set(seen.processes.values()) == {"driver", "actors[0]", "actors[1]", "learner"} | shards
        assert any(name.startswith("wait for actors[0], actors[1]") for name in seen.count("driver", "driver", "sync"))
        for shard in shards:
            assert seen.count(shard, "requests", "sample")["answer"] > 0


def test_a_worker_works_while_the_driver_waits(tmp_path: Path) -> None:
    """All processes have one clock: what a worker does for a region call lies within that call."""
    launch(DQN, policy=COARSE, engine="process", workers=1, trace=tmp_path / "trace.json", **SMALL)
    seen = Seen(tmp_path / "trace.json")
    calls = [e for e in seen.rows["driver", "driver"] if e["name"].endswith(" collect")]
    runs = [e for e in seen.rows["actors[0]", "actors[0]"] if e["name"].endswith(" collect")]
    assert len(calls) == len(runs) == 3
    for call, run in zip(calls, runs, strict=True):
        assert call["name"] == run["name"]
        assert call["ts"] <= run["ts"] and run["ts"] + run["dur"] <= call["ts"] + call["dur"]


def test_one_actor_under_local_and_a_failing_run_leave_a_trace(tmp_path: Path) -> None:
    launch(QLike, iterations=2, trace=tmp_path / "new" / "trace.json")
    seen = Seen(tmp_path / "new" / "trace.json")
    seen.check_nesting()
    assert seen.count("driver", "driver", "learn")["agent_learn"] > 0

    class Fails(QLike):
        def train(self) -> None:
            self.msrl.env_reset()
            raise UsageError("no")

    with pytest.raises(UsageError):
        launch(Fails, trace=tmp_path / "failed.json")
    assert Seen(tmp_path / "failed.json").count("driver", "driver", "train")
    assert not trace.on()


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    traced = launch(DQN, policy=COARSE, trace=tmp_path / "trace.json", **SMALL)
    assert traced.params_sha256 == launch(DQN, policy=COARSE, **SMALL).params_sha256


def test_the_command_line_writes_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "train dqn --iterations 1 --envs 2 --eval-episodes 0 --quiet --dist-policy single_learner_coarse".split()
    for extra in (["--trace", "here.json"], ["--trace"], ["--trace", "--log-dir", "other"]):
        assert CliRunner().invoke(app, words + extra).exit_code == 0
    files = [Path("here.json"), *Path("runs").glob("*/trace.json"), *Path("other").glob("*/trace.json")]
    assert len(files) == 3
    for file in files:
        assert Seen(file).count("driver", "driver", "region")
