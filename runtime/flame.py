"""The Flame engine: each worker is a service of a Flame cluster, one session with one instance.

What goes from one worker to another lies in Flame's object cache, under a key that passes the driver. Weights are there
once per version. Every wait of Flame's has a deadline of ours: a service shows signs of life in the cache, whatever it
is doing, and a task that fails without an answer means that its process is gone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from fdg.errors import RunError, UsageError, WorkerLost, is_users
from fdg.runtime.backends import load_factory
from fdg.runtime.flame_cache import CacheLost, delete, elsewhere, first_line, objects
from fdg.runtime.flame_cluster import LIMIT, pointed
from fdg.runtime.flame_fork import FOLDER
from fdg.runtime.flame_service import PING, lost_worker
from fdg.runtime.flame_worker import BEAT, CacheArena, CacheLibrary, packed, unpacked
from fdg.runtime.forkserver import THREADS
from fdg.runtime.group import Seat
from fdg.runtime.instance import InstanceKey
from fdg.runtime.parts import prepare_to_send
from fdg.runtime.process import DRIVER, Processes
from fdg.runtime.shared import Slot
from fdg.runtime.worker import raise_remote

START_SECONDS = 180.0
"""Seconds that a service may take to start: it imports torch."""
ANSWER_SECONDS = 5.0
"""Seconds that an idle service, or the session manager, may take to answer."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the cluster while the driver waits."""
LEAST_SILENCE = 5 * BEAT
"""Seconds without a sign of life that mean nothing, whatever the deadline: a busy machine is late."""
LEASE_SECONDS = 60.0
"""Seconds without a word from the driver after which a service ends itself: a driver that was killed says nothing."""
DELAY_RELEASE = 10**9
"""Seconds without work after which Flame would end a service, state and all."""
RESREQ, RESOURCES = "FDG_FLAME_RESREQ", "cpu=1,mem=1g"
"""What a worker asks a cluster for that is not ours, and the variable that says otherwise."""
READY = 1
"""Flame's number for a node that can be used."""
BOUND = 4
"""Flame's number for an executor whose service is there."""
GAVE_UP = 1002
"""Flame's number for the event that it will not try again to start a service."""
CLOSE_SECONDS = 10.0
"""Seconds that a running task is given before its session is left to itself."""
WATCH_SECONDS = 20.0
"""Seconds after which a task is asked for anew."""
SUCCEEDED = 2
"""Flame's number for a task that has an answer; what is above has failed or was cancelled."""


class Frontend:
    """Flame's stub of the session manager, with a deadline on every call; its client's own methods set none."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, timeout=ANSWER_SECONDS: method(request, timeout=timeout)


class Cluster:
    """A connection to a Flame cluster, and this run's application in it."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.idle: list[Any] = []
        """Sessions whose services wait for another run."""
        self.leaving: list[tuple[Any, concurrent.futures.Future[bytes]]] = []
        """Sessions to be closed when their last task has been answered."""
        self.lost: list[Any] = []
        """Sessions whose service is gone. Flame may have started another one for them."""
        self.name = f"fdg-{uuid.uuid4().hex[:12]}"
        self._stack.enter_context(pointed())
        self.folder = tempfile.mkdtemp(prefix=FOLDER)
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.closed = threading.Event()
        self._stack.callback(self.closed.set)
        try:
            self._register()
            self.lease = objects().put_object(f"{self.name}/lease", 0)
            threading.Thread(target=self._live, daemon=True, name="fdg-lease").start()
        except Exception as error:
            self._stack.close()
            known = "FLAME_ENDPOINT" in os.environ or Path.home().joinpath(".flame", "flame.yaml").exists()
            raise RunError(
                (
                    f"the Flame cluster at {endpoint()} does not answer: {first_line(error)}"
                    if known
                    else "no Flame cluster runs here"
                )
                + ". Start one with `fdg flame up`, or set FLAME_ENDPOINT and FLAME_CACHE_ENDPOINT to one that runs; fdg doctor "
                "says what is found"
            ) from error

    def _register(self) -> None:
        import flamepy
        from flamepy.core import client

        client.ConnectionInstance._connection = client.ConnectionInstance._context = None  # of another cluster, before
        elsewhere()
        self.connection = connection = client.ConnectionInstance.instance()
        connection._frontend = Frontend(connection._frontend)
        connection.register_application(
            self.name,
            flamepy.ApplicationAttributes(
                command=os.environ.get("FDG_FLAME_PYTHON", sys.executable),
                arguments=["-m", "fdg.runtime.flame_service"],
                working_directory=self.folder,
                delay_release=DELAY_RELEASE,
                environments=self.environment(),
            ),
        )

    def _live(self) -> None:
        """Let the services know that their driver lives."""
        turn = 0
        while not self.closed.wait(LEASE_SECONDS / 10):
            turn += 1
            with contextlib.suppress(Exception):
                objects().update_object(self.lease, turn)

    def environment(self) -> dict[str, str]:
        """What a service has beside the executor manager's own environment; Flame adds where the cluster is."""
        names = ("HOME", "PATH", "FDG_CACHE", "PYTHONPATH", "FLAME_CA_FILE")
        known = {name: os.environ[name] for name in names if name in os.environ}
        return {**known, "TMPDIR": self.folder, **dict.fromkeys(THREADS, "1")}

    # room

    def nodes(self) -> list[Any]:
        """The nodes that are ready."""
        from flamepy.proto.frontend_pb2 import ListNodesRequest

        return [node for node in self._ask("ListNodes", ListNodesRequest()).nodes if node.status.state == READY]

    def executors(self) -> dict[str, Any]:
        """The executors in use, by their session."""
        from flamepy.proto.frontend_pb2 import ListExecutorRequest

        found = self._ask("ListExecutor", ListExecutorRequest()).executors
        return {executor.status.session_id: executor for executor in found if executor.status.session_id}

    def _ask(self, name: str, request: Any) -> Any:
        """Ask the session manager."""
        import grpc

        try:
            return getattr(self.connection._frontend, name)(request)
        except grpc.RpcError as error:
            details = error.details()  # type: ignore[attr-defined]
            raise RunError(
                f"the Flame session manager at {endpoint()} does not answer: {details}. Start it again, or a new cluster (fdg flame "
                "down, fdg flame up); where there is a checkpoint, --resume goes on from it"
            ) from None

    def check_room(self, names: Sequence[str], deadline: float) -> None:
        """Refuse a run for which there is no room: Flame would let it wait, or start more than the nodes can bear."""
        end = time.monotonic() + deadline
        while not (nodes := self.nodes()):
            if time.monotonic() > end:
                raise RunError(
                    f"the Flame cluster at {endpoint()} has no node that is ready, and this run needs {len(names)} executors "
                    f"({', '.join(names)}). Start flame-executor-manager on a node, or a new cluster (fdg flame down, fdg flame "
                    "up); where there is a checkpoint, --resume goes on from it"
                )
            time.sleep(0.5)
        held = {node.metadata.name for node in nodes}
        self.idle = living([session for session in self.idle if self._usable(session, held)])
        mine = {session.id for session in self.idle}
        used = sum(session not in mine for session in self.executors())
        each, limit = resources(), os.environ.get(LIMIT)
        room = int(limit) if limit else sum(fits(node.status.capacity, each) for node in nodes)
        if len(names) > room - used:
            sizes = ", ".join(
                f"{n.metadata.name}: cpu={n.status.capacity.cpu}, {n.status.capacity.memory >> 20} MiB" for n in nodes
            )
            why = (
                f"it was started for {limit}"
                if limit
                else f"a worker needs {os.environ.get(RESREQ, RESOURCES)}, nodes have {sizes}"
            )
            raise RunError(
                f"this run needs {len(names)} executors ({', '.join(names)}), and the Flame cluster at {endpoint()} has room for "
                f"{max(room - used, 0)}: {why}; {used} in use. Use fewer --workers or --replay-shards, "
                + (
                    "or fdg flame up --executors N"
                    if limit
                    else f"add nodes, or set {RESREQ} to what a worker really needs"
                )
            )

    def _usable(self, session: Any, nodes: set[str]) -> bool:
        executor = self.executors().get(session.id)
        return executor is not None and executor.spec.node in nodes

    # sessions

    def take_session(self) -> Any:
        """A session with a service of its own."""
        from flamepy.core.types import SessionAttributes

        if self.idle:
            return self.idle.pop()
        need = None if os.environ.get(LIMIT) else resources()
        attributes = SessionAttributes(application=self.name, min_instances=1, max_instances=1, resreq=need)
        return self.connection.create_session(attributes)

    def give_back(self, session: Any, answer: concurrent.futures.Future[bytes], *, idle: bool) -> None:
        """A run needs a session no more: it waits for another run, if its service is idle and there will be one."""
        if idle and _kept == [self]:
            self.idle.append(session)
        else:
            self.leaving.append((session, answer))

    def close(self) -> None:
        concurrent.futures.wait([answer for _, answer in self.leaving], timeout=CLOSE_SECONDS)
        done = [session for session, answer in self.leaving if answer.done() and answer.exception() is None]
        for session in living([*self.idle, *done, *self.lost]):
            end_session(session)
        with contextlib.suppress(Exception):
            self.connection.unregister_application(self.name)
        delete(f"{self.name}/*")
        self._stack.close()


def ask(session: Any, data: bytes, answer: concurrent.futures.Future[bytes]) -> None:
    """Put the answer to a request into a future, from a thread of its own.

    It ends with the process: Flame's client has ten threads for all, and waits for them at exit.
    """

    def call() -> None:
        try:
            task = session.create_task(data)
            while not answer.done():
                watch(session, task.id, answer)
        except BaseException as error:
            if not answer.done():
                answer.set_exception(error)

    threading.Thread(target=call, daemon=True, name=f"fdg-{session.id}").start()


def watch(session: Any, task: str, answer: concurrent.futures.Future[bytes]) -> None:
    """Wait for a task for some time: a stream that broke would never say so."""
    import grpc
    from flamepy.proto.frontend_pb2 import WatchTaskRequest

    request = WatchTaskRequest(task_id=task, session_id=session.id)
    try:
        for update in session.connection._frontend.WatchTask(request, timeout=WATCH_SECONDS):
            if update.status.state == SUCCEEDED:
                answer.set_result(update.spec.output)
                return
            if update.status.state > SUCCEEDED:
                events = "; ".join(event.message for event in update.status.events)
                raise RunError(f"the task failed: {events or 'no reason given'}")
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
            raise RunError(f"{error.code()}: {error.details()}") from None  # type: ignore[attr-defined]


def resources() -> Any:
    """What a worker asks a cluster for that is not ours."""
    from flamepy.core.types import ResourceRequirement

    text = os.environ.get(RESREQ, RESOURCES)
    try:
        return ResourceRequirement.from_string(text)
    except ValueError as error:
        raise UsageError(f"{RESREQ} is {text!r}: {error}; write for example {RESOURCES}") from None


def fits(node: Any, each: Any) -> int:
    """How many workers a node has room for."""
    return min([node.memory // max(each.memory, 1), *([node.cpu // each.cpu] if each.cpu else [])])


def end_session(session: Any) -> None:
    """Close a session and have it forgotten: the session manager keeps what went in and out of closed ones.

    Its service must live: closing the session of a dead one would keep the executor manager busy for ever.
    """
    from flamepy.proto.frontend_pb2 import DeleteSessionRequest

    with contextlib.suppress(Exception):
        session.close()
        session.connection._frontend.DeleteSession(DeleteSessionRequest(session_id=session.id))


def living(sessions: list[Any]) -> list[Any]:
    """Those of some idle sessions whose service answers."""
    answers: list[concurrent.futures.Future[bytes]] = [concurrent.futures.Future() for _ in sessions]
    for session, answer in zip(sessions, answers, strict=True):
        ask(session, PING, answer)
    concurrent.futures.wait(answers, timeout=ANSWER_SECONDS)
    return [
        session
        for session, answer in zip(sessions, answers, strict=True)
        if answer.done() and answer.exception() is None
    ]


_kept: list[Cluster] = []


@contextlib.contextmanager
def services() -> Iterator[None]:
    """Keep services between runs inside the `with`: they have imported everything already."""
    cluster = Cluster()
    _kept[:] = [cluster]
    try:
        yield
    finally:
        _kept.clear()
        cluster.close()


def endpoint() -> str:
    return os.environ.get("FLAME_ENDPOINT", "the endpoint in ~/.flame/flame.yaml")


class FlameRemote:
    """A worker in the cluster, as the driver sees it."""

    def __init__(self, number: int, name: str, cluster: Cluster, arena: CacheArena, library: CacheLibrary) -> None:
        self.number, self.name, self.cluster = number, name, cluster
        self.arena, self.library = arena, library
        self.session: Any = None
        self.node = self.executor = ""
        """Where Flame has put it."""
        self.pid = 0
        self.pulse: Any = None
        self.beat = self.heard = 0.0
        """Its last sign of life, and when it was seen to be a new one."""
        self.asked, self.since = "", time.monotonic()
        self.gone = False
        self._slots: list[Slot] = []
        self.answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

    def open(self) -> None:
        self.session = self.cluster.take_session()
        lease = self.cluster.lease
        self.ask("hello", self.number, (lease.endpoint, lease.key, LEASE_SECONDS), doing="start")

    def ask(self, name: str, *arguments: Any, needs: Any = (), doing: str = "") -> None:
        self.asked, self.since = doing or name, time.monotonic()
        data = packed((name, arguments), self.arena, self._slots)
        self.answer = concurrent.futures.Future()
        ask(self.session, data, self.answer)

    def ready(self) -> bool:
        return self.answer.done()

    def hear(self) -> Any:
        try:
            data = self.answer.result(0)
        except Exception as error:
            self.gone = True
            raise self.lost(first_line(error)) from None
        ended = lost_worker(data)
        lost = self.lost(ended) if ended else None
        doing, self.asked = self.asked, ""
        for slot in self._slots:
            self.arena.free(slot)
        self._slots = []
        if lost is not None:
            raise lost
        kind, value = unpacked(data, self.library)
        if kind == "error" and isinstance(value.error, CacheLost):
            raise RunError(f"worker {self.name}, which was to do: {doing}: {value.error}")
        if kind == "error":
            raise_remote(value)
        return value

    def lost(self, why: str) -> WorkerLost:
        session = "" if self.session is None else f"Flame session {self.session.id}, "
        return WorkerLost(
            f"worker {self.name} ({session}process {self.pid}) is gone while it was to do: {self.asked or 'nothing'} ({why})"
        )

    def listen(self) -> None:
        """Look for a sign of life in the cache. Not on the driver's thread: the cache's client has no deadlines."""
        cache = objects()
        with contextlib.suppress(Exception):
            beat = cache.get_object(cache.ObjectRef(*self.pulse, 0))
            if beat != self.beat:
                self.beat, self.heard = beat, time.monotonic()

    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - max(self.heard, self.since)

    def check_events(self) -> None:
        """A service that cannot be started says so in its session's events, and nowhere else. Flame tries several times: one
        that is slow to start may fail the first time."""
        events: list[Any] = []
        with contextlib.suppress(Exception):  # a session manager that does not answer shows in the worker's silence
            events = self.cluster.connection.get_session(self.session.id).events or []
        if any(event.code == GAVE_UP for event in events):
            why = next((event.message for event in events if event.code != GAVE_UP), "no reason given")
            raise RunError(
                f"Flame cannot start the service of worker {self.name}: {first_line(Exception(why))}. Does the node have the Python "
                "that FDG_FLAME_PYTHON names (by default the driver's own), with fdg in it?"
            )

    def kill(self) -> None:
        if self.session is not None and self.gone:
            self.cluster.lost.append(self.session)
        elif self.session is not None:
            self.cluster.give_back(self.session, self.answer, idle=not self.asked)


class Flame(Processes):
    """Hosts the instances of a run in services of a Flame cluster."""

    name = "flame"

    def _memory(self) -> tuple[Any, Any]:
        return CacheArena(DRIVER, "fdg/driver"), CacheLibrary()

    @contextlib.contextmanager
    def _server(self) -> Iterator[Cluster]:
        cluster = _kept[0] if _kept else Cluster()
        try:
            elsewhere()
            self.cluster, self.arena.prefix = cluster, f"{cluster.name}/driver"
            yield cluster
        finally:
            if cluster not in _kept:
                cluster.close()

    def _prepare(self, server: Cluster) -> None:
        """The user's modules travel by value: a copy that the cluster has may be another one, or an older one."""
        todo, seen = prepare_to_send(self.parts), set()
        env = self.parts.config.env
        if isinstance(env, str) and ".py:" in env:
            self.parts.factory = load_factory(env)
            todo.append(self.parts.factory.__module__)
        while todo:
            module = sys.modules.get(name := todo.pop())
            file = getattr(module, "__file__", None)
            if name in seen or name.startswith("fdg.") or module is None or file is None or not is_users(file):
                continue
            seen.add(name)
            cloudpickle.register_pickle_by_value(module)
            for value in list(vars(module).values()):  # what it has imported
                todo.append(value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", "")))

    def _spread(self) -> None:
        """A node's CPUs are the node's affair."""

    def _board(self, weights: Any) -> tuple[Slot, ...]:
        return ()

    def note_board(self, where: Any) -> None:
        if where is not None and (self.board_at is None or where[0] >= self.board_at[0]):
            self.board_at = where

    def load_state(self, state: dict[str, Any]) -> list[str]:
        lost = super().load_state(state)
        if (learner := self._learner()) is not None:
            learner.ask("where")
            self.note_board(self.hear([learner])[0])
        return lost

    def _seat(self, keys: list[InstanceKey], remote: Any) -> Seat | None:
        """Replicas of a learner exchange gradients over this machine's loopback."""
        seat, here = super()._seat(keys, remote), socket.gethostname()
        if seat is not None and remote.node not in ("", here):
            raise RunError(
                f"worker {remote.name} is on node {remote.node}, and the driver on {here}: several learners work together only on "
                "the driver's own machine. Use single_learner_coarse, or one learner (--workers 1)"
            )
        return seat

    def _fork(self, server: Cluster, name: str) -> FlameRemote:
        remote = FlameRemote(len(self.remotes) + 1, name, server, self.arena, self.library)
        self.remotes.append(remote)
        return remote

    def _started(self) -> None:
        """Start all services at once, if there is room for them."""
        self.cluster.check_room([remote.name for remote in self.remotes], self.options.deadline)
        for remote in self.remotes:
            remote.open()
        deadline, self.options = self.options, _Longer(self.options)
        try:
            for remote, (pid, pulse) in zip(self.remotes, self.hear(self.remotes), strict=True):
                remote.pid, remote.pulse = pid, pulse
        finally:
            self.options = deadline
        executors = self.cluster.executors()
        for remote in self.remotes:
            if (executor := executors.get(remote.session.id)) is not None:
                remote.node, remote.executor = executor.spec.node, executor.metadata.id
        threading.Thread(target=self._listen, daemon=True, name="fdg-pulse").start()

    def _listen(self) -> None:
        """Look for signs of life of workers that have been asked something."""
        while self.remotes:
            for remote in list(self.remotes):
                if remote.asked and time.monotonic() - remote.since > LOOK_SECONDS:
                    remote.listen()
            time.sleep(LOOK_SECONDS / 2)

    def next(self, remotes: Sequence[Any]) -> Any:
        """The first of some workers to answer."""
        looked = time.monotonic()
        missing: set[str] = set()
        while True:
            waiting = [remote.answer for remote in remotes]
            concurrent.futures.wait(waiting, timeout=LOOK_SECONDS / 2, return_when=concurrent.futures.FIRST_COMPLETED)
            for remote in remotes:
                if remote.ready():
                    return remote
            if time.monotonic() - looked < LOOK_SECONDS:
                continue
            looked, missing = time.monotonic(), self.look(remotes, missing)

    def look(self, remotes: Sequence[Any], missing: set[str]) -> set[str]:
        """Find out why workers do not answer; returns the nodes and executors that are not there, the second time an error."""
        away: set[str] = set()
        with contextlib.suppress(Exception):  # the session manager's own end shows in the answers
            ready = {node.metadata.name for node in self.cluster.nodes()}
            bound = {found.metadata.id for found in self.cluster.executors().values() if found.status.state == BOUND}
            away = {remote.node for remote in remotes} - ready | {remote.executor for remote in remotes} - bound
        away.discard("")
        for remote in remotes:
            if gone := {remote.node, remote.executor} & away & missing:
                remote.gone = True
                raise remote.lost(
                    f"its node {remote.node} is lost: is flame-executor-manager there gone?"
                    if remote.node in gone
                    else "Flame has ended its service"
                )
            if remote.pulse is None:
                remote.check_events()
            limit = max(self.options.deadline, LEAST_SILENCE)
            if remote.silence() > limit and not {remote.node, remote.executor} & away:
                raise RunError(
                    f"worker {remote.name} (Flame session {remote.session.id}) has shown no sign of life for "
                    f"{remote.silence():.0f} s while it was to do: {remote.asked}. {self.scheduled()}"
                )
        return away

    def scheduled(self) -> str:
        """What the cluster says of itself."""
        if not delete(f"{self.cluster.name}/nothing"):
            return "Flame's object cache does not answer: is it stopped? Start it again; --resume goes on from a checkpoint"
        with contextlib.suppress(Exception):
            bound = self.cluster.executors()
            mine = sum(remote.session.id in bound for remote in self.remotes)
            return (
                f"The cluster has {len(self.cluster.nodes())} nodes that are ready and {len(bound)} executors in use, {mine} by this "
                f"run, which needs {len(self.remotes)}. --deadline sets how long to wait; --resume goes on from a checkpoint"
            )
        return "The session manager does not answer either"


class _Longer:
    """Options with the deadline of a start."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return START_SECONDS if name == "deadline" else getattr(self._options, name)
