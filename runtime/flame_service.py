"""The service that a Flame cluster runs for each worker: a supervisor that imports nothing large and cannot fail.

    python -m fdg.runtime.flame_service

The worker itself is a process of its own behind it. So a worker that dies, or cannot even start, is an answer in
milliseconds, and the session can be closed: Flame itself says nothing of a service that does not start, and closing the
session of a dead one keeps its executor manager busy for ever.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

_LENGTH = struct.Struct("<Q")
LOST = b"worker lost: "
"""How the answer of a supervisor begins whose worker has ended."""


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
    """Runs the worker and passes requests on to it."""

    def __init__(self) -> None:
        self.prefix = ""
        self.worker: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.parent = os.getppid()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End with the executor manager, which would leave this process behind."""
        while os.getppid() == self.parent:
            time.sleep(1)
        self.stop()
        os._exit(0)

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "fdg.runtime.flame_worker", str(theirs.fileno()), self.prefix]
        self.worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def invoke(self, data: bytes) -> bytes:
        """The worker's answer; a worker that has ended says how, once, and is started again for the next run."""
        if self.worker is None:
            self.start()
        assert self.control is not None and self.worker is not None
        answer = None
        try:
            send(self.control, data)
            answer = receive(self.control)
        except OSError:
            pass
        if answer is None:
            code = self.worker.wait()
            self.stop()
            return LOST + (f"ended with code {code}" if code >= 0 else f"killed by signal {-code}").encode()
        return answer

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
        if self.control is not None:
            self.control.close()
        self.worker = self.control = None


def main() -> None:
    import flamepy

    class FlameWorker(flamepy.FlameService):
        def __init__(self) -> None:
            self.supervisor = Supervisor()

        def on_session_enter(self, context: Any) -> None:
            self.supervisor.prefix = f"{context.application.name}/{context.session_id}"
            self.supervisor.start()

        def on_task_invoke(self, context: Any) -> bytes:
            return self.supervisor.invoke(context.input)

        def on_session_leave(self) -> None:
            self.supervisor.stop()

    flamepy.run(FlameWorker())


if __name__ == "__main__":
    main()
