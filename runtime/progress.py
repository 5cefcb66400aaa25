"""Progress of a run: frames and episodes counted over all environments, `log` calls turned into rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from fdg.config import Config
from fdg.runtime.coordinator import Count
from fdg.runtime.environments import Environment

RECENT = 100
"""Episodes whose mean return is shown during training."""


class Progress:
    """Counts frames and episodes over all environments, and turns `log` calls into rows."""

    def __init__(self, config: Config, observers: Sequence[Any]) -> None:
        self.config, self.observers = config, observers
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
        values = plain_numbers(value, metrics)
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


def plain_numbers(value: Any, metrics: dict[str, Any]) -> dict[str, float]:
    """Logged values as plain numbers: tensors by their mean, TensorDicts and dicts entry by entry."""
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
        elif isinstance(item, (list, tuple)) and item and all(isinstance(part, (bool, int, float)) for part in item):
            out[name or "loss"] = sum(map(float, item)) / len(item)

    if value is not None:
        put("", value)
    for name, item in metrics.items():
        put(name, item)
    return out
