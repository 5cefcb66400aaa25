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
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

from fdg.errors import RunError, UsageError, WorkerLost, is_users
from fdg.runtime.flame_service import lost_worker
from fdg.runtime.flame_worker import CacheArena, CacheLibrary, packed, unpacked
from fdg.runtime.parts import prepare_to_send
from fdg.runtime.process import DRIVER, Processes
from fdg.runtime.shared import Slot
from fdg.runtime.worker import raise_remote

START_SECONDS = 180.0
"""Seconds that a service may take to start: it imports torch."""
CLOSE_SECONDS = 10.0
"""Seconds that a running task is given before its session is left to itself."""
WATCH_SECONDS = 20.0
"""Seconds after which a task is asked for anew."""
SUCCEEDED = 2
"""Flame's number for a task that has an answer; what is above has failed or was cancelled."""


class Cluster:
    """A connection to a Flame cluster, and this run's application in it."""

    def __init__(self) -> None:
        import flamepy
        from flamepy.core import cache, client

        client.ConnectionInstance._connection = None  # another cluster may have been used before
        cache._context_cache = None
        self.flame = flamepy
        self.name = f"fdg-{uuid.uuid4().hex[:12]}"
        self.folder = tempfile.mkdtemp(prefix="fdg-flame-")
        self.idle: list[Any] = []
        """Sessions whose services wait for another run."""
        self.busy: list[Any] = []
        """Sessions that could not be closed, because a task of theirs runs."""
        try:
            self.flame.register_application(
                self.name,
                flamepy.ApplicationAttributes(
                    command=os.environ.get("FDG_FLAME_PYTHON", sys.executable),
                    arguments=["-m", "fdg.runtime.flame_service"],
                    working_directory=self.folder,
                    delay_release=10**9,
                    environments=self.environment(),
                ),
            )
        except Exception as error:
            raise UsageError(
                f"the Flame cluster at {endpoint()} does not answer: {error}. Start one with `fdg flame up`, or set "
                "FLAME_ENDPOINT and FLAME_CACHE_ENDPOINT"
            ) from error

    def environment(self) -> dict[str, str]:
        names = ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "HOME", "PATH", "FDG_CACHE", "PYTHONPATH")
        known = {name: os.environ[name] for name in names if name in os.environ}
        return {**known, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def take_session(self) -> Any:
        """A session with a service of its own."""
        return self.idle.pop() if self.idle else self.flame.create_session(self.name, min_instances=1, max_instances=1)

    def give_back(self, session: Any, *, idle: bool) -> None:
        """A run needs a session no more: it waits for another run, if its service is idle and there will be one."""
        if idle and _kept == [self]:
            self.idle.append(session)
        elif not end_session(session):
            self.busy.append(session)

    def close(self) -> None:
        end = time.monotonic() + CLOSE_SECONDS
        waiting = [session for session in (*self.idle, *self.busy) if not end_session(session)]
        while waiting and time.monotonic() < end:
            time.sleep(0.2)
            waiting = [session for session in waiting if not end_session(session)]
        with contextlib.suppress(Exception):
            self.flame.unregister_application(self.name)
        from flamepy.core.cache import delete_objects

        with contextlib.suppress(Exception):
            delete_objects(f"{self.name}/*")
        shutil.rmtree(self.folder, ignore_errors=True)


def end_session(session: Any) -> bool:
    """Close a session and have it forgotten: the session manager keeps what went in and out of closed ones."""
    from flamepy.proto.frontend_pb2 import DeleteSessionRequest

    try:
        session.close()
        session.connection._frontend.DeleteSession(DeleteSessionRequest(session_id=session.id), timeout=5)
    except Exception as error:
        return "running tasks" not in str(error)
    return True


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
    return os.environ.get("FLAME_ENDPOINT", "its configured endpoint")


class FlameRemote:
    """A worker in the cluster, as the driver sees it."""

    def __init__(self, number: int, name: str, cluster: Cluster, arena: CacheArena, library: CacheLibrary) -> None:
        self.number, self.name, self.cluster = number, name, cluster
        self.arena, self.library = arena, library
        self.session = cluster.take_session()
        self.pid = 0
        self.pulse: Any = None
        self.asked = ""
        self.gone = False
        self._slots: list[Slot] = []
        self.answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

    def ask(self, name: str, *arguments: Any, needs: Any = (), doing: str = "") -> None:
        self.asked, self.since = doing or name, time.monotonic()
        data = packed((name, arguments), self.arena, self._slots)
        self.answer = concurrent.futures.Future()
        # A thread of its own, which ends with the process: Flame's client has ten for all, and waits for them at exit.
        threading.Thread(target=self._call, args=(data, self.answer), daemon=True, name=f"fdg-{self.name}").start()

    def _call(self, data: bytes, answer: concurrent.futures.Future[bytes]) -> None:
        try:
            task = self.session.create_task(data)
            while not answer.done():
                self._watch(task.id, answer)
        except BaseException as error:
            if not answer.done():
                answer.set_exception(error)

    def _watch(self, task: str, answer: concurrent.futures.Future[bytes]) -> None:
        """Wait for a task for some time: a stream that broke would never say so."""
        import grpc
        from flamepy.proto.frontend_pb2 import WatchTaskRequest

        stub = self.session.connection._frontend
        try:
            for update in stub.WatchTask(
                WatchTaskRequest(task_id=task, session_id=self.session.id), timeout=WATCH_SECONDS
            ):
                if update.status.state == SUCCEEDED:
                    answer.set_result(update.spec.output)
                    return
                if update.status.state > SUCCEEDED:
                    events = "; ".join(event.message for event in update.status.events)
                    raise RunError(f"the task failed: {events or 'no reason given'}")
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
                raise

    def ready(self) -> bool:
        return self.answer.done()

    def hear(self) -> Any:
        try:
            data = self.answer.result(0)
        except Exception as error:
            self.gone = True
            raise self.lost(str(error)) from None
        lost = lost_worker(data)
        if lost:
            raise self.lost(lost)
        kind, value = unpacked(data, self.library)
        self.asked = ""
        for slot in self._slots:
            self.arena.free(slot)
        self._slots = []
        if kind == "error":
            raise_remote(value)
        return value

    def lost(self, why: str) -> WorkerLost:
        return WorkerLost(
            f"worker {self.name} (Flame session {self.session.id}, process {self.pid}) is gone while it was to do: "
            f"{self.asked or 'nothing'} ({why.splitlines()[0] if why else 'no reason given'})"
        )

    def silence(self) -> float:
        """Seconds since the last sign of life, as far as the cache tells."""
        if self.pulse is None:
            self.check_events()
            return time.monotonic() - self.since
        from flamepy.core import ObjectRef, get_object

        try:
            beat = get_object(ObjectRef(*self.pulse, 0))
        except Exception as error:
            raise RunError(
                f"Flame's object cache does not answer ({str(error).splitlines()[0][:200]}), asked for the pulse of worker "
                f"{self.name}, which was to do: {self.asked}. Start it again; --resume goes on from the last checkpoint"
            ) from error
        return max(0.0, min(time.time() - beat, time.monotonic() - self.since)) if beat > 1e9 else 0.0

    def check_events(self) -> None:
        """A service that cannot be started says so in its session's events, and nowhere else."""
        for event in self.cluster.flame.get_session(self.session.id).events or []:
            if event.code in (1001, 1002):
                raise RunError(f"Flame cannot start the service of worker {self.name}: {event.message}")

    def kill(self) -> None:
        if not self.gone:  # closing a session whose process is dead makes the executor manager spin
            self.cluster.give_back(self.session, idle=not self.asked)


class Flame(Processes):
    """Hosts the instances of a run in services of a Flame cluster."""

    name = "flame"

    def _memory(self) -> tuple[Any, Any]:
        return CacheArena(DRIVER, "fdg/driver"), CacheLibrary()

    @contextlib.contextmanager
    def _server(self) -> Iterator[Cluster]:
        cluster = _kept[0] if _kept else Cluster()
        try:
            self.arena.prefix = f"{cluster.name}/driver"
            yield cluster
        finally:
            if cluster not in _kept:
                cluster.close()

    def _prepare(self, server: Cluster) -> None:
        """The user's modules travel by value: a copy that the cluster has may be another one."""
        for name in prepare_to_send(self.parts):
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if module is not None and file is not None and is_users(file) and not name.startswith("fdg."):
                cloudpickle.register_pickle_by_value(module)

    def _board(self, weights: Any) -> tuple[Slot, ...]:
        return ()

    def note_board(self, where: Any) -> None:
        if where is not None and (self.board_at is None or where[0] >= self.board_at[0]):
            self.board_at = where

    def _fork(self, server: Cluster, name: str) -> FlameRemote:
        remote = FlameRemote(len(self.remotes) + 1, name, server, self.arena, self.library)
        self.remotes.append(remote)
        remote.ask("hello", remote.number, doing="start")
        return remote

    def _started(self) -> None:
        deadline, self.options = self.options, _Longer(self.options)
        try:
            for remote, (pid, pulse) in zip(self.remotes, self.hear(self.remotes), strict=True):
                remote.pid, remote.pulse = pid, pulse
        finally:
            self.options = deadline

    def next(self, remotes: Sequence[Any]) -> Any:
        """The first of some workers to answer."""
        checked = time.monotonic()
        while True:
            waiting = [remote.answer for remote in remotes]
            concurrent.futures.wait(waiting, timeout=1.0, return_when=concurrent.futures.FIRST_COMPLETED)
            for remote in remotes:
                if remote.ready():
                    return remote
            if time.monotonic() - checked < 5:
                continue
            checked = time.monotonic()
            for remote in remotes:
                silent = remote.silence()
                if silent > self.options.deadline:
                    raise RunError(
                        f"worker {remote.name} (Flame session {remote.session.id}) has shown no sign of life for {silent:.0f} s "
                        f"while it was to do: {remote.asked}. {self.scheduled()}"
                    )

    def scheduled(self) -> str:
        """What the cluster says of its capacity."""
        with contextlib.suppress(Exception):
            executors = self.remotes[0].cluster.flame.list_executors()
            bound = [executor for executor in executors if executor.status.session_id]
            return (
                f"The cluster has {len(executors)} executors, {len(bound)} of them in use; this run needs "
                f"{len(self.remotes)}. Is an executor manager gone, or is there no room? --deadline sets how long to wait"
            )
        return "The session manager does not answer either"


class _Longer:
    """Options with the deadline of a start."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return START_SECONDS if name == "deadline" else getattr(self._options, name)
