"""Replicas that do the same thing at the same time, and exchange values while they do (torch.distributed, gloo).

Each exchange begins with a meeting: a small message of fixed size from everyone to everyone that says what is to be
exchanged. A replica that has failed says that instead, so that nobody waits for it, and replicas that are at different
places in the program find out before they take one thing for another.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fdg.errors import RunError
from fdg.runtime.wire import pack, unpack

HEAD = struct.Struct("<24sq")
ROOM = 512 - HEAD.size
"""Bytes that fit into a meeting."""
FAILED = "failure"


class PeerFailed(RunError):
    """Another replica has failed; its own error says why."""


class OutOfStep(RunError):
    """The replicas are at different places in the program."""


class Seat(NamedTuple):
    """A replica's place in its group: what it needs to join."""

    rank: int
    size: int
    port: int
    seconds: float


def open_store() -> dist.TCPStore:
    """Where replicas find each other. Lives in the driver, on a port of its own."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Group:
    """The group as one replica sees it."""

    def __init__(self, seat: Seat) -> None:
        self.rank, self.size = seat.rank, seat.size
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # a host's own name need not resolve
        limit = datetime.timedelta(seconds=seat.seconds)
        store = dist.TCPStore("127.0.0.1", seat.port, None, False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self._table = torch.zeros(self.size, HEAD.size + ROOM, dtype=torch.uint8)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Everyone's value, in the order of ranks."""
        message = pack(value)
        data = pickle.dumps((message.head, [bytes(buffer) for buffer in message.buffers]))
        return [unpack(*pickle.loads(item)) for item in self._meet(what, data)]

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of everyone's tensor, to the bit the same for all."""
        self._meet(what)
        with _lost():
            dist.all_reduce(tensor)
        return tensor

    def fail(self) -> None:
        """Let the others know that this replica cannot go on. To be called once where an exchange is due."""
        with contextlib.suppress(RunError):
            self._meet(FAILED)

    def _meet(self, what: str, data: bytes = b"") -> list[bytes]:
        table = self._table
        mine = HEAD.pack(what.encode()[:24], len(data)) + data[:ROOM]
        table[self.rank, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        with _lost():
            dist.all_gather_into_tensor(table.view(-1), table[self.rank].clone())
        rows = [row.numpy().tobytes() for row in table]
        heads = [HEAD.unpack_from(row) for row in rows]
        words = [word.rstrip(b"\0").decode() for word, _ in heads]
        if FAILED in words:
            raise PeerFailed(f"replica {words.index(FAILED)} of the learner has failed")
        if len(set(words)) > 1:
            seen = "; ".join(f"replica {rank}: {word}" for rank, word in enumerate(words))
            raise OutOfStep(
                f"the replicas of the learner do not do the same in `learn` ({seen}): each has to make the same calls of "
                "backward(), self.mean, self.std and self.sum, whatever rows it has. Let no condition around them depend "
                "on the rows: write self.sum(x) or self.mean(x) in it"
            )
        longest = max(size for _, size in heads)
        if longest > ROOM:
            whole = torch.zeros(self.size, longest, dtype=torch.uint8)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            with _lost():
                dist.all_gather_into_tensor(whole.view(-1), padded)
            return [row[:size].numpy().tobytes() for row, (_, size) in zip(whole, heads, strict=True)]
        return [row[HEAD.size : HEAD.size + size] for row, (_, size) in zip(rows, heads, strict=True)]


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(f"a replica of the learner is gone, or waits longer than the deadline: {error}") from None
