"""An index from keys (of adapters and prefixes) to the nodes that hold them.

An adapter's key has a row with a small code for each node. The code's bits say how the node has the
adapter:

    adapter key    node 0      node 1      node 2
    a1             RESIDENT    0           HOST | COMING
    a2             0           RUNNING     0

An element of a row is `NUM_CODES * node + code`, an index into a table with a line for each node
and code. A prefix needs only one bit for each node, so its nodes are one integer.

Rows and integers exist only for keys that some node holds. A key also gives the nodes an order of
its own (`Orders`), the same wherever it is worked out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

RESIDENT, HOST, COMING, RUNNING = 1, 2, 4, 8
"""On the device; on the host; about to be on the device; in the batch."""
NUM_CODES = 16

MAX_ORDERS = MAX_ROWS = 20_000
"""How many keys' orders, and how many masks' rows, are remembered."""
ORDER_S = 0.5e-3
"""What each place in a key's order of nodes counts."""
MASK = (1 << 64) - 1

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]


class KeyedCodes:
    """Owner of the rows of adapters' keys."""

    def __init__(self) -> None:
        self._nothing: Ints = np.zeros(0, dtype=np.intp)
        """The row of a key that no node holds."""
        self._rows: dict[int, Ints] = {}
        self._holders: dict[int, int] = {}
        """How many nodes have a code other than 0."""

    def row(self, key: int) -> Ints:
        """The row of a key, which changes when nodes tell more."""
        return self._rows.get(key, self._nothing)

    def add(self, node: int, bit: int, keys: Iterable[int]) -> None:
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = self._nothing.copy()
                self._holders[key] = 0
            code = int(row[node])
            if not code & bit:
                self._holders[key] += code == NUM_CODES * node
                row[node] = code | bit

    def discard(self, node: int, bit: int, keys: Iterable[int]) -> None:
        for key in keys:
            row = self._rows.get(key)
            if row is not None and (code := int(row[node])) & bit:
                row[node] = code & ~bit
                if code & ~bit == NUM_CODES * node:
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
        self._nothing = NUM_CODES * np.arange(num_nodes, dtype=np.intp)
        more = self._nothing[old:]
        self._rows = {key: np.concatenate((row, more)) for key, row in self._rows.items()}

    def check(self) -> None:
        """Raise AssertionError unless the counts of holders are true."""
        assert self._rows.keys() == self._holders.keys()
        for key, row in self._rows.items():
            assert self._holders[key] == int((row != self._nothing).sum()) > 0


class KeyedNodes:
    """Owner of the nodes of prefixes' keys: an integer for each, whose bit i stands for node i."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        """Not to be changed by others."""
        self._rows: dict[int, Ints] = {}
        self._capacity = 0

    def row(self, mask: int) -> Ints:
        """1 at each node of a mask, 0 at others. Not to be changed."""
        row = self._rows.get(mask)
        if row is None:
            if len(self._rows) >= MAX_ROWS:
                self._rows.clear()
            content = np.frombuffer(mask.to_bytes(self._capacity // 8, "little"), np.uint8)
            row = np.unpackbits(content, bitorder="little").astype(np.intp)
            self._rows[mask] = row
        return row

    def grow(self, num_nodes: int) -> None:
        """Rows have so many elements, a multiple of 8."""
        self._capacity = num_nodes
        self._rows.clear()

    def add(self, node: int, keys: Iterable[int]) -> None:
        nodes, bit = self.masks, 1 << node
        for key in keys:
            nodes[key] = nodes.get(key, 0) | bit

    def discard(self, node: int, keys: Iterable[int]) -> None:
        nodes, others = self.masks, ~(1 << node)
        for key in keys:
            if left := nodes.get(key, 0) & others:
                nodes[key] = left
            else:
                nodes.pop(key, None)

    def forget(self, node: int) -> None:
        """The node holds nothing any more."""
        bit = 1 << node
        self.discard(node, [key for key, nodes in self.masks.items() if nodes & bit])

    def check(self) -> None:
        """Raise AssertionError if a key is held by no node."""
        assert all(self.masks.values())


def hash_of(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mixed(x: Hashes) -> Hashes:
    """Integers in which each bit depends on all bits of those given, by the finalizer of splitmix64
    (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Orders:
    """The order in which each key prefers the nodes: by a hash of both (rendezvous hashing; Thaler
    and Ravishankar, "Using name-based mappings to increase hit rates", 1998). A node that comes or
    goes changes the first place of those keys alone that have it there."""

    def __init__(self) -> None:
        self._indices: Ints = np.zeros(0, dtype=np.intp)
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._capacity = 0
        self._seconds: dict[int, Floats] = {}

    def set_nodes(self, names: Mapping[int, str], capacity: int) -> None:
        """These nodes are there, by their index; arrays have `capacity` elements."""
        self._indices = np.array(list(names), dtype=np.intp)
        self._hashes = np.array([hash_of(name) for name in names.values()], dtype=np.uint64)
        self._capacity = capacity
        self._seconds.clear()

    def seconds(self, key: int) -> Floats:
        """ORDER_S times each node's place in the key's order: 0 for the first one. 0 where there is
        no node. Not to be changed."""
        found = self._seconds.get(key)
        if found is None:
            if len(self._seconds) >= MAX_ORDERS:
                self._seconds.clear()
            found = self._seconds[key] = self._work_out(key)
        return found

    def _work_out(self, key: int) -> Floats:
        x = mixed(self._hashes ^ np.uint64(key & MASK))
        seconds = np.zeros(self._capacity)
        seconds[self._indices[np.argsort(x)]] = ORDER_S * np.arange(len(x))
        return seconds
