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
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdg.errors import RunError, UsageError

PREFIX = Path("/usr/local/flame")
"""Where Flame's own installer puts it."""
SERVERS = {"cache": "flame-object-cache", "sessions": "flame-session-manager", "executors": "flame-executor-manager"}
START_SECONDS = 20.0
DIES_WITH_PARENT = [
    sys.executable,
    "-S",
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
]
"""Becomes the program behind it, which the system (Linux) kills when its parent ends."""
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


def with_tls(config: str, files: dict[str, str]) -> str:
    """A configuration with TLS at both endpoints."""
    lines = "".join(f'    {name}: "{file}"\n' for name, file in files.items())
    for section in ("cluster:\n", "cache:\n"):
        config = config.replace(f"\n{section}", f"\n{section}  tls:\n{lines}")
    return config.replace('"http:', '"https:').replace('"grpc:', '"grpcs:')


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


LIMIT = "FDG_FLAME_EXECUTORS"
"""How many executors a cluster of ours was started for; Flame itself does not hold to it."""


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
        s = "s" if known["authority"] else ""
        found = {
            "FLAME_ENDPOINT": f"http{s}://127.0.0.1:{known['port']}",
            "FLAME_CACHE_ENDPOINT": f"grpc{s}://127.0.0.1:{known['cache_port']}",
            LIMIT: str(known["executors"]),
        }
        return {**found, "FLAME_CA_FILE": known["authority"]} if s else found

    # life

    def up(
        self, executors: int = 16, memory: str = "1G", *, mine: bool = False, tls: dict[str, str] | None = None
    ) -> None:
        """Start the servers, in their order, and wait until an executor manager is ready.

        `mine` end with this process. `tls` names the files of Flame's TLS: cert_file, key_file, ca_file.
        """
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
        text = CONFIG.format(
            port=port,
            cache_port=cache_port,
            executors=executors,
            sessions=f"{sockets}/sessions",
            storage=self.folder / "cache",
            memory=memory,
        )
        (self.folder / "cluster.yaml").write_text(with_tls(text, tls) if tls else text)
        known: dict[str, Any] = {
            "port": port,
            "cache_port": cache_port,
            "executors": executors,
            "sockets": sockets,
            "authority": tls["ca_file"] if tls else "",
            "pids": {},
        }
        self._file.write_text(json.dumps(known))
        try:
            for name in SERVERS:
                self.start(name, mine=mine)
        except BaseException:
            self.down()
            raise

    def start(self, name: str, *, mine: bool = False) -> None:
        """Start one of the servers and wait until it is ready."""
        known = self.known()
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FLAME_")},
            "FLAME_HOME": str(self.folder / "home"),
            "FLAME_SOCKET_DIR": known["sockets"],
            "RUST_LOG": "error",
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*(DIES_WITH_PARENT if mine else []), find_servers()[name], "--config", self.folder / "cluster.yaml"],
                cwd=self.folder / "work",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        known["pids"][name] = process.pid
        self._file.write_text(json.dumps(known))
        ports = {"cache": [known["cache_port"]], "sessions": [known["port"], known["port"] + 1]}.get(name, [])
        self._wait(name, process, lambda: all(map(listens, ports)) and (name != "executors" or self._has_node()))

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
        with contextlib.suppress(Exception), self._connected() as connection:
            return any(node.status.state == 1 for node in connection.list_nodes())
        return False

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        import flamepy
        from flamepy.core.types import FlameClientTls

        known = self.environment()
        tls = FlameClientTls(ca_file=known["FLAME_CA_FILE"]) if "FLAME_CA_FILE" in known else None
        connection = flamepy.connect(known["FLAME_ENDPOINT"], tls)
        try:
            yield connection
        finally:
            connection.close()

    def describe(self) -> Iterator[str]:
        """What runs in the cluster, in words."""
        with self._connected() as connection:
            for node in connection.list_nodes():
                size, state = node.status.capacity, {0: "unknown", 1: "ready"}.get(node.status.state, "not ready")
                yield f"node {node.metadata.name}: {state}, {size.cpu} cores, {size.memory >> 20} MiB"
            used = [executor for executor in connection.list_executors() if executor.status.session_id]
            yield f"{len(used)} of {self.known()['executors']} executors in use"
            for executor in used:
                yield f"  {executor.status.session_id} on {executor.spec.node}"

    def down(self) -> list[int]:
        """End the servers and what they started; returns the processes that had to be ended."""
        known, running = self.known(), self.alive()
        ended = [*running.values(), *(members(known["sockets"]) - set(running.values()))] if known else []
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            end = time.monotonic() + 5
            while any(map(is_alive, ended)) and time.monotonic() < end:
                time.sleep(0.02)
            _reap(ended)
        if known:
            shutil.rmtree(known["sockets"], ignore_errors=True)
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
            self._file.unlink(missing_ok=True)
        return ended


@contextlib.contextmanager
def loopback(executors: int = 16, *, tls: dict[str, str] | None = None) -> Iterator[Loopback]:
    """A cluster for the time of a `with`; Flame's clients in this process use it."""
    folder = Path(tempfile.mkdtemp(prefix="fdg-flame-"))
    cluster = Loopback(folder)
    try:
        cluster.up(executors, mine=True, tls=tls)
        with variables(cluster.environment()):
            yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def pointed() -> Iterator[None]:
    """Let Flame's client find a cluster: the one that is configured, or else the one that `fdg flame up` has started."""
    mine = Loopback(default_folder())
    with variables(mine.environment() if not configured_endpoint()[0] and mine.alive() else {}):
        yield


def configured_endpoint() -> tuple[str, str]:
    """The endpoint that the user has configured for Flame's client, and where; empty if none."""
    if os.environ.get("FLAME_ENDPOINT"):
        return os.environ["FLAME_ENDPOINT"], "FLAME_ENDPOINT"
    file = Path.home() / ".flame" / "flame.yaml"
    if file.exists():
        import yaml

        try:
            data = yaml.safe_load(file.read_text())
            (found,) = [c["cluster"]["endpoint"] for c in data["contexts"] if c["name"] == data["current-context"]]
        except Exception as error:
            raise UsageError(f"{file} names no endpoint for its current context: {error!r}") from error
        return found, str(file)
    return "", ""


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the time of a `with`."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def free_ports() -> tuple[int, int]:
    """A port whose neighbour is free as well, and another one.

    Not of those that the system gives to connections: while a server is started anew, one might take its port.
    """
    below, chance = 32768, random.SystemRandom()
    with contextlib.suppress(OSError, ValueError):
        below = max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 12000)
    while True:
        port, other = chance.randrange(10000, below - 1), chance.randrange(10000, below - 1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + 1, other):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port, other


def listens(port: int, host: str = "127.0.0.1", seconds: float = 0.2) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), seconds).close()
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


def members(sockets: str) -> set[int]:
    """The processes of a cluster, whoever their parent is now: all have the variable with which its servers were started."""
    mark, found = f"FLAME_SOCKET_DIR={sockets}".encode(), set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and mark in (entry / "environ").read_bytes().split(b"\0")
                and is_alive(int(entry.name))
            ):
                found.add(int(entry.name))
    return found


def _reap(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
