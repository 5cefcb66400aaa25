"""The forkserver: a process that has imported everything once, and forks workers in a few milliseconds.

    with forkserver():                       keeps it between runs; without this each run has its own
        launch(…, engine="process")

The server and its workers end with the process that started them, however that ends: each holds one end of a socket
whose other end only that process has, and asks the system (Linux) to be killed with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from fdg.errors import RunError

PRELOAD = ("torch", "tensordict", "gymnasium", "cloudpickle", "fdg.runtime.worker")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SPINS = "GOMP_SPINCOUNT", "1000"
"""How long torch's idle threads look for work before they sleep. Left to itself, one of two workers with two threads each
keeps the CPU that the other one needs."""
START_SECONDS = 120.0


class ForkServer:
    """The server as the process that uses it sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = {**dict([SPINS]), **os.environ, **dict.fromkeys(THREADS, "1")}
        command = [
            sys.executable,
            "-P",
            "-c",
            "from fdg.runtime.forkserver import serve; serve()",
            str(theirs.fileno()),
        ]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={**environment, "FDG_PATH": path},
            stdin=subprocess.DEVNULL,
        )  # no preexec_fn: with one, Python forks, and libraries with threads of their own (gRPC) may abort in the child
        theirs.close()
        self._socket.settimeout(START_SECONDS)
        self._ready = False

    def fork(self, fds: list[int]) -> int:
        """A new worker with the given descriptors; its process id."""
        self._wait()
        socket.send_fds(self._socket, [b"fork"], fds)
        return int(self._hear())

    def preload(self, modules: list[str]) -> None:
        """Import modules in the server, so that workers need not."""
        self._wait()
        for name in modules:
            self._socket.send(f"import {name}".encode())
            self._hear()

    def status(self, pid: int) -> str:
        """How a worker ended, in words."""
        with contextlib.suppress(OSError, RunError):
            self._socket.send(f"wait {pid}".encode())
            code = int(self._hear())
            if code < 0:
                return f"killed by {signal.Signals(-code).name}"
            return f"ended with code {code}"
        return "gone"

    def _wait(self) -> None:
        """Wait until the server has imported what it must."""
        if not self._ready:
            self._hear()
            self._ready = True

    def _hear(self) -> bytes:
        try:
            answer = self._socket.recv(256)
        except TimeoutError:
            raise RunError(
                f"the forkserver (process {self._process.pid}) has not answered in {START_SECONDS:.0f} s"
            ) from None
        if not answer:
            raise RunError(
                f"the forkserver has ended (code {self._process.wait()}); what it wrote, if anything, is above"
            )
        return answer

    def stop(self) -> None:
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_kept: list[ForkServer] = []


@contextlib.contextmanager
def forkserver() -> Iterator[None]:
    """Keep one server for all runs inside the `with`; within another one, that server."""
    if _kept:
        yield
        return
    server = ForkServer()
    _kept.append(server)
    try:
        yield
    finally:
        _kept.remove(server)
        server.stop()


@contextlib.contextmanager
def for_one_run() -> Iterator[ForkServer]:
    """The server that is kept, or a new one."""
    if _kept:
        yield _kept[-1]
        return
    server = ForkServer()
    try:
        yield server
    finally:
        server.stop()


# in the server --------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Ask the system to be killed when the parent ends; where it cannot, the end of the socket has to do."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve() -> None:
    """The server's main loop: fork on demand, tell how workers ended."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    # Behind Python's own: a file of the user's called json.py must not stand for the library's. Workers get the true order.
    sys.path += [entry for entry in os.environ.pop("FDG_PATH").split(os.pathsep) if entry not in sys.path]
    for name in PRELOAD:
        __import__(name)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        control.send(b"ready")
    except OSError:  # the driver has gone meanwhile
        os._exit(0)
    ended: dict[int, int] = {}
    while True:
        request, fds, _, _ = socket.recv_fds(control, 256, 16)
        if not request:
            os._exit(0)
        if request == b"fork":
            if not gc.get_freeze_count():
                gc.collect()
                gc.freeze()  # workers need not look at what was made here: that would copy its memory
            pid = os.fork()
            if not pid:
                control.close()
                _work(fds)
            for fd in fds:
                os.close(fd)
            control.send(str(pid).encode())
            continue
        word, name = request.decode().split()
        if word == "import":
            with contextlib.suppress(Exception):  # a worker that needs it will say what is wrong
                __import__(name)
            control.send(b"imported")
        else:
            control.send(str(_reap(int(name), ended)).encode())


def _reap(pid: int, ended: dict[int, int]) -> int:
    """The exit code of a worker that has ended, or is about to."""
    if pid not in ended:
        _, status = os.waitpid(pid, 0)
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]


def _work(fds: list[int]) -> Any:
    code = 1
    try:
        die_with_parent()
        from fdg.runtime.worker import work

        work(*fds)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
