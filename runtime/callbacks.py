"""Callbacks: a user's own code that watches a run, alike under every policy and on every engine.

    class Best(fdg.Callback):
        def on_evaluation(self, evaluation):
            if evaluation["mean_return"] >= 475:
                raise fdg.StopTraining

    fdg.launch(DQN, eval_every=10, callbacks=[Best()])            # or: fdg train dqn --eval-every 10 --callback FILE.py:Best

They run in the driver's process, between two statements of `train`, with random numbers of their own: what they draw
changes nothing in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fdg.errors import UsageError, did_you_mean
from fdg.registry import import_file, split_file
from fdg.runtime.streams import Streams


class StopTraining(BaseException):
    """Raised by a callback, it ends training there; the run closes as if `train` had returned None.

    No `Exception`: a trainer's own `except Exception` lets it pass.
    """


class Callback:
    """What a run calls. Write those methods that you need; each gets one dict, which is not to be changed."""

    def on_iteration(self, row: dict[str, Any]) -> None:
        """After each `self.msrl.log`: iteration, frames, episodes, seconds, frames_per_second, episodic_return, values."""

    def on_evaluation(self, evaluation: dict[str, Any]) -> None:
        """After each periodic evaluation (`--eval-every`) and the final one: iteration, frames, returns, mean_return."""

    def on_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """After each checkpoint: turns of the outermost loop that are done, and path (None if it is kept in memory)."""

    def on_end(self, metrics: dict[str, Any]) -> None:
        """After the final evaluation; not if the run fails. The metrics are those of `--metrics-json`."""


NAMES = ("on_iteration", "on_evaluation", "on_checkpoint", "on_end")


class Callbacks:
    """The observer that calls the user's callbacks."""

    def __init__(self, callbacks: Iterable[Any], seed: int) -> None:
        self.callbacks = [checked(callback) for callback in callbacks]
        self._stream = Streams(seed).of("callbacks")

    def _call(self, name: str, about: dict[str, Any]) -> None:
        with self._stream:
            for callback in self.callbacks:
                if (method := getattr(callback, name, None)) is not None:
                    method(about)

    def on_start(self, *_: Any) -> None: ...

    def on_log(self, row: dict[str, Any]) -> None:
        self._call("on_iteration", row)

    def on_evaluation(self, evaluation: dict[str, Any]) -> None:
        self._call("on_evaluation", evaluation)

    def on_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._call("on_checkpoint", checkpoint)

    def on_end(self, metrics: dict[str, Any]) -> None:
        self._call("on_end", metrics)


class Function(Callback):
    """A plain function as a callback: it gets each logged row."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function

    def on_iteration(self, row: dict[str, Any]) -> None:
        self.function(row)


def checked(callback: Any) -> Any:
    """A callback as an object with some of the four methods: of a class one is made, a function gets each logged row."""
    if isinstance(callback, type):
        try:
            callback = callback()
        except TypeError as error:
            raise UsageError(
                f"callback {callback.__name__} is made without arguments, and cannot be: {error}"
            ) from error
    if any(callable(getattr(callback, name, None)) for name in NAMES):
        return callback
    if callable(callback):
        return Function(callback)
    raise UsageError(
        f"callback {callback!r} has none of {', '.join(NAMES)}, and is no function; write: class …(fdg.Callback)"
    )


def find_callback(name: str) -> Any:
    """The callback that `FILE.py:NAME` means: a class, an object or a function.

    Raises:
        UsageError: no such file, or nothing of that name in it.
    """
    place = split_file(name) if ".py" in name else None
    if place is None or not place[1]:
        raise UsageError(f"callback {name!r}: write FILE.py:NAME, a class, an object or a function in it")
    path, word = place
    members = {key: value for key, value in vars(import_file(str(path))).items() if not key.startswith("_")}
    if word not in members:
        raise UsageError(f"{Path(path).name} has no {word!r}: {did_you_mean(word, members)}")
    return checked(members[word])
