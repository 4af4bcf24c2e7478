"""The block pool: which KV blocks are free, shared or cached. Pure Python, no tensors.

A block is *in use* while its reference count is positive. A block that is given back keeps its
content and, if it was registered, its place in the prefix index, until it is taken again:

    free, cached, in the order of release      [oldest ......... newest]
      allocate() takes the oldest ^                                ^ release() appends
      share(key) takes a cached one from anywhere

The prefix index maps the hash of a full block, chained from its predecessors, to a block. Where an
adapter becomes active in a sequence, its version's digest and the position go into the chain:

    base              k0 ── k1 ── k2 ── k3
    a, from 0 on      └a0── ...
    a, from 37 on                 └a37─ ...      (blocks of 16 tokens)

So no version shares what it computed with another, and all of them share what the base computed
before they became active. A version that became active elsewhere in the same tokens has computed
something else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BlockKey = bytes


ROOT_KEY: BlockKey = b""
"""Before the first block."""


def adapted_key(parent: BlockKey, digest: str, active_from: int) -> BlockKey:
    """In place of `parent` for the block in which an adapter version becomes active, at this
    position of the sequence."""
    content = bytes.fromhex(digest) + active_from.to_bytes(8, "little")
    return hashlib.blake2b(parent + content, digest_size=16, person=b"adapter").digest()


def chain_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of a full block with these tokens after `parent`."""
    hashed = hashlib.blake2b(parent, digest_size=16)
    hashed.update(array("q", token_ids).tobytes())
    return hashed.digest()


class BlockPool:
    """Owner of all KV blocks and of the prefix index."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self) -> int:
        """A block for new content; forgets what it held. The caller checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
        self._refs[block] = 1
        return block

    def lookup(self, key: BlockKey) -> int | None:
        """The block registered under `key`, without taking it."""
        return self._block_of.get(key)

    def share(self, block: int) -> None:
        """One more user of a registered block."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def register(self, block: int, key: BlockKey) -> None:
        """Put a full block in use into the prefix index. The first block of a key stays."""
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each. Later blocks of a chain become the older free ones, so that a
        chain is eaten from its end and its beginning stays useful."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def num_users(self, block: int) -> int:
        return self._refs[block]

    @property
    def total_users(self) -> int:
        return sum(self._refs)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert all(r >= 0 for r in self._refs)
        assert set(self._free) == {b for b, r in enumerate(self._refs) if r == 0}
        registered = {k: b for b, k in enumerate(self._key_of) if k is not None}
        assert registered == self._block_of
