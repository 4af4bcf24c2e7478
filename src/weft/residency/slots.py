"""Which adapters are on the device, and where: pure bookkeeping, no tensors, no clock.

The device arena is a line of elements. Adapters take extents of exactly their size:

    |  a (leased)  |   b   |......free......|  c (loading)  |  d (leased) |..free..|

An adapter is known (added), then absent, loading or resident. A lease keeps it resident while a
request uses it. To make room, the cheapest window of free space and evictable neighbours is
found by sliding over the line; what is in it goes. Time is the caller's step number.

A pinned adapter has a *home* from the moment it is added: a place where nothing else is put, and
from which it is not evicted. Homes lie close together, from the end of the line on, so that the
gaps between them stay long. The longest gap holds every adapter that is not pinned: what would
break that is refused, as such an adapter's requests would wait for ever.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.core.errors import AdapterConflict, AdapterInvalid
from weft.residency.policy import Policy, lru


@dataclass(frozen=True, slots=True)
class Load:
    """Order to copy an adapter's image to the arena."""

    digest: str
    slot: int
    start: int
    """First element of its extent."""
    evicted_slots: tuple[int, ...]
    evicted: tuple[str, ...] = ()
    """The digests that were in those slots."""


@dataclass(slots=True)
class _Extent:
    digest: str
    slot: int
    start: int
    size: int
    loading: bool
    came: int
    last_use: int
    leases: int = 0
    leased_since: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.size


Cost = Callable[[_Extent], float | None]

Span = tuple[int, int]
"""[start, stop) of the arena."""


class AdapterSlots:
    """Owner of the slot table and of residency on the device.

    capacity: elements of the arena. num_slots: bound on resident adapters. policy: which of the
    adapters without leases go first.
    """

    def __init__(self, capacity: int, num_slots: int, policy: Policy = lru) -> None:
        self.capacity = capacity
        self._num_slots = num_slots
        self._policy = policy
        self.num_evictions = 0
        self.num_loads = 0
        self._sizes: dict[str, int] = {}
        self._extents: dict[str, _Extent] = {}
        self._line: list[_Extent] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._dropped: set[str] = set()
        self._homes: dict[str, Span] = {}
        """Of pinned adapters."""
        self._wanted: set[str] = set()

    # -- what is known -------------------------------------------------------------------------

    def add(self, digest: str, size: int, pinned: bool = False) -> None:
        """Make an adapter of `size` elements known, or pin or unpin it; a failure changes nothing.

        Raises AdapterInvalid if it can never fit, AdapterConflict if it is to be pinned and no
        gap would be left for the largest adapter known, or if the pinned ones leave none for it.
        """
        if size > self.capacity:
            raise AdapterInvalid(
                f"the adapter takes {size} elements of adapter memory, which has {self.capacity}; "
                "raise --adapter-memory",
                "adapter_memory",
            )
        homes = {other: home for other, home in self._homes.items() if other != digest}
        if pinned:
            homes[digest] = self._homes.get(digest) or self._choose_home(digest, size, homes)
        elif size > self._longest_gap(homes):
            raise AdapterConflict(
                f"the adapter takes {size} elements of adapter memory in one piece, and pinned "
                f"adapters leave {self._longest_gap(homes)}; unload some of them, or raise "
                "--adapter-memory",
                "pinned",
            )
        self._homes = homes
        self._dropped.discard(digest)
        self._sizes[digest] = size
        if pinned and digest not in self._extents:
            self._wanted.add(digest)
        else:
            self._wanted.discard(digest)

    def knows(self, digest: str) -> bool:
        return digest in self._sizes

    def remove(self, digest: str) -> int | None:
        """Forget an adapter without leases; the slot it leaves, if it was resident.

        One that is loading leaves when its load ends.
        """
        self._sizes.pop(digest, None)
        self._homes.pop(digest, None)
        self._wanted.discard(digest)
        extent = self._extents.get(digest)
        if extent is None:
            return None
        assert extent.leases == 0, "removed while leased"
        if extent.loading:
            self._dropped.add(digest)
            return None
        self._forget(extent)
        return extent.slot

    # -- leases --------------------------------------------------------------------------------

    def is_resident(self, digest: str) -> bool:
        extent = self._extents.get(digest)
        return extent is not None and not extent.loading

    def is_loading(self, digest: str) -> bool:
        extent = self._extents.get(digest)
        return extent is not None and extent.loading

    def acquire(self, digest: str, now: int) -> int:
        """Lease a resident adapter; its slot."""
        extent = self._extents[digest]
        assert not extent.loading, "leased before it was there"
        if extent.leases == 0:
            extent.leased_since = now
        extent.leases += 1
        extent.last_use = now
        return extent.slot

    def release(self, digest: str, now: int) -> None:
        extent = self._extents[digest]
        assert extent.leases > 0, "released without a lease"
        extent.leases -= 1
        extent.last_use = now

    def touch(self, digest: str, now: int) -> None:
        """Somebody waits for it: it is not evicted in favour of others in this step."""
        extent = self._extents.get(digest)
        if extent is not None:
            extent.last_use = now

    def num_leases(self, digest: str) -> int:
        extent = self._extents.get(digest)
        return extent.leases if extent else 0

    # -- loads ---------------------------------------------------------------------------------

    def start_load(self, digest: str, now: int) -> Load | None:
        """Make room for an absent adapter and reserve it; None when there is none just now."""
        evicted: list[_Extent] = []
        if not self._free_slots:
            idle = [(c, e) for e in self._line if (c := self._idle_cost(e, now)) is not None]
            if not idle:
                return None
            evicted.append(min(idle, key=lambda each: each[0])[1])
        window = self._window(digest, lambda e: self._idle_cost(e, now))
        if window is None:
            return None
        start, in_window = window
        evicted = in_window or evicted
        for extent in evicted:
            self._forget(extent)
            self.num_evictions += 1
        slot = self._free_slots.pop()
        extent = _Extent(digest, slot, start, self._sizes[digest], True, now, now)
        self._extents[digest] = extent
        self._line.append(extent)
        self._line.sort(key=lambda e: e.start)
        self._wanted.discard(digest)
        slots, digests = tuple(e.slot for e in evicted), tuple(e.digest for e in evicted)
        return Load(digest, slot, start, slots, digests)

    def loaded(self, digest: str) -> bool:
        """The image is in its extent. False if the adapter was removed meanwhile."""
        extent = self._extents[digest]
        extent.loading = False
        self.num_loads += 1
        if digest in self._dropped:
            self._dropped.discard(digest)
            self._forget(extent)
            return False
        return True

    def load_failed(self, digest: str) -> None:
        self._dropped.discard(digest)
        self._forget(self._extents[digest])

    def choose_victims(self, digest: str, now: int, quantum: int) -> list[str]:
        """Leased adapters whose leases would have to end so that `digest` fits.

        Only those that had the device for `quantum` steps may be chosen; the longest there go
        first. Empty when no choice of them makes room yet, or when none is needed.
        """

        def cost(extent: _Extent) -> float | None:
            if extent.loading:
                return None
            if extent.leases == 0:
                return 0.0
            tenure = now - extent.leased_since
            return None if tenure < quantum else 1.0 + 1.0 / (1 + tenure)

        window = self._window(digest, cost)
        return [e.digest for e in window[1] if e.leases] if window else []

    def longest_leased(self, now: int, quantum: int) -> str | None:
        """The adapter that was leased longest ago, at least `quantum` steps."""
        leased = [e for e in self._line if e.leases and now - e.leased_since >= quantum]
        return min(leased, key=lambda e: e.leased_since).digest if leased else None

    # -- views ---------------------------------------------------------------------------------

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(e.digest for e in self._line if not e.loading)

    @property
    def pinned(self) -> tuple[str, ...]:
        return tuple(self._homes)

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
            assert e.digest in self._sizes or e.digest in self._dropped
            stop = e.stop
        assert stop <= self.capacity
        slots = [e.slot for e in self._line]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots)
        assert self._homes.keys() <= self._sizes.keys()
        assert self._wanted <= self._homes.keys() - self._extents.keys()
        free = sum(hi - lo for lo, hi in _gaps(self._homes.values(), self.capacity))
        taken = sum(self._sizes[digest] for digest in self._homes)
        assert free + taken == self.capacity, "homes overlap"
        for digest, home in self._homes.items():
            extent = self._extents.get(digest)
            assert extent is None or (extent.start, extent.stop) == home, "not at home"
        loose = [size for digest, size in self._sizes.items() if digest not in self._homes]
        assert max(loose, default=0) <= self._longest_gap(self._homes), "one can never be loaded"

    # -- inside --------------------------------------------------------------------------------

    def _choose_home(self, digest: str, size: int, homes: dict[str, Span]) -> Span:
        """Where the adapter is, or the end of the smallest gap between `homes` that holds it.

        The largest adapter known must fit beside all homes: it stands for those to come.
        """
        gaps = [gap for gap in _gaps(homes.values(), self.capacity) if gap[1] - gap[0] >= size]
        extent = self._extents.get(digest)
        home: Span | None = None
        if extent is None and gaps:
            _, stop = min(gaps, key=lambda gap: (gap[1] - gap[0], -gap[1]))
            home = (stop - size, stop)
        elif extent and any(lo <= extent.start and extent.stop <= hi for lo, hi in gaps):
            home = (extent.start, extent.stop)
        largest = max([size, *self._sizes.values()])
        fits = home is not None and self._longest_gap(homes | {digest: home}) >= largest
        if home is None or not fits or len(homes) + 1 >= self._num_slots:
            raise AdapterConflict(
                f"the adapter can't be pinned: pinned adapters must leave {largest} elements of "
                "adapter memory in one piece, as many as the largest adapter takes; unload "
                "pinned adapters, or raise --adapter-memory",
                "pinned",
            )
        return home

    def _longest_gap(self, homes: dict[str, Span]) -> int:
        return max((hi - lo for lo, hi in _gaps(homes.values(), self.capacity)), default=0)

    def _idle_cost(self, extent: _Extent, now: int) -> float | None:
        """What the policy says; None for what must stay."""
        if extent.loading or extent.leases or extent.last_use >= now:
            return None
        if extent.digest in self._homes:
            return None
        return float(self._policy(extent.came, extent.last_use) + 1)

    def _window(self, digest: str, cost: Cost) -> tuple[int, list[_Extent]] | None:
        """Cheapest place for an adapter: (start, extents to remove). None if there is none.

        The cost of a place is that of its dearest extent, then the number of extents. A pinned
        adapter's place is its home; all others lie between the homes.
        """
        size, home = self._sizes[digest], self._homes.get(digest)
        spans = _gaps(self._homes.values(), self.capacity) if home is None else [home]
        found = (self._window_in(span, size, cost) for span in spans if span[1] - span[0] >= size)
        best = min((w for w in found if w is not None), key=lambda w: w[:3], default=None)
        return (best[2], best[3]) if best else None

    def _window_in(
        self, span: Span, size: int, cost: Cost
    ) -> tuple[float, int, int, list[_Extent]] | None:
        """Cheapest `size` elements in a row: (dearest cost, number of extents, start, extents)."""
        lo, hi = span
        line = self._line[
            bisect_right(self._line, lo, key=lambda e: e.stop) : bisect_left(
                self._line, hi, key=lambda e: e.start
            )
        ]
        best: tuple[float, int, int, list[_Extent]] | None = None
        edges = [lo, *(e.stop for e in line)]
        costs = [cost(e) for e in line]
        starts = [e.start for e in line] + [hi]
        for first, left in enumerate(edges):
            dearest, last = 0.0, first
            while starts[last] - left < size:
                if last == len(line) or (c := costs[last]) is None:
                    break
                dearest = max(dearest, c)
                last += 1
            else:
                found = (dearest, last - first, left, line[first:last])
                if best is None or found[:3] < best[:3]:
                    best = found
        return best

    def _forget(self, extent: _Extent) -> None:
        del self._extents[extent.digest]
        self._line.remove(extent)
        self._free_slots.append(extent.slot)


def _gaps(homes: Iterable[Span], capacity: int) -> list[Span]:
    """What lies between the homes, in order."""
    gaps: list[Span] = []
    left = 0
    for start, stop in [*sorted(homes), (capacity, capacity)]:
        if start > left:
            gaps.append((left, start))
        left = stop
    return gaps
