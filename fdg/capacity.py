"""What a run needs of the machine: told before it starts, and refused where the machine has less.

needs = Needs.of(buffer, spec, config.actors, workers=["actors[0]", "learner"])
needs.check()             UsageError, with numbers, if there is not that much memory
needs.lines()             what is said of it when the run starts
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fdg.doctor import memory
from fdg.errors import FdgError, UsageError

if TYPE_CHECKING:
    from fdg.config import Config
    from fdg.policies import Policy
    from fdg.runtime.parts import Parts

SERVER_BYTES, WORKER_BYTES = 450_000_000, 25_000_000
"""Memory that the libraries take once for all workers, and what each worker takes on top before it does anything."""


@dataclass(frozen=True)
class Needs:
    """What a run needs."""

    rows: int = 0
    """Rows that the replay buffer keeps."""
    replay_bytes: int = 0
    """Bytes of the replay buffer when it is full."""
    workers: tuple[str, ...] = ()
    """Processes beside this one, by name."""
    engine: str = "inprocess"
    storage: str = "memory"
    """Where the rows are."""

    @classmethod
    def of(
        cls,
        buffer: Any,
        spec: Any,
        actors: int,
        workers: Sequence[str] = (),
        engine: str = "inprocess",
        storage: str = "memory",
    ) -> Needs:
        if buffer is None:
            return cls(0, 0, tuple(workers), engine, storage)
        return cls(buffer.capacity, buffer.nbytes(spec, actors), tuple(workers), engine, storage)

    @property
    def bytes(self) -> int:
        processes = SERVER_BYTES + WORKER_BYTES * len(self.workers) if self.workers else 0
        return processes + (self.replay_bytes if self.storage == "memory" else 0)

    def check(self) -> None:
        """Refuse what does not fit into memory, where the system tells how much there is; a cluster may have more."""
        total, free = memory()
        if not total or self.bytes <= free or self.engine == "flame":
            return
        parts = []
        replay = self.replay_bytes if self.storage == "memory" else 0
        if replay:
            parts.append(f"{size(replay)} for a replay buffer of {self.rows:,} rows")
        if self.workers:
            parts.append(f"{size(self.bytes - replay)} for {self.processes()}")
        raise UsageError(
            f"not enough memory: this run needs {' and '.join(parts)}, and {size(free)} of {size(total)} are free; use a "
            f"smaller buffer (--buffer-size){' or fewer --workers' if self.workers else ''}, or close other programs"
        )

    def replay(self) -> str:
        """The replay buffer in words."""
        where = ", in Flame's object cache" if self.storage == "flame" else ""
        return f"replay buffer {size(self.replay_bytes)} when full ({self.rows:,} rows){where}" if self.rows else ""

    def processes(self) -> str:
        one, many = (
            ("Flame service", "Flame services") if self.engine == "flame" else ("worker process", "worker processes")
        )
        return f"{len(self.workers)} {one if len(self.workers) == 1 else many}"

    def lines(self) -> Iterator[str]:
        """What is said when a run starts."""
        total, free = memory()
        if self.rows:
            here = total and self.engine != "flame" and self.storage == "memory"
            yield self.replay() + (f", {size(free)} of memory free" if here else "")
        if self.workers:
            yield f"{self.processes()}: {', '.join(self.workers)}; {cores()} cores"
        else:
            yield f"all in this process; {cores()} cores"


def check_workers(workers: int | None, config: Config, policy: type[Policy]) -> None:
    """Refuse workers that would have nothing to do; with a learner in each, all have."""
    if workers is not None and workers > config.actors and not policy.replicated:
        raise UsageError(
            f"workers is {workers}, and there {'is' if config.actors == 1 else 'are'} only {config.actors} actor"
            f"{'' if config.actors == 1 else 's'} to share: write --workers {config.actors}, or --actors {workers} (which "
            "makes it another experiment)"
        )


def stuck(parts: Parts) -> str:
    """Why a trainer cannot go to other processes; empty if it can."""
    from fdg.runtime.parts import prepare_to_send
    from fdg.runtime.wire import pack

    prepare_to_send(parts)
    pieces = {
        "the config": parts.config,
        "the actor": parts.agent.actor,
        "the learner": parts.agent.learner,
        "the replay buffer": parts.buffer,
        **{f"`self.{name}` of the trainer": value for name, value in parts.attributes.items()},
        "the trainer": parts,
    }
    for name, piece in pieces.items():
        try:
            pack(piece, name)
        except FdgError as error:
            return str(error)
    return ""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_lent: set[int] = set()


def lend(cpus: set[int]) -> None:
    """Let this process use CPUs of other workers while those are idle."""
    _lent.clear()
    _lent.update(cpus)


def lent() -> set[int]:
    """CPUs of other workers, to be used only while they are idle."""
    return _lent


def size(count: float) -> str:
    """Bytes in few characters.

    >>> size(12_400), size(8_600_000), size(19.25e9), size(5.2e14)
    ('12.4 kB', '8.6 MB', '19.2 GB', '520.0 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.1f} TB"
