"""Random streams: around each component call the global torch, numpy and `random` states are that component's own.

    streams = Streams(seed=7)
    with streams.of("actor", 0):
        torch.rand(1), np.random.rand(), random.random()      # drawn from (7, "actor", 0)

User code draws from the global generators as always; which numbers it gets depends on (seed, component, index) and on
what that component drew before, never on where it runs. All three are swapped on every component call, so a swap must
be quick: with six copies of memory it takes half a µs (3 when the caches are full of other things), with the public
functions 150.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
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


class PlainStream:
    """One component's generators. As a context manager it puts them in the place of the global ones, and back.

    By public functions alone, so that it works with any version of Python, torch and numpy."""

    def __init__(self, seed: int) -> None:
        self._begin()
        self._swap()
        _generator.manual_seed(seed)
        random.seed(seed)
        _numpy.set_bit_generator(np.random.MT19937(seed & 0xFFFFFFFF))
        self._swap()

    def _begin(self) -> None:
        """Take a copy of the global generators."""
        normal = {key: value for key, value in _numpy.get_state(legacy=False).items() if "gauss" in key}
        self._mine: Any = _generator.get_state(), random.getstate(), _numpy.get_bit_generator(), normal

    def _swap(self) -> None:
        generator, python, numpy, normal = self._mine
        self._begin()
        _generator.set_state(generator)
        random.setstate(python)
        _numpy.set_bit_generator(numpy)  # this forgets the spare normal, which is kept beside the bit generator
        _numpy.set_state(numpy.state | normal)

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *exception: object) -> None:
        self._swap()

    def state(self) -> dict[str, Any]:
        """The stream as plain data, for a checkpoint. Only while it is not the one in use."""
        self._swap()
        numpy = _numpy.get_state(legacy=False)
        state = {"torch": _generator.get_state(), "numpy": numpy, "python": random.getstate()}
        self._swap()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        self._swap()
        _generator.set_state(state["torch"])
        _numpy.set_state(state["numpy"])
        random.setstate((version, tuple(words), gauss))
        self._swap()


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


def _find_numpy(state: Any) -> memoryview | None:
    """In a RandomState of numpy: a reference to its bit generator, a copy of that one's interface (where its words are,
    and four functions), the address of the copy, and the spare normal (whether there is one, and which)."""
    bits, known = state._bit_generator, state.get_state(legacy=False)
    words = _view(id(state), type(state).__basicsize__ & ~7).cast("Q").tolist()
    if id(bits) not in words[:-8]:
        return None
    start = words.index(id(bits))
    memory = _view(id(state) + 8 * start, 72)
    seen = words[start + 1], words[start + 6], memory[56:60].cast("i")[0], memory[64:].cast("d")[0]
    expected = bits.ctypes.state_address, id(state) + 8 * start + 8, known["has_gauss"], known["gauss"]
    return memory if seen == expected else None


def _find_all() -> tuple[Any, Any, Any]:
    """Where the three global generators lie in memory; nothing if one of them is not as expected."""
    probe = np.random.RandomState(1)
    probe.standard_normal()  # leaves a spare normal
    found = _find_torch(), _find_python(), _find_numpy(probe) and _find_numpy(_numpy.mtrand._rand)
    return found if all(found) else (None, None, None)


_torch_memory, _python_memory, _numpy_memory = _find_all()


def _copies() -> list[Any]:
    return [memoryview(bytearray(_torch_memory)), memoryview(bytearray(_python_memory)), _numpy_memory.tobytes()]


_spare, _all = _copies() if _torch_memory else [], slice(None)
_keep = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_IncRef", ctypes.pythonapi))
_release = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))


class QuickStream(PlainStream):
    """The same by copies of memory, where the generators lie in it as expected (looked at once)."""

    def _begin(self) -> None:
        self._mine, self._gauss = _copies(), _python.gauss_next
        _keep(id(_numpy.get_bit_generator()))  # the reference in the copy counts, as the one in numpy does

    def _swap(self, *exception: object) -> None:
        global _spare  # one for all streams: it stays in the cache
        generator, python, numpy = self._mine
        spare = _spare
        spare[0][_all] = _torch_memory
        spare[1][_all] = _python_memory
        spare[2] = _numpy_memory.tobytes()
        _torch_memory[_all] = generator
        _python_memory[_all] = python
        _numpy_memory[_all] = numpy
        self._mine, _spare = spare, self._mine
        gauss = _python.gauss_next
        if gauss is not self._gauss:
            _python.gauss_next, self._gauss = self._gauss, gauss

    __enter__ = __exit__ = _swap

    def __del__(self) -> None:
        _release(int.from_bytes(self._mine[2][:8], sys.byteorder))


Stream = QuickStream if _torch_memory else PlainStream


class Streams:
    """All streams of one run, made when first asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[tuple[str, int], PlainStream] = {}

    def of(self, component: str, index: int = 0) -> PlainStream:
        key = (component, index)
        if key not in self._streams:
            self._streams[key] = Stream(derive_seed(self.seed, component, index))
        return self._streams[key]

    def state(self) -> dict[str, Any]:
        return {f"{component}/{index}": stream.state() for (component, index), stream in self._streams.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            component, index = key.rsplit("/", 1)
            self.of(component, int(index)).load_state(value)
