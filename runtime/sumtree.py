"""Sum trees for prioritized replay: batches of leaves are set, and batches of offsets found, in a few numpy calls.

One `SumTree` object holds several trees of equal size (one per replay lane): one call serves rows of many lanes. No
sum crosses from one tree to another, and how a tree adds up depends on its own size alone, so it gives the same bits
whichever trees stand beside it.

Each level is one array in which the nodes of tree t follow those of tree t - 1; node j has the children 2j and 2j + 1
in the level below. A sum is always computed anew from its two children, never by adding a difference, so it depends on
the leaves and not on the order in which they were set. The tree has no tip: above the level of about size ** 0.6 nodes
a running sum and a binary search cost less than numpy calls for the remaining levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class SumTree:
    """`trees` separate sum trees with `leaves` non-negative float64 leaves each, all zero at first.

    >>> tree = SumTree(trees=1, leaves=4)
    >>> tree.set(np.array([0, 0, 0]), np.array([0, 1, 3]), np.array([1.0, 2.0, 4.0]))
    >>> tree.mass()
    array([7.])
    >>> tree.find(np.array([0, 0, 0]), np.array([0.5, 2.9, 3.0]))
    array([0, 1, 3])
    """

    def __init__(self, trees: int, leaves: int) -> None:
        bits = max(leaves - 1, 0).bit_length()
        self.size, self.top = 1 << bits, 1 << 3 * bits // 5
        sizes = [self.top << level for level in range(bits - 3 * bits // 5 + 1)]
        self._sums = np.zeros((trees, self.top + 1))
        self._stale = False
        self._adopt([np.zeros(trees * size) for size in sizes])

    def _adopt(self, levels: list[np.ndarray]) -> None:
        """Take the levels, from the uppermost one kept down to the leaves, and make the views that calls use."""
        self._levels = levels
        self._leaves = levels[-1]
        self._pairs = [level.reshape(-1, 2) for level in levels[1:]]  # row j: the children of node j one level up

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_leaves", "_pairs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt(self._levels)  # pickled views would come back as copies

    @staticmethod
    def nbytes(trees: int, leaves: int) -> int:
        """Bytes that so many trees take (their uppermost level, a few kB, not counted twice)."""
        return trees * 2 * 8 * (1 << max(leaves - 1, 0).bit_length())

    def set(self, tree: np.ndarray, leaf: np.ndarray, value: np.ndarray | float) -> None:
        """Give leaves their values; of two for the same leaf the last one counts."""
        node = tree * self.size + leaf
        self._leaves[node] = value
        for level, pairs in zip(self._levels[-2::-1], self._pairs[::-1], strict=True):
            node = node >> 1
            if len(node) > 1024:  # many leaves share a parent: visit it once
                node = np.unique(node)
            pair = pairs.take(node, axis=0)
            level[node] = pair[:, 0] + pair[:, 1]
        self._stale = True

    def get(self, tree: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        """The values of leaves."""
        return self._leaves.take(tree * self.size + leaf)

    def mass(self) -> np.ndarray:
        """The sum of all leaves, of each tree."""
        return self._running()[:, -1].copy()

    def find(self, tree: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The leaf of each tree at which the running sum of its leaves first exceeds the offset.

        Offsets are in [0, mass); one at or above the mass finds the last leaf that is not zero. Up to rounding: a value
        within the last bits of the boundary between two leaves may find either, but a leaf of zero is never found.
        """
        sums = self._running()
        if len(sums) == 1:
            offset = np.minimum(offset, np.nextafter(sums[0, -1], 0.0))
            node = sums[0, 1:].searchsorted(offset, side="right")
            offset = offset - sums[0].take(node)
        else:
            offset = np.minimum(offset, np.nextafter(sums[:, -1], 0.0)[tree])
            node = np.empty(len(offset), np.int64)
            for index in range(len(sums)):
                rows = np.flatnonzero(tree == index)
                node[rows] = sums[index, 1:].searchsorted(offset[rows], side="right")
            offset = offset - sums[tree, node]
            node += tree * self.top
        found = self._descend(node, offset, careful=False)
        empty = self._leaves.take(found) == 0.0
        if empty.any():
            found[empty] = self._descend(node[empty], offset[empty], careful=True)
        return found & (self.size - 1)

    def clear(self) -> None:
        """Set every leaf to zero."""
        for level in self._levels:
            level[:] = 0.0
        self._stale = True

    def _descend(self, node: np.ndarray, offset: np.ndarray, careful: bool) -> np.ndarray:
        """From nodes of the uppermost level to leaves; carefully: never to a child of sum zero, however it rounds."""
        for pairs in self._pairs:
            pair = pairs.take(node, axis=0)
            left = pair[:, 0]
            right = offset >= left
            if careful:
                right &= pair[:, 1] > 0.0
            offset = offset - left * right
            node = 2 * node + right
        return node

    def _running(self) -> np.ndarray:
        """Running sums over the uppermost level kept, with a zero in front: [trees, top + 1]."""
        if self._stale:
            # cumsum adds one after the other; the order in which np.sum adds is numpy's own affair
            np.cumsum(self._levels[0].reshape(-1, self.top), axis=1, out=self._sums[:, 1:])
            self._stale = False
        return self._sums
