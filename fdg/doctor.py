"""`fdg doctor`: what this machine has, and the next step for what it lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGES = ("torch", "torchrl", "tensordict", "gymnasium", "numpy", "networkx", "libcst", "tensorboard", "flamepy")
BACKENDS = {
    "classic control": ("gymnasium.envs.classic_control", "pip install 'gymnasium[classic-control]'"),
    "MuJoCo": ("mujoco", "pip install 'gymnasium[mujoco]'"),
    "Box2D (LunarLander)": ("Box2D", "pip install 'gymnasium[box2d]', if you want LunarLander"),
}


@dataclass
class Finding:
    """One thing looked at. `bad` stops training; `note` only narrows what can be run."""

    what: str
    state: Literal["ok", "note", "bad"]
    seen: str
    next_step: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, the cheap things first."""
    yield Finding("python", "ok", platform.python_version())
    yield from packages()
    yield torchrl_compiled_part()
    yield from machine()
    for name, (module, remedy) in BACKENDS.items():
        yield backend(name, module, remedy)
    yield flame()


def packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "bad", "not installed", f"pip install {name}")


def torchrl_compiled_part() -> Finding:
    """TorchRL's C++ extension is built for one version of torch; FDG uses nothing of it."""
    try:
        importlib.import_module("torchrl")
    except Exception as error:  # whatever breaks an installation
        return Finding("torchrl import", "bad", f"fails: {first_line(error)}", "pip install --force-reinstall torchrl")
    try:
        importlib.import_module("torchrl._torchrl")
    except Exception:
        return Finding("torchrl compiled part", "ok", "does not load with this torch; FDG does not need it")
    return Finding("torchrl compiled part", "ok", "loads (not needed)")


def machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", str(cores))
    total, free = memory()
    if total:
        enough = free >= 2e9
        step = "" if enough else "close other programs, or use a smaller --buffer-size: torchrl alone takes 0.4 GB"
        yield Finding("memory", "ok" if enough else "note", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free", step)
    try:
        import torch

        threads, set_to = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
        yield Finding("torch threads", "ok", f"{threads}" + (f" (OMP_NUM_THREADS={set_to})" if set_to else ""))
    except Exception as error:
        yield Finding("torch import", "bad", f"fails: {first_line(error)}", "pip install --force-reinstall torch")


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


def backend(name: str, module: str, remedy: str) -> Finding:
    try:
        importlib.import_module(module)
    except Exception as error:
        return Finding(name, "note", f"not usable: {first_line(error)}", remedy)
    return Finding(name, "ok", "usable")


def flame() -> Finding:
    """Flame's servers; their absence only rules out `--engine flame`."""
    program = "flame-session-manager"
    homes = [Path(home) for home in (os.environ.get("FLAME_HOME"), "/usr/local/flame") if home]
    places = [folder / program for home in homes for folder in (home, home / "bin")]
    found = next((str(place) for place in places if place.is_file()), None) or shutil.which(program)
    if found:
        return Finding("Flame", "ok", found)
    return Finding("Flame", "note", "not found", f"set FLAME_HOME to the folder of {program}, if you want a cluster")


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
