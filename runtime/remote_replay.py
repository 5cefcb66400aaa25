"""Replay whose shards are in workers: the driver's process has the router, rows go from actors to shards to the learner.

Ref         rows that lie in an actor's shared memory: a shard reads them there
LazyBatch   a batch that lies in parts in the shards' shared memory: the learner puts it together
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from fdg.runtime.replay import Draw, ReplayBuffer, Router, for_shard
from fdg.runtime.shared import Slot


class Ref(NamedTuple):
    """Rows in another process's shared memory."""

    slot: Slot

    def __len__(self) -> int:
        return sum(self.slot.sizes[1:])

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> Ref:
        return self


class Shards(Protocol):
    """How the shards' workers are asked."""

    def ask(self, shard: int, name: str, *arguments: Any) -> None: ...

    def hear(self, shards: Sequence[int]) -> list[Any]: ...

    def first(self, shards: Sequence[int]) -> tuple[int, Any]: ...

    def read(self, slot: Slot) -> Any: ...


class LazyBatch:
    """A batch in parts. Copied, it is the batch itself."""

    def __init__(self, slots: tuple[Slot, ...], order: Any, router: Router, buffer: RemoteBuffer) -> None:
        self.slots, self.order, self.router, self._buffer = slots, order, router, buffer

    def batch(self) -> TensorDict:
        return self.router.join([self._buffer.shards.read(slot) for slot in self.slots], self.order)

    def __deepcopy__(self, memo: Any) -> TensorDict:
        return self.batch()

    def __del__(self) -> None:
        self._buffer.release(self.slots)


class RemoteBuffer(ReplayBuffer):
    """The replay buffer as the head of the replay fragment sees it."""

    def __init__(self, like: ReplayBuffer, actors: int, count: int, shards: Shards, parallel: int, work: int) -> None:
        super().__init__(like.capacity, prioritized=like.prioritized, alpha=like.alpha, beta=like.beta, eps=like.eps)
        self._router = self.router(actors, count)
        self.shards, self.count, self.parallel, self.work = shards, count, parallel, work
        self.lazy = False
        """Whether the region that runs only passes batches on."""
        self._inserting: dict[int, int] = {}
        self._released: dict[int, list[Slot]] = {}

    def insert(self, lane: int, td: Any) -> int:
        """Send rows to their shard; `flush` waits until all have arrived."""
        shard = lane % self.count
        if shard in self._inserting:
            self._arrived([shard])
        slot, rows = (td.slot, None) if isinstance(td, Ref) else (None, td)
        self.shards.ask(shard, "insert", lane, slot, rows)
        self._inserting[shard] = lane
        return 0

    def flush(self) -> None:
        self._arrived(list(self._inserting))

    def _arrived(self, shards: list[int]) -> None:
        for shard, count in zip(shards, self.shards.hear(shards), strict=True):
            self._opened().wrote(self._inserting.pop(shard), count)

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        everyone = range(self.count)
        for shard in everyone:
            self.shards.ask(shard, name, *arguments)
        return self.shards.hear(everyone)

    def sample(self, n: int) -> Any:
        self.flush()
        router = self._opened()
        if router.prioritized:
            for index, masses in enumerate(self._all("masses")):
                router.weigh(index, masses)
        parts, order = router.split(router.draw(n))
        slots = self._answers(parts)
        batch = LazyBatch(slots, order, router, self)
        return batch if self.lazy else batch.batch()

    def _answers(self, parts: list[tuple[int, Draw]]) -> tuple[Slot, ...]:
        """Ask the shards for their parts, so many at a time: in as many queues, each shard always in the same one, since
        shards of one queue may share a CPU."""
        queues: dict[int, list[tuple[int, Draw]]] = {}
        for part in parts:
            queues.setdefault(part[0] % self.parallel, []).append(part)
        asked: list[int] = []
        found: dict[int, Slot] = {}

        def ask(queue: list[tuple[int, Draw]]) -> None:
            shard, draw = queue.pop(0)
            self.shards.ask(shard, "answer", draw, self.work, self._released.pop(shard, []))
            asked.append(shard)

        for queue in queues.values():
            ask(queue)
        while asked:
            shard, slot = self.shards.first(asked)
            asked.remove(shard)
            found[shard] = slot
            if queue := queues[shard % self.parallel]:
                ask(queue)
        return tuple(found[shard] for shard, _ in parts)

    def release(self, slots: tuple[Slot, ...]) -> None:
        """Slots whose batch nobody needs any more; their shards hear of it with the next request."""
        for slot in slots:
            self._released.setdefault(self.shard_of(slot), []).append(slot)

    shard_of: Callable[[Slot], int]

    def update_priority(self, batch_or_index: Any, priority: Any = None) -> None:
        self.flush()
        updates = self._opened().updates(batch_or_index, priority)
        for shard, update in enumerate(updates):
            self.shards.ask(shard, "update", update)
        self.dropped += sum(self.shards.hear(range(self.count)))

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        self.flush()
        return {"router": self._opened().state(), "shards": self._all("shard_state"), "dropped": self.dropped}

    def load_state(self, state: dict[str, Any]) -> None:
        router = self._opened()
        router.load_state(state["router"])
        for shard in range(self.count):
            self.shards.ask(shard, "load_shard_state", for_shard(state["shards"], shard, self.count))
        self.shards.hear(range(self.count))
        self.dropped = state["dropped"]

    def clear(self) -> None:
        self.flush()
        router = self._opened()
        router.clear()
        self._all("clear", router.fresh)

    def __len__(self) -> int:
        self.flush()
        return len(self._opened())


class Uses(NamedTuple):
    """How a region of the replay fragment uses what enters and leaves."""

    inserted: frozenset[str]
    """Inputs that are only inserted: the shards can read them where they are."""
    updated: frozenset[str]
    """Inputs of which only the priorities are read."""
    passes: bool
    """Whether sampled batches are only passed on."""


def uses_of(source: str) -> dict[str, Uses]:
    """How each region of a fragment's code uses its values."""
    tree = ast.parse(source)
    regions = [node for part in tree.body if isinstance(part, ast.ClassDef) for node in part.body]
    return {node.name: _uses(node) for node in regions if isinstance(node, ast.FunctionDef)}


def _uses(region: ast.FunctionDef) -> Uses:
    loads = [node for node in ast.walk(region) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    calls = [node for node in ast.walk(region) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]

    def only(name: str, nodes: list[ast.expr]) -> bool:
        return all(any(load is node for node in nodes) for load in loads if load.id == name)

    def arguments(*operations: str) -> list[ast.expr]:
        return [call.args[0] for call in calls if call.func.attr in operations and call.args]  # type: ignore[attr-defined]

    names = {argument.arg for argument in (*region.args.args, *region.args.kwonlyargs)} - {"self"}
    stored = {node.id for node in ast.walk(region) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inserts = arguments("replay_buffer_insert", "replay_buffer_insert_rows")
    inserted = {name for name in names - stored if only(name, inserts)}
    updated = {name for name in names - stored if only(name, arguments("replay_buffer_update_priority"))}
    samples = [call for call in calls if call.func.attr == "replay_buffer_sample"]  # type: ignore[attr-defined]
    bound = [
        node.targets[0].id
        for node in ast.walk(region)
        if isinstance(node, ast.Assign) and node.value in samples and isinstance(node.targets[0], ast.Name)
    ]
    returned = [
        item
        for node in ast.walk(region)
        if isinstance(node, ast.Return) and node.value is not None
        for item in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
    ]
    passes = len(bound) == len(samples) and all(only(name, returned) for name in bound)
    return Uses(frozenset(inserted), frozenset(updated), passes)
