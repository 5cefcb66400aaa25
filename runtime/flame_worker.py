"""A worker on Flame: the process behind a service. Requests come from its supervisor (`flame_service`), through a socket.

A request and its answer are bytes of a Flame task; what is large lies in the object cache, and only its key travels.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import threading
import time
from typing import Any

import numpy as np
import torch

from fdg.runtime.flame_cache import cache_errors, delete, forget, objects
from fdg.runtime.flame_service import LOST, receive, send
from fdg.runtime.forkserver import die_with_parent
from fdg.runtime.shared import Slot, _padded, _room
from fdg.runtime.wire import Message, pack, unpack
from fdg.runtime.worker import Worker, remote_error

INLINE = 64 * 1024
"""Bytes up to which a message is a task's own input or output: the session manager keeps these in memory."""
BEAT = 1.0
"""Seconds between two signs of life."""


class CacheArena:
    """What one process puts into the object cache for others to read."""

    def __init__(self, owner: int, prefix: str) -> None:
        self.owner, self.prefix = owner, prefix
        self.keys: set[str] = set()

    def put(self, message: Message) -> Slot:
        sizes = (len(message.head), *(buffer.nbytes for buffer in message.buffers))
        whole = np.zeros(_room(sizes), np.uint8)
        at = 0
        for part, size in zip((message.head, *message.buffers), sizes, strict=True):
            whole[at : at + size] = np.frombuffer(part, np.uint8)  # type: ignore[call-overload]
            at += _padded(size)
        with cache_errors(f"put {whole.nbytes} bytes"):
            ref = objects().put_object(self.prefix, whole)
        self.keys.add(ref.key)
        return Slot(self.owner, (ref.endpoint, ref.key, ref.version), 0, sizes)

    def free(self, slot: Slot) -> None:
        self.keys.discard(slot.segment[1])
        delete(slot.segment[1])

    def close(self) -> None:
        while self.keys and delete(self.keys.pop()):
            pass  # a cache that does not answer will not for the next one either


class CacheLibrary:
    """What other processes have put into the object cache."""

    def read(self, slot: Slot, *, copy: bool = True) -> Any:
        cache = objects()
        endpoint, key, version = slot.segment
        with cache_errors(f"get {key}"):
            whole = cache.get_object(cache.ObjectRef(endpoint, key, version))
        forget(key)
        view, at, found = memoryview(whole).cast("B"), 0, []
        for size in slot.sizes:
            found.append(view[at : at + size])
            at += _padded(size)
        return unpack(found[0], found[1:], copy=copy)

    def close(self) -> None:
        pass


class CacheBoard:
    """Weights in the object cache, once per version; the driver passes on where they are."""

    def __init__(self, arena: CacheArena, library: CacheLibrary) -> None:
        self.arena, self.library = arena, library
        self.where: tuple[int, Slot] | None = None
        self._read: tuple[int, list[torch.Tensor]] | None = None

    def write(self, weights: list[torch.Tensor], version: int) -> None:
        if not weights:
            return
        if self.where is not None:
            self.arena.free(self.where[1])
        self.where = (version, self.arena.put(pack([tensor.detach() for tensor in weights])))

    def note(self, where: tuple[int, Slot] | None) -> None:
        """Hear from the driver where the newest weights are."""
        if where is not None and (self.where is None or self.where[1].owner != self.arena.owner):
            self.where = where

    def read(self, weights: list[torch.Tensor], version: int) -> None:
        assert self.where is not None and self.where[0] == version, f"weights {version}, known {self.where}"
        if self._read is None or self._read[0] != version:  # several actors here: fetched once
            self._read = (version, self.library.read(self.where[1]))
        with torch.no_grad():
            for mine, new in zip(weights, self._read[1], strict=True):
                mine.copy_(new)


def packed(value: Any, arena: CacheArena, slots: list[Slot]) -> bytes:
    """A value as the bytes of a task; what is large goes into the cache, and `slots` remembers it."""
    message = pack(value)
    if message.nbytes <= INLINE:
        return pickle.dumps((message.head, [bytes(buffer) for buffer in message.buffers]))
    slot = arena.put(message)
    slots.append(slot)
    return pickle.dumps((slot, None))


def unpacked(data: bytes, library: CacheLibrary) -> Any:
    head, buffers = pickle.loads(data)
    return library.read(head) if isinstance(head, Slot) else unpack(head, buffers)


class FlameWorker(Worker):
    """A worker that can say where its weights are."""

    def where(self) -> tuple[int, Slot] | None:
        return self.board.where


class Service:
    """What a worker on Flame holds."""

    def __init__(self, prefix: str) -> None:
        self.worker: Any = None
        self.prefix = prefix
        self.slots: list[Slot] = []
        self.pulse: Any = None
        self.lease: Any = None
        """Where the driver shows that it lives, and after how many seconds without that it does not."""

    def _beat(self) -> None:
        """Show signs of life, and look for the driver's; where it shows none any more, leave."""
        heard, since = None, time.monotonic()
        for turn in itertools.count():
            time.sleep(BEAT)
            with contextlib.suppress(Exception):
                objects().update_object(self.pulse, time.time())
            if turn % 2:
                continue
            with contextlib.suppress(Exception):  # a cache that does not answer tells nothing of the driver
                *place, seconds = self.lease
                try:
                    found = objects().get_object(objects().ObjectRef(*place, 0))
                except KeyError:  # deleted: the driver has ended
                    found = None
                if (place, found) != heard:
                    heard, since = (place, found), time.monotonic()
                elif time.monotonic() - since > seconds:
                    self.leave()

    def leave(self) -> None:
        """Close the own session, which ends this process; refused while a task runs, and then tried again."""
        import flamepy

        application, session = self.prefix.split("/")
        delete(f"{application}/driver")  # the others are still to look for the driver's signs of life
        delete(self.prefix)
        flamepy.close_session(session)

    def hello(self, number: int, lease: tuple[str, str, float]) -> tuple[int, tuple[str, str]]:
        """Become the worker of that number; what was another run's worker before begins anew."""
        self.lease = lease
        if self.pulse is None:
            with cache_errors("put a pulse"):
                self.pulse = objects().put_object(self.prefix, time.time())
            threading.Thread(target=self._beat, daemon=True).start()
        if self.worker is not None:
            self.worker.arena.close()
        arena, library = CacheArena(number, self.prefix), CacheLibrary()
        self.worker = FlameWorker(arena, library, CacheBoard(arena, library))
        return os.getpid(), (self.pulse.endpoint, self.pulse.key)

    def invoke(self, data: bytes) -> bytes:
        arena = CacheArena(0, self.prefix)
        for slot in self.slots:
            arena.free(slot)  # the driver has read the last answer
        self.slots = []
        try:
            name, arguments = unpacked(data, CacheLibrary())
            if name != "hello" and self.worker is None:
                return LOST + b"Flame has started it anew, without its state"
            answer = getattr(self if name == "hello" else self.worker, name)(*arguments)
            return packed(("ok", answer), arena, self.slots)
        except BaseException as error:
            return packed(("error", remote_error(error)), arena, self.slots)


def work(control: int, prefix: str) -> None:
    """Answer the supervisor's requests until it is gone."""
    die_with_parent()
    end, service = socket.socket(fileno=control), Service(prefix)
    while (data := receive(end)) is not None:
        send(end, service.invoke(data))
