"""The process engine: fragments in worker processes of this machine, tensors by shared memory.

    actors      W workers, each with some of the logical actors
    learners    in each of W workers beside its actors, where the policy replicates the learner; they run in lock step
    replay      one worker per shard; the router is here, in the driver's process
    the rest    one worker per fragment

What goes from one worker to another lies in the sender's shared memory; only its slot passes the driver. Weights are on
a board that all workers see. Every wait ends: with an answer, with the worker's end, or when it shows no sign of life.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fdg.errors import RunError, WorkerLost
from fdg.runtime import trace
from fdg.runtime.channel import Channel, Gone, Library
from fdg.runtime.forkserver import ForkServer, for_one_run
from fdg.runtime.group import PeerFailed, Seat, open_store
from fdg.runtime.inprocess import perform_copied
from fdg.runtime.instance import From, Here, Host, InstanceKey, LocalWeights, Reply, Task, learned
from fdg.runtime.parts import Parts, prepare_to_send
from fdg.runtime.remote_replay import LazyBatch, Ref, RemoteBuffer, uses_of
from fdg.runtime.shared import Arena, Board, Segment, Slot
from fdg.runtime.state import merged
from fdg.runtime.values import Varying, copied
from fdg.runtime.wire import Packed, pack
from fdg.runtime.worker import PULSE, Joined, fingerprint, raise_remote

DRIVER, BOARD = 0, -1
"""Owners of segments that no worker has."""


class Remote:
    """A worker as the driver sees it."""

    def __init__(self, number: int, name: str, server: ForkServer, arena: Arena, library: Library) -> None:
        self.number, self.name, self.server = number, name, server
        mine, theirs = socket.socketpair()
        self.pulse = Segment(PULSE.size)
        self.pid = server.fork([theirs.fileno(), self.pulse.fd])
        theirs.close()
        mine.sendall(number.to_bytes(4, "little"))
        self.channel = Channel(mine, arena, library)
        self.asked = ""
        """What it is doing, in words; empty when it waits."""
        self.since = time.monotonic()

    def ask(self, name: str, *arguments: Any, needs: tuple[Slot, ...] = (), doing: str = "") -> None:
        self.asked, self.since = doing or name, time.monotonic()
        try:
            self.channel.send((name, arguments), needs)
        except OSError:
            raise self.lost() from None

    def hear(self) -> Any:
        """The answer, which must have come."""
        try:
            kind, value = self.channel.receive()
        except (Gone, OSError):
            raise self.lost() from None
        self.asked = ""
        self.channel.done()
        if kind == "error":
            raise_remote(value)
        return value

    def silence(self) -> float:
        """Seconds since the last sign of life."""
        (beat,) = PULSE.unpack_from(self.pulse.memory, 0)
        return time.monotonic() - max(beat, self.since)

    def lost(self) -> WorkerLost:
        how = self.server.status(self.pid)
        return WorkerLost(
            f"worker {self.name} (process {self.pid}) was {how} while it was to do: {self.asked or 'nothing'}"
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.server.status(self.pid)
        self.channel.close()
        self.pulse.close()


def layout(parts: Parts, workers: int | None) -> tuple[list[tuple[str, list[InstanceKey]]], list[InstanceKey]]:
    """The workers of a run with their instances, and the instances of the replay fragment, whose rows are with the shards."""
    plan: list[tuple[str, list[InstanceKey]]] = []
    local: list[InstanceKey] = []
    for name, fragment in parts.fragments.items():
        keys = [key for key in parts.instance_keys() if key[0] == name]
        if fragment.per in ("actor", "worker"):
            count = min(workers or os.cpu_count() or 1, parts.config.actors)
            count = fragment.replicas if fragment.per == "worker" else count
            groups = [
                [key for key in keys if key[1] == "one" or key[2] * count // parts.config.actors == w]
                for w in range(count)
            ]
            plan += [(f"{name}[{w}]", group) for w, group in enumerate(groups)]
        elif fragment.per == "shard" and parts.buffer is not None:
            local += keys
        else:
            plan.append((name, keys))
    return plan, local


def worker_names(parts: Parts, workers: int | None) -> list[str]:
    """The workers that a run starts."""
    plan, local = layout(parts, workers)
    return [name for name, _ in plan] + [
        f"replay[{shard}]" for shard in range(parts.config.replay_shards if local else 0)
    ]


class Processes:
    """Hosts the instances of a run in workers."""

    name = "process"

    def __init__(self, parts: Parts, options: Any) -> None:
        self.parts, self.options = parts, options
        self.arena, self.library = self._memory()
        self.remotes: list[Any] = []
        self.homes: dict[InstanceKey, Remote] = {}
        self.replicas: dict[InstanceKey, list[Remote]] = {}
        """Instances that exist in several workers. The first is their home: its replies count."""
        self.published: dict[InstanceKey, dict[tuple[int, ...], Slot]] = {}
        self.host: Host | None = None
        self.buffer: RemoteBuffer | None = None
        self.shards: list[Remote] = []
        self.store: Any = None
        """Where replicas of a learner find each other."""
        self._stack = contextlib.ExitStack()
        try:
            self._start(self._stack.enter_context(self._server()))
        except BaseException:
            self.stop()
            raise

    def _memory(self) -> tuple[Any, Any]:
        return Arena(DRIVER), Library()

    def _server(self) -> Any:
        return for_one_run()

    # start and stop ---------------------------------------------------------------------------------------------------

    def _start(self, server: Any) -> None:
        parts, options = self.parts, self.options
        self._prepare(server)
        weights = parts.weights()
        board = self._board(weights)
        plan, local = layout(parts, options.workers)
        for name, keys in plan:
            remote = self._fork(server, name)
            for key in keys:
                self.homes.setdefault(key, remote)
                self.replicas.setdefault(key, []).append(remote)
        if local:
            count = parts.config.replay_shards
            self.shards = [self._fork(server, f"replay[{shard}]") for shard in range(count)]
        self._started()
        self._spread()
        for remote in self.remotes:
            remote.ask("path", [entry or os.getcwd() for entry in sys.path])
        self.hear(self.remotes)
        for (_, keys), remote in zip(plan, self.remotes, strict=False):
            seat = self._seat(keys, remote)
            remote.ask("start", parts, keys, bool(weights), options.threads, seat, needs=board, doing="start")
        for index, remote in enumerate(self.shards):
            shard = parts.buffer.shard(index, parts.config.actors, len(self.shards))  # type: ignore[union-attr]
            remote.ask("start_shard", shard, options.threads, doing="start")
        mine = fingerprint()
        for remote, seen in zip(self.remotes, self.hear(self.remotes), strict=True):
            self.note_board(seen.get("board"))
            if seen["fingerprint"] != mine:
                raise RunError(
                    f"worker {remote.name} computes differently from the driver ({seen['fingerprint']}, here {mine}): "
                    "results would differ in the last bits"
                )
        if trace.on():
            for remote in self.remotes:
                remote.ask("take_trace")
            self.hear(self.remotes)
        if local:
            self._open_replay(local)

    def log_to(self, folder: Path) -> None:
        """From now on what a worker prints goes to a file of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        for remote in self.remotes:
            remote.ask("log_to", str(folder.absolute() / f"{remote.name.replace('[', '-').rstrip(']')}.log"))
        self.hear(self.remotes)

    def _started(self) -> None:
        """All workers have been asked for."""

    def _spread(self) -> None:
        """Give workers that work side by side a CPU each, or one for each of their threads: woken by the driver they would
        start on its own, one behind the other, and some kernels leave them there for seconds. FDG_PIN=0 leaves it to the
        system."""
        if not hasattr(os, "sched_getaffinity") or os.environ.get("FDG_PIN") == "0":
            return
        cpus, threads = sorted(os.sched_getaffinity(0)), self.options.threads
        if threads > 1 and threads >= len(cpus):
            return
        groups: dict[str, list[Any]] = {}
        for remote in self.remotes:
            groups.setdefault(remote.name.partition("[")[0], []).append(remote)
        pinned = [remote for group in groups.values() if len(group) > 1 for remote in group]
        for group in groups.values():
            for index, remote in enumerate(group if len(group) > 1 else ()):
                remote.ask("pin", {cpus[(index * threads + thread) % len(cpus)] for thread in range(threads)})
        self.hear(pinned)

    def _prepare(self, server: Any) -> None:
        server.preload(prepare_to_send(self.parts))

    def _board(self, weights: list[torch.Tensor]) -> tuple[Slot, ...]:
        """Where weights are published; the slots that workers need for it."""
        board = Board(weights)
        self.library.segments[BOARD, 0] = board.segment
        return (Slot(BOARD, 0, 0, ()),)

    def _fork(self, server: Any, name: str) -> Any:
        remote = Remote(len(self.remotes) + 1, name, server, self.arena, self.library)
        self.remotes.append(remote)
        return remote

    def _seat(self, keys: list[InstanceKey], remote: Remote) -> Seat | None:
        """A worker's place among the replicas of a learner; None if there is one learner."""
        for key in keys:
            if key[1] == "one" and len(self.replicas[key]) > 1 and self.parts.agent.learner is not None:
                self.store = self.store or open_store()
                found = self.replicas[key]
                return Seat(found.index(remote), len(found), self.store.port, self.options.deadline)
        return None

    def _open_replay(self, keys: list[InstanceKey]) -> None:
        parts, options = self.parts, self.options
        assert parts.buffer is not None
        self.buffer = RemoteBuffer(
            parts.buffer,
            parts.config.actors,
            len(self.shards),
            _Shards(self),
            options.sample_parallelism,
            parts.sample_work,
        )
        numbers = {remote.number: index for index, remote in enumerate(self.shards)}
        self.buffer.shard_of = lambda slot: numbers[slot.owner]
        instances = parts.instances(keys)
        for instance in instances.values():
            instance.msrl._buffer, instance.msrl._sample_work = self.buffer, 0
        self.host = Host(instances, LocalWeights())
        self.uses = {key[0]: uses_of(parts.files[key[0]].read_text()) for key in keys}

    def stop(self) -> None:
        for remote in self.remotes:
            remote.kill()
        self.remotes, self.shards, self.homes, self.replicas, self.store = [], [], {}, {}, None
        self._stack.close()
        self.library.close()
        self.arena.close()

    # asking -----------------------------------------------------------------------------------------------------------

    def hear(self, remotes: Sequence[Remote]) -> list[Any]:
        """The answers of some workers. A worker's exception is raised when all have answered or ended."""
        missing, answers, failed = list(dict.fromkeys(remotes)), {}, []  # type: ignore[var-annotated]
        while missing:
            remote = self.next(missing)
            missing.remove(remote)
            try:
                answers[remote.number] = remote.hear()
            except WorkerLost:
                raise
            except BaseException as error:
                failed.append((remote.number, error))
        if failed:
            raise min(failed, key=lambda pair: (isinstance(pair[1], PeerFailed), pair[0]))[1]
        return [answers[remote.number] for remote in remotes]

    def next(self, remotes: Sequence[Remote]) -> Remote:
        """The first of some workers to answer."""
        while True:
            ready = select.select([remote.channel for remote in remotes], [], [], 1.0)[0]
            if ready:
                return next(remote for remote in remotes if remote.channel in ready)
            for remote in remotes:
                if remote.silence() > self.options.deadline:
                    raise RunError(
                        f"worker {remote.name} (process {remote.pid}) has shown no sign of life for "
                        f"{remote.silence():.0f} s while it was to do: {remote.asked}. Is it stopped, or swapped out? "
                        "--deadline sets how long to wait"
                    )

    def place(self, instance: InstanceKey) -> int:
        remote = self.homes.get(instance)
        return remote.number if remote is not None else DRIVER

    # tasks ------------------------------------------------------------------------------------------------------------

    def call(self, tasks: list[Task]) -> list[Reply]:
        if tasks[0].instance not in self.homes:
            return [self.call_here(task) for task in tasks]
        mine: list[Slot] = []
        groups: dict[int, tuple[Remote, list[tuple[Packed, Any]], set[Slot], str]] = {}
        with trace.span(trace.DRIVER_ROW, "transfer", "transfer"):
            for task in tasks:
                packed = Packed(task)
                for remote in self.replicas[task.instance]:
                    given = self.locate(task, remote, mine)
                    group = groups.setdefault(remote.number, (remote, [], set(), self.describe(task)))
                    group[1].append((packed, given))
                    group[2].update(slot for where in given.values() for slot in _slots_of(where))
            for remote, requests, needs, doing in groups.values():
                remote.ask("perform", requests, self.board_at, needs=tuple(needs), doing=doing)
        remotes = [group[0] for group in groups.values()]
        answers = {}
        with trace.span(trace.DRIVER_ROW, f"wait for {', '.join(remote.name for remote in remotes)}", "sync"):
            try:
                heard = self.hear(remotes)
            except Exception as error:
                self.note_board(learned(error)[1])
                raise
        for remote, answer in zip(remotes, heard, strict=True):
            answers[remote.number] = iter(answer["replies"])
            self.note_board(answer["board"])
        for slot in mine:
            self.arena.free(slot)
        replies = []
        for task in tasks:
            packed, sent = next(answers[self.homes[task.instance].number])
            self.published[task.instance] = sent
            replies.append(packed.open())
        return replies

    board_at: Any = None
    """Where the weights are, for engines whose workers cannot know."""

    def note_board(self, where: Any) -> None:
        pass

    def describe(self, task: Task) -> str:
        """A task in words, for errors: the region, the user's lines, and the edges that wait for it."""
        fragment = self.parts.fragments[task.instance[0]]
        region = next(region for region in fragment.regions if region.name == task.region)
        lines = f"{os.path.basename(region.file)}:{region.lines[0]}-{region.lines[1]}"
        values = {out.name for out in task.outputs}
        waiting = [edge for edge in self.parts.edges if edge[0] == fragment.name and edge[2] in values]
        sent = ", ".join(f"{source} → {target} `{value}`" for source, target, value in waiting)
        return f"{fragment.name}.{region.name} ({lines})" + (f", for the edges {sent}" if sent else "")

    def locate(self, task: Task, target: Remote, mine: list[Slot]) -> dict[Any, Any]:
        """Where the objects are that a task brings from other instances."""
        given: dict[Any, Any] = {}
        for value in _items(task.inputs):
            if not isinstance(value, From):
                continue
            name = (value.source, value.keys)
            home = self.homes.get(value.source)
            if name in given or home is target:
                continue
            given[name] = self.slot_of(value.source, value.keys) if home is not None else self.offer(*name, mine)
        return given

    def slot_of(self, source: InstanceKey, keys: tuple[int, ...]) -> Slot:
        """Where objects of a worker's instance lie for others to read."""
        known = self.published.setdefault(source, {})
        if keys not in known:
            remote = self.homes[source]
            remote.ask("publish", source, keys)
            (known[keys],) = self.hear([remote])
        return known[keys]

    def offer(self, source: InstanceKey, keys: tuple[int, ...], mine: list[Slot]) -> Slot | Joined:
        """Objects of an instance in this process, for a worker to read."""
        assert self.host is not None
        objects = self.host.objects(source, keys)
        if len(objects) == 1 and isinstance(objects[0], LazyBatch):
            lazy = objects[0]
            return Joined(lazy.slots, lazy.order, lazy.router)
        slot = self.arena.put(pack(tuple(item.batch() if isinstance(item, LazyBatch) else item for item in objects)))
        mine.append(slot)
        return slot

    def call_here(self, task: Task) -> Reply:
        """A region of the replay fragment: the router's part is here, rows stay where they are."""
        assert self.host is not None and self.buffer is not None
        uses = self.uses[task.instance[0]][task.region]
        store = self.host.instances[task.instance].store
        sizes: dict[str, int] = {}
        inputs = {name: self.enter_here(name, value, uses, sizes) for name, value in task.inputs.items()}
        for item in _items(task.inputs):
            if isinstance(item, Here) and isinstance(lazy := store.objects[item.key], LazyBatch):
                store.put(item.key, lazy.batch())
        self.buffer.lazy = uses.passes
        (reply,) = perform_copied(self.host, [task._replace(inputs=inputs)], self.fetch)
        self.buffer.flush()
        reply.bytes.update(sizes)
        return reply

    def enter_here(self, name: str, value: Any, uses: Any, sizes: dict[str, int]) -> Any:
        if isinstance(value, Varying):
            return Varying(self.enter_here(name, item, uses, sizes) for item in value)
        if not isinstance(value, From) or value.source not in self.homes:
            return value
        if name in uses.inserted and len(value.keys) == 1:
            ref = Ref(self.slot_of(value.source, value.keys))
            sizes[name] = sizes.get(name, 0) + len(ref)
            return ref
        if name in uses.updated and len(value.keys) == 1:
            remote = self.homes[value.source]
            remote.ask("priorities", value.source, value.keys[0])
            (found,) = self.hear([remote])
            sizes[name] = sizes.get(name, 0) + pack(found).nbytes
            return found
        return value

    def fetch(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        remote = self.homes.get(source)
        if remote is None:
            assert self.host is not None
            return copied(self.host.objects(source, keys), {})
        remote.ask("fetch", source, keys)
        return self.hear([remote])[0]

    # checkpoints ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        hosts = list(dict.fromkeys(self.homes.values()))
        for remote in hosts:
            remote.ask("state")
        states = self.hear(hosts)
        return merged([*states, self.host.state()] if self.host is not None else states)

    def load_state(self, state: dict[str, Any]) -> list[str]:
        hosts = list(dict.fromkeys(remote for remotes in self.replicas.values() for remote in remotes))
        for remote in hosts:
            mine = [key for key, remotes in self.replicas.items() if remote in remotes]
            remote.ask("load_state", self.part_of(state, mine))
        lost = [item for answer in self.hear(hosts) for item in answer]
        return lost + (self.host.load_state(state) if self.host is not None else [])

    def part_of(self, state: dict[str, Any], keys: list[InstanceKey]) -> dict[str, Any]:
        """Of a run's state what some instances need."""
        components = {name for key in keys for name in self.parts.fragments[key[0]].components}
        indices = {index for _, kind, index in keys if kind == "actor"}
        part = {name: value for name, value in state.items() if name in ("version", "streams")}
        for name in ("env", "actor"):
            part[name] = {index: value for index, value in state[name].items() if index in indices}
        part.update({name: state[name] for name in ("learner", "buffer") if name in components and name in state})
        return part

    def put(self, target: InstanceKey, values: tuple[Any, ...]) -> tuple[int, ...]:
        remote = self.homes.get(target)
        if remote is None:
            assert self.host is not None
            return self.host.put(target, copied(values, {}))
        for replica in self.replicas[target]:
            replica.ask("put", target, values)
        return self.hear(self.replicas[target])[0]

    # the learner ------------------------------------------------------------------------------------------------------

    def _learner(self) -> Remote | None:
        for name, fragment in self.parts.fragments.items():
            if "learner" in fragment.components and self.parts.agent.learner is not None:
                return self.homes[name, "one", 0]
        return None

    def spans(self) -> list[trace.Place]:
        for remote in self.remotes:
            remote.ask("spans")
        found = self.hear(self.remotes)
        return [trace.Place(seen[0], remote.name, seen[1]) for remote, seen in zip(self.remotes, found, strict=True)]

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._ask_learner("parameters") or {}

    def evaluate(self, episodes: int, seed: int) -> list[float] | None:
        return self._ask_learner("evaluate", episodes, seed)

    def policy_state(self) -> dict[str, Any] | None:
        return self._ask_learner("policy_state")

    def _ask_learner(self, name: str, *arguments: Any) -> Any:
        remote = self._learner()
        if remote is None:
            return None
        remote.ask(name, *arguments)
        return self.hear([remote])[0]


class _Shards:
    """The shards' workers, as the buffer asks them."""

    def __init__(self, engine: Processes) -> None:
        self.engine = engine

    def ask(self, shard: int, name: str, *arguments: Any) -> None:
        needs = tuple(item for item in arguments if isinstance(item, Slot))
        self.engine.shards[shard].ask(name, *arguments, needs=needs, doing=f"{name} of the replay buffer")

    def hear(self, shards: Sequence[int]) -> list[Any]:
        return self.engine.hear([self.engine.shards[shard] for shard in shards])

    def first(self, shards: Sequence[int]) -> tuple[int, Any]:
        remote = self.engine.next([self.engine.shards[shard] for shard in shards])
        return self.engine.shards.index(remote), remote.hear()

    def read(self, slot: Slot) -> Any:
        return self.engine.library.read(slot)


def _items(inputs: dict[str, Any]) -> list[Any]:
    """The values of a task, one by one."""
    return [item for value in inputs.values() for item in (value if isinstance(value, Varying) else [value])]


def _slots_of(where: Slot | Joined) -> tuple[Slot, ...]:
    return where.parts if isinstance(where, Joined) else (where,)
