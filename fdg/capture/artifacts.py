"""Compiled traces, kept for the next run: one file each, named by a hash of all that the code depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fdg.capture.arguments import NotCaptured
from fdg.doctor import find_compiler

KEPT_FILES, KEPT_BYTES = 64, 512 * 2**20
"""Artifacts that stay in the cache: the ones used last."""
FORMAT = "1"
"""Part of every artifact's name: what is compiled from a trace."""


def compiled(module: torch.fx.GraphModule, inputs: list[torch.Tensor], say: Callable[[str], None]) -> Any:
    """The code of a graph: from the cache, or compiled now."""
    path = cache() / f"{artifact(module, inputs)}.pt2"
    if path.exists():
        os.utime(path)
    else:
        make_artifact(module, inputs, path, say)
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)  # type: ignore[attr-defined]
    return loader.run


def artifact(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> str:
    """The name of what is compiled: equal names, equal code."""
    kinds = [(str(tensor.dtype), tuple(tensor.shape), tensor.stride()) for tensor in inputs]
    about = [FORMAT, torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), cpu(), kinds]
    return hashlib.sha256(f"{about}\n{module.code}".encode()).hexdigest()[:32]


def cpu() -> str:
    """What code for this machine depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
        return "\n".join(found.get(name, "") for name in ("model name", "flags", "Features"))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def cache() -> Path:
    folder = Path(os.environ.get("FDG_CACHE") or Path.home() / ".cache" / "fdg") / "updates"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_artifact(module: Any, inputs: list[torch.Tensor], path: Path, say: Callable[[str], None]) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise NotCaptured("there is no C++ compiler; install g++ or clang++, or name one in CXX")
    say("compiling the update step (about half a minute; the next run finds it in the cache)")
    start = time.perf_counter()
    settings = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.cxx": (None, compiler)}
    part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    try:
        import torch._inductor.config as config
        from torch._inductor import aoti_compile_and_package
        from torch._inductor.utils import fresh_cache

        with torch.no_grad(), fresh_cache(), config.patch(settings):
            exported = torch.export.export(module, tuple(inputs), strict=False)
            aoti_compile_and_package(exported, package_path=str(part))
        part.replace(path)
    except Exception as error:
        part.unlink(missing_ok=True)
        words = str(error).strip().splitlines()
        raise NotCaptured(f"compiling failed ({type(error).__name__}: {words[0][:300] if words else ''})") from None
    say(f"compiled the update step in {time.perf_counter() - start:.0f} s; it is kept in {path.parent}")
    tidy(path.parent)


def tidy(folder: Path) -> None:
    """Keep the cache small."""
    size = 0
    files = sorted(folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime, reverse=True)
    for number, file in enumerate(files):
        size += file.stat().st_size
        if number >= KEPT_FILES or (number and size > KEPT_BYTES):
            file.unlink(missing_ok=True)
