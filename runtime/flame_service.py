"""The service that a Flame cluster runs for each worker: a supervisor that imports nothing large and cannot fail.

    python -m fdg.runtime.flame_service

The worker itself is a process of its own behind it (`flame_fork` makes it). So a worker that dies, or cannot even start, is an answer in
milliseconds, and the session can be closed: Flame itself says nothing of a service that does not start, and closing the
session of a dead one keeps its executor manager busy for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

from fdg.runtime.flame_fork import connect

_LENGTH = struct.Struct("<Q")
LOST = b"worker lost: "
"""How the answer of a supervisor begins whose worker has ended."""
PING = b"ping"
"""A request that the supervisor itself answers."""


def lost_worker(answer: bytes) -> str:
    """How the worker ended; empty for an answer of its own."""
    return answer[len(LOST) :].decode() if answer.startswith(LOST) else ""


def send(end: socket.socket, data: bytes) -> None:
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive(end: socket.socket) -> bytes | None:
    """The next message; None when the other side has ended."""
    data = bytearray()
    wanted: int | None = None
    while wanted is None or len(data) < wanted:
        try:
            part = end.recv(min((wanted or _LENGTH.size) - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
        if wanted is None and len(data) == _LENGTH.size:
            wanted, data = _LENGTH.unpack(data)[0], bytearray()
    return bytes(data)


class Supervisor:
    """Has a worker forked and passes requests on to it."""

    def __init__(self) -> None:
        self.prefix = ""
        self.folder = os.environ.get("TMPDIR") or os.getcwd()
        self.server: socket.socket | None = None
        """The connection that is the worker's life (`flame_fork`). It is made early: the server has much to import."""
        with contextlib.suppress(OSError, RuntimeError):
            self.server = connect(self.folder)
        self.control: socket.socket | None = None
        self.parent = os.getppid()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End with the executor manager, which would leave this process behind."""
        while os.getppid() == self.parent:
            time.sleep(1)
        os._exit(0)

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        self.server = self.server or connect(self.folder)
        socket.send_fds(self.server, [self.prefix.encode()], [theirs.fileno()])
        theirs.close()

    def invoke(self, data: bytes) -> bytes:
        """The worker's answer; a worker that has ended says how, once, and is started again for the next run."""
        if data == PING:
            return PING
        try:
            if self.control is None:
                self.start()
            assert self.control is not None
            send(self.control, data)
            answer = receive(self.control)
        except OSError:
            answer = None
        if answer is None:
            how = self.ended()
            self.stop()
            return LOST + how.encode()
        return answer

    def ended(self) -> str:
        """How the worker ended, in words."""
        if self.server is not None:
            self.server.settimeout(5)
            with contextlib.suppress(OSError, ValueError):
                code = int(self.server.recv(64))
                return f"ended with code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"the process that starts workers has ended; its log is in {self.folder} on {socket.gethostname()}"

    def stop(self) -> None:
        for end in (self.server, self.control):
            if end is not None:
                end.close()
        self.server = self.control = None


def main() -> None:
    supervisor = Supervisor()

    import flamepy

    class FlameWorker(flamepy.FlameService):
        def on_session_enter(self, context: Any) -> None:
            supervisor.prefix = f"{context.application.name}/{context.session_id}"
            supervisor.start()

        def on_task_invoke(self, context: Any) -> bytes:
            return supervisor.invoke(context.input)

        def on_session_leave(self) -> None:
            supervisor.stop()

    flamepy.run(FlameWorker())


if __name__ == "__main__":
    main()
