"""Which adapters are on the device, and where: pure bookkeeping, no tensors, no clock.

The device arena is a line of elements. Adapters take extents of exactly their size:

    |  a (leased)  |   b   |......free......|  c (loading)  |  d (leased) |..free..|

An adapter is known (added), then absent, loading or resident. A lease keeps it resident while a
request uses it. To make room, the cheapest window of free space and evictable neighbours is
found by sliding over the line; what is in it goes. Time is the caller's step number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.core.errors import AdapterInvalid


@dataclass(frozen=True, slots=True)
class Load:
    """Order to copy an adapter's image to the arena."""

    digest: str
    slot: int
    start: int
    """First element of its extent."""
    evicted_slots: tuple[int, ...]


@dataclass(slots=True)
class _Extent:
    digest: str
    slot: int
    start: int
    size: int
    loading: bool
    leases: int = 0
    leased_since: int = 0
    last_use: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.size


Cost = Callable[[_Extent], float | None]


class AdapterSlots:
    """Owner of the slot table and of residency on the device.

    capacity: elements of the arena. num_slots: bound on resident adapters.
    """

    def __init__(self, capacity: int, num_slots: int) -> None:
        self.capacity = capacity
        self.num_evictions = 0
        self.num_loads = 0
        self._sizes: dict[str, int] = {}
        self._extents: dict[str, _Extent] = {}
        self._line: list[_Extent] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._dropped: set[str] = set()

    # -- what is known -------------------------------------------------------------------------

    def add(self, digest: str, size: int) -> None:
        """Make an adapter of `size` elements known. Raises AdapterInvalid if it can never fit."""
        if size > self.capacity:
            raise AdapterInvalid(
                f"the adapter takes {size} elements of adapter memory, which has {self.capacity}; "
                "raise --adapter-memory",
                "adapter_memory",
            )
        self._dropped.discard(digest)
        self._sizes[digest] = size

    def knows(self, digest: str) -> bool:
        return digest in self._sizes

    def remove(self, digest: str) -> int | None:
        """Forget an adapter without leases; the slot it leaves, if it was resident.

        One that is loading leaves when its load ends.
        """
        self._sizes.pop(digest, None)
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
            idle = [e for e in self._line if self._idle_cost(e, now) is not None]
            if not idle:
                return None
            evicted.append(min(idle, key=lambda e: e.last_use))
        window = self._window(self._sizes[digest], lambda e: self._idle_cost(e, now))
        if window is None:
            return None
        start, in_window = window
        evicted = in_window or evicted
        for extent in evicted:
            self._forget(extent)
            self.num_evictions += 1
        slot = self._free_slots.pop()
        extent = _Extent(digest, slot, start, self._sizes[digest], loading=True, last_use=now)
        self._extents[digest] = extent
        self._line.append(extent)
        self._line.sort(key=lambda e: e.start)
        return Load(digest, slot, start, tuple(e.slot for e in evicted))

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

        window = self._window(self._sizes[digest], cost)
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

    # -- inside --------------------------------------------------------------------------------

    def _idle_cost(self, extent: _Extent, now: int) -> float | None:
        """Least recently used first; None for what must stay."""
        if extent.loading or extent.leases or extent.last_use >= now:
            return None
        return float(extent.last_use + 1)

    def _window(self, size: int, cost: Cost) -> tuple[int, list[_Extent]] | None:
        """Cheapest `size` elements in a row: (start, extents to remove). None if there are none.

        The cost of a window is that of its dearest extent, then the number of extents.
        """
        best: tuple[float, int, int, list[_Extent]] | None = None
        edges = [0, *(e.stop for e in self._line)]
        costs = [cost(e) for e in self._line]
        starts = [e.start for e in self._line] + [self.capacity]
        for first, left in enumerate(edges):
            dearest, last = 0.0, first
            while starts[last] - left < size:
                if last == len(self._line) or (c := costs[last]) is None:
                    break
                dearest = max(dearest, c)
                last += 1
            else:
                found = (dearest, last - first, left, self._line[first:last])
                if best is None or found[:3] < best[:3]:
                    best = found
        return (best[2], best[3]) if best else None

    def _forget(self, extent: _Extent) -> None:
        del self._extents[extent.digest]
        self._line.remove(extent)
        self._free_slots.append(extent.slot)
