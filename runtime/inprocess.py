"""The in-process engine: fragments as separate objects that share no state; every crossing value is really copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fdg.runtime import trace
from fdg.runtime.instance import Host, InstanceKey, Kept, LocalWeights, Reply, Task
from fdg.runtime.parts import Parts
from fdg.runtime.values import copied
from fdg.runtime.weights import parameters_of


class InProcess:
    """All instances in this process."""

    name = "inprocess"

    def __init__(self, parts: Parts) -> None:
        self.host = Host(parts.instances(parts.instance_keys()), LocalWeights())
        self.learner = next((i.msrl for i in self.host.instances.values() if i.msrl._learner is not None), None)

    def call(self, tasks: list[Task]) -> list[Reply]:
        return perform_copied(self.host, tasks, self.fetch)

    def fetch(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        return copied(self.host.objects(source, keys), {})

    def place(self, instance: InstanceKey) -> int:
        return 0

    def parameters(self) -> dict[str, torch.Tensor]:
        return parameters_of(self.learner._learner) if self.learner is not None else {}

    def evaluate(self, episodes: int, seed: int) -> list[float] | None:
        return self.learner.returns_apart(episodes, seed) if self.learner is not None else None

    def policy_state(self) -> dict[str, Any] | None:
        return self.learner.policy_state() if self.learner is not None else None

    def state(self) -> dict[str, Any]:
        return self.host.state()

    def load_state(self, state: dict[str, Any]) -> list[str]:
        return self.host.load_state(state)

    def put(self, target: InstanceKey, values: tuple[Any, ...]) -> tuple[int, ...]:
        return self.host.put(target, copied(values, {}))

    def spans(self) -> list[trace.Place]:
        return []

    def log_to(self, folder: Path) -> None:
        """There are no workers."""

    def stop(self) -> None:
        pass


def perform_copied(host: Host, tasks: list[Task], bring: Any) -> list[Reply]:
    """Perform tasks in this process: what enters is a copy, and what leaves is one."""
    own = []
    with trace.span(trace.DRIVER_ROW, "transfer", "transfer"):
        for task in tasks:
            inputs, lent = copied((task.inputs, task.lent), {})
            own.append(task._replace(inputs=inputs, lent=lent))
    replies = host.perform_all(own, bring)
    for reply in replies:
        memo: dict[Any, Any] = {}
        reply.outputs = [
            Kept(value.key, copied(value.copy, {})) if isinstance(value, Kept) else copied(value, memo)
            for value in reply.outputs
        ]
        reply.restored, reply.lent = copied((reply.restored, reply.lent), memo)
    return replies
