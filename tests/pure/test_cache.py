"""The cache alone: blocks, the prefix index and recurrent states, driven at random."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.requests import TokenArray
from weft.schedule.cache import NEVER, Cache, Holding
from weft.schedule.journal import BlocksStored, Journal

BLOCK = 4
NUM_BLOCKS = 12
DIGESTS = [hashlib.sha256(name).hexdigest() for name in (b"a", b"b")]

Content = tuple[tuple[int, str | None, int | None], ...]
"""Each token of a prefix with the adapter that computed it, and where that became active."""


@dataclass
class Sequence:
    """A sequence with what it holds; its tokens count as computed when `computed` says so."""

    tokens: TokenArray
    digest: str | None
    active_from: int
    holding: Holding = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        self.holding = Holding(self.digest, self.active_from, name=self.digest)

    def content(self, count: int) -> Content:
        begin = NEVER if self.digest is None else self.active_from
        return tuple(
            (t, self.digest, begin) if i >= begin else (t, None, None)
            for i, t in enumerate(self.tokens[:count])
        )


class CacheMachine(RuleBasedStateMachine):
    num_states = num_snapshots = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(NUM_BLOCKS, BLOCK, self.num_states, num_snapshots=self.num_snapshots)
        self.cache.journal = Journal()
        self.told: set[bytes] = set()
        """The keys that who reads the journal knows to be there."""
        self.chains: dict[bytes, list[tuple[int, str | None]]] = {}
        """By key that was ever there: all tokens up to there, with what the event says of them."""
        self.sequences: list[Sequence] = []
        self.written: dict[int, Content] = {}
        """What each block was computed from."""

    def _write(self, seq: Sequence, computed: int) -> None:
        for i in range(seq.computed // BLOCK, -(-computed // BLOCK)):
            self.written[seq.holding.blocks[i]] = seq.content(min(computed, (i + 1) * BLOCK))
        seq.computed = computed
        self.cache.register(seq.holding, seq.tokens, computed)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        digest=st.none() | st.sampled_from(DIGESTS),
        active_from=st.integers(0, 19),
        spare=st.integers(0, 2),
    )
    def begin(self, tokens: list[int], digest: str | None, active_from: int, spare: int) -> None:
        seq = Sequence(array("Q", tokens), digest, min(active_from, len(tokens) - 1))
        hits = self.cache.match(seq.holding, seq.tokens)
        assert len(hits) * BLOCK < len(tokens)
        for i, block in enumerate(hits):
            assert self.written[block] == seq.content((i + 1) * BLOCK)
        before = self.cache.num_free
        fresh = -(-len(tokens) // BLOCK) - len(hits)
        if self.cache.reserve(seq.holding, len(tokens), hits, spare):
            assert seq.holding.blocks[: len(hits)] == hits
            assert len(seq.holding.blocks) == -(-len(tokens) // BLOCK)
            assert before - len(hits) - fresh <= self.cache.num_free
            assert self.cache.num_free >= spare
            seq.computed = len(hits) * BLOCK
            self.sequences.append(seq)
            self._write(seq, len(tokens))
        else:
            assert not seq.holding.blocks
            assert seq.holding.state == -1
            assert self.cache.num_free == before
            assert before < fresh + len(hits) + spare or self._all_states_taken()

    def _all_states_taken(self) -> bool:
        return 0 < self.num_states == len(self.sequences)

    @rule(index=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    @precondition(lambda self: self.sequences)
    def go_on(self, index: int, new: list[int]) -> None:
        """Several tokens at a time, as far as there is room."""
        seq = self.sequences[index % len(self.sequences)]
        seq.tokens.extend(new)
        while len(seq.tokens) > len(seq.holding.blocks) * BLOCK:
            free = self.cache.num_free
            if self.cache.extend(seq.holding) is None:
                assert not free
                del seq.tokens[len(seq.holding.blocks) * BLOCK :]
        self._write(seq, len(seq.tokens))

    @rule(index=st.integers(0, 99))
    @precondition(lambda self: self.sequences)
    def end(self, index: int) -> None:
        seq = self.sequences.pop(index % len(self.sequences))
        self.cache.release(seq.holding)
        assert (seq.holding.blocks, seq.holding.state) == ([], -1)

    @invariant()
    def consistent(self) -> None:
        self.cache.check(seq.holding for seq in self.sequences)
        states = [seq.holding.state for seq in self.sequences]
        assert len(set(states)) == len(states) if self.num_states else set(states) <= {-1}

    @invariant()
    def the_journal_tells_what_can_be_found(self) -> None:
        for event in self.cache.journal.take():
            if isinstance(event, BlocksStored):
                assert len(event.token_ids) == len(event.keys) * BLOCK
                chain = list(self.chains[event.parent]) if event.parent else []
                for i, key in enumerate(event.keys):
                    part = event.token_ids[i * BLOCK : (i + 1) * BLOCK]
                    chain += [(token, event.adapter) for token in part]
                    self.chains[key] = list(chain)
                self.told.update(event.keys)
            else:
                self.told.difference_update(event.keys)
        for seq in self.sequences:
            for i in range(seq.computed // BLOCK):
                key = seq.holding.key(seq.tokens, i, BLOCK)
                if key in self.told:
                    assert self.chains[key] == self._as_told(seq, (i + 1) * BLOCK)
        assert self.told == self.cache._block_of.keys()

    def _as_told(self, seq: Sequence, count: int) -> list[tuple[int, str | None]]:
        """An adapter that becomes active within a block is told of all of it."""
        begin = NEVER if seq.digest is None else seq.active_from // BLOCK * BLOCK
        return [(t, seq.digest if i >= begin else None) for i, t in enumerate(seq.tokens[:count])]


class RecurrentMachine(CacheMachine):
    """Each sequence has a state of its own, and nothing is found in the prefix index."""

    num_states = 3

    def _write(self, seq: Sequence, computed: int) -> None:
        super()._write(seq, computed)
        assert seq.holding.stops == ()

    @invariant()
    def nothing_is_shared(self) -> None:
        for seq in self.sequences:
            assert self.cache.match(Holding(), seq.tokens) == []


class SnapshotMachine(CacheMachine):
    """What is matched ends at a snapshot, which was taken of the same content as the blocks."""

    num_states, num_snapshots = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Content] = {}
        """What each snapshot was computed from."""
        self.pending: dict[int, Content] = {}

    def _write(self, seq: Sequence, computed: int) -> None:
        if seq.holding.restored >= 0:
            assert self.kept[seq.holding.restored] == seq.content(seq.computed)
            seq.holding.restored = -1  # from here on it goes on
        for stop in seq.holding.stops:
            assert stop % BLOCK == 0
            if seq.computed < stop <= computed:
                super()._write(seq, stop)
                number = self.cache.snapshot(seq.holding, seq.tokens, stop)
                if number is not None:
                    assert number not in self.pending
                    self.pending[number] = seq.content(stop)
        super()._write(seq, computed)

    @rule(written=st.booleans())
    @precondition(lambda self: self.pending)
    def step_ends(self, written: bool) -> None:
        number = next(iter(self.pending))
        content = self.pending.pop(number)
        if written:
            self.kept[number] = content
        self.cache.snapshot_ended(number, written)

    @invariant()
    def matches_end_at_snapshots(self) -> None:
        for seq in self.sequences:
            hits = self.cache.match(Holding(seq.digest, seq.active_from), seq.tokens)
            for i, block in enumerate(hits):
                assert self.written[block] == seq.content((i + 1) * BLOCK)
            if hits:
                assert seq.content(len(hits) * BLOCK) in self.kept.values()


_settings = settings(max_examples=12, stateful_step_count=40)
TestAttention = CacheMachine.TestCase
TestAttention.settings = _settings
TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = _settings
TestSnapshots = SnapshotMachine.TestCase
TestSnapshots.settings = _settings


def test_a_prompt_that_goes_on_otherwise_leaves_a_snapshot_where_it_does() -> None:
    """The first request leaves one at its end, the second where they part; the third finds that."""
    cache = Cache(40, BLOCK, 3, num_snapshots=4)
    shared = list(range(5 * BLOCK))
    found = []
    for own in (100, 200, 300):
        tokens, holding = array("Q", [*shared, *range(own, own + 9)]), Holding()
        hits = cache.match(holding, tokens)
        assert cache.reserve(holding, len(tokens), hits)
        found.append((len(hits), holding.stops))
        numbers = [cache.snapshot(holding, tokens, stop) for stop in holding.stops]
        cache.register(holding, tokens, len(tokens))
        for number in numbers:
            assert number is not None
            cache.snapshot_ended(number, True)
        cache.release(holding)
    at_end = 7 * BLOCK
    assert found == [(0, (at_end,)), (0, (5 * BLOCK, at_end)), (5, (at_end,))]


def test_snapshots_are_of_one_version_and_salt() -> None:
    cache = Cache(60, BLOCK, 6, num_snapshots=9)
    tokens = array("Q", range(4 * BLOCK + 1))
    made: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"digest": DIGESTS[0], "active_from": 0},
        {"digest": DIGESTS[1], "active_from": 0},
        {"digest": DIGESTS[0], "active_from": 0, "salt": "a"},
    ]
    for fields in made:
        holding = Holding(**fields)
        assert cache.match(holding, tokens) == []
        assert cache.reserve(holding, len(tokens))
        number = cache.snapshot(holding, tokens, 4 * BLOCK)
        assert number is not None
        cache.register(holding, tokens, len(tokens))
        cache.snapshot_ended(number, True)
        cache.release(holding)
    assert all(len(cache.match(Holding(**fields), tokens)) == 4 for fields in made)
    activated = Holding(DIGESTS[1], 3 * BLOCK + 2)
    assert cache.match(activated, tokens) == []  # the base left none where it ends
    assert cache.reserve(activated, len(tokens))
    assert activated.stops == (3 * BLOCK, 4 * BLOCK)


@given(st.lists(st.integers(0, 3), min_size=9, max_size=30))
def test_what_was_computed_is_found(ids: list[int]) -> None:
    cache, tokens = Cache(20, BLOCK), array("Q", ids)
    first, second = Holding(), Holding()
    assert cache.reserve(first, len(tokens))
    cache.register(first, tokens, len(tokens))
    cache.release(first)
    hits = cache.match(second, tokens)
    assert len(hits) == (len(tokens) - 1) // BLOCK
    assert cache.reserve(second, len(tokens), hits)
    assert second.next_full == (len(hits) + 1) * BLOCK


def test_nothing_is_shared_where_that_is_off() -> None:
    cache = Cache(8, BLOCK, share_prefixes=False)
    holding = Holding()
    assert cache.reserve(holding, 8)
    tokens = array("Q", [1] * 8)
    cache.register(holding, tokens, 8)
    assert cache.match(Holding(), tokens) == []
