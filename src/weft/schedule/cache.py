"""Owns the KV blocks, the prefix index and the recurrent states. Pure Python, no tensors.

A block is *in use* while its reference count is positive. A free block keeps its content and, if it
was registered, its place in the prefix index, until it is taken again:

    free, cached, in the order of release      [oldest ......... newest]
      a fresh block is the oldest ^                             ^ release() appends
      match() finds a cached one anywhere

The prefix index maps the key of a full block to a block. The key is the SHA-256 of all tokens up to
the block's end, so that content with the same key is the same. Where an adapter becomes active in a
sequence, its version's digest and the position go into the hash:

    base              k0 ── k1 ── k2 ── k3
    a, from 0 on      └a0── ...
    a, from 37 on                 └a37─ ...      (blocks of 16 tokens)

So blocks that an adapter computed are shared only by sequences with the same version, active from
the same position; blocks that the base computed before are shared by all. The hash begins with the
sequence's *salt*: only sequences with the same salt share blocks.

A sequence of a model with recurrent layers holds one *state*, from reserve() to release(). The
state depends on all tokens so far, so another sequence's blocks are of no use without the state at
their end. Such states are kept as *snapshots* (`weft.schedule.snapshots`), and blocks are matched
only up to a snapshot. They are taken in prompts:

    tokens      [ .......... | ..... | ......................... | .. ]
    snapshots   where another prompt | behind the last full block
                with these blocks    | where an activated adapter's base part ends
                went on otherwise
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from weft.core.requests import TokenArray
from weft.schedule.journal import Journal
from weft.schedule.sketch import PrefixSketch
from weft.schedule.snapshots import Snapshots

NEVER = 1 << 62
"""A position beyond any other."""

AHEAD = 64
"""For how many blocks keys are computed at a time. More would be wasted, and hold up the step, when
the first of many blocks is missing."""

MIN_BLOCKS = 2
"""A snapshot is taken where it saves others at least so many blocks of computing."""


def _chain(kind: bytes, *content: bytes) -> hashlib._Hash:
    """A hash to which tokens are added. It begins with the 32-byte digest of `kind` and `content`,
    whose parts, except the last, have lengths that follow from the kind."""
    return hashlib.sha256(hashlib.sha256(b"".join((kind, *content))).digest())


class Holding:
    """What one sequence holds of the cache. Only the cache changes it; the batch sets `lag`."""

    __slots__ = (
        "_active_from",
        "_chain",
        "_digest",
        "_first_adapted",
        "_keys",
        "_known_blocks",
        "_name",
        "blocks",
        "lag",
        "next_full",
        "restored",
        "room",
        "state",
        "stops",
    )

    def __init__(
        self,
        digest: str | None = None,
        active_from: int = NEVER,
        salt: str = "",
        name: str | None = None,
        keys: list[bytes] | None = None,
    ) -> None:
        """The adapter version `digest` is active from the position `active_from` on. `name` is its
        name in the request. `keys`: the keys of all its full blocks, if known already; sequences
        with the same tokens may share the list."""
        self._chain = _chain(b"salt", salt.encode())
        """The hash of the blocks whose keys are known."""
        self._digest = digest
        self._name = name
        self._active_from = active_from
        self._first_adapted = NEVER if digest is None else active_from
        self._keys: list[bytes] = [] if keys is None else keys
        """Keys of the full blocks of the tokens, as far as they were needed."""
        self.blocks: list[int] = []
        self.room = 0
        """How many tokens the blocks have room for."""
        self.state = -1
        """The recurrent state; -1 while it has none."""
        self.lag = 0
        """How many computed tokens the state lacks until the next step: the guesses that were right
        in the last one."""
        self.next_full = NEVER
        """The number of computed tokens at which the next block is full and may be registered."""
        self.restored = -1
        """The snapshot from which the state begins; -1: it begins empty, or continues."""
        self.stops: tuple[int, ...] = ()
        """Numbers of computed tokens, ascending, at which a chunk must end for a snapshot."""
        self._known_blocks = 0
        """How many blocks of its tokens were in the prefix index, with a snapshot or without."""

    def key(self, tokens: TokenArray, index: int, size: int) -> bytes:
        """The key of the full block `index`; `tokens` only ever grow between calls."""
        if index >= len(self._keys):
            self._extend(tokens, index + 1, size)
        return self._keys[index]

    def keys(self, tokens: TokenArray, begin: int, end: int, size: int) -> list[bytes]:
        """The keys of the full blocks from `begin` to `end`; see `key`."""
        if end > len(self._keys):
            self._extend(memoryview(tokens), end, size)
        return self._keys[begin:end]

    def _extend(self, content: TokenArray | memoryview, end: int, size: int) -> None:
        """Make the keys of the full blocks of `content` before `end`. Of many blocks, parts of a
        view are made faster than parts of an array."""
        keys, chain, first_adapted = self._keys, self._chain, self._first_adapted // size
        for i in range(len(keys), end):
            if i == first_adapted:
                chain = self._chain = self._adapted(chain.digest())
            chain.update(content[i * size : (i + 1) * size])
            keys.append(chain.digest())

    def _adapted(self, before: bytes) -> hashlib._Hash:
        """The hash that replaces one with the digest `before` where the version becomes active."""
        assert self._digest is not None
        position = self._active_from.to_bytes(8, "little")
        return _chain(b"adapter", before, bytes.fromhex(self._digest), position)

    def adapter_at(self, index: int, size: int) -> str | None:
        """The name of the adapter that computes the block `index`; None: the base does."""
        return self._name if index >= self._active_from // size else None

    def cached_key(self, num_blocks: int) -> bytes:
        """The key of the last of `num_blocks` matched blocks."""
        return self._keys[num_blocks - 1]


class Cache:
    """Owner of all KV blocks, of the prefix index and of all recurrent states.

    num_blocks: blocks of `block_size` tokens each. num_states: recurrent states, 0 for a model
    that has none. share_prefixes: whether sequences share blocks with the same content.
    num_snapshots: places for snapshots of states; without any, a model with states shares nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        share_prefixes: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_states = num_states
        self._shares = share_prefixes and (not num_states or num_snapshots > 0)
        self.snapshots = Snapshots(num_states, num_snapshots)
        self._users = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_states = list(range(num_states - 1, -1, -1))
        self.sketch: PrefixSketch | None = None
        """The keys that the engine's load reports; None: nobody needs them."""
        self.journal: Journal | None = None
        """Records the changes of the prefix index; None: nobody needs them."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def match(self, holding: Holding, tokens: TokenArray) -> list[int]:
        """Registered blocks with the beginning of `tokens`, without taking them; for a model with
        states, up to the last block with a snapshot. At least one token is left to compute. The
        blocks stay registered until the next reserve() or extend()."""
        hits, size = self._registered(holding, tokens), self.block_size
        if self.sketch is not None:
            self.sketch.found(holding.keys(tokens, 0, len(hits), size))
        holding._known_blocks = len(hits)
        if self._num_states:
            while hits and holding.key(tokens, len(hits) - 1, size) not in self.snapshots:
                hits.pop()
        return hits

    def _registered(self, holding: Holding, tokens: TokenArray) -> list[int]:
        """The registered blocks from the first one on, up to one that is missing."""
        hits: list[int] = []
        block_of, size = self._block_of, self.block_size
        most = (len(tokens) - 1) // size if self._shares else 0
        for begin in range(0, most, AHEAD):
            for key in holding.keys(tokens, begin, min(begin + AHEAD, most), size):
                block = block_of.get(key)
                if block is None:
                    return hits
                hits.append(block)
        return hits

    def reserve(
        self, holding: Holding, num_tokens: int, hits: Sequence[int] = (), spare: int = 0
    ) -> bool:
        """Take a state, the blocks `hits`, and fresh ones until there is room for `num_tokens`.

            blocks that it holds | hits | fresh        in the order of the sequence

        False, with nothing taken, if that would leave fewer than `spare` blocks free. Only a
        holding without blocks can take hits.
        """
        users, free = self._users, self._free
        fresh = -(-num_tokens // self.block_size) - len(holding.blocks) - len(hits)
        idle_hits = [block for block in hits if not users[block]]
        if fresh + len(idle_hits) + spare > len(free):
            return False
        if self._num_states and holding.state < 0:
            if not self._free_states:
                return False
            holding.state = self._free_states.pop()
        for block in idle_hits:
            del free[block]
        for block in hits:
            users[block] += 1
        holding.restored = -1
        if not holding.blocks:
            first_full = (len(hits) + 1) * self.block_size
            holding.next_full = first_full if self._shares else NEVER
            if self._num_states and self._shares:
                self._begin_state(holding, num_tokens, len(hits))
        holding.blocks += hits
        holding.blocks += [self._allocate() for _ in range(fresh)]
        holding.room = len(holding.blocks) * self.block_size
        return True

    def _begin_state(self, holding: Holding, num_tokens: int, num_hits: int) -> None:
        """Choose where the state begins, and where snapshots of it are worth their time."""
        size = self.block_size
        if num_hits:
            holding.restored = self.snapshots.use(holding.cached_key(num_hits))
        wanted = {
            holding._known_blocks,
            (num_tokens - 1) // size,
            min(holding._active_from, num_tokens) // size,
        }
        least = (num_hits + MIN_BLOCKS) * size
        stops = sorted(blocks * size for blocks in wanted)
        holding.stops = tuple(stop for stop in stops if least <= stop < num_tokens)

    def snapshot(self, holding: Holding, tokens: TokenArray, computed: int) -> int | None:
        """Begin a snapshot of a sequence's state after its first `computed` tokens. Returns its
        number, for `snapshot_ended` after the step that takes it; None: none is to be taken."""
        if computed not in holding.stops:
            return None
        key = holding.key(tokens, computed // self.block_size - 1, self.block_size)
        return self.snapshots.begin(key)

    def snapshot_ended(self, number: int, written: bool) -> None:
        """End a snapshot: its step has run, and its blocks were registered, or it has failed."""
        snapshots = self.snapshots
        snapshots.end(number, written and snapshots.key_of(number) in self._block_of)

    def extend(self, holding: Holding) -> int | None:
        """Take one more block and return it; None if no block is free."""
        if not self._free:
            return None
        block = self._allocate()
        holding.blocks.append(block)
        holding.room += self.block_size
        return block

    def register(self, holding: Holding, tokens: TokenArray, computed: int) -> None:
        """Offer the full blocks of the first `computed` tokens to the prefix index. If it has a
        block with the same content already, that one stays."""
        size, full, most = self.block_size, holding.next_full, min(computed, holding.room)
        while full <= most:
            index = full // size - 1
            block, key = holding.blocks[index], holding.key(tokens, index, size)
            if self._key_of[block] is None and key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key
                if self.sketch is not None:
                    self.sketch.use(index, key)
                if self.journal is not None:
                    parent = holding.key(tokens, index - 1, size) if index else None
                    content = tokens[index * size : (index + 1) * size].tolist()
                    self.journal.store(key, parent, content, holding.adapter_at(index, size))
            holding.next_full = full = full + size

    def release(self, holding: Holding) -> None:
        """Give everything back. The sequence's last block becomes the oldest of them, so that a
        chain of cached blocks is reused from its end, and its beginning stays useful."""
        for block in reversed(holding.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
        if holding.state >= 0:
            self._free_states.append(holding.state)
        holding.blocks, holding.room, holding.state, holding.next_full = [], 0, -1, NEVER
        holding.restored, holding.stops, holding.lag = -1, (), 0

    def _allocate(self) -> int:
        """Take the oldest free block for new content; it leaves the prefix index."""
        block, _ = self._free.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            self.snapshots.drop(key)
            if self.sketch is not None:
                self.sketch.drop(key)
            if self.journal is not None:
                self.journal.remove(key)
        self._users[block] = 1
        return block

    def check(self, holdings: Iterable[Holding]) -> None:
        """Raise AssertionError unless all invariants hold, given all holdings that there are."""
        holdings = list(holdings)
        uses = Counter(block for holding in holdings for block in holding.blocks)
        assert all(len(set(h.blocks)) == len(h.blocks) for h in holdings)
        assert all(h.room == len(h.blocks) * self.block_size for h in holdings)
        assert uses == {b: n for b, n in enumerate(self._users) if n}
        assert set(self._free) == {b for b, n in enumerate(self._users) if not n}
        registered = {k: b for b, k in enumerate(self._key_of) if k is not None}
        assert registered == self._block_of
        states = [holding.state for holding in holdings if holding.state >= 0]
        assert sorted(states + self._free_states) == list(range(self._num_states))
        if self._num_states:
            assert all((holding.state >= 0) == bool(holding.blocks) for holding in holdings)
        self.snapshots.check()
        assert self.snapshots.keys <= self._block_of.keys()
