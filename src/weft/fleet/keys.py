"""Which keys are held by which nodes, so that a look-up answers for all nodes at once.

For each key there is a row, and in it one small code for each node, whose bits say how the node
has what the key stands for:

    adapter key    node 0      node 1      node 2
    a1             RESIDENT    0           HOST | COMING
    a2             0           RUNNING     0

An element of a row is `stride * node + code`, which with a stride of `NUM_CODES` says where to look
in a table with a line for each node and code. Rows
exist only for keys that some node holds.

A key also gives the nodes an order of its own (`Orders`), the same wherever it is worked out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESIDENT, HOST, COMING, RUNNING = 1, 2, 4, 8
"""On the device; on the host; about to be on the device; in the batch."""
NUM_CODES = 16

MAX_ORDERS = 20_000
"""How many keys' orders are remembered."""
MASK = (1 << 64) - 1

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]


class KeyedCodes:
    """Owner of the rows of one kind of keys."""

    def __init__(self, stride: int, dtype: np.dtype[Any]) -> None:
        """`dtype`: that of the rows."""
        self._stride = stride
        self._nothing: NDArray[Any] = np.zeros(0, dtype)
        """The row of a key that no node holds."""
        self._rows: dict[int, NDArray[Any]] = {}
        self._holders: dict[int, int] = {}
        """How many nodes have a code other than 0."""

    def row(self, key: int) -> NDArray[Any]:
        return self._rows.get(key, self._nothing)

    def find(self, key: int) -> NDArray[Any] | None:
        """The row of a key that some node holds, or None."""
        return self._rows.get(key)

    def add(self, node: int, bit: int, keys: Iterable[int]) -> None:
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = self._nothing.copy()
                self._holders[key] = 0
            code = int(row[node])
            if not code & bit:
                self._holders[key] += code == self._stride * node
                row[node] = code | bit

    def discard(self, node: int, bit: int, keys: Iterable[int]) -> None:
        for key in keys:
            row = self._rows.get(key)
            if row is not None and (code := int(row[node])) & bit:
                row[node] = code & ~bit
                if code & ~bit == self._stride * node:
                    self._holders[key] -= 1
                    if not self._holders[key]:
                        del self._rows[key], self._holders[key]

    def replace(self, node: int, bit: int, old: AbstractSet[int], new: AbstractSet[int]) -> None:
        """The node held `old` in this way, and holds `new` now."""
        if old != new:
            self.discard(node, bit, old - new)
            self.add(node, bit, new - old)

    def forget(self, node: int) -> None:
        """The node holds nothing any more."""
        held = [key for key, row in self._rows.items() if row[node] != self._nothing[node]]
        for bit in (RESIDENT, HOST, COMING, RUNNING):
            self.discard(node, bit, held)

    def grow(self, num_nodes: int) -> None:
        old = len(self._nothing)
        self._nothing = self._stride * np.arange(num_nodes, dtype=self._nothing.dtype)
        more = self._nothing[old:]
        self._rows = {key: np.concatenate((row, more)) for key, row in self._rows.items()}

    def check(self) -> None:
        """Raise AssertionError unless the counts of holders are true."""
        assert self._rows.keys() == self._holders.keys()
        for key, row in self._rows.items():
            assert self._holders[key] == int((row != self._nothing).sum()) > 0


def hash_of(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Orders:
    """The order in which each key prefers the nodes: by a hash of both (rendezvous hashing; Thaler
    and Ravishankar, "Using name-based mappings to increase hit rates", 1998). A node that comes or
    goes changes the first place of those keys alone that have it there."""

    def __init__(self) -> None:
        self._indices: Ints = np.zeros(0, dtype=np.intp)
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._capacity = 0
        self._places: dict[int, Floats] = {}

    def set_nodes(self, names: Mapping[int, str], capacity: int) -> None:
        """These nodes are there, by their index; arrays have `capacity` elements."""
        self._indices = np.array(list(names), dtype=np.intp)
        self._hashes = np.array([hash_of(name) for name in names.values()], dtype=np.uint64)
        self._capacity = capacity
        self._places.clear()

    def places(self, key: int) -> Floats:
        """Each node's place in the key's order: 0 for the first one. 0 where there is no node."""
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= MAX_ORDERS:
                self._places.clear()
            found = self._places[key] = self._work_out(key)
        return found

    def _work_out(self, key: int) -> Floats:
        # The finalizer of splitmix64 (Steele, Lea and Flood, 2014) mixes all bits into all others.
        x = self._hashes ^ np.uint64(key & MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        places = np.zeros(self._capacity)
        places[self._indices[np.argsort(x)]] = np.arange(len(x))
        return places
