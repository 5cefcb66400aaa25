"""Progress of a run: frames and episodes counted over all environments, `log` calls turned into rows."""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from fdg.config import Config
from fdg.errors import UsageError
from fdg.runtime.coordinator import Count
from fdg.runtime.environments import Environment
from fdg.runtime.values import UNBOUND

RECENT = 100
"""Episodes whose mean return is shown during training."""


class Progress:
    """Counts frames and episodes over all environments, and turns `log` calls into rows."""

    def __init__(self, config: Config, observers: Sequence[Any], notice: Callable[[str], None]) -> None:
        self.config, self.observers, self.notice = config, observers, notice
        self.environments: Sequence[Environment | Count] = []
        self.history: list[dict[str, Any]] = []
        self.returns: list[float] = []
        self.told: float | None = None
        """The mean return by the trainer's own account."""
        self.episodes = 0
        self.start = time.perf_counter()
        self.seconds_before = 0.0
        """Seconds of the run before it was resumed."""
        self.reported = 0
        """Rows that observers have seen: a run that goes back to a checkpoint makes some of them again."""
        self.not_finite = ""
        """The first value that was nan or infinite, in words."""
        self.given = False
        """Whether `log` was ever given a value, if only None."""
        self.eval_every = 0
        """Rows between two evaluations; 0: none."""
        self.evaluate: Callable[[], list[float] | None] = lambda: None

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.start

    def frames(self) -> int:
        return sum(environment.frames for environment in self.environments)

    def state(self) -> dict[str, Any]:
        """What was counted and logged so far, for a checkpoint."""
        return {
            "frames": [environment.frames for environment in self.environments],
            "history": [dict(row) for row in self.history],
            "returns": list(self.returns),
            "told": self.told,
            "episodes": self.episodes,
            "seconds": self.seconds(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for environment, frames in zip(self.environments, state["frames"], strict=True):
            environment.frames = frames
        self.history[:], self.returns = state["history"], list(state["returns"])
        self.told, self.episodes = state["told"], state["episodes"]
        self.seconds_before = state["seconds"]
        self.not_finite = next(filter(None, map(not_finite, self.history)), "")

    def drain(self) -> None:
        for environment in self.environments:
            finished = environment.drain_episodes()
            self.episodes += len(finished)
            self.returns += [value for value, _ in finished]
        del self.returns[:-RECENT]

    def mean_return(self) -> float | None:
        """What the trainer logged as `episodic_return` (it may count only some episodes), else the mean of the last."""
        if self.told is not None:
            return self.told
        return sum(self.returns) / len(self.returns) if self.returns else None

    def log(self, step: int, value: Any, metrics: dict[str, Any]) -> None:
        self.drain()
        given = metrics if value is UNBOUND else {"": value, **metrics}
        self.given = self.given or bool(given)
        values = plain_numbers(given)
        self.told = values.get("episodic_return", self.told)
        seconds = self.seconds()
        frames = self.frames()
        row: dict[str, Any] = {
            "iteration": int(step),
            "frames": frames,
            "episodes": self.episodes,
            "seconds": seconds,
            "frames_per_second": frames / seconds if seconds else 0.0,
            "episodic_return": self.mean_return(),
            "values": values,
        }
        self.history.append(row)
        returns = None
        if self.eval_every and len(self.history) % self.eval_every == 0 and (returns := self.evaluate()):
            row["evaluation"] = sum(returns) / len(returns)
        if len(self.history) > self.reported:
            self.reported = len(self.history)
            if not self.not_finite and (found := not_finite(row)):
                self.not_finite = found
                self.notice(f"{found}; the run goes on, and what it learns from there may be worth nothing")
            for observer in self.observers:
                observer.on_log(row)
            if returns:
                self.tell_evaluation(row["iteration"], returns)

    def tell_evaluation(self, iteration: int | None, returns: list[float]) -> None:
        """Tell those who want to know of an evaluation; the final one has no iteration."""
        about = {
            "iteration": iteration,
            "frames": self.frames(),
            "returns": returns,
            "mean_return": sum(returns) / len(returns),
        }
        for observer in self.observers:
            if hasattr(observer, "on_evaluation"):
                observer.on_evaluation(about)


def not_finite(row: dict[str, Any]) -> str:
    """The first number of a row that is nan or infinite, in words; empty if there is none."""
    for name, value in [*row["values"].items(), ("episodic_return", row["episodic_return"])]:
        if value is not None and not math.isfinite(value):
            return f"{name} is {value} at iteration {row['iteration']}"
    return ""


def plain_numbers(given: dict[str, Any]) -> dict[str, float]:
    """Logged values as plain numbers: tensors and lists by their mean, TensorDicts and dicts entry by entry; not None.

    Raises:
        UsageError: for a value that is no number and holds none.
    """
    out: dict[str, float] = {}

    def put(name: str, item: Any) -> None:
        if isinstance(item, TensorDictBase):
            item = item.to_dict()
        if isinstance(item, dict):
            for key, inner in item.items():
                put(f"{name}/{key}" if name else str(key), inner)
        elif isinstance(item, torch.Tensor):
            if item.numel():
                number = item.detach()
                out[name or "loss"] = float(number if number.numel() == 1 else number.double().mean())
        elif isinstance(item, (bool, int, float)) or hasattr(item, "__float__"):
            out[name or "loss"] = float(item)
        elif isinstance(item, (list, tuple)) and all(isinstance(part, (bool, int, float)) for part in item):
            if item:
                out[name or "loss"] = sum(map(float, item)) / len(item)
        elif item is not None:
            raise UsageError(
                f"self.msrl.log: {name or 'the value'} is {reprlib.repr(item)}, a {type(item).__name__}; "
                "log numbers, tensors, lists of numbers, or dicts of these"
            )

    for name, item in given.items():
        put(name, item)
    return out
