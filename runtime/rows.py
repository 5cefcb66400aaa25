"""Rows in memory: a table with one array per key, and the builder in which an actor's rows travel.

Storage is numpy, because its calls on a few rows cost a fraction of torch's: a slice assignment 0.3 µs (torch 3.5),
taking 64 rows 0.6 µs (torch 2.5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from fdg.errors import UsageError
from fdg.runtime.native import native

Key = tuple[str, ...]

INDEX = "index"
"""The key of a sampled row's identity: int64 [n, 2], lane and sequence."""
WEIGHTS = ("_weight", "priority_weight")
"""The keys of a sampled row's importance weight: TorchRL's older name, and the one that its losses read today."""
MASS = "_mass"
"""The key of a drawn row's mass, on the way from its shard to the router."""
_RESERVED = {(INDEX,), (MASS,), *((name,) for name in WEIGHTS)}
_NO_DATA = {("next", "reset_observation"), ("reset_observation",)}  # a message from the environment to the next step
_STAND_IN = {1: torch.uint8, 2: torch.int16}  # by size: how dtypes that numpy lacks (bfloat16, float8) are stored

# The constructor's checks cost 15 µs a batch; what is built here is consistent by construction.
_tensordict = getattr(TensorDict, "_new_unsafe", TensorDict)


class Column(NamedTuple):
    """One entry of every row, and the numpy array [rows, *shape] that holds it."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    array: np.ndarray

    @classmethod
    def empty(cls, key: Key, shape: Iterable[int], dtype: torch.dtype, rows: int) -> Column:
        """A column for so many rows; the system hands out its memory only as rows are written."""
        stored = dtype
        try:
            kind = torch.empty(0, dtype=dtype).numpy().dtype
        except TypeError:
            stored = _STAND_IN[dtype.itemsize]
            kind = torch.empty(0, dtype=stored).numpy().dtype
        return cls(key, tuple(shape), dtype, stored, np.empty((rows, *shape), kind))

    def tensor(self, array: np.ndarray) -> Tensor:
        """Values taken from the array, as the tensor that was put in."""
        value = torch.from_numpy(array)
        return value if self.stored is self.dtype else value.view(self.dtype)


class Layout(NamedTuple):
    """Where the rows of a TensorDict are, batch [E]: for those after it, which mostly look the same."""

    batch: torch.Size
    keys: list[tuple[str | None, set[str]]]
    """Of the root (None) and of each TensorDict in it."""
    columns: list[tuple[int, str, torch.dtype, tuple[int, ...]]]
    """In which of these, under which name, of what kind."""

    @classmethod
    def of(cls, td: TensorDictBase, columns: Sequence[Column]) -> Layout | None:
        """None where it takes more than a look to say."""
        plain = all(len(column.key) <= 2 and column.stored is column.dtype for column in columns)
        if type(td) is not TensorDict or len(td.batch_size) != 1 or not plain:
            return None
        root = td._tensordict  # type: ignore[attr-defined]
        inner = [name for name, value in root.items() if isinstance(value, TensorDictBase)]
        if any(type(root[name]) is not TensorDict or _nested(root[name]) for name in inner):
            return None
        keys = [(None, set(root)), *((name, set(root[name]._tensordict)) for name in inner)]
        places = [None, *inner]
        shapes = [(*td.batch_size, *column.shape) for column in columns]
        where = [
            (places.index(column.key[0] if column.key[1:] else None), column.key[-1], column.dtype, shape)
            for column, shape in zip(columns, shapes, strict=True)
        ]
        return cls(td.batch_size, keys, where)

    def read(self, td: TensorDict) -> list[np.ndarray] | None:
        """An array per column; None if this one looks different."""
        places = self._places(td)
        if places is None:
            return None
        result = []
        for place, name, dtype, shape in self.columns:
            value = places[place][name]
            if type(value) is not Tensor or value.dtype is not dtype:
                return None
            array = value.numpy(force=True)
            if array.shape != shape:
                return None
            result.append(array)
        return result

    def addresses(self, td: TensorDict) -> list[int] | None:
        """Where the rows of each column lie in memory, one after the other; None if this one looks different."""
        places = self._places(td)
        if places is None:
            return None
        result = []
        for place, name, dtype, shape in self.columns:
            value = places[place][name]
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape:
                return None
            if not value.is_contiguous() or not value.is_cpu:
                return None
            if value.is_neg() or value.is_conj() or value._is_zerotensor():
                return None
            result.append(value.data_ptr())
        return result

    def _places(self, td: TensorDict) -> list[dict[str, Any]] | None:
        """The entries of the root and of each TensorDict in it, if they have the names that they should."""
        if type(td) is not TensorDict or td.batch_size != self.batch:
            return None
        root = td._tensordict  # type: ignore[attr-defined]
        places = []
        for name, keys in self.keys:
            inner = root if name is None else root[name]
            if inner is not root:
                if type(inner) is not TensorDict:
                    return None
                inner = inner._tensordict
            if inner.keys() != keys:
                return None
            places.append(inner)
        return places


def _nested(td: TensorDictBase) -> bool:
    return any(isinstance(value, TensorDictBase) for value in td.values())


class Table:
    """Rows of one kind, one array per key. The first rows it sees fix keys, shapes and dtypes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.columns: list[Column] = []
        self._expected: dict[torch.Size, list[tuple[int, ...]]] = {}
        self._layout: Layout | None = None

    def put(self, at: int, td: TensorDictBase) -> bool:
        """Write the rows of `td` from row `at` on, in one call for all columns; False: rather by `values` and `write`."""
        if native is None or self._layout is None:
            return False
        places = self._layout.addresses(td)  # type: ignore[arg-type]
        if places is None:
            return False
        native.write_rows([column.array for column in self.columns], places, at, td.batch_size[0], self.rows)
        return True

    def values(self, td: TensorDictBase) -> list[np.ndarray]:
        """The rows of `td`, time-major, as an array [n, *shape] per column. Nothing is copied or written yet."""
        result = None if self._layout is None else self._layout.read(td)  # type: ignore[arg-type]
        if result is None:
            result = self._values(td)
            self._layout = Layout.of(td, self.columns)
        return result

    def _values(self, td: TensorDictBase) -> list[np.ndarray]:
        found = dict(leaves(td))
        batch = td.batch_size
        if not self.columns:
            self._start(found, len(batch))
        shapes = self._expected.get(batch)
        if shapes is None:
            if len(self._expected) >= 64:  # ragged data: do not remember every length ever seen
                self._expected.clear()
            shapes = self._expected[batch] = [(*batch, *column.shape) for column in self.columns]
        if len(found) != len(shapes):
            raise self._unlike(found, len(batch))
        result = []
        flat = len(batch) == 1
        for (key, inner, dtype, stored, _), shape in zip(self.columns, shapes, strict=True):
            value = found.get(key)
            if value is None or value.dtype is not dtype:
                raise self._unlike(found, len(batch))
            if stored is not dtype:
                value = value.view(stored)
            array = value.numpy(force=True)
            if array.shape != shape:
                raise self._unlike(found, len(batch))
            result.append(array if flat else array.reshape(-1, *inner))
        return result

    def write(self, at: int, values: Sequence[np.ndarray], start: int, stop: int) -> None:
        """Copy the rows start … stop of `values` into the table, from row `at` on."""
        end = at + stop - start
        for column, value in zip(self.columns, values, strict=True):
            column.array[at:end] = value if len(value) == stop - start else value[start:stop]

    def part(self, at: int, count: int) -> list[np.ndarray]:
        """So many rows from `at` on, as an array per column; they may be the table's own memory."""
        return [column.array[at : at + count] for column in self.columns]

    def restart(self, columns: Iterable[tuple[Key, tuple[int, ...], torch.dtype]]) -> None:
        """Forget all rows; the next ones have these columns."""
        self.columns = [self._column(*column) for column in columns]
        self._expected.clear()
        self._layout = None

    def _column(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Column:
        return Column.empty(key, shape, dtype, self.rows)

    def take(self, rows: np.ndarray) -> list[tuple[Key, Tensor]]:
        """The given rows in fresh memory."""
        return [(column.key, column.tensor(column.array.take(rows, axis=0))) for column in self.columns]

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        for i, old in enumerate(self.columns):
            self.columns[i] = Column.empty(old.key, old.shape, old.dtype, rows)
            self.columns[i].array[: self.rows] = old.array
        self.rows = rows

    def _start(self, found: dict[Key, Tensor], batch_dims: int) -> None:
        columns = []
        for key in sorted(found):  # sorted: two shards agree, whatever order their actors built the rows in
            if key in _RESERVED:
                raise UsageError(
                    f"the key {_say(key)} is one that sample() adds to rows; "
                    f"write td.exclude({_say(key)}) before the insert, or rename it"
                )
            value = found[key]
            columns.append(self._column(key, tuple(value.shape[batch_dims:]), value.dtype))
        if not columns:
            raise UsageError("rows without any tensor cannot be inserted: got an empty TensorDict")
        self.columns = columns

    def _unlike(self, found: dict[Key, Tensor], batch_dims: int) -> UsageError:
        """The error that says which entry differs from the first rows, and how."""
        here = {key: (tuple(value.shape[batch_dims:]), value.dtype) for key, value in found.items()}
        known = {column.key: (column.shape, column.dtype) for column in self.columns}
        for key in sorted(known.keys() - here.keys()):
            return UsageError(
                f"replay rows must all have the same keys: {_say(key)} was in the first insert and is missing now "
                f"(keys now: {', '.join(map(_say, sorted(here)))}); put it into every row, or exclude it from all"
            )
        for key in sorted(here.keys() - known.keys()):
            return UsageError(
                f"replay rows must all have the same keys: {_say(key)} was not in the first insert and is there now "
                f"(keys then: {', '.join(map(_say, sorted(known)))}); write td.exclude({_say(key)}) before the insert"
            )
        key = next(key for key in sorted(known) if known[key] != here[key])
        then, now = (f"{list(shape)} {dtype}" for shape, dtype in (known[key], here[key]))
        return UsageError(
            f"replay rows must all be alike: {_say(key)} of a row was {then} in the first insert and is {now} here; "
            "convert it before the insert"
        )


class Rows:
    """Rows on their way to the replay buffer: an actor appends, one transfer carries all of them.

    `append` takes a snapshot, so what happens to the tensors later does not matter. A `Rows` object pickles as plain
    numpy arrays, several times cheaper than a TensorDict; `insert` takes it as it is.

    >>> rows = Rows()
    >>> rows.append(TensorDict({"reward": torch.zeros(2, 1)}, batch_size=[2]))
    >>> rows.append(TensorDict({"reward": torch.ones(2, 1)}, batch_size=[2]))
    >>> len(rows), rows.pack().batch_size
    (4, torch.Size([2, 2]))
    """

    def __init__(self) -> None:
        self._table = Table(0)
        self._count = 0
        self._width: int | None = None  # environments, when every append had as many; 0 when they differ

    def append(self, td: TensorDictBase) -> None:
        """Add the rows of `td`: batch [E] (a step of E environments), [T, E], or [N]."""
        batch = td.batch_size
        added = batch.numel()
        if not added:
            return
        if not self._count:
            self._table.rows = 16 * added
        if self._count + added > self._table.rows or not self._table.put(self._count, td):
            values = self._table.values(td)
            if self._count + added > self._table.rows:
                self._table.grow(2 * self._count + added)
            self._table.write(self._count, values, 0, added)
        self._count += added
        width = batch[-1] if batch else 0
        self._width = width if self._width in (None, width) else 0

    def pack(self) -> TensorDict:
        """All rows so far, in memory of their own: batch [T, E], or [N] when the appends were of different lengths."""
        batch = (self._count // self._width, self._width) if self._width else (self._count,)
        return build(
            (
                (column.key, column.tensor(column.array[: self._count].reshape(*batch, *column.shape).copy()))
                for column in self._table.columns
            ),
            batch,
        )

    def cut(self, start: int, stop: int) -> Rows:
        """Of every step, the rows of some of its environments."""
        if self._count and not self._width:
            raise UsageError(
                "rows of steps with different numbers of environments cannot be cut into those of each actor"
            )
        part = Rows()
        part._width, part._count = stop - start, self._count // (self._width or 1) * (stop - start)
        part._table = Table(part._count)
        for column in self._table.columns:
            steps = column.array[: self._count].reshape(-1, self._width or 1, *column.shape)
            part._table.columns.append(column._replace(array=steps[:, start:stop].reshape(part._count, *column.shape)))
        return part

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        columns = [column._replace(array=column.array[: self._count].copy()) for column in self._table.columns]
        return {"columns": columns, "count": self._count, "width": self._width}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = Table(state["count"])
        self._table.columns = [Column(*column) for column in state["columns"]]
        self._count, self._width = state["count"], state["width"]


def leaves(td: TensorDictBase, prefix: Key = ()) -> list[tuple[Key, Tensor]]:
    """Every tensor of the rows with its path, without what is no part of a transition."""
    found: list[tuple[Key, Tensor]] = []
    entries = td._tensordict if type(td) is TensorDict else td  # type: ignore[attr-defined]
    for name, value in entries.items():
        key = (*prefix, name)
        if type(value) is Tensor or isinstance(value, Tensor):
            if key not in _NO_DATA:
                found.append((key, value))
        elif isinstance(value, TensorDictBase):
            found += leaves(value, key)
        else:
            raise UsageError(
                f"replay rows hold tensors only, and {_say(key)} is a {type(value).__name__}; "
                f"write td.exclude({_say(key)}) before the insert"
            )
    return found


def build(items: Iterable[tuple[Key, Tensor]], batch: Sequence[int]) -> TensorDict:
    """A TensorDict of entries at their paths."""
    root: dict[str, Any] = {}
    for key, value in items:
        node = root
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = value
    return _tensordict(root, batch_size=torch.Size(batch))


def _say(key: Key) -> str:
    """A key as a user writes it."""
    return repr(key[0]) if len(key) == 1 else repr(key)
