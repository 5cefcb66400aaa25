"""A worker: a process that hosts instances, or a replay shard, and does what the driver asks of it.

Requests are (name, arguments); each is answered by ("ok", value) or ("error", RemoteError). A request may speak of
slots: objects that are in the shared memory of other workers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from types import CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from fdg.capacity import lend
from fdg.errors import RunError
from fdg.msrl import sample_work
from fdg.runtime import trace
from fdg.runtime.backends import GIVEN
from fdg.runtime.channel import Channel, Gone, Library
from fdg.runtime.group import Group, Seat
from fdg.runtime.instance import Host, InstanceKey, Kept, LocalWeights, Weights, learned
from fdg.runtime.native import native
from fdg.runtime.parts import Parts
from fdg.runtime.replay import PRIORITY, Draw, Router, Shard, Update
from fdg.runtime.replicas import Replica
from fdg.runtime.rows import INDEX
from fdg.runtime.shared import Arena, Board, Segment, Slot
from fdg.runtime.weights import parameters_of
from fdg.runtime.wire import Packed, pack, unpack

BEAT = 0.2
"""Seconds between two signs of life."""
REQUESTS = {"perform": "request", "publish": "transfer", "fetch": "transfer", "evaluate": "evaluate"}
SHARD_REQUESTS = {"insert": "insert", "answer": "sample", "masses": "sample", "update": "sample"}
"""What a worker, or a replay shard, is asked, and the phase of it in a trace."""
PULSE = struct.Struct("<d")


class Joined(NamedTuple):
    """A batch that lies in parts with the replay shards: who wants it puts it together."""

    parts: tuple[Slot, ...]
    order: Any
    router: Router


class RemoteError(NamedTuple):
    """An exception and where it came from: (file, line, function), outermost first."""

    error: BaseException
    frames: list[tuple[str, int, str]]


class Worker:
    """What a worker holds."""

    def __init__(self, arena: Any, library: Any, board: Any = None) -> None:
        self.arena, self.library, self.board = arena, library, board
        """Where it puts what others read, where it reads what others put, and where weights are published."""
        self.parts: Parts | None = None
        self.host: Host | None = None
        self.shard: Shard | None = None
        self.published: dict[InstanceKey, dict[tuple[int, ...], Slot]] = {}
        """Objects that lie in the arena for others to read, until their instance runs again."""
        self.given: dict[tuple[InstanceKey, tuple[int, ...]], Slot | Joined] = {}
        """Where the objects that the current task brings from elsewhere are."""

    # life

    def path(self, entries: list[str]) -> None:
        """Find modules where the driver finds them."""
        sys.path[:] = entries
        importlib.invalidate_caches()

    def log_to(self, file: str) -> None:
        """Print to a file from now on."""
        sys.stdout.flush()
        sys.stderr.flush()
        with open(file, "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def pin(self, cpus: set[int]) -> None:
        """Stay on some CPUs, and leave those of the others to them while they work."""
        with contextlib.suppress(OSError):
            others = os.sched_getaffinity(0) - cpus
            os.sched_setaffinity(0, cpus)
            lend(others)

    def start(
        self, parts: Parts, keys: list[InstanceKey], board: bool, threads: int, seat: Seat | None = None
    ) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.parts = parts
        if parts.factory is not None:
            GIVEN[parts.config.env] = parts.factory
        weights: Weights = self.board or LocalWeights()
        if board and self.board is None:
            ((_, segment),) = [item for item in self.library.segments.items() if item[0][0] == -1]
            weights = Board(parts.weights(), segment)
        self.host = Host(parts.instances(keys), weights, publishes=seat is None or seat.rank == 0)
        if seat is not None and seat.size > 1:
            msrl = self.learner()
            msrl.replica = Replica(Group(seat), msrl._learner, msrl._weights)
        return {"fingerprint": fingerprint(), "board": getattr(self.board, "where", None)}

    def start_shard(self, shard: Shard, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.shard = shard
        return {"fingerprint": fingerprint()}

    def take_trace(self) -> None:
        """Take a trace from now on: of requests, regions and component calls."""
        trace.begin()
        trace.watch(self, trace.REQUESTS, REQUESTS if self.shard is None else SHARD_REQUESTS)
        if self.host is not None:
            self.host.watch()

    def spans(self) -> tuple[int, list[trace.Span]]:
        return os.getpid(), trace.taken()

    # instances

    def perform(self, tasks: list[tuple[Packed, dict[Any, Any]]], board: Any) -> dict[str, Any]:
        """Perform tasks, one after the other. `board` says where the weights are, if that is not known anyway."""
        if board is not None:
            self.board.note(board)
        assert self.host is not None
        answers: list[tuple[Packed, dict[tuple[int, ...], Slot]]] = []
        opened = [(packed.open(), given) for packed, given in tasks]
        fused = self.host.instances[opened[0][0].instance].team is not None
        for some in [opened] if fused else [[one] for one in opened]:
            self.given = {}
            for task, given in some:
                self.given.update(given)
                for slot in self.published.pop(task.instance, {}).values():
                    self.arena.free(slot)
            replies = self.host.perform_all([task for task, _ in some], self.bring)
            for (task, _), reply in zip(some, replies, strict=True):
                sent: dict[tuple[int, ...], Slot] = {
                    (value.key,): self.publish(task.instance, (value.key,))
                    for out, value in zip(task.outputs, reply.outputs, strict=True)
                    if out.sent and isinstance(value, Kept)
                }
                answers.append((Packed(reply), sent))
        return {"replies": answers, "board": getattr(self.board, "where", None)}

    def bring(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        assert self.host is not None
        where = self.given.get((source, keys))
        if where is None:  # an instance of this very worker
            message = pack(self.host.objects(source, keys))
            return unpack(message.head, message.buffers)
        if isinstance(where, Joined):
            return (where.router.join([self.library.read(slot) for slot in where.parts], where.order),)
        return self.library.read(where)

    def publish(self, source: InstanceKey, keys: tuple[int, ...]) -> Slot:
        """Put objects into the arena, for another worker to read."""
        assert self.host is not None
        mine = self.published.setdefault(source, {})
        if keys not in mine:
            mine[keys] = self.arena.put(pack(self.host.objects(source, keys)))
        return mine[keys]

    def fetch(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        assert self.host is not None
        return self.host.objects(source, keys)

    def priorities(self, source: InstanceKey, key: int) -> Any:
        """Of a batch only what an update of priorities reads."""
        (value,) = self.fetch(source, (key,))
        if isinstance(value, TensorDictBase):
            return value.select(INDEX, PRIORITY, strict=False)
        return value

    def state(self) -> dict[str, Any]:
        assert self.host is not None
        return self.host.state()

    def load_state(self, state: dict[str, Any]) -> list[str]:
        assert self.host is not None
        return self.host.load_state(state)

    def put(self, target: InstanceKey, values: tuple[Any, ...]) -> tuple[int, ...]:
        assert self.host is not None
        return self.host.put(target, values)

    def parameters(self) -> dict[str, torch.Tensor]:
        return parameters_of(self.learner()._learner)

    def evaluate(self, episodes: int, seed: int) -> list[float]:
        return self.learner().returns_apart(episodes, seed)

    def policy_state(self) -> dict[str, Any]:
        return self.learner().policy_state()

    def learner(self) -> Any:
        assert self.host is not None
        return next(i.msrl for i in self.host.instances.values() if i.msrl._learner is not None)

    # a replay shard

    def insert(self, lane: int, slot: Slot | None, rows: Any) -> int:
        assert self.shard is not None
        if slot is not None:
            (rows,) = self.library.read(slot, copy=False)  # the shard copies them into its table
        return self.shard.insert(lane, rows)

    def answer(self, draw: Draw, work: int, release: list[Slot]) -> Slot:
        assert self.shard is not None
        self.release(release)
        part = self.shard.answer(draw)
        if work:
            part["checksum"] = sample_work(part, work)
        return self.arena.put(pack(part))

    def masses(self) -> Any:
        assert self.shard is not None
        return self.shard.masses()

    def update(self, update: Update) -> int:
        assert self.shard is not None
        return self.shard.update(update)

    def clear(self, fresh: float) -> None:
        assert self.shard is not None
        self.shard.clear(fresh)

    def shard_state(self) -> dict[str, Any]:
        assert self.shard is not None
        return self.shard.state(copy=False)

    def load_shard_state(self, state: dict[str, Any]) -> None:
        assert self.shard is not None
        self.shard.load_state(state)

    def release(self, slots: list[Slot]) -> None:
        for slot in slots:
            self.arena.free(slot)


def work(control: int, pulse: int) -> None:
    """A worker's main loop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=control)
    number = int.from_bytes(end.recv(4), "little")
    beating = Segment(PULSE.size, pulse)
    threading.Thread(target=_beat, args=(beating,), daemon=True).start()
    channel = Channel(end, Arena(number), Library())
    worker = Worker(channel.arena, channel.library)
    gc.freeze()  # collections of garbage pass over all that was imported
    while True:
        try:
            name, arguments = channel.receive()
        except Gone:
            os._exit(0)
        channel.done()  # the driver has read the last answer
        if name == "stop":
            channel.send(("ok", None))
            return
        try:
            answer = ("ok", getattr(worker, name)(*arguments))
        except BaseException as error:
            answer = ("error", remote_error(error))  # type: ignore[assignment]
        try:
            channel.send(answer, _slots(answer))
        except (RunError, TypeError) as error:
            channel.send(("error", remote_error(error)))
        except (BrokenPipeError, ConnectionError):
            os._exit(0)


def _slots(value: Any) -> tuple[Slot, ...]:
    """The slots that an answer speaks of."""
    if isinstance(value, Slot):
        return (value,)
    if type(value) in (list, tuple):
        return tuple(slot for item in value for slot in _slots(item))
    if type(value) is dict:
        return tuple(slot for item in value.values() for slot in _slots(item))
    return ()


def _beat(segment: Segment) -> None:
    while True:
        PULSE.pack_into(segment.memory, 0, time.monotonic())
        time.sleep(BEAT)


def fingerprint() -> str:
    """What this process's arithmetic is like: unlike machines may differ in the last bit."""
    import hashlib

    state = torch.Generator().manual_seed(7)
    a, b = torch.randn(65, 130, generator=state), torch.randn(130, 33, generator=state)
    seen = torch.tanh(a @ b).sum(0).numpy().tobytes()
    steps = "compiled steps" if native else "no compiled steps"  # `fdg.fast` differs in the last bits
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__} {capability} {hashlib.sha256(seen).hexdigest()[:12]}, {steps}"


# exceptions across processes ------------------------------------------------------------------------------------------


def remote_error(error: BaseException) -> RemoteError:
    """An exception as it travels: itself if it can be packed, else what it says."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pack(error)
    except RunError:
        unpacked, error = error, RunError(f"{type(error).__name__}: {error}")
        vars(error).update({"_fdg_learned": learned(unpacked)})
    return RemoteError(error, frames)


def raise_remote(remote: RemoteError) -> None:
    """Raise a worker's exception here, with a traceback that goes on to the line where it was raised there."""
    after: TracebackType | None = None
    for file, line, name in reversed(remote.frames):
        after = TracebackType(after, _frame(file, name), -1, max(line, 1))
    raise remote.error.with_traceback(after)


def _frame(file: str, name: str) -> Any:
    def here() -> Any:
        return sys._getframe()

    code: CodeType = here.__code__.replace(co_filename=file, co_name=name, co_qualname=name)
    return FunctionType(code, {"sys": sys, "__name__": name})()
