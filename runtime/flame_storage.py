"""Replay rows in Flame's object cache: a TorchRL `Storage` whose blocks are Flame objects.

    with loopback():
        buffer = torchrl.data.ReplayBuffer(storage=FlameStorage(100_000), collate_fn=lambda rows: rows)
        buffer.extend(rows)                      # appended as a patch to the newest block
        batch = buffer.sample(256)

Rows lie in blocks of fixed size. New rows are *patches* of their block: what is sent is the rows, not the block. Flame takes at
most 1000 patches per object, and each makes reading slower, so a block is written anew, in one piece, long before that. The
cache may evict objects when its memory is full; a block that is gone, or has fewer patches than were written, is an
error that names it: rows are never lost in silence.
"""

from __future__ import annotations

import contextlib
import pickle
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Storage

from fdg.errors import RunError
from fdg.runtime.flame_worker import cache_errors, forget
from fdg.runtime.wire import pack, unpack

BLOCK_ROWS = 1024
MERGE = 200
"""Patches of a block at which it is written in one piece; Flame refuses more than 1000."""


class FlameStorage(Storage):
    """Rows in Flame's object cache, up to `max_size`; the writer decides which are overwritten."""

    def __init__(self, max_size: int, *, block_rows: int = BLOCK_ROWS, blocks_here: int = 16, prefix: str = "") -> None:
        super().__init__(max_size)
        self.block_rows, self.blocks_here = block_rows, blocks_here
        self.prefix = prefix or f"fdg-storage/{uuid.uuid4().hex[:12]}"
        self._refs: dict[int, Any] = {}
        self._patches: dict[int, int] = {}
        self._known: OrderedDict[int, TensorDictBase] = OrderedDict()
        """The blocks that were used last, `blocks_here` of them, as they are in the cache."""
        self._size = 0

    # writing

    def set(self, cursor: int | Sequence[int] | torch.Tensor | slice, data: Any, *, set_cursor: bool = True) -> None:
        rows = self._rows(cursor)
        data = as_rows(data, single=isinstance(cursor, int))
        if len(rows) != len(data):
            raise ValueError(f"{len(rows)} places were given for {len(data)} rows")
        if len(rows) and (min(rows) < 0 or max(rows) >= self.max_size):
            raise IndexError(f"row {max(rows)} is outside of a storage for {self.max_size} rows")
        blocks: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            blocks.setdefault(row // self.block_rows, []).append(position)
        for block, positions in blocks.items():
            places = [rows[position] % self.block_rows for position in positions]
            self._write(block, places, data[torch.tensor(positions)])
        self._size = max(self._size, max(rows, default=-1) + 1)

    def _write(self, block: int, places: list[int], rows: TensorDictBase) -> None:
        from flamepy.core import patch_object, put_object, update_object

        if block in self._refs and self._patches[block] < MERGE:
            with cache_errors(f"append to block {block}"):
                self._refs[block] = patch_object(self._refs[block], as_bytes((places, rows)))
            self._patches[block] += 1
            self._known.pop(block, None)
            return
        whole = self._block(block) if block in self._refs else empty_like(rows, self.block_rows)
        whole[torch.tensor(places)] = rows
        with cache_errors(f"write block {block}"):
            data = as_bytes(whole)
            self._refs[block] = (
                update_object(self._refs[block], data) if block in self._refs else put_object(self.prefix, data)
            )
        self._patches[block] = 0
        self._keep(block, whole)

    def _keep(self, block: int, whole: TensorDictBase) -> None:
        self._known[block] = whole
        self._known.move_to_end(block)
        while len(self._known) > self.blocks_here:
            self._known.popitem(last=False)

    # reading

    def _block(self, block: int) -> TensorDictBase:
        """A block with all that was appended to it."""
        from flamepy.core import ObjectRef, get_object

        if block not in self._known:
            ref = self._refs[block]
            with cache_errors(f"read block {block} of a replay buffer"):
                forget(ref.key)
                base, patches = get_object(
                    ObjectRef(ref.endpoint, ref.key, 0), deserializer=lambda base, deltas: (base, deltas)
                )
                forget(ref.key)
            if len(patches) != self._patches[block]:
                raise RunError(
                    f"block {block} of a replay buffer in Flame's object cache has {len(patches)} of {self._patches[block]} patches: "
                    "rows were lost. Give the cache more memory (eviction.max_memory), or a storage folder"
                )
            whole = from_bytes(base)
            for delta in patches:
                places, rows = from_bytes(delta)
                whole[torch.tensor(places)] = rows
            self._keep(block, whole)
        self._known.move_to_end(block)
        return self._known[block]

    def get(self, index: Any) -> Any:
        rows = self._rows(index)
        if rows and (min(rows) < 0 or max(rows) >= self._size):
            raise IndexError(f"row {max(rows)} was asked for, of {self._size}")
        if isinstance(index, int):
            return self._block(rows[0] // self.block_rows)[rows[0] % self.block_rows].clone()
        parts, order = [], []
        for block in sorted({row // self.block_rows for row in rows}):
            here = [position for position, row in enumerate(rows) if row // self.block_rows == block]
            parts.append(self._block(block)[torch.tensor([rows[position] % self.block_rows for position in here])])
            order += here
        joined = torch.cat(parts) if parts else empty_like(self._block(0), 0)
        return joined[torch.tensor(np.argsort(order))] if parts else joined

    def _rows(self, index: Any) -> list[int]:
        if isinstance(index, slice):
            return list(range(*index.indices(self._size)))
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        found = torch.as_tensor(index)
        if found.dtype is torch.bool:
            found = found.nonzero().squeeze(-1)
        return [int(row) for row in found.reshape(-1)]

    def __len__(self) -> int:
        return self._size

    def contains(self, item: Any) -> Any:
        inside = torch.as_tensor(item)
        inside = (inside >= 0) & (inside < self._size)
        return bool(inside) if inside.ndim == 0 else inside

    # all of it

    def _empty(self) -> None:
        from flamepy.core.cache import delete_objects

        with contextlib.suppress(Exception):
            delete_objects(self.prefix)
        self._refs, self._patches, self._known, self._size = {}, {}, OrderedDict(), 0

    def close(self) -> None:
        """Delete the rows from the cache."""
        self._empty()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.get(slice(None)) if self._size else None, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._empty()
        if state["rows"] is not None:
            self.set(range(state["size"]), state["rows"])


def as_rows(data: Any, *, single: bool) -> TensorDictBase:
    """Rows as one TensorDict with a first dimension."""
    if isinstance(data, (list, tuple)):
        return torch.stack(list(data))
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"rows in Flame's object cache are TensorDicts, and this is a {type(data).__name__}")
    return data.unsqueeze(0) if single and data.ndim == 0 else data


def empty_like(rows: TensorDictBase, count: int) -> TensorDict:
    """Room for rows of the same kind."""
    return TensorDict(
        {key: value.new_zeros((count, *value.shape[1:])) for key, value in rows.items(True, True)}, [count]
    )


def as_bytes(value: Any) -> bytes:
    message = pack(value)
    return pickle.dumps((message.head, [bytes(buffer) for buffer in message.buffers]))


def from_bytes(data: bytes) -> Any:
    return unpack(*pickle.loads(data))
