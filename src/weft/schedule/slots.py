"""Which adapters are on the device, and where: pure bookkeeping, no tensors, no clock.

The device arena is a line of elements. Adapters take extents of exactly their size:

    |  a (leased)  |   b   |......free......|  c (loading)  |  d (leased) |..free..|

An adapter is known (added), then absent, loading or resident. A lease keeps it resident while a
request uses it. When one is to be loaded and the free elements don't suffice, the policy says who
of those without leases goes, wherever they lie. When there is room, but in no single gap, the
fewest elements are moved that make one. Leased adapters may be moved, as moves are ordered with
steps; those that are loading may not, as loads are not: they are barriers, and what lies between
two of them is a *stretch*. So a load may find no room while others are under way; it finds it
later.

A pinned adapter is never evicted. Pinned ones leave room for the largest adapter known: what would
break that is refused, as requests of such an adapter would wait for ever.

An adapter that starves has a *claim* on the room: until its load has started, no other load
starts. It ends by itself when the adapter is not asked for any more.

Time is a number that never decreases, and the same within one plan of the scheduler.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from weft.core.errors import AdapterConflict, AdapterInvalid, WeftError
from weft.schedule.policy import Facts, Policy, Worth, cost

NO_DEMAND: Mapping[str, int] = MappingProxyType({})


class Move(NamedTuple):
    """Order to copy `size` elements of the arena, those of an image, to another place there.

    The two places may overlap.
    """

    slot: int
    source: int
    dest: int
    size: int


class Moved(Protocol):
    """Moves that were ordered, and all those before them."""

    def wait(self) -> None:
        """Until they are done; any thread. What they have freed may then be written."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Order to copy an adapter's image to the arena."""

    digest: str
    slot: int
    start: int
    """First element of its extent."""
    evicted_slots: tuple[int, ...]
    evicted: tuple[str, ...]
    """The digests that were in those slots."""
    moves: tuple[Move, ...]
    """To be carried out before, in this order."""
    size: int
    """Elements of its extent."""


@dataclass(slots=True)
class _Known:
    """An adapter that was added."""

    size: int
    uses: int = 0
    reload_s: float = 0.0
    refusal: WeftError | None = None


@dataclass(slots=True, eq=False)
class _Extent:
    digest: str
    slot: int
    start: int
    size: int
    came: float
    last_use: float
    floor: float
    loading: bool = True
    leases: int = 0
    served_since: float = math.inf
    """Its first lease since it came."""

    @property
    def stop(self) -> int:
        return self.start + self.size


class _Stretch(NamedTuple):
    """What lies between two barriers, [start, stop): extents that may move, and free elements."""

    start: int
    stop: int
    extents: list[_Extent]

    @property
    def free(self) -> int:
        return self.stop - self.start - sum(e.size for e in self.extents)

    def gaps(self) -> list[int]:
        """Free elements before each extent, and behind the last."""
        edges = [self.start, *(e.stop for e in self.extents)]
        starts = [*(e.start for e in self.extents), self.stop]
        return [start - edge for edge, start in zip(edges, starts, strict=True)]


class _Window(NamedTuple):
    """Consecutive gaps of a stretch that hold an adapter, once what is between them has moved.
    The least is the best: fewest elements moved, then least room left over."""

    moved: int
    free: int
    start: int
    extents: list[_Extent]


class AdapterSlots:
    """Owner of the slot table and of residency on the device.

    capacity: elements of the arena. num_slots: bound on resident adapters. policy: which of the
    adapters without leases go first.
    """

    def __init__(self, capacity: int, num_slots: int, policy: Policy = cost) -> None:
        self.capacity = capacity
        self._num_slots = num_slots
        self._policy = policy
        self.num_evictions = 0
        self.num_loads = 0
        self.num_moved = 0
        """Elements moved so far."""
        self._known: dict[str, _Known] = {}
        self._pinned: dict[str, int] = {}
        """Their sizes."""
        self._wanted: set[str] = set()
        self._extents: dict[str, _Extent] = {}
        """A digest that is not known any more is here until its load ends."""
        self._line: list[_Extent] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._floor = 0.0
        """Of `Facts`."""
        self._claim: str | None = None
        self._claimed_at = 0.0
        """When it was asked for last."""
        self._times = (0.0, 0.0)
        """The two last times at which loads were asked for."""
        self._refused = (-1.0, 0)
        """When a load found no room, and its size: the same time and state have none for more."""

    # -- what is known -------------------------------------------------------------------------

    def add(self, digest: str, size: int, pinned: bool = False) -> None:
        """Make an adapter of `size` elements known, or pin or unpin it; a failure changes nothing.

        Raises AdapterInvalid if it can never fit, AdapterConflict if it is to be pinned and too
        little would be left for the largest adapter known, or if the pinned ones leave too little
        for it.
        """
        if size > self.capacity:
            raise AdapterInvalid(
                f"the adapter takes {size} elements of adapter memory, which has {self.capacity}; "
                "raise --adapter-memory",
                "adapter_memory",
            )
        self._set_pin(digest, size, pinned)
        self._known.setdefault(digest, _Known(size)).refusal = None

    def pin(self, digest: str, pinned: bool) -> None:
        """Pin an adapter that is known, or unpin it. Raises AdapterConflict as `add` does."""
        self._set_pin(digest, self._known[digest].size, pinned)

    def _set_pin(self, digest: str, size: int, pinned: bool) -> None:
        others = {other: n for other, n in self._pinned.items() if other != digest}
        left = self.capacity - sum(others.values())
        if pinned and digest not in self._pinned:
            self._check_pin(size, left, len(others))
        elif not pinned and size > left:
            raise AdapterConflict(
                f"the adapter takes {size} elements of adapter memory, and pinned adapters leave "
                f"{left}; unload some of them, or raise --adapter-memory",
                "pinned",
            )
        self._pinned = others | {digest: size} if pinned else others
        if pinned and digest not in self._extents:
            self._wanted.add(digest)
        else:
            self._wanted.discard(digest)
        self._changed()

    def _check_pin(self, size: int, left: int, num_pinned: int) -> None:
        """The largest adapter known must fit beside all pinned ones: it stands for those to
        come."""
        largest = max([size, *(known.size for known in self._known.values())])
        if left - size < largest or num_pinned + 1 >= self._num_slots:
            raise AdapterConflict(
                f"the adapter can't be pinned: pinned adapters must leave {largest} elements of "
                "adapter memory, as many as the largest adapter takes; unload pinned adapters, or "
                "raise --adapter-memory",
                "pinned",
            )

    def knows(self, digest: str) -> bool:
        return digest in self._known

    def refuse(self, digest: str, reason: WeftError) -> None:
        """From now on requests of this adapter, if it is known, are not served; `add` lifts it."""
        if digest in self._known:
            self._known[digest].refusal = reason

    def refusal(self, digest: str) -> WeftError | None:
        known = self._known.get(digest)
        return known.refusal if known else None

    def remove(self, digest: str) -> int | None:
        """Forget an adapter without leases; the slot it leaves, if it was resident.

        One that is loading leaves when its load ends.
        """
        self._known.pop(digest, None)
        self._pinned.pop(digest, None)
        self._wanted.discard(digest)
        extent = self._extents.get(digest)
        if extent is None or extent.loading:
            return None
        assert extent.leases == 0, "removed while leased"
        self._forget(extent)
        return extent.slot

    # -- leases --------------------------------------------------------------------------------

    def is_resident(self, digest: str) -> bool:
        extent = self._extents.get(digest)
        return extent is not None and not extent.loading

    def is_loading(self, digest: str) -> bool:
        extent = self._extents.get(digest)
        return extent is not None and extent.loading

    def acquire(self, digest: str, now: float) -> int:
        """Lease a resident adapter; its slot."""
        extent = self._extents[digest]
        assert not extent.loading, "leased before it was there"
        extent.served_since = min(extent.served_since, now)
        extent.leases += 1
        extent.last_use = now
        extent.floor = self._floor
        self._known[digest].uses += 1
        return extent.slot

    def release(self, digest: str, now: float) -> None:
        extent = self._extents[digest]
        assert extent.leases > 0, "released without a lease"
        extent.leases -= 1
        extent.last_use = now
        self._changed()

    def touch(self, digest: str, now: float) -> None:
        """Somebody waits for it: it is not evicted at this time, but for one that starves."""
        extent = self._extents.get(digest)
        if extent is not None:
            extent.last_use = now

    def num_leases(self, digest: str) -> int:
        extent = self._extents.get(digest)
        return extent.leases if extent else 0

    # -- loads ---------------------------------------------------------------------------------

    def start_load(
        self, digest: str, now: float, demand: Mapping[str, int] = NO_DEMAND
    ) -> Load | None:
        """Make room for an absent adapter and reserve it; None when there is none just now.

        demand: requests in the engine, by digest.
        """
        size = self._known[digest].size
        if self._is_claimed(digest, now) or (now == self._refused[0] and size >= self._refused[1]):
            return None
        order = self._idle(now, demand, evenly=digest == self._claim)
        evicted = self._choose(size, [extent for _, extent in order])
        if evicted is None:
            self._refused = (now, size)
            return None
        worth = {extent.digest: worth for worth, extent in order}
        for extent in evicted:
            self._forget(extent)
            self.num_evictions += 1
            self._floor = max(self._floor, worth[extent.digest].value)
        start, moves = self._open(size)
        extent = _Extent(digest, self._free_slots.pop(), start, size, now, now, self._floor)
        self._extents[digest] = extent
        insort(self._line, extent, key=lambda e: e.start)
        self._wanted.discard(digest)
        if digest == self._claim:
            self._claim = None
        slots, digests = tuple(e.slot for e in evicted), tuple(e.digest for e in evicted)
        return Load(digest, extent.slot, start, slots, digests, moves, size)

    def loaded(self, digest: str, load_s: float = 0.0) -> bool:
        """The image is in its extent, `load_s` seconds after it was ordered. False if the adapter
        was removed meanwhile."""
        extent = self._extents[digest]
        extent.loading = False
        self.num_loads += 1
        known = self._known.get(digest)
        if known is None:
            self._forget(extent)
            return False
        # One load may have met a cold disk or a busy link: half of what was known stays.
        known.reload_s = (known.reload_s + load_s) / 2 if known.reload_s else load_s
        self._changed()
        return True

    def load_failed(self, digest: str) -> None:
        self._forget(self._extents[digest])

    def choose_victims(self, digest: str, now: float, quantum: float) -> list[str]:
        """Leased adapters whose leases would have to end so that `digest`, which starves, fits.

        Only those that are served for a time of `quantum` or longer may be chosen; the longest go
        first. Empty when no choice of them makes room yet, when none is needed, and while
        another one that starves has its claim.
        """
        if digest in self._extents or self._is_claimed(digest, now):
            return []
        self._claim, self._claimed_at = digest, now
        self._changed()
        idle = [e for e in self._line if self._may_go(e)]
        leased = [e for e in self._line if e.leases and e.digest not in self._pinned]
        served = [e for e in leased if now - e.served_since >= quantum]
        served.sort(key=lambda e: e.served_since)
        chosen = self._choose(self._known[digest].size, idle + served)
        return [e.digest for e in chosen or () if e.leases]

    # -- views ---------------------------------------------------------------------------------

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(e.digest for e in self._line if not e.loading)

    @property
    def pinned(self) -> tuple[str, ...]:
        return tuple(self._pinned)

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(digest for digest, known in self._known.items() if known.refusal)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Pinned adapters to be loaded although nobody asks for them: none was tried yet."""
        return tuple(sorted(self._wanted))

    @property
    def used_elements(self) -> int:
        return sum(e.size for e in self._line)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert {id(e) for e in self._line} == {id(e) for e in self._extents.values()}
        stop = 0
        for e in self._line:
            assert e.start >= stop, "extents overlap"
            assert e.leases >= 0
            assert not (e.loading and e.leases), "leased while loading"
            assert e.loading or e.digest in self._known, "what was removed stayed"
            assert e.digest not in self._known or e.size == self._known[e.digest].size
            stop = e.stop
        assert stop <= self.capacity
        slots = [e.slot for e in self._line]
        assert sorted([*slots, *self._free_slots]) == list(range(self._num_slots))
        assert self._pinned.keys() <= self._known.keys()
        assert self._wanted <= self._pinned.keys() - self._extents.keys()
        loose = [known.size for d, known in self._known.items() if d not in self._pinned]
        room = self.capacity - sum(self._pinned.values())
        assert max(loose, default=0) <= room, "one can never be loaded"
        assert not self._pinned or len(self._pinned) < self._num_slots

    # -- inside --------------------------------------------------------------------------------

    def _is_claimed(self, digest: str, now: float) -> bool:
        """Whether a load has to stand back behind one that starves, and still asks for room."""
        if now > self._times[1]:
            self._times = (self._times[1], now)
        if self._claim == digest:
            self._claimed_at = now
        elif self._claimed_at < self._times[0] or self._claim not in self._known:
            self._claim = None
        return self._claim not in (None, digest)

    def _may_go(self, extent: _Extent) -> bool:
        return not (extent.loading or extent.leases or extent.digest in self._pinned)

    def _idle(
        self, now: float, demand: Mapping[str, int], evenly: bool
    ) -> list[tuple[Worth, _Extent]]:
        """What may be evicted, the least worth first; `evenly`: touched or not."""
        found: list[tuple[Worth, _Extent]] = []
        for e in self._line:
            if self._may_go(e) and (evenly or e.last_use < now):
                known, wanted = self._known[e.digest], demand.get(e.digest, 0)
                facts = Facts(
                    e.size, e.came, e.last_use, known.uses, known.reload_s, wanted, e.floor
                )
                found.append((self._policy(facts), e))
        return sorted(found, key=lambda each: each[0])

    def _choose(self, size: int, order: Sequence[_Extent]) -> list[_Extent] | None:
        """The first extents of `order` that must go so that `size` elements are free in one
        stretch, and a slot is. None if all of them are not enough."""
        best: tuple[int, list[_Extent]] | None = None
        for stretch in self._stretches():
            free = stretch.free
            gone: list[tuple[int, _Extent]] = []
            for i, extent in enumerate(order):
                if free >= size:
                    break
                if stretch.start <= extent.start < stretch.stop:
                    gone.append((i, extent))
                    free += extent.size
            if free < size:
                continue
            dearest = gone[-1][0] if gone else -1
            for entry in reversed(gone[:-1]):  # a larger one that had to go may suffice
                if free - entry[1].size >= size:
                    gone.remove(entry)
                    free -= entry[1].size
            if best is None or dearest < best[0]:
                best = dearest, [extent for _, extent in gone]
        if best is None or self._free_slots or best[1]:
            return best[1] if best else None
        return list(order[:1]) or None

    def _stretches(self) -> Iterator[_Stretch]:
        start, extents = 0, list[_Extent]()
        for e in self._line:
            if e.loading:
                yield _Stretch(start, e.start, extents)
                start, extents = e.stop, []
            else:
                extents.append(e)
        yield _Stretch(start, self.capacity, extents)

    def _open(self, size: int) -> tuple[int, tuple[Move, ...]]:
        """A gap of at least `size` elements, for which there is room: its start, and the moves
        that make it. What moves goes to the left, so that in order no move overwrites another's
        source."""
        window = min(w for stretch in self._stretches() for w in _windows(stretch, size))
        start = window.start
        moves: list[Move] = []
        for e in window.extents:
            moves.append(Move(e.slot, e.start, start, e.size))
            e.start = start
            start = e.stop
        self.num_moved += window.moved
        return start, tuple(moves)

    def _forget(self, extent: _Extent) -> None:
        del self._extents[extent.digest]
        self._line.remove(extent)
        self._free_slots.append(extent.slot)
        self._changed()

    def _changed(self) -> None:
        """There may be room where there was none."""
        self._refused = (-1.0, 0)


def _windows(stretch: _Stretch, size: int) -> Iterator[_Window]:
    """For each gap in which one can end, the shortest window of `size` free elements."""
    gaps, extents = stretch.gaps(), stretch.extents
    first = moved = free = 0
    for last, gap in enumerate(gaps):
        free += gap
        while free - gaps[first] >= size and first < last:
            free -= gaps[first]
            moved -= extents[first].size
            first += 1
        if free >= size:
            start = extents[first - 1].stop if first else stretch.start
            yield _Window(moved, free, start, extents[first:last])
        if last < len(extents):
            moved += extents[last].size
