"""Replay rows in Flame's object cache.

    Blocks        rows in blocks, each a Flame object
    FlameTable    them as the memory of a replay shard: `--replay-storage flame`
    FlameStorage  them as a TorchRL `Storage`, for a `ReplayBuffer` of TorchRL's own:

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
import functools
import os
import pickle
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Storage

from fdg.errors import RunError
from fdg.runtime.flame_cache import CacheLost, cache_errors, delete, elsewhere, first_line, forget, objects
from fdg.runtime.flame_cluster import pointed
from fdg.runtime.rows import Column, Key, Table

BLOCK_ROWS, BLOCK_BYTES = 1024, 1 << 20
"""Rows of a block, and about how large one may be: large rows make smaller blocks."""
PATCH_ROWS = 64
"""Rows that are collected here before they leave as one patch."""
MERGE = 200
"""Patches of a block at which it is written in one piece; Flame refuses more than 1000."""
HERE_BYTES = 64 << 20
"""Memory for copies of the blocks that were used last."""


class Blocks:
    """Rows by number, each one entry in some arrays; the arrays' blocks are Flame objects under a prefix."""

    def __init__(self, prefix: str, *, block_rows: int | None = None, here_bytes: int = HERE_BYTES) -> None:
        self.prefix, self._wanted, self.here_bytes = prefix, block_rows, here_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all rows. Objects in the cache stay until `delete`."""
        self.block_rows = self._wanted or 0
        self._like: list[np.ndarray] = []
        """An array without rows for each column."""
        self._refs: dict[int, Any] = {}
        self._patches: dict[int, int] = {}
        self._waiting: dict[int, list[tuple[np.ndarray, list[np.ndarray]]]] = {}
        """Rows that have not left yet, with their places; their blocks are here, and have them already."""
        self._here: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        """The blocks that were used last."""

    def delete(self) -> None:
        """Delete all rows from the cache."""
        self.clear()
        delete(self.prefix)

    def write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Give rows their values; of two values for one row the last counts."""
        if not self._like:
            self._like = [np.empty((0, *value.shape[1:]), value.dtype) for value in values]
            each = sum(value.nbytes for value in values) // max(len(rows), 1)
            self.block_rows = self.block_rows or min(BLOCK_ROWS, max(BLOCK_BYTES // max(each, 1), 1))
        for block, at in self._split(rows):
            places, part = rows[at] % self.block_rows, [value[at] for value in values]
            for column, value in zip(self._block(block), part, strict=True):
                column[places] = value
            waiting = self._waiting.setdefault(block, [])
            waiting.append((places, part))
            if sum(len(places) for places, _ in waiting) >= PATCH_ROWS:
                self._send(block)

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """The values of rows, in fresh memory."""
        found = [np.empty((len(rows), *like.shape[1:]), like.dtype) for like in self._like]
        for block, at in self._split(rows):
            places = rows[at] % self.block_rows
            for value, column in zip(found, self._block(block), strict=True):
                value[at] = column[places]
        return found

    def _split(self, rows: np.ndarray) -> Iterator[tuple[int, Any]]:
        """The blocks of some rows, and which rows are in each."""
        blocks = rows // (self.block_rows or 1)
        for block in np.unique(blocks).tolist():
            yield block, np.flatnonzero(blocks == block)

    def _block(self, block: int) -> list[np.ndarray]:
        """A block with all that was written to it."""
        if block not in self._here:
            whole = self._fetched(block) if block in self._refs else None
            self._here[block] = whole or [np.zeros((self.block_rows, *a.shape[1:]), a.dtype) for a in self._like]
            room = max(self.here_bytes // max(sum(array.nbytes for array in self._here[block]), 1), 1)
            while len(self._here) > room:
                oldest = next(iter(self._here))
                self._send(oldest)
                del self._here[oldest]
        self._here.move_to_end(block)
        return self._here[block]

    def _fetched(self, block: int) -> list[np.ndarray]:
        cache, ref = objects(), self._refs[block]
        with cache_errors(f"read block {block} of a replay buffer"):
            forget(ref.key)
            base, patches = cache.get_object(
                cache.ObjectRef(ref.endpoint, ref.key, 0), deserializer=lambda base, deltas: (base, deltas)
            )
            forget(ref.key)
        if len(patches) != self._patches[block]:
            raise RunError(
                f"block {block} of a replay buffer in Flame's object cache has {len(patches)} of {self._patches[block]} patches: "
                "rows were lost. Give the cache more memory (eviction.max_memory), or a storage folder"
            )
        whole = [array.copy() for array in pickle.loads(base)]
        for patch in patches:
            places, values = pickle.loads(patch)
            for column, value in zip(whole, values, strict=True):
                column[places] = value
        return whole

    def _send(self, block: int) -> None:
        """Send the rows of a block that wait: as a patch, or with the whole block where it is new or has many patches."""
        waiting = self._waiting.pop(block, None)
        if not waiting:
            return
        cache, ref = objects(), self._refs.get(block)
        with cache_errors(f"write block {block} of a replay buffer"):
            if ref is not None and self._patches[block] < MERGE:
                places = np.concatenate([places for places, _ in waiting])
                values = [np.concatenate(parts) for parts in zip(*(part for _, part in waiting), strict=True)]
                self._refs[block] = cache.patch_object(ref, pickle.dumps((places, values), 5))
                self._patches[block] += 1
            else:
                data = pickle.dumps(self._here[block], 5)
                self._refs[block] = (
                    cache.put_object(self.prefix, data) if ref is None else cache.update_object(ref, data)
                )
                self._patches[block] = 0


# FDG's own replay buffer ----------------------------------------------------------------------------------------------


class FlameTable(Table):
    """The rows of a replay shard, in the object cache."""

    def __init__(self, rows: int, *, prefix: str, cluster: dict[str, str]) -> None:
        super().__init__(rows)
        self.blocks, self.cluster = Blocks(prefix), cluster

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        os.environ.update(self.cluster)  # a worker that Flame did not start does not know where the cache is

    def _column(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Column:
        return Column.empty(key, shape, dtype, 0)

    def put(self, at: int, td: TensorDictBase) -> bool:
        return False

    def write(self, at: int, values: Sequence[np.ndarray], start: int, stop: int) -> None:
        self.blocks.write(np.arange(at, at + stop - start), [value[start:stop] for value in values])

    def part(self, at: int, count: int) -> list[np.ndarray]:
        return self.blocks.read(np.arange(at, at + count))

    def take(self, rows: np.ndarray) -> list[tuple[Key, torch.Tensor]]:
        found = self.blocks.read(rows)
        return [(column.key, column.tensor(array)) for column, array in zip(self.columns, found, strict=True)]

    def restart(self, columns: Any) -> None:
        super().restart(columns)
        self.blocks.clear()


@contextlib.contextmanager
def replay_tables(engine: str) -> Iterator[Callable[[int], Table]]:
    """Memory for the replay shards of one run in Flame's object cache; all of it is deleted at the end.

    Raises:
        RunError: no cluster is found, or its cache does not answer.
    """
    prefix = f"fdg-replay-{uuid.uuid4().hex[:12]}/rows"
    with pointed():
        elsewhere()
        try:
            with cache_errors("put an object"):
                objects().put_object(prefix, b"")
        except CacheLost as error:
            raise RunError(
                f"--replay-storage flame needs a Flame cluster, whatever the engine: {first_line(error)}. `fdg flame up` starts one on "
                "this machine; FLAME_ENDPOINT and FLAME_CACHE_ENDPOINT name one that runs; --replay-storage memory needs none"
            ) from None
        names = ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE")
        known = {name: os.environ[name] for name in names if name in os.environ and engine != "flame"}
        try:
            yield functools.partial(FlameTable, prefix=prefix, cluster=known)
        finally:
            delete(prefix)


# TorchRL's ------------------------------------------------------------------------------------------------------------


class FlameStorage(Storage):
    """Rows in Flame's object cache, up to `max_size`; the writer decides which are overwritten."""

    def __init__(
        self, max_size: int, *, block_rows: int | None = None, here_bytes: int = HERE_BYTES, prefix: str = ""
    ) -> None:
        super().__init__(max_size)
        self.blocks = Blocks(
            prefix or f"fdg-storage/{uuid.uuid4().hex[:12]}", block_rows=block_rows, here_bytes=here_bytes
        )
        self._columns: list[Column] = []
        self._size = 0

    def set(self, cursor: int | Sequence[int] | torch.Tensor | slice, data: Any, *, set_cursor: bool = True) -> None:
        rows = self._rows(cursor)
        found = dict(as_rows(data, single=isinstance(cursor, int)).items(True, True))
        keys = {key if isinstance(key, tuple) else (key,): value for key, value in found.items()}
        if not self._columns:
            self._columns = [Column.empty(key, value.shape[1:], value.dtype, 0) for key, value in keys.items()]
        if set(keys) != {column.key for column in self._columns}:
            raise ValueError(
                f"rows have the keys {sorted(keys)}, and the first ones had {sorted(c.key for c in self._columns)}"
            )
        values = [keys[column.key].view(column.stored).numpy(force=True) for column in self._columns]
        if any(len(value) != len(rows) for value in values):
            raise ValueError(f"{len(rows)} places were given for {len(values[0])} rows")
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_size):
            raise IndexError(f"row {rows.max()} is outside of a storage for {self.max_size} rows")
        self.blocks.write(rows, values)
        self._size = max(self._size, int(rows.max(initial=-1)) + 1)

    def get(self, index: Any) -> Any:
        rows = self._rows(index)
        if len(rows) and (rows.min() < 0 or rows.max() >= self._size):
            raise IndexError(f"row {rows.max()} was asked for, of {self._size}")
        found = TensorDict(batch_size=[len(rows)])
        for column, array in zip(self._columns, self.blocks.read(rows), strict=True):
            found.set(column.key, column.tensor(array))
        return found[0] if isinstance(index, int) else found

    def _rows(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            return np.arange(*index.indices(self._size))
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        found = torch.as_tensor(index)
        if found.dtype is torch.bool:
            found = found.nonzero().squeeze(-1)
        return found.reshape(-1).numpy().astype(np.int64)

    def __len__(self) -> int:
        return self._size

    def contains(self, item: Any) -> Any:
        inside = torch.as_tensor(item)
        inside = (inside >= 0) & (inside < self._size)
        return bool(inside) if inside.ndim == 0 else inside

    def _empty(self) -> None:
        self.blocks.delete()
        self._columns, self._size = [], 0

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
