"""The run folder: what a run was and how it went, under the names CleanRL's users know.

    runs/<env>__<algo>__<policy>__<seed>__<time>/
        config.json  launch.json  graph.json  graph.txt  fragments/*.py     what ran, and how
        metrics.csv  events.out.tfevents…  metrics.json                     how it went
        logs/<fragment>.log  logs/<worker>.log                              what each fragment did, what each worker printed
        checkpoints/*.fdg                                                   from where it can go on
        policy.fdg                                                          what it learned, for `fdg eval`
        superseded/                                                         what there was, when it went on from before

A RunFolder is an observer of a run, see `Observer`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from fdg.config import Config
from fdg.errors import UsageError
from fdg.graph import Graph
from fdg.runtime import checkpoint

EVALUATION = "eval/episodic_return"
COLUMNS = ("iteration", "frames", "episodes", "seconds", "frames_per_second", "episodic_return")


class Observer(Protocol):
    """Who watches a run. The run calls these in its own thread, in this order; none may change what it is given.

    `on_start` once, before the first component call; `on_log` for each `self.msrl.log`; `on_end` once, after the final
    evaluation, and not at all if the run fails. A row holds iteration, frames, episodes, seconds, frames_per_second,
    episodic_return (None before the first episode ends) and values {name: number}. An observer with a method `on_needs`
    gets the `fdg.capacity.Needs` of the run before anything is started; one with `on_cross` gets the edge and the value of
    each crossing between the driver and a fragment; `on_evaluation` and `on_checkpoint` are as in `fdg.Callback`. A row
    with an evaluation has its mean return as `evaluation`.
    """

    def on_start(self, config: Config, graph: Graph | None) -> None: ...

    def on_log(self, row: dict[str, Any]) -> None: ...

    def on_end(self, metrics: dict[str, Any]) -> None: ...


LAUNCH, LOGS, METRICS, POLICY = "launch.json", "logs", "metrics.json", "policy.fdg"
ASIDE = "superseded"


class RunFolder:
    """Writes the run folder as the run goes. Use it in a `with`, so that its files close when the run fails.

    As a path (`os.PathLike`) it is the folder, which is there from `on_start` on.
    """

    def __init__(self, log_dir: str | Path, env: str, algo: str, policy: str, seed: int) -> None:
        words = [env_word(env), algo, policy, str(seed), time.strftime("%Y%m%d-%H%M%S")]
        self.path = Path(log_dir) / "__".join(re.sub(r"[^\w.=-]+", "-", word) for word in words)
        self.flags: dict[str, Any] = {}
        """How the run is launched, kept for when it goes on."""
        self.made = False
        self._goes_on: dict[str, Any] | None = None
        self._columns: list[str] = []
        self._csv: TextIO | None = None
        self._events: Events | None = None
        self._graph: Graph | None = None

    @classmethod
    def again(cls, path: Path, state: dict[str, Any]) -> RunFolder:
        """The folder of a run that goes on from the state of a checkpoint: what came after that is put aside."""
        folder = cls(path.parent, "", "", "", 0)
        folder.path, folder._goes_on = path, state
        return folder

    def later(self) -> list[Path]:
        """What came after the checkpoint from which it goes on: further ones, and the results of a run that had ended."""
        if self._goes_on is None:
            return []
        found = checkpoint.checkpoints(self.path / checkpoint.FOLDER)
        found = [file for file in found if int(file.stem) > self._goes_on["done"]]
        if (self.path / METRICS).exists():
            rows = json.loads((self.path / METRICS).read_text())["iterations"]
            if len(rows) > len(self._goes_on["progress"]["history"]):
                found += [file for name in (METRICS, POLICY) if (file := self.path / name).exists()]
        return found

    def __fspath__(self) -> str:
        return str(self.path)

    def on_start(self, config: Config, graph: Graph | None) -> None:
        if self._goes_on is None:
            self.path = new_folder(self.path)  # only now: a run refused for its input leaves no empty folder
            self.made = True
        write_json(self.path / "config.json", dataclasses.asdict(config))
        write_json(self.path / LAUNCH, self.flags)
        self._graph = graph
        if graph is not None:
            write_graph(self.path, graph)
        self._events = open_events(self.path)
        if self._goes_on is not None:
            self._go_on(self._goes_on)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Leave of the run before what the checkpoint knows of it; the rest is put aside."""
        rows = state["progress"]["history"]
        if later := self.later():
            aside = self.path / ASIDE
            aside.mkdir(exist_ok=True)
            for file in later:
                file.replace(aside / file.name)
            if (self.path / "metrics.csv").exists():
                shutil.copy2(self.path / "metrics.csv", aside)
        for row in rows:
            self._write_csv(row)
        if not rows:
            (self.path / "metrics.csv").unlink(missing_ok=True)
        if self._events is not None:
            self._events.purge(rows[-1]["frames"] + 1 if rows else 0)

    def on_log(self, row: dict[str, Any]) -> None:
        self._write_csv(row)
        if self._events is not None:
            self._events.write(row["frames"], event_names(row))

    def _write_csv(self, row: dict[str, Any]) -> None:
        cells = {name: row[name] for name in COLUMNS}
        for name, value in own_values(row).items():
            cells[name if name not in COLUMNS else f"values/{name}"] = value
        if "evaluation" in row:
            cells[EVALUATION] = row["evaluation"]
        if new := [name for name in cells if name not in self._columns]:
            self._widen(new)
        csv.DictWriter(self._csv, self._columns).writerow(cells)  # type: ignore[arg-type, type-var]

    def has_checkpoint(self) -> bool:
        return bool(checkpoint.checkpoints(self.path / checkpoint.FOLDER))

    def on_end(self, metrics: dict[str, Any]) -> None:
        write_json(self.path / METRICS, metrics)
        if self._graph is not None:
            write_logs(self.path / LOGS, self._graph, metrics)
        if self._events is not None:
            self._events.write(metrics["frames"], {EVALUATION: metrics.get("mean_reward")})

    def _widen(self, new: list[str]) -> None:
        """Start metrics.csv, or write it anew when a value is logged for the first time later on."""
        file, rows = self.path / "metrics.csv", []
        if self._csv is not None:
            self._csv.close()
            with open(file, newline="") as old:
                rows = list(csv.DictReader(old))
        self._columns += new
        self._csv = open(file, "w", newline="", buffering=1)  # noqa: SIM115  (open as long as the run)
        writer = csv.DictWriter(self._csv, self._columns)
        writer.writeheader()
        writer.writerows(rows)

    def close(self) -> None:
        for file in (self._csv, self._events):
            if file is not None:
                file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()
        if kind is not None and self.made and self._csv is None and not self.has_checkpoint():
            shutil.rmtree(self.path, ignore_errors=True)  # it failed before the first row: nothing to keep


def env_word(env: str) -> str:
    """An environment in the name of a folder.

    >>> env_word("CartPole-v1"), env_word("/home/me/corridor.py:make_env")
    ('CartPole-v1', 'corridor.make_env')
    """
    file, _, function = env.rpartition(":")
    return f"{Path(file).stem}.{function}" if file.endswith(".py") else env


def new_folder(wanted: Path) -> Path:
    """Make a folder of that name, or with a number behind it if two runs start in the same second."""
    number, parent = 1, wanted.parent
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not folder.is_dir():
                raise UsageError(f"the log folder {str(parent)!r} is a file; give another --log-dir") from None
            number += 1
        except OSError as error:
            raise UsageError(f"the log folder {str(parent)!r} cannot be written: {error.strerror}") from error


def write_graph(folder: Path, graph: Graph) -> None:
    """The graph as data, as a picture, and the code it runs."""
    from fdg.draw import draw

    (folder / "graph.json").write_text(graph.to_json() + "\n")
    (folder / "graph.txt").write_text(draw(graph, "text").rstrip() + "\n")
    shutil.rmtree(folder / "fragments", ignore_errors=True)
    (folder / "fragments").mkdir()
    for name, source in [("driver", graph.driver), *((part.name, part.source) for part in graph.fragments.values())]:
        (folder / "fragments" / f"{name}.py").write_text(source)


def write_logs(folder: Path, graph: Graph, metrics: dict[str, Any]) -> None:
    """What each fragment did: its regions, where they stand in the user's source, how often each was called."""
    folder.mkdir(exist_ok=True)
    calls = metrics["calls"]
    for part in graph.fragments.values():
        lines = [f"{part.name}: {', '.join(part.components)}; engine {metrics['engine']}"]
        if not calls:
            lines.append("the whole of train, uncut")
        for region in part.regions if calls else ():
            first, last = region.lines
            count = calls.get(f"{part.name}.{region.name}", 0)
            lines.append(f"{count:>10,} calls  {region.name}  {Path(region.file).name}:{first}-{last}")
        for edge in graph.edges:
            if calls and part.name in (edge.source, edge.target):
                lines.append(f"{edge.bytes:>10,} bytes  {edge.source} → {edge.target} `{edge.value}`")
        with open(folder / f"{part.name}.log", "a") as log:
            log.write("\n".join(lines) + "\n")


def write_json(file: str | Path, data: Any) -> None:
    Path(file).write_text(as_json(data))


def as_json(data: Any) -> str:
    """Strict JSON: a number that is not finite becomes null."""
    return json.dumps(finite(data), indent=2, default=str) + "\n"


def finite(data: Any) -> Any:
    """`data` with None in place of nan and infinity, which JSON does not know."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


class Events:
    """TensorBoard's event file, over frames.

    A row is one event of several scalars: torch's SummaryWriter makes an event, and a queue entry, of each scalar
    (260 µs a row, against 90).
    """

    def __init__(self, folder: Path) -> None:
        # Imported here: only a run needs it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._writer = Event, Summary, EventFileWriter(str(folder))
        self._start = SessionLog(status=SessionLog.START)

    def write(self, frames: int, scalars: dict[str, float | None]) -> None:
        known = {tag: value for tag, value in scalars.items() if value is not None}
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=frames, summary=summary))

    def purge(self, frames: int) -> None:
        """TensorBoard forgets what older event files say from so many frames on."""
        self._writer.add_event(self._event(wall_time=time.time(), step=frames, session_log=self._start))

    def close(self) -> None:
        self._writer.close()


def open_events(folder: Path) -> Events | None:
    """The event file, or None where tensorboard is not installed."""
    try:
        return Events(folder)
    except ImportError:
        return None


def own_values(row: dict[str, Any]) -> dict[str, float]:
    """What the trainer logged, without the return: the row has it already."""
    return {name: value for name, value in row["values"].items() if name != "episodic_return"}


def event_names(row: dict[str, Any]) -> dict[str, float | None]:
    """A row's numbers under CleanRL's names. A logged value with the name of a column counts something: it is no loss."""
    own = {f"{'charts' if name in COLUMNS else 'losses'}/{name}": value for name, value in own_values(row).items()}
    charts = {"charts/SPS": row["frames_per_second"], "charts/episodic_return": row["episodic_return"]}
    return {**charts, **own, EVALUATION: row.get("evaluation")}
