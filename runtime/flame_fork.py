"""One process per node and run that has imported everything once, and forks the workers behind the run's services.

The first supervisor (`flame_service`) that needs it starts it; all find it by a socket in the run's folder. A connection
is a worker: when the worker ends, its exit code is the answer; when the connection ends, the worker is killed. So no
worker outlives its supervisor, and the process itself ends soon after the last connection, and removes the run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PRELOAD = (
    "torch",
    "tensordict",
    "gymnasium",
    "cloudpickle",
    "flamepy",
    "flamepy.core.cache",
    "fdg.runtime.flame_worker",
)
LINGER = 3.0
"""Seconds that the process waits for another connection: Flame may start a service anew."""
FOLDER = "fdg-flame-"
"""How the name of a run's folder begins."""


def connect(folder: str) -> socket.socket:
    """A connection to this node's server, which is started if there is none."""
    for _ in range(20):  # the last server may be removing the folder at this moment
        os.makedirs(folder, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), locked(folder) as path:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):
                end.connect(path)
                return end
            Path(path).unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(128)
                subprocess.Popen(
                    [sys.executable, "-m", "fdg.runtime.flame_fork", str(listener.fileno()), folder],
                    pass_fds=[listener.fileno()],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # it may outlive the supervisor that started it
                )
                end.connect(path)
            return end
    raise RuntimeError(f"{folder} is removed again and again")


@contextlib.contextmanager
def locked(folder: str) -> Iterator[str]:
    """This node's socket, while nobody else makes or removes it."""
    node = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]  # the folder may be one that nodes share
    path = f"{folder}/fork-{node}"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def serve() -> None:
    """The server's main loop."""
    listener, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for name in PRELOAD:
        __import__(name)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    pids: dict[socket.socket, int] = {}
    while True:
        events = waiting.select(None if pids else LINGER)
        if not events and not pids:
            end_alone(listener, folder)
        for key, _ in events:
            end = key.fileobj
            if end is listener:
                connection = listener.accept()[0]
                pids[connection] = 0
                waiting.register(connection, selectors.EVENT_READ)
            elif isinstance(end, socket.socket):
                prefix, fds = _receive(end)
                if prefix:
                    pids[end] = pid = os.fork()
                    if not pid:
                        for other in (listener, *pids):
                            other.close()
                        waiting.close()
                        _work(fds[0], prefix.decode())
                    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, end))
                else:
                    waiting.unregister(end)
                    if pid := pids.pop(end):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    end.close()
                for fd in fds:
                    os.close(fd)
            else:  # a worker has ended
                pid, owner = key.data
                waiting.unregister(end)
                os.close(end)  # type: ignore[arg-type]
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if owner in pids:
                    pids[owner] = 0
                    with contextlib.suppress(OSError):
                        owner.send(str(code).encode())


def end_alone(listener: socket.socket, folder: str) -> None:
    """End, and remove the run's folder, unless somebody has just come."""
    with contextlib.suppress(FileNotFoundError), locked(folder) as path:
        if select.select([listener], [], [], 0)[0]:
            return
        Path(path).unlink(missing_ok=True)
        if Path(folder).name.startswith(FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _receive(end: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(end, 4096, 1)
    except OSError:
        return b"", []
    return data, list(fds)


def _work(control: int, prefix: str) -> None:
    code = 1
    try:
        from fdg.runtime.flame_worker import work

        work(control, prefix)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
