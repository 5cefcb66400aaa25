"""`fdg doctor`: what this machine has, and the next step for what it lacks; with `--env`, how fast an environment is."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fdg import __version__
from fdg.errors import UsageError

PACKAGES = ("torch", "torchrl", "tensordict", "gymnasium", "numpy", "networkx", "libcst", "typer", "rich")
OPTIONAL = {
    "mujoco": ("the MuJoCo environments", "pip install 'gymnasium[mujoco]'"),
    "box2d": ("LunarLander and BipedalWalker", "pip install 'gymnasium[box2d]'"),
    "tensorboard": ("TensorBoard events in the run folder", "pip install tensorboard"),
}
"""Package → what it is for, and how to get it."""


@dataclass
class Finding:
    """One thing looked at. `bad` stops training; `note` only narrows what can be run."""

    what: str
    state: Literal["ok", "note", "bad"]
    seen: str
    next_step: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything. Versions are read from the packages' metadata; what has to be imported comes last."""
    yield Finding("fdg", "ok", f"{__version__} in {Path(__file__).parent}")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from packages()
    yield from machine()
    yield cache()
    yield compiler()
    yield flamepy()
    yield flame()
    yield flame_cluster()
    yield imports("torch")
    yield imports("torchrl")
    yield torchrl_compiled_part()
    yield compiled_steps()


def version(name: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages() -> Iterator[Finding]:
    for name in PACKAGES:
        found = version(name)
        yield Finding(name, "ok", found) if found else Finding(name, "bad", "not installed", f"pip install {name}")
    for name, (purpose, remedy) in OPTIONAL.items():
        found = version(name) or version(f"{name}-py")  # as Box2D is called for some versions of Python
        if found:
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "note", "not installed", f"{remedy}, if you want {purpose}")


def machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", f"{cores}; a run sets torch to 1 thread, since the number changes the last bits")
    total, free = memory()
    if total:
        enough = free >= 2e9
        step = "" if enough else "close other programs, or use a smaller --buffer-size: torchrl alone takes 0.4 GB"
        yield Finding("memory", "ok" if enough else "note", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free", step)


def memory() -> tuple[float, float]:
    """Bytes of memory, all and free, as far as the container allows; zeros where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (float(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0.0, 0.0
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (float((group / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(total, limit), min(free, limit - used)
    except (OSError, ValueError):  # no limit, or no cgroup
        return total, free


def find_compiler() -> str | None:
    """The C++ compiler that CXX names; without it g++ or clang++."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)


def compiler() -> Finding:
    """What --compile-update needs."""
    if found := find_compiler():
        return Finding("C++ compiler", "ok", f"{found}, for --compile-update")
    seen = f"CXX is {os.environ['CXX']}, which is not there" if "CXX" in os.environ else "none"
    return Finding("C++ compiler", "note", seen, "install g++ or clang++, if you want --compile-update")


def compiled_steps() -> Finding:
    """FDG's own compiled part."""
    from fdg.runtime.native import native

    if native is not None:
        return Finding("compiled steps", "ok", "loaded: CartPole's and MuJoCo's rows are stepped by them")
    step = "install a C compiler and then FDG again, if you want quicker steps of CartPole and MuJoCo"
    return Finding("compiled steps", "note", "not there: FDG was installed without a C compiler", step)


def cache() -> Finding:
    """Where generated code is kept."""
    folder = Path(os.environ.get("FDG_CACHE") or Path.home() / ".cache" / "fdg")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return Finding("cache folder", "ok", f"{folder} ({size / 1e6:.1f} MB); FDG_CACHE names another")
    return Finding("cache folder", "bad", f"{folder} cannot be written", "set FDG_CACHE to a folder that can")


def flamepy() -> Finding:
    found = version("flamepy")
    if found:
        return Finding("flamepy", "ok", found)
    return Finding("flamepy", "note", "not installed", "pip install flamepy, if you want to run on Flame")


def flame() -> Finding:
    """Flame's servers; their absence only rules out a cluster of one's own."""
    from fdg.runtime.flame_cluster import find_servers

    try:
        found = find_servers()
    except UsageError as error:
        seen, _, step = str(error).partition(": ")
        return Finding("Flame servers", "note", seen, f"{step}, if you want to run on Flame")
    return Finding(
        "Flame servers", "ok", f"{', '.join(path.name for path in found.values())} in {found['cache'].parent}"
    )


def flame_cluster() -> Finding:
    """The cluster that `--engine flame` would use."""
    from fdg.runtime.flame_cluster import Loopback, configured_endpoint, default_folder, listens

    what, mine = "Flame cluster", Loopback(default_folder())
    endpoint, source = configured_endpoint()
    if not endpoint:
        if not mine.known():
            return Finding(
                what, "note", "none runs", "fdg flame up, or set FLAME_ENDPOINT, if you want to run on Flame"
            )
        if len(mine.alive()) < 3:
            return Finding(what, "note", f"servers of {mine.folder} are gone", "fdg flame down, then fdg flame up")
        endpoint, source = mine.environment()["FLAME_ENDPOINT"], "fdg flame up"
    address = urlsplit(endpoint)
    if not listens(address.port or 8080, address.hostname or "127.0.0.1", 2.0):
        step = "start it, or unset FLAME_ENDPOINT to use the one of fdg flame up"
        return Finding(what, "note", f"{endpoint} ({source}) does not answer", step)
    authority = os.environ.get("FLAME_CA_FILE", "")
    if address.scheme == "https" and source == "FLAME_ENDPOINT" and not Path(authority).is_file():
        step = "set FLAME_CA_FILE to the certificate of its authority"
        return Finding(what, "note", f"{endpoint} has TLS, and FLAME_CA_FILE is {authority or 'not set'}", step)
    return Finding(what, "ok", f"{endpoint} ({source})")


def imports(name: str) -> Finding:
    """Whether a package can be imported: versions that do not fit each other show only here."""
    start = time.perf_counter()
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever breaks an installation
        step = f"pip install --force-reinstall {name}"
        return Finding(f"import {name}", "bad", f"fails: {type(error).__name__}: {first_line(error)}", step)
    return Finding(f"import {name}", "ok", f"takes {time.perf_counter() - start:.1f} s")


def torchrl_compiled_part() -> Finding:
    """TorchRL's C++ extension is built for one version of torch; FDG uses nothing of it."""
    try:
        importlib.import_module("torchrl._torchrl")
    except Exception as error:
        seen = f"does not load ({first_line(error)[:60]}): no matter, FDG uses nothing of it"
    else:
        seen = "loads; FDG uses nothing of it"
    return Finding("torchrl's C++ part", "ok", seen)


ENVS = (1, 8, 64)
"""Numbers of environments that are tried."""
SECONDS = 0.5
"""How long each is stepped."""


def measure(env: str) -> Iterator[Finding]:
    """Frames per second of random actions, by backend and number of environments; then what to choose.

    Raises:
        UsageError: there is no such environment, or a package it needs is missing.
    """
    from fdg.runtime.backends import backend_for, make_rows, resolve_env

    env_id = resolve_env(env)
    chosen = backend_for(env_id)
    yield Finding("environment", "ok", f"{env_id}, stepped by {chosen}")
    speeds: dict[tuple[str, int], float] = {}
    for backend in dict.fromkeys((chosen, "sync")):
        for envs in ENVS:
            rows = make_rows(env_id, envs, backend)
            try:
                rows.reset(list(range(envs)))
                speeds[backend, envs] = frames_per_second(rows, envs)
            finally:
                rows.close()
        seen = ", ".join(f"{speeds[backend, envs]:,.0f} with {envs}" for envs in ENVS)
        yield Finding(backend, "ok", f"frames/s: {seen} environments")
    apart = gymnasium_processes(env_id)
    envs = ENVS[1]
    yield Finding(
        "a process each", "ok", f"frames/s: {apart:,.0f} with {envs} environments (Gymnasium's AsyncVectorEnv)"
    )
    yield from advice(env_id, chosen, speeds, apart / max(speeds[backend, envs] for backend, _ in speeds))


def advice(env_id: str, chosen: str, speeds: dict[tuple[str, int], float], gain: float) -> Iterator[Finding]:
    """What the measurements say; `gain` is how much faster processes were."""
    best = max(speeds, key=lambda key: speeds[key])[0]
    own = {envs: speed for (backend, envs), speed in speeds.items() if backend == best}
    enough = min(envs for envs, speed in own.items() if speed > 0.8 * max(own.values()))
    seen = "the backend of the table is the fastest" if best == chosen else f"{best} is faster here than {chosen}"
    words = [*([] if best == chosen else [f"--backend {best}"]), f"--envs {enough}"]
    yield Finding("advice", "ok", f"{seen}, {enough} at a time are enough for its speed", " ".join(words))
    if gain > 1.2:
        seen, step = (
            f"processes are {gain:.1f} times as fast",
            "--actors 2 --workers 2 (or more) shares them over the cores",
        )
    else:
        seen, step = "other processes would not step them faster", "keep them in one: leave --workers out"
    yield Finding("", "ok", seen, step)


def frames_per_second(rows: Any, envs: int) -> float:
    """Steps of single environments in a second, under random actions."""
    from gymnasium.vector.utils import batch_space

    space = batch_space(rows.action_space, envs)
    space.seed(1)
    actions = [space.sample() for _ in range(64)]
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        rows.step(actions[steps % len(actions)])
        steps += 1
    return steps * envs / (time.perf_counter() - start)


def gymnasium_processes(env_id: str) -> float:
    """Frames per second of environments in a process each, which FDG does not use: its workers have actors with them."""
    from gymnasium.vector import AsyncVectorEnv

    from fdg.runtime.backends import maker

    vector = AsyncVectorEnv([maker(env_id)] * ENVS[1])
    try:
        vector.reset(seed=1)
        vector.action_space.seed(1)
        actions = [vector.action_space.sample() for _ in range(64)]
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            vector.step(actions[steps % len(actions)])
            steps += 1
        return steps * ENVS[1] / (time.perf_counter() - start)
    finally:
        vector.close()


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
