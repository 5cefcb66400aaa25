"""Random streams: around each component call the global torch, numpy and `random` states are that component's own.

    streams = Streams(seed=7)
    with streams.of("actor", 0):
        torch.rand(1), np.random.rand(), random.random()      # drawn from (7, "actor", 0)

User code draws from the global generators as always; which numbers it gets depends on (seed, component, index) and on
what that component drew before, never on where it runs. A swap costs about 2 µs, so it is done on every component call.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_generator = torch.default_generator
_python: Any = random._inst  # type: ignore[attr-defined]
_numpy: Any = np.random


def derive_seed(seed: int, component: str, index: int = 0) -> int:
    """A 63-bit seed that depends on all three and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{component}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _Memory:
    """The state of a global generator, read and written as memory where its layout is the known one (checked once),
    else through the public functions: 0.2 µs instead of 1 (torch) and 12 (Python)."""

    def __init__(
        self, find: Callable[[], memoryview | None], get: Callable[[], Any], set: Callable[[Any], Any]
    ) -> None:
        self.memory = find()
        self.get = self.memory.tobytes if self.memory is not None else get
        self.set = self._write if self.memory is not None else set

    def _write(self, state: bytes) -> None:
        self.memory[:] = state  # type: ignore[index]


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _find_python() -> memoryview | None:
    """Position and 624 words of Python's generator."""
    memory = _view(id(_python) + object.__basicsize__, 4 * 625)
    *words, position = random.getstate()[1]
    return memory if memory.cast("I").tolist() == [position, *words] else None


def _find_torch() -> memoryview | None:
    """Seed (8 bytes), position (12), 624 words and spare normals (28) of torch's generator.

    Found by a seed that nothing else has; taken if the words follow, and if writing it back undoes some draws."""
    outer = _generator.get_state()
    try:
        seed = _generator.manual_seed(0x5EED_0123_4567).initial_seed()
        torch.randn(1, dtype=torch.float64)  # leaves a spare normal
        before = _generator.get_state()
        start = int(_generator._cdata)  # type: ignore[attr-defined]
        words = before[24 : 24 + 8 * 624].view(torch.int64).tolist()
        for address in range(start, start + 128, 8):
            if _view(address, 8).cast("Q")[0] == seed and _view(address + 20, 4 * 624).cast("I").tolist() == words:
                memory = _view(address, 20 + 4 * 624 + 28)
                saved = memory.tobytes()
                torch.randn(1, dtype=torch.float64), torch.rand(1000)
                memory[:] = saved
                return memory if torch.equal(_generator.get_state(), before) else None
        return None
    finally:
        _generator.set_state(outer)


_torch_state = _Memory(_find_torch, _generator.get_state, _generator.set_state)
_python_state = _Memory(_find_python, random.getstate, random.setstate)
_get_torch, _set_torch = _torch_state.get, _torch_state.set
_get_python, _set_python = _python_state.get, _python_state.set
_get_numpy, _set_numpy = _numpy.get_bit_generator, _numpy.set_bit_generator


class Stream:
    """One component's generators. As a context manager it puts them in the place of the global ones, and back."""

    def __init__(self, seed: int) -> None:
        self.numpy: Any = np.random.MT19937(seed & 0xFFFFFFFF)
        self.torch, self.python, self.gauss = _get_torch(), _get_python(), _python.gauss_next
        self._swap()
        _generator.manual_seed(seed)
        random.seed(seed)
        self._swap()

    def _swap(self) -> None:
        """All but numpy, whose spare normal is lost in a swap."""
        mine, self.torch = self.torch, _get_torch()
        _set_torch(mine)
        mine, self.python = self.python, _get_python()
        gauss, self.gauss = self.gauss, _python.gauss_next
        _set_python(mine)
        _python.gauss_next = gauss

    def __enter__(self) -> None:
        self._swap()
        mine, self.numpy = self.numpy, _get_numpy()
        _set_numpy(mine)

    def __exit__(self, *exception: object) -> None:
        self.__enter__()

    def state(self) -> dict[str, Any]:
        """The stream as plain data, for a checkpoint. Only while it is not the one in use."""
        self._swap()
        state = {"torch": _generator.get_state(), "numpy": self.numpy.state, "python": random.getstate()}
        self._swap()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        self._swap()
        _generator.set_state(state["torch"])
        random.setstate((version, tuple(words), gauss))
        self._swap()
        self.numpy.state = state["numpy"]


class Streams:
    """All streams of one run, made when first asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[tuple[str, int], Stream] = {}

    def of(self, component: str, index: int = 0) -> Stream:
        key = (component, index)
        if key not in self._streams:
            self._streams[key] = Stream(derive_seed(self.seed, component, index))
        return self._streams[key]

    def touch(self) -> None:
        """What a component call does to the generators in use when it runs elsewhere: numpy forgets a spare normal."""
        _set_numpy(_get_numpy())

    def state(self) -> dict[str, Any]:
        return {f"{component}/{index}": stream.state() for (component, index), stream in self._streams.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            component, index = key.rsplit("/", 1)
            self.of(component, int(index)).load_state(value)
