"""A channel between the driver and one worker: framed messages over a socket; large ones lie in shared memory.

    send(value)     packs a value; above INLINE bytes it goes into the sender's arena, and only its slot travels
    receive()       the value, in memory of the receiver's own

Segments that the other side has not seen yet travel with the message, as file descriptors.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
from typing import Any

from fdg.runtime.shared import Arena, Segment, Slot, parts
from fdg.runtime.wire import Message, pack, unpack

INLINE = 32 * 1024
"""Bytes up to which a message goes through the socket."""
_HEADER = struct.Struct("<QI")
_FDS = 200
"""Descriptors per message."""


class Gone(Exception):
    """The other side has closed the channel."""


class Library:
    """The segments of other processes that this one has open."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, int], Segment] = {}

    def add(self, owner: int, index: int, size: int, fd: int) -> None:
        self.segments[owner, index] = Segment(size, fd)

    def read(self, slot: Slot, *, copy: bool = True) -> Any:
        """The value in a slot."""
        head, buffers = parts(self.segments[slot.owner, slot.segment], slot)
        return unpack(head, buffers, copy=copy)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()


class Channel:
    """One end of a channel. A message that was sent through the arena stays there until `done` is called."""

    def __init__(self, end: socket.socket, arena: Arena, library: Library) -> None:
        self.socket, self.arena, self.library = end, arena, library
        self._announced: set[tuple[int, int]] = set()
        self._slots: list[Slot] = []

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, value: Any, needs: tuple[Slot, ...] = ()) -> int:
        """Send a value; `needs` are slots that it speaks of, whose segments the other side must have. Bytes sent."""
        message = pack(value)
        body: Any = message
        if message.nbytes > INLINE:
            body = self.arena.put(message)
            self._slots.append(body)
            needs = (*needs, body)
        news, fds = self._news(needs)
        inline = [bytes(buffer) for buffer in message.buffers] if body is message else []
        frame = pickle.dumps((news, message.head if body is message else body, inline), protocol=5)
        header = _HEADER.pack(len(frame), len(fds))
        if fds:
            socket.send_fds(self.socket, [header], fds)
            self.socket.sendall(frame)
        else:
            self.socket.sendall(header + frame)
        return message.nbytes

    def _news(self, needs: tuple[Slot, ...]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Segments to announce to the other side, and their descriptors."""
        news, fds = [], []
        for slot in needs:
            name = (slot.owner, slot.segment)
            if name not in self._announced:
                self._announced.add(name)
                own = slot.owner == self.arena.owner
                segment = self.arena.segments[slot.segment] if own else self.library.segments[name]
                news.append((*name, segment.size))
                fds.append(segment.fd)
        return news, fds

    def know(self, owner: int, index: int) -> None:
        """The other side has that segment."""
        self._announced.add((owner, index))

    def receive(self) -> Any:
        """The next value; Gone when the other side has ended."""
        try:
            header, fds, _, _ = socket.recv_fds(self.socket, _HEADER.size, _FDS)
            while 0 < len(header) < _HEADER.size:
                header += self.socket.recv(_HEADER.size - len(header))
            if not header:
                raise Gone
            length, _ = _HEADER.unpack(header)
            frame = self._exactly(length)
        except (ConnectionError, BrokenPipeError) as error:
            raise Gone from error
        news, body, inline = pickle.loads(frame)
        for (owner, index, size), fd in zip(news, fds, strict=True):
            self.library.add(owner, index, size, fd)
            self.know(owner, index)
        if isinstance(body, Slot):
            return self.library.read(body)
        return unpack(body, inline)

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            count = self.socket.recv_into(view[got:])
            if not count:
                raise Gone
            got += count
        return data

    def ready(self, seconds: float) -> bool:
        """Whether a message (or the end) has come within so many seconds."""
        return bool(select.select([self.socket], [], [], seconds)[0])

    def done(self) -> None:
        """The other side has read what was sent: its slots are free again."""
        for slot in self._slots:
            self.arena.free(slot)
        self._slots.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


__all__ = ["Channel", "Gone", "Library", "Message"]
