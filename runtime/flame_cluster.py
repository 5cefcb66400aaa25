"""A Flame cluster of one's own on this machine: started from installed servers, on loopback, and ended without a rest.

    with loopback(executors=8):                  for tests and laptops
        launch(…, engine="flame")

    fdg flame up | down | status                 one that stays until it is taken down

Servers are found by FLAME_HOME, PATH, or Flame's default prefix. The session manager listens on all interfaces, whatever
its endpoint says, and asks nobody who he is: see docs/flame.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdg.errors import RunError, UsageError
from fdg.runtime.forkserver import die_with_parent

PREFIX = Path("/usr/local/flame")
"""Where Flame's own installer puts it."""
SERVERS = {"cache": "flame-object-cache", "sessions": "flame-session-manager", "executors": "flame-executor-manager"}
START_SECONDS = 20.0
CONFIG = """\
---
cluster:
  name: fdg
  endpoint: "http://127.0.0.1:{port}"
  resreq: "cpu=0,mem=256m"
  policies: [priority, gang]
  storage: "fs://{sessions}"
  schedule_interval: 100
  executors:
    shim: host
  limits:
    max_executors: {executors}
cache:
  endpoint: "grpc://127.0.0.1:{cache_port}"
  network_interface: "^lo$"
  storage: "{storage}"
  eviction:
    policy: lru
    max_memory: "{memory}"
"""


def find_servers() -> dict[str, Path]:
    """The server programs; a UsageError says where they were looked for."""
    places = [Path(os.environ["FLAME_HOME"]) / "bin"] if os.environ.get("FLAME_HOME") else []
    on_path = shutil.which(SERVERS["sessions"])
    if on_path:
        places.append(Path(on_path).parent)
    places.append(PREFIX / "bin")
    for place in places:
        found = {name: place / program for name, program in SERVERS.items()}
        if all(os.access(program, os.X_OK) for program in found.values()):
            return found
    raise UsageError(
        f"no Flame servers found (looked in {', '.join(map(str, places))}): install Flame as its own documentation says, or set "
        "FLAME_HOME to where it is"
    )


def default_folder() -> Path:
    root = os.environ.get("FDG_CACHE") or Path.home() / ".cache" / "fdg"
    return Path(root) / "flame"


class Loopback:
    """A cluster on this machine. Its folder holds configuration, logs and the processes' ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # what it is

    @property
    def _file(self) -> Path:
        return self.folder / "cluster.json"

    def known(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}

    def alive(self) -> dict[str, int]:
        """The servers that run, by what they are."""
        return {name: pid for name, pid in self.known().get("pids", {}).items() if is_server(pid, SERVERS[name])}

    def environment(self) -> dict[str, str]:
        """What tells Flame's clients where it is."""
        known = self.known()
        return {
            "FLAME_ENDPOINT": f"http://127.0.0.1:{known['port']}",
            "FLAME_CACHE_ENDPOINT": f"grpc://127.0.0.1:{known['cache_port']}",
        }

    # life

    def up(self, executors: int = 16, memory: str = "1G", *, mine: bool = False) -> None:
        """Start the servers, in their order, and wait until an executor manager is ready. `mine` end with this process."""
        if self.alive():
            raise UsageError(f"a Flame cluster runs already ({self.folder}): fdg flame down ends it")
        servers = find_servers()
        for name in ("work", "cache", "home/logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "lib", "wheels", "migrations"):
            link, real = self.folder / "home" / name, servers["cache"].parent.parent / name
            if real.exists() and not link.exists():
                link.symlink_to(real)
        # Short, since the names of sockets are limited; in memory if there is such a place: the session manager writes
        # every task to its storage.
        sockets = tempfile.mkdtemp(prefix="fdg-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        port, cache_port = free_ports()
        config = self.folder / "cluster.yaml"
        config.write_text(
            CONFIG.format(
                port=port,
                cache_port=cache_port,
                executors=executors,
                sessions=f"{sockets}/sessions",
                storage=self.folder / "cache",
                memory=memory,
            )
        )
        known: dict[str, Any] = {
            "port": port,
            "cache_port": cache_port,
            "executors": executors,
            "sockets": sockets,
            "pids": {},
        }
        environment = {
            **os.environ,
            "FLAME_HOME": str(self.folder / "home"),
            "FLAME_SOCKET_DIR": sockets,
            "RUST_LOG": "warn",
        }
        try:
            for name, ports in (("cache", [cache_port]), ("sessions", [port, port + 1]), ("executors", [])):
                with open(self.folder / f"{name}.log", "ab") as log:
                    process = subprocess.Popen(
                        [servers[name], "--config", config],
                        cwd=self.folder / "work",
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent if mine else None,
                    )
                known["pids"][name] = process.pid
                self._file.write_text(json.dumps(known))
                self._wait(name, process, lambda ports=ports: all(map(listens, ports)))  # type: ignore[misc]
            self._wait("executors", process, self._has_node)
        except BaseException:
            self.down()
            raise

    def _wait(self, name: str, process: subprocess.Popen[bytes], ready: Any) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                what = f"ended with code {process.returncode}" if process.poll() is not None else "is not ready"
                tail = (self.folder / f"{name}.log").read_text(errors="replace")[-600:]
                raise RunError(
                    f"Flame's {SERVERS[name]} {what} after {START_SECONDS:.0f} s at most; its log ends:\n{tail}"
                )
            time.sleep(0.05)

    def _has_node(self) -> bool:
        import flamepy

        with contextlib.suppress(Exception):
            connection = flamepy.connect(self.environment()["FLAME_ENDPOINT"])
            try:
                return any(node.status.state == 1 for node in connection.list_nodes())
            finally:
                connection.close()
        return False

    def down(self) -> list[int]:
        """End the servers and what they started; returns the processes that had to be ended."""
        known, running = self.known(), self.alive()
        ended = [pid for server in running.values() for pid in (server, *descendants(server))]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            end = time.monotonic() + 5
            while any(map(is_alive, ended)) and time.monotonic() < end:
                _reap(ended)
                time.sleep(0.02)
        if known:
            shutil.rmtree(known["sockets"], ignore_errors=True)
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
            self._file.unlink(missing_ok=True)
        return ended


@contextlib.contextmanager
def loopback(executors: int = 16) -> Iterator[Loopback]:
    """A cluster for the time of a `with`; Flame's clients in this process use it."""
    folder = Path(tempfile.mkdtemp(prefix="fdg-flame-"))
    cluster = Loopback(folder)
    before = {name: os.environ.get(name) for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT")}
    try:
        cluster.up(executors, mine=True)
        os.environ.update(cluster.environment())
        yield cluster
    finally:
        cluster.down()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def free_ports() -> tuple[int, int]:
    """A port whose neighbour is free as well, and another one."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            third.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port, third.getsockname()[1]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 0.2).close()
        return True
    return False


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def is_server(pid: int, program: str) -> bool:
    """Whether a process is the server it was, and not another with the same number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return False
    return is_alive(pid) and Path(command).name == program


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def _reap(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
