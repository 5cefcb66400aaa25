"""Memory that processes share: without names, so that nothing is left behind whatever dies, and whenever.

Segment   anonymous memory behind a file descriptor; a descriptor sent to another process opens it there
Arena     the segments of one process, in which it puts what others read; made once, slots are used again
Slot      (segment, offset, sizes): all that travels of a message whose bytes are in an arena
Board     weights in one flat segment, with their version
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdg.errors import RunError
from fdg.runtime.wire import Message

ALIGN = 64
FIRST = 2**20
"""Bytes of an arena's first segment; each further one is at least twice as large."""


class Segment:
    """Anonymous shared memory."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fd = _anonymous(size) if fd is None else fd
        self.size = size
        self.memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        os.close(self.fd)
        try:
            self.memory.close()
        except BufferError:  # somebody still looks into it; it goes with the last view
            pass


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fdg", os.MFD_CLOEXEC)
    else:  # a file that has no name any more
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Slot(NamedTuple):
    """Where a message is: process, segment, offset of the head, and the sizes of head and buffers."""

    owner: int
    segment: Any
    offset: int
    sizes: tuple[int, ...]


class Arena:
    """What one process offers to others to read."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.segments: list[Segment] = []
        self._free: list[list[tuple[int, int]]] = []
        """Per segment, its free stretches (offset, size) in order."""

    def put(self, message: Message) -> Slot:
        """Copy a message into the arena."""
        sizes = (len(message.head), *(buffer.nbytes for buffer in message.buffers))
        segment, offset = self._allocate(_room(sizes))
        memory, at = self.segments[segment].memory, offset
        for part in (memoryview(message.head), *message.buffers):
            memory[at : at + len(part)] = part
            at += _padded(len(part))
        return Slot(self.owner, segment, offset, sizes)

    def free(self, slot: Slot) -> None:
        """Give a slot back."""
        stretches = self._free[slot.segment]
        stretches.append((slot.offset, _room(slot.sizes)))
        stretches.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in stretches:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free[slot.segment] = merged

    def _allocate(self, size: int) -> tuple[int, int]:
        for index, stretches in enumerate(self._free):
            for place, (offset, room) in enumerate(stretches):
                if room >= size:
                    stretches[place : place + 1] = [(offset + size, room - size)] if room > size else []
                    return index, offset
        grown = max(FIRST, 2 * self.segments[-1].size if self.segments else 0, _power(size))
        self.segments.append(Segment(grown))
        self._free.append([(size, grown - size)] if grown > size else [])
        return len(self.segments) - 1, 0

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


def parts(segment: Segment, slot: Slot) -> tuple[memoryview, list[memoryview]]:
    """Head and buffers of the message in a slot, as views."""
    view, at, found = memoryview(segment.memory), slot.offset, []
    for size in slot.sizes:
        found.append(view[at : at + size])
        at += _padded(size)
    return found[0], found[1:]


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _room(sizes: Sequence[int]) -> int:
    return max(sum(map(_padded, sizes)), ALIGN)


def _power(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()


class Board:
    """Weights in one flat segment: the learner writes them when they have changed, actors read them."""

    def __init__(self, like: Sequence[torch.Tensor], segment: Segment | None = None) -> None:
        offsets, at = [], ALIGN
        for tensor in like:
            offsets.append(at)
            at += _padded(tensor.nbytes)
        self.segment = segment or Segment(at)
        whole = torch.frombuffer(self.segment.memory, dtype=torch.uint8)
        self._version = whole[:8].view(torch.int64)
        self._tensors = [
            whole[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, like, strict=True)
        ]

    def write(self, weights: Sequence[torch.Tensor], version: int) -> None:
        self._version[0] = -1  # whoever reads meanwhile sees that
        with torch.no_grad():
            for mine, new in zip(self._tensors, weights, strict=True):
                mine.copy_(new)
        self._version[0] = version

    def read(self, weights: Sequence[torch.Tensor], version: int) -> None:
        with torch.no_grad():
            for mine, new in zip(weights, self._tensors, strict=True):
                mine.copy_(new)
        if int(self._version[0]) != version:
            raise RunError(f"weights of version {int(self._version[0])} are published, version {version} was expected")
