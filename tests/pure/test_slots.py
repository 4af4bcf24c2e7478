"""Adapters on the device: places, moves, claims and who is evicted, against brute force."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tables import build_table

from weft.core.errors import AdapterConflict, AdapterInvalid
from weft.core.targets import layout_of
from weft.schedule.policy import POLICIES, Candidate, Policy, cost, fifo, lru
from weft.schedule.slots import AdapterSlots, Load

CAPACITY = 24
NUM_SLOTS = 5


@dataclass
class Placed:
    slot: int
    start: int
    size: int
    came: int
    last_use: int
    leases: int = 0
    loading: bool = True
    served_since: float = float("inf")

    @property
    def stop(self) -> int:
        return self.start + self.size


class SlotsMachine(RuleBasedStateMachine):
    """AdapterSlots beside a memory that carries out its orders, and an oracle that tries all.

    An element of the memory is (digest, index in its image); what nobody wrote is None.
    """

    names = st.sampled_from([f"d{i}" for i in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(CAPACITY, NUM_SLOTS, lru)
        self.memory: list[tuple[str, int] | None] = [None] * CAPACITY
        self.sizes: dict[str, int] = {}
        self.first_size: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.wanted: set[str] = set()
        self.placed: dict[str, Placed] = {}
        self.claim: str | None = None
        self.claimed_at = 0
        self.asked = [0, 0]
        """Times at which a load was asked for, the last two."""
        self.now = 1

    # -- what is known -------------------------------------------------------------------------

    @rule(name=names, size=st.integers(2, 14), pinned=st.booleans())
    def add(self, name: str, size: int, pinned: bool) -> None:
        # content has one size for good: it is part of what the digest stands for
        size = self.first_size.setdefault(name, size)
        others = sum(self.sizes[p] for p in self.pinned - {name})
        possible = others + size <= CAPACITY
        if pinned and name not in self.pinned:
            largest = max(size, *self.sizes.values(), 0)
            few = len(self.pinned) + 1 < NUM_SLOTS
            possible = others + size + largest <= CAPACITY and few
        try:
            self.slots.add(name, size, pinned)
        except AdapterConflict as error:
            assert not possible and error.param == "pinned"
            return
        assert possible
        self.sizes[name] = size
        (self.pinned.add if pinned else self.pinned.discard)(name)
        new = pinned and name not in self.placed
        (self.wanted.add if new else self.wanted.discard)(name)

    @rule(name=names)
    def remove(self, name: str) -> None:
        found = self.placed.get(name)
        if found and found.leases:
            return
        slot = self.slots.remove(name)
        assert (slot is not None) == (found is not None and not found.loading)
        self.sizes.pop(name, None)
        self.pinned.discard(name)
        self.wanted.discard(name)
        if found and slot is not None:
            assert slot == found.slot
            del self.placed[name]

    # -- use -----------------------------------------------------------------------------------

    @rule()
    def tick(self) -> None:
        self.now += 1

    @rule(name=names)
    def acquire(self, name: str) -> None:
        p = self.placed.get(name)
        if p and not p.loading and name in self.sizes:
            assert self.slots.acquire(name, self.now) == p.slot
            p.leases += 1
            p.last_use = self.now
            p.served_since = min(p.served_since, self.now)

    @rule(name=names)
    def release(self, name: str) -> None:
        p = self.placed.get(name)
        if p and p.leases:
            self.slots.release(name, self.now)
            p.leases -= 1
            p.last_use = self.now

    @rule(name=names)
    def touch(self, name: str) -> None:
        self.slots.touch(name, self.now)
        if name in self.placed:
            self.placed[name].last_use = self.now

    # -- loads ---------------------------------------------------------------------------------

    @rule(name=names)
    def start_load(self, name: str) -> None:
        if name not in self.sizes or name in self.placed:
            return
        stands_back = self.stands_back(name)
        starving = self.claim == name
        idle = [n for n in self.line() if self.may_go(n, starving)]
        size = self.sizes[name]
        possible = self.room_without(idle, size)
        before = {n: self.placed[n] for n in self.line()}
        load = self.slots.start_load(name, self.now)
        assert (load is not None) == (possible and not stands_back)
        if load is None:
            return
        self.check_evicted(load, idle, size)
        for gone in load.evicted:
            del self.placed[gone]
        assert load.evicted_slots == tuple(before[n].slot for n in load.evicted)
        self.check_moves(load, size)
        self.write(load, size)
        self.placed[name] = Placed(load.slot, load.start, size, self.now, self.now)
        self.wanted.discard(name)
        if starving:
            self.claim = None

    def stands_back(self, name: str) -> bool:
        """Whether another one has a claim that it has renewed lately."""
        if self.now > self.asked[1]:
            self.asked = [self.asked[1], self.now]
        if self.claim == name:
            self.claimed_at = self.now
        elif self.claim not in self.sizes or self.claimed_at < self.asked[0]:
            self.claim = None
        return self.claim not in (None, name)

    def check_evicted(self, load: Load, idle: list[str], size: int) -> None:
        """None for nothing, and none that is used later than need be."""
        gone = list(load.evicted)
        assert set(gone) <= set(idle)
        full = len(self.placed) == NUM_SLOTS
        for name in gone:
            rest = [n for n in gone if n != name]
            where = [s for s in self.stretches() if load.start in range(s[0], s[1] + 1)]
            enough = any(self.free(s, rest) >= size for s in where)
            assert not enough or (full and not rest), "evicted for nothing"
        idle.sort(key=lambda n: (self.placed[n].last_use, self.placed[n].start))
        if gone:
            dearest = max(idle.index(name) for name in gone)
            assert not self.room_without(idle[:dearest], size), "others could have gone"

    def check_moves(self, load: Load, size: int) -> None:
        """As few elements as possible; none of an adapter that is being loaded."""
        slots = {p.slot: p for p in self.placed.values() if not p.loading}
        assert {m.slot for m in load.moves} <= slots.keys()
        assert sum(m.size for m in load.moves) == self.fewest_moved(size)
        if not load.moves:
            fitting = [b - a for a, b in self.gaps() if b - a >= size]
            assert min(fitting) == next(b - a for a, b in self.gaps() if a == load.start)

    def write(self, load: Load, size: int) -> None:
        """The moves in their order, then the load, whose content is complete when it ends."""
        slots = {p.slot: p for p in self.placed.values()}
        for slot, source, dest, count in load.moves:
            p = slots[slot]
            assert (p.start, p.size) == (source, count)
            self.memory[dest : dest + count] = self.memory[source : source + count]
            p.start = dest
        assert load.start >= 0 and load.start + size <= CAPACITY
        self.memory[load.start : load.start + size] = [(load.digest, i) for i in range(size)]

    @rule(name=names, fails=st.booleans())
    def end_load(self, name: str, fails: bool) -> None:
        p = self.placed.get(name)
        if not p or not p.loading:
            return
        if fails:
            self.slots.load_failed(name)
            del self.placed[name]
        elif self.slots.loaded(name, 0.5):
            assert name in self.sizes
            p.loading = False
        else:
            assert name not in self.sizes
            del self.placed[name]

    @rule(name=names, size=st.integers(2, 14), lease=st.booleans())
    def bring(self, name: str, size: int, lease: bool) -> None:
        """All that makes an adapter useful, so that the line fills up."""
        self.add(name, size, pinned=name in self.pinned)
        self.tick()
        self.start_load(name)
        self.end_load(name, fails=False)
        if lease:
            self.acquire(name)

    @precondition(lambda self: self.sizes)
    @rule(name=names, quantum=st.integers(0, 4))
    def choose_victims(self, name: str, quantum: int) -> None:
        """Once they have no leases, the load starts; none is chosen beyond need."""
        if name not in self.sizes:
            return
        victims = self.slots.choose_victims(name, self.now, quantum)
        if name in self.placed or self.stands_back(name):
            assert not victims
            return
        self.claim, self.claimed_at = name, self.now
        may_yield = [
            n
            for n, p in self.placed.items()
            if p.leases and n not in self.pinned and self.now - p.served_since >= quantum
        ]
        assert set(victims) <= set(may_yield)
        idle = [n for n in self.placed if self.may_go(n, starving=True)]
        if not self.room_without(idle + may_yield, self.sizes[name]):
            assert not victims
            return
        assert self.room_without(idle + victims, self.sizes[name])
        longest = sorted(may_yield, key=lambda n: self.placed[n].served_since)
        if victims:
            newest = max(self.placed[n].served_since for n in victims)
            before = [n for n in longest if self.placed[n].served_since < newest]
            assert not self.room_without(idle + before, self.sizes[name])

    # -- the oracle ----------------------------------------------------------------------------

    def line(self) -> list[str]:
        return sorted(self.placed, key=lambda n: self.placed[n].start)

    def may_go(self, name: str, starving: bool) -> bool:
        p = self.placed[name]
        waited_for = p.last_use >= self.now and not starving
        return not (p.loading or p.leases or name in self.pinned or waited_for)

    def stretches(self) -> list[tuple[int, int]]:
        """What lies between loads."""
        walls = [(p.start, p.stop) for p in map(self.placed.get, self.line()) if p and p.loading]
        return [(a[1], b[0]) for a, b in pairwise([(0, 0), *walls, (CAPACITY, CAPACITY)])]

    def inside(self, stretch: tuple[int, int]) -> list[str]:
        lo, hi = stretch
        return [n for n in self.line() if lo <= self.placed[n].start and self.placed[n].stop <= hi]

    def free(self, stretch: tuple[int, int], gone: Iterable[str]) -> int:
        stay = [n for n in self.inside(stretch) if n not in gone]
        return stretch[1] - stretch[0] - sum(self.placed[n].size for n in stay)

    def room_without(self, gone: list[str], size: int) -> bool:
        enough = any(self.free(stretch, gone) >= size for stretch in self.stretches())
        return enough and len(self.placed) - len(gone) < NUM_SLOTS

    def gaps(self) -> list[tuple[int, int]]:
        edges = [(self.placed[n].start, self.placed[n].stop) for n in self.line()]
        return [(a[1], b[0]) for a, b in pairwise([(0, 0), *edges, (CAPACITY, CAPACITY)])]

    def fewest_moved(self, size: int) -> int:
        """Over all neighbours whose gaps together are enough."""
        found: list[int] = []
        for lo, hi in self.stretches():
            names = self.inside((lo, hi))
            edges = [lo, *(self.placed[n].stop for n in names)]
            starts = [*(self.placed[n].start for n in names), hi]
            for i in range(len(edges)):
                for j in range(i, len(starts)):
                    moved = sum(self.placed[n].size for n in names[i:j])
                    if starts[j] - edges[i] - moved >= size:
                        found.append(moved)
        return min(found)

    @invariant()
    def same(self) -> None:
        self.slots.check()
        for name, p in self.placed.items():
            whole = [(name, i) for i in range(p.size)]
            assert self.memory[p.start : p.stop] == whole, "an image was damaged"
            assert self.slots.is_resident(name) == (not p.loading)
            assert self.slots.is_loading(name) == p.loading
            assert self.slots.num_leases(name) == p.leases
        resident = tuple(n for n in self.line() if not self.placed[n].loading)
        assert self.slots.resident == resident
        assert set(self.slots.pinned) == self.pinned
        assert self.slots.wanted == tuple(sorted(self.wanted))
        assert self.slots.used_elements == sum(p.size for p in self.placed.values())


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


# -- nobody starves ----------------------------------------------------------------------------

QUANTUM = 10
LOAD_STEPS = 4
DRAIN_STEPS = 2


class Crowd:
    """Small adapters in use all the time, and the steps of a scheduler that serves them.

    In each step some requests come, and each asks for its adapter's load if need be. Those of
    adapters that yield wait.
    """

    def __init__(self, seed: int, capacity: int) -> None:
        self.random = random.Random(seed)
        self.slots = AdapterSlots(capacity, 100)
        self.names = [f"small{i}" for i in range(12)]
        for name in self.names:
            self.slots.add(name, self.random.randint(5, 20))
        self.now = 0
        self.loading: dict[str, int] = {}
        """Steps until a load ends."""
        self.ends: dict[str, list[int]] = {}
        """When the leases of an adapter end."""
        self.yielding: set[str] = set()

    def step(self) -> None:
        self.now += 1
        for name in [n for n, end in self.loading.items() if end <= self.now]:
            del self.loading[name]
            assert self.slots.loaded(name)
        for name, ends in self.ends.items():
            for _ in [end for end in ends if end <= self.now]:
                self.slots.release(name, self.now)
            self.ends[name] = [end for end in ends if end > self.now]
        for name in self.random.sample(self.names, len(self.names)):
            if name not in self.yielding:
                self.ask(name)
        self.slots.check()

    def ask(self, name: str) -> None:
        if self.slots.is_resident(name):
            self.slots.acquire(name, self.now)
            length = self.random.choice([1, 2, 3, 30])
            self.ends.setdefault(name, []).append(self.now + length)
        elif name not in self.loading:
            self.load(name)

    def load(self, name: str) -> bool:
        started = self.slots.start_load(name, self.now) is not None
        if started:
            self.loading[name] = self.now + self.random.randint(1, LOAD_STEPS)
        return started

    def give_way(self, starving: str) -> None:
        """The starving one is looked after first, as the scheduler does."""
        if any(self.slots.num_leases(name) for name in self.yielding):
            return
        for name in self.slots.choose_victims(starving, self.now, QUANTUM):
            self.yielding.add(name)
            ends = self.ends[name]
            self.ends[name] = [min(end, self.now + DRAIN_STEPS) for end in ends]


@pytest.mark.parametrize("seed", range(60))
def test_a_large_adapter_gets_its_place_among_many_small_ones(seed: int) -> None:
    """Whatever the others do: within the time that each is served, its load and its last steps,
    twice, as one that was idle may have been leased again while others made room."""
    crowd = Crowd(seed, capacity=64)
    for _ in range(40):
        crowd.step()
    crowd.slots.add("large", 64 if seed % 2 else 50)
    since = crowd.now
    while True:
        crowd.give_way("large")
        crowd.step()
        if crowd.load("large"):
            break
        assert crowd.now - since <= 2 * (QUANTUM + LOAD_STEPS + DRAIN_STEPS + 2), "it starves"
    loads = crowd.slots.num_loads
    for _ in range(60):  # the others go on
        crowd.yielding.clear()
        crowd.step()
    assert crowd.slots.num_loads > loads + 1


def test_a_claim_ends_with_whom_it_serves() -> None:
    """If the starving one is not asked for any more, or is removed, others load again."""
    slots = AdapterSlots(10, 4)
    for name, size in (("a", 6), ("large", 10), ("b", 4), ("c", 4)):
        slots.add(name, size)
    assert slots.start_load("a", 1) and slots.loaded("a")
    slots.acquire("a", 1)
    assert slots.choose_victims("large", 2, 5) == []
    assert slots.start_load("b", 2) is None
    assert slots.start_load("b", 3) is None and slots.start_load("large", 3) is None
    assert slots.start_load("b", 4) is None, "it asked in the last step"
    load = slots.start_load("b", 5)
    assert load is not None and slots.loaded("b")
    assert slots.choose_victims("large", 6, 5) == ["a"]
    slots.remove("large")
    assert slots.start_load("c", 6) is not None
    slots.check()


# -- bytes -------------------------------------------------------------------------------------

NUM_LAYERS = 32
TABLE = build_table(
    [
        row
        for i in range(NUM_LAYERS)
        for row in (
            ("linear", 4096, [(f"{i}.q", 4096), (f"{i}.k", 1024), (f"{i}.v", 1024)]),
            ("linear", 4096, [(f"{i}.o", 4096)]),
            ("linear", 4096, [(f"{i}.gate", 14336), (f"{i}.up", 14336)]),
            ("linear", 14336, [(f"{i}.down", 4096)]),
        )
    ]  # type: ignore[arg-type]
)


def sizes_of_adapters(seed: int, count: int) -> list[int]:
    """Elements on the device of adapters of mixed ranks and targets of an 8B model."""
    rng = random.Random(seed)
    sizes: list[int] = []
    for _ in range(count):
        rank = rng.choice([8, 16, 32, 64, 128])
        suffixes = rng.sample(["q", "k", "v", "o", "gate", "up", "down"], rng.randint(1, 7))
        chosen = [t.name.partition(".")[2] in suffixes for t in TABLE.targets]
        ranks = tuple(rank if each else 0 for each in chosen)
        own = sum(
            rank * ((t.in_features if first else 0) + t.out_features)
            for t, each in zip(TABLE.targets, chosen, strict=True)
            if each
            for first in (True,)
        )
        size = layout_of(TABLE, ranks).num_elements
        assert size <= 1.10 * own
        sizes.append(size)
    return sizes


@pytest.mark.parametrize("seed", range(3))
def test_as_many_are_resident_as_the_bytes_say(seed: int) -> None:
    """Mixed ranks and targets: none is evicted while the free bytes suffice, in whatever pieces
    they lie, and no more than must be; so what is unused is less than the next one takes."""
    sizes = sizes_of_adapters(seed, 120)
    capacity = sum(sizes) // 4
    slots = AdapterSlots(capacity, 1000)
    for i, size in enumerate(sizes):
        slots.add(str(i), size)
    rng = random.Random(seed)
    for now in range(1, 600):
        name = str(rng.randrange(len(sizes)))
        if slots.is_resident(name):
            continue
        free = capacity - slots.used_elements
        load = slots.start_load(name, now)
        assert load is not None and slots.loaded(name)
        assert bool(load.evicted) == (free < sizes[int(name)])
        left = [sizes[int(gone)] for gone in load.evicted]
        assert not left or free + sum(left) - min(left) < sizes[int(name)]
    assert slots.num_moved > 0
    slots.check()


# -- who goes ----------------------------------------------------------------------------------


def use(slots: AdapterSlots, name: str, now: float) -> bool:
    """One request; whether its adapter was resident."""
    hit = slots.is_resident(name)
    if not hit:
        assert slots.start_load(name, now) is not None
        assert slots.loaded(name, 0.01)
    slots.acquire(name, now)
    slots.release(name, now)
    return hit


def popular(rng: random.Random, count: int, population: int) -> list[int]:
    weights = list(accumulate(1 / (k + 1) for k in range(population)))
    return [bisect(weights, rng.random() * weights[-1]) for _ in range(count)]


def hits(policy: Policy, trace: Iterable[int]) -> tuple[int, AdapterSlots]:
    slots = AdapterSlots(30, 1000, policy)
    count = 0
    for now, adapter in enumerate(trace, 1):
        slots.add(f"d{adapter}", 1)
        count += use(slots, f"d{adapter}", now)
    return count, slots


def test_a_scan_does_not_flush_the_hot_set() -> None:
    """Requests by Zipf's law, then a scan of adapters that are used once."""
    trace = [*popular(random.Random(0), 3000, 300), *range(1000, 1100)]
    hot = {f"d{k}" for k in range(10)}
    assert hot <= set(hits(cost, trace)[1].resident)
    assert not hot & set(hits(lru, trace)[1].resident)


def test_the_default_serves_popular_adapters_more_often_than_lru() -> None:
    trace = popular(random.Random(1), 4000, 300)
    assert hits(cost, trace)[0] > 1.08 * hits(lru, trace)[0]


def test_what_was_popular_once_makes_way() -> None:
    """The favourites change: after a while the new ones are as good as resident."""
    rng = random.Random(2)
    trace = popular(rng, 9000, 300) + [299 - k for k in popular(rng, 2500, 300)]
    _, slots = hits(cost, trace)
    assert {f"d{299 - k}" for k in range(8)} <= set(slots.resident)


@pytest.mark.parametrize(
    ("dear", "cheap"),
    [
        ({"uses": 9}, {"uses": 2}),
        ({"reload_s": 0.4}, {"reload_s": 0.1}),
        ({"size": 10}, {"size": 40}),
        ({"floor": 1.0}, {"floor": 0.0}),
        ({"demand": 1, "uses": 1}, {"uses": 1000}),
        ({"demand": 4}, {"demand": 1}),
    ],
)
def test_what_counts(dear: dict[str, float], cheap: dict[str, float]) -> None:
    facts = Candidate(size=20, came=1, used=2, uses=3, reload_s=0.2)
    assert cost(facts._replace(**cheap)) < cost(facts._replace(**dear))  # type: ignore[arg-type]


def test_times_decide_for_lru_and_fifo() -> None:
    key: Policy
    for key, first in ((lru, "b"), (fifo, "a")):
        times = {"a": (1, 9), "b": (2, 3), "c": (4, 4)}
        assert min(times, key=lambda digest: key(Candidate(1, *times[digest]))) == first


@pytest.mark.parametrize("name", ["lru", "fifo"])
@given(uses=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_the_policy_says_who_goes_first(name: str, uses: list[int]) -> None:
    slots = AdapterSlots(8 * 4, 4, POLICIES[name])
    came: dict[str, int] = {}
    used: dict[str, int] = {}
    for now, each in enumerate(uses):
        digest = f"d{each}"
        slots.add(digest, 8)
        used[digest] = now
        if digest in came:
            assert use(slots, digest, now)
            continue
        load = slots.start_load(digest, now)
        assert load is not None and slots.loaded(digest)
        if len(came) == 4:
            first = min(came, key=(came if name == "fifo" else used).__getitem__)
            assert load.evicted == (first,)
            del came[first]
        came[digest] = now
        slots.check()
        assert set(slots.resident) == set(came)


def test_requests_that_wait_keep_their_adapter() -> None:
    slots = AdapterSlots(20, 4)
    for now, name in enumerate("abc", 1):
        slots.add(name, 10)
        if name != "c":
            use(slots, name, now)
    load = slots.start_load("c", 9, {"a": 1, "c": 5})
    assert load is not None and load.evicted == ("b",)


def test_a_slow_load_is_worth_more() -> None:
    """What is reported last counts half."""
    slots = AdapterSlots(20, 4)
    for name in "abc":
        slots.add(name, 10)
    for now, (name, seconds) in enumerate([("a", 3.0), ("b", 2.0)], 1):
        assert slots.start_load(name, now) and slots.loaded(name, seconds)
        slots.acquire(name, now)
        slots.release(name, now)
    load = slots.start_load("c", 9)
    assert load is not None and load.evicted == ("b",)


# -- examples ----------------------------------------------------------------------------------


def filled(capacity: int, sizes: dict[str, int], **pins: bool) -> AdapterSlots:
    """All of them resident, one after the other."""
    slots = AdapterSlots(capacity, 8, lru)
    for now, (name, size) in enumerate(sizes.items()):
        slots.add(name, size, pins.get(name, False))
        assert slots.start_load(name, now) and slots.loaded(name)
    return slots


def test_running_and_pinned_adapters_are_moved_and_stay() -> None:
    slots = filled(12, {"a": 3, "pinned": 2, "b": 3, "leased": 2, "c": 2}, pinned=True)
    slot = slots.acquire("leased", 9)
    for name in "abc":
        slots.remove(name)
    slots.add("large", 8)
    load = slots.start_load("large", 10)
    assert load is not None and load.evicted == () and load.start == 4
    assert [m[1:] for m in load.moves] == [(3, 0, 2), (8, 2, 2)]
    assert load.moves[1].slot == slot == slots.acquire("leased", 10)
    assert slots.num_moved == 4
    slots.check()


def test_what_is_being_loaded_stays_where_it_is() -> None:
    slots = filled(10, {"a": 3, "b": 3, "c": 3})
    slots.remove("b")
    slots.add("loading", 2)
    load = slots.start_load("loading", 5)
    assert load is not None and load.start == 3
    slots.remove("a")
    slots.acquire("c", 5)
    slots.add("large", 5)
    assert slots.start_load("large", 6) is None, "free elements lie on both sides of a load"
    assert slots.loaded("loading")
    load = slots.start_load("large", 6)
    assert load is not None and [m[1:] for m in load.moves] == [(3, 0, 2), (6, 2, 3)]
    slots.check()


def test_what_never_fits() -> None:
    slots = AdapterSlots(10, 4, element_bytes=2)
    with pytest.raises(AdapterInvalid, match="22 bytes of adapter memory, which has 20") as invalid:
        slots.add("a", 11)
    assert invalid.value.param == "adapter_memory" and not slots.knows("a")
    slots.add("p", 4, pinned=True)
    with pytest.raises(AdapterConflict, match="pinned adapters leave 12 bytes") as conflict:
        slots.add("a", 7)
    assert conflict.value.param == "pinned" and not slots.knows("a")
    with pytest.raises(AdapterConflict, match="must leave 8 bytes"):
        slots.add("q", 4, pinned=True)
    slots.add("q", 3, pinned=False)
    slots.check()


def test_pins_move_together_for_the_largest() -> None:
    """Wherever they were loaded, what they leave is usable in one piece."""
    slots = filled(20, {"p": 3, "a": 8, "q": 3, "b": 6}, p=True)
    slots.add("q", 3, pinned=True)
    slots.add("large", 14)
    load = slots.start_load("large", 9)
    assert load is not None and set(load.evicted) == {"a", "b"}
    assert slots.loaded("large") and set(slots.resident) == {"p", "q", "large"}
    slots.check()


def test_a_pinned_adapter_keeps_its_slot_when_slots_run_out() -> None:
    slots = AdapterSlots(100, 3, lru)
    for now, name in enumerate(["pinned", "a", "b", "c"]):
        slots.add(name, 10, pinned=name == "pinned")
        load = slots.start_load(name, now)
        assert load is not None and slots.loaded(name)
    assert load.evicted == ("a",)
    with pytest.raises(AdapterConflict):
        for name in "bc":
            slots.add(name, 10, pinned=True)
    slots.check()


def test_what_is_waited_for_is_not_evicted_in_that_step() -> None:
    """But for one that starves."""
    slots = filled(10, {"a": 10})
    slots.add("b", 10)
    slots.touch("a", 2)
    assert slots.start_load("b", 2) is None
    assert slots.choose_victims("b", 2, 5) == []
    load = slots.start_load("b", 2)
    assert load is not None and load.evicted == ("a",)
    slots.check()


def test_what_makes_way_gives_its_slot_too() -> None:
    """All slots are taken; who leaves room in the arena leaves a slot, and nobody else goes."""
    slots = AdapterSlots(10, 2)
    for now, (name, size) in enumerate([("small", 2), ("large", 8), ("next", 8)]):
        slots.add(name, size)
        load = slots.start_load(name, now)
        assert load is not None and slots.loaded(name)
    assert slots.resident == ("small", "next") and slots.num_evictions == 1
    slots.check()
