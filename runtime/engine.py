"""What an engine is: it hosts the instances of a run and performs tasks on them. The coordinator asks, nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from fdg.runtime.instance import InstanceKey, Reply, Task
from fdg.runtime.trace import Place


class Engine(Protocol):
    """Hosts instances. An engine raises the exceptions of user code as they were, with a traceback to the user's line."""

    name: str

    def call(self, tasks: list[Task]) -> list[Reply]:
        """Perform tasks, side by side where they can be; replies in the order of the tasks."""
        ...

    def fetch(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        """Copies of objects of an instance."""
        ...

    def place(self, instance: InstanceKey) -> int:
        """A number for the place of an instance: tasks of one place run one after the other."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """The learner's parameters by name; empty without a learner."""
        ...

    def evaluate(self, episodes: int, seed: int) -> list[float] | None:
        """Returns of the learner's policy, which depend on it and the seed alone; None without a learner."""
        ...

    def policy_state(self) -> dict[str, Any] | None:
        """The actor with the learner's weights, as plain data; None without a learner."""
        ...

    def state(self) -> dict[str, Any]:
        """The state of all components."""
        ...

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Give all components their state; returns what could not be restored, in words."""
        ...

    def put(self, target: InstanceKey, values: tuple[Any, ...]) -> tuple[int, ...]:
        """Put copies of objects into an instance's store; their keys."""
        ...

    def spans(self) -> list[Place]:
        """What workers noted for the trace; nothing of this process."""
        ...

    def log_to(self, folder: Path) -> None:
        """Where workers of this machine print to, each to a file of its own."""
        ...

    def stop(self) -> None:
        """End everything that was started."""
        ...
