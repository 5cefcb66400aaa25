"""`fdg compare`: one algorithm, one seed, several policies and engines; equal or not, and at what price.

The first run is the reference. Runs are equal when their logs and the learner's parameters are, to the bit. Where they
are not, the first difference is named: what crossed an edge in an iteration, if the driver saw it, else what was logged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from fdg.api import Trainer
from fdg.capacity import size
from fdg.config import Config, make_config
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

LOGGED = ("iteration", "frames", "episodes", "episodic_return")


class Watch:
    """An observer that keeps, by iteration and edge, digests of what crosses between the driver and the fragments.

    They are kept as sets: how often a value crosses is a policy's own.
    """

    def __init__(self) -> None:
        self.iterations: list[dict[str, set[str]]] = [{}]

    def on_cross(self, edge: Any, value: Any) -> None:
        name = f"{edge.source} → {edge.target} `{edge.value}`"
        self.iterations[-1].setdefault(name, set()).add(digest(value))

    def on_log(self, row: dict[str, Any]) -> None:
        self.iterations.append({})

    def on_start(self, *_: Any) -> None: ...

    def on_end(self, *_: Any) -> None: ...


@dataclass
class Row:
    """One run, compared with the reference."""

    policy: str
    engine: str
    exact: bool
    """Whether the policy promises equality to the bit."""
    result: Result
    difference: str = ""
    watch: Watch = field(default_factory=Watch)

    @property
    def name(self) -> str:
        return f"{self.policy} on {self.engine}"

    @property
    def outcome(self) -> str:
        if not self.difference:
            return "equal"
        if self.exact:
            return "DIFFERS"
        return "not compared" if self.result.metrics["learners_draw"] else "close"

    def as_dict(self) -> dict[str, Any]:
        """The run for a JSON file."""
        kept = ("seconds", "frames_per_second", "phases", "calls", "bytes", "frames", "params_sha256")
        own = {"policy": self.policy, "engine": self.engine, "exact": self.exact}
        found = {"equal": not self.difference, "outcome": self.outcome, "difference": self.difference or None}
        return own | found | {name: self.result.metrics[name] for name in kept}


def compare(
    load: Callable[[], type[Trainer]],
    config: Config,
    policies: Sequence[Any],
    engines: Sequence[str],
    *,
    workers: int | None = None,
    sample_parallelism: int = 1,
    **options: Any,
) -> Iterator[Row]:
    """Run under each policy, on each engine; each run as it ends. `local` runs once, in this process.

    `load` gives the trainer for each run: what one run leaves in variables of the trainer's module, the next is not to see.
    """
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    reference: Row | None = None
    with forkserver() if "process" in engines else nullcontext():
        for policy in policies:
            for engine in dict.fromkeys("inprocess" if policy.name == "local" else engine for engine in engines):
                watch = Watch()
                physical: dict[str, Any] = {}
                if engine != "inprocess":
                    physical = {"workers": workers, "sample_parallelism": sample_parallelism}
                trainer = load()
                own = make_config(trainer.config_class(), values)
                result = launch(trainer, own, policy=policy, engine=engine, observers=[watch], **physical, **options)
                row = Row(policy.name, engine, not policy.replicated, result, "", watch)
                reference = reference or row
                row.difference = difference(reference, row)
                yield row


def difference(reference: Row, row: Row) -> str:
    """The first difference between two runs, in words; empty if there is none."""
    expected, seen = reference.result, row.result
    logged = next(different_logs(expected.history, seen.history), None)
    if logged is None and expected.params_sha256 == seen.params_sha256:
        return ""
    parameters = f"the parameters differ by up to {furthest(expected, seen):.2g}"
    if not row.exact:
        differs = f"{logged[1] + '; ' if logged else ''}{parameters}"
        if seen.metrics["learners_draw"]:
            return f"{differs}; not compared: `learn` draws random numbers, and each learner draws for its own rows"
        return f"{differs}; this policy does not promise the same bits"
    turn, text = logged or (len(seen.history), parameters)
    for number, (left, right) in enumerate(zip(reference.watch.iterations, row.watch.iterations, strict=False)):
        if number > turn:
            break
        for edge in left:
            if edge in right and left[edge] != right[edge]:
                when = when_logged(expected.history, number)
                return f"{when}: {edge} carries another value" + (f"; {text}" if number == turn else "")
    return text


def when_logged(history: list[dict[str, Any]], turn: int) -> str:
    """Up to which `log` something happened, by the step that was given to it."""
    if turn < len(history):
        return f"by iteration {history[turn]['iteration']}"
    return f"after iteration {history[-1]['iteration']}" if history else "without a log"


def different_logs(expected: list[dict[str, Any]], seen: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """What was logged otherwise, with the turn of the log."""
    for turn, (left, right) in enumerate(zip(expected, seen, strict=False)):
        step = left["iteration"]
        left, right = ({**{n: row[n] for n in LOGGED}, **row["values"]} for row in (left, right))
        for name in dict.fromkeys([*left, *right]):
            if not same(left.get(name), right.get(name)):
                yield turn, f"iteration {step}: {name} is {right.get(name)}, expected {left.get(name)}"
    if len(expected) != len(seen):
        yield min(len(expected), len(seen)), f"{len(seen)} logs, expected {len(expected)}"


def same(left: Any, right: Any) -> bool:
    return left == right or (left != left and right != right)


def furthest(expected: Result, seen: Result) -> float:
    """The largest difference between two parameters; infinite where their shapes differ."""
    if {name: t.shape for name, t in expected.parameters.items()} != {n: t.shape for n, t in seen.parameters.items()}:
        return float("inf")
    pairs = [(tensor.double(), seen.parameters[name].double()) for name, tensor in expected.parameters.items()]
    return max((float((left - right).abs().max()) for left, right in pairs if left.numel()), default=0.0)


def digest(value: Any) -> str:
    """Names a value: equal ones, and only those, have the same."""
    sum_ = hashlib.blake2b(digest_size=16)

    def feed(item: Any) -> None:
        sum_.update(f"{type(item).__name__}(".encode())
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu().contiguous()
            sum_.update(f"{item.dtype}{tuple(item.shape)}".encode())
            sum_.update(item.reshape(-1).view(torch.uint8).numpy() if item.numel() else b"")
        elif isinstance(item, np.ndarray):
            sum_.update(f"{item.dtype}{item.shape}".encode() + item.tobytes())
        elif isinstance(item, (dict, TensorDictBase)):
            for key in sorted(item.keys(), key=str):
                sum_.update(f"{key}=".encode())
                feed(item[key])
        elif isinstance(item, (list, tuple)):
            for inner in item:
                feed(inner)
        elif isinstance(item, (bool, int, float, str, bytes, type(None), np.generic)):
            sum_.update(repr(item).encode())
        sum_.update(b")")

    feed(value)
    return sum_.hexdigest()


def table(rows: Sequence[Row]) -> list[str]:
    """The comparison as lines of text."""
    phases = list(rows[0].result.metrics["phases"])
    cells = [["policy", "engine", "result", "seconds", *phases, "calls", "bytes", "frames/s"]]
    for number, row in enumerate(rows):
        metrics = row.result.metrics
        spent = [metrics["seconds"], *(metrics["phases"][name] for name in phases)]
        cells.append(
            [
                row.policy,
                row.engine,
                "reference" if not number else row.outcome,
                *(f"{seconds:.2f}" for seconds in spent),
                str(sum(metrics["calls"].values())),
                size(sum(metrics["bytes"].values())),
                f"{metrics['frames_per_second']:,.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        words = zip(line, widths, strict=True)
        lines.append("  ".join(w.ljust(n) if i < 3 else w.rjust(n) for i, (w, n) in enumerate(words)).rstrip())
    if not rows[0].result.metrics["phases"]["learn"]:
        lines.append("nothing was learned in these runs: equal parameters say little; train for longer")
    for row in rows:
        if row.difference:
            lines.append(f"{row.name}: {row.difference}")
    for row in rows:
        sent = sorted(row.result.metrics["bytes"].items(), key=lambda item: -item[1])
        if edges := [f"{edge.replace('->', ' → ').replace(':', ' ')} {size(count)}" for edge, count in sent if count]:
            lines.append(f"{row.name}: {', '.join(edges)}")
    return lines
