"""Tracks which adapters are on the device, and where. Pure bookkeeping, no tensors, no clock.

An adapter that was added is absent, loading or resident. A lease keeps it resident while a request
uses it. If a load finds too few free elements, the policy chooses which of the adapters without
leases are evicted, wherever they lie. If there is room, but in no single gap, as few elements as
possible are moved to make one (`weft.schedule.extents` has a picture). Adapters that are loading
can't be moved, so a load may find no room while others are under way, and is tried again later.

A pinned adapter is never evicted. Pinned adapters leave room for the largest known adapter, whose
requests would otherwise wait for ever.

An adapter that starves has a *claim* on the room: until its load has started, no other load
starts. The claim ends by itself when the adapter is not asked for any more.

Time is a number that never decreases, and the same within one plan of the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from weft.core.errors import AdapterConflict, AdapterInvalid, WeftError
from weft.schedule.extents import ArenaExtent, ArenaLine, Move
from weft.schedule.policy import Candidate, Policy, Worth, cost

NO_DEMAND: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Load:
    """Order to copy an adapter's image to the arena, after `moves` are carried out in order."""

    digest: str
    slot: int
    start: int
    """First element of its extent."""
    evicted_slots: tuple[int, ...]
    evicted: tuple[str, ...]
    """The digests that were in those slots."""
    moves: tuple[Move, ...]
    size: int


@dataclass(slots=True)
class _KnownAdapter:
    size: int
    uses: int = 0
    reload_s: float = 0.0
    refusal: WeftError | None = None


class _Claim:
    """The claim to the next room that one starving adapter may have, as long as it asks for it."""

    def __init__(self) -> None:
        self.digest: str | None = None
        self._asked_at = 0.0
        """When it asked last."""
        self._times = (0.0, 0.0)
        """The last two times at which any adapter asked."""

    def stake(self, digest: str, now: float) -> None:
        self.digest, self._asked_at = digest, now

    def holds_back(self, digest: str, now: float, known: Collection[str]) -> bool:
        """Note that an adapter asks for room, and return whether another one has the claim."""
        if now > self._times[1]:
            self._times = (self._times[1], now)
        if self.digest == digest:
            self._asked_at = now
        elif self._asked_at < self._times[0] or self.digest not in known:
            self.digest = None
        return self.digest not in (None, digest)


class AdapterSlots:
    """Owner of the slot table and of residency on the device.

    capacity: elements of the arena. num_slots: the most adapters that are resident or loading.
    policy: which adapters without leases go first. element_bytes: for messages only.
    """

    def __init__(
        self, capacity: int, num_slots: int, policy: Policy = cost, element_bytes: int = 1
    ) -> None:
        self._line = ArenaLine(capacity)
        self._element_bytes = element_bytes
        self._num_slots = num_slots
        self._policy = policy
        self.num_evictions = 0
        self.num_loads = 0
        self._known: dict[str, _KnownAdapter] = {}
        self._pinned: dict[str, int] = {}
        """The sizes of pinned adapters, by digest."""
        self._wanted: set[str] = set()
        self._extents: dict[str, ArenaExtent] = {}
        """By digest: adapters on the device, and those forgotten while they are still loading."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._floor = 0.0
        """See `Candidate.floor`."""
        self._claim = _Claim()
        self._refused = (-1.0, 0)
        """When a load last found no room, and its size. At that time, no load of that size or more
        is tried again unless something has changed."""

    # -- what is known -------------------------------------------------------------------------

    def add(self, digest: str, size: int, pinned: bool = False) -> None:
        """Make an adapter of `size` elements known, or pin or unpin it; a failure changes nothing.

        Raises AdapterInvalid if it can never fit; AdapterConflict if pinning it would leave too
        little for the largest known adapter, or if pinned adapters leave too little for it.
        """
        if size > self.capacity:
            has = f"{self._shown(size)} of adapter memory, which has {self._shown(self.capacity)}"
            message = f"the adapter takes {has}; raise --adapter-memory"
            raise AdapterInvalid(message, "adapter_memory")
        self._set_pin(digest, size, pinned)
        self._known.setdefault(digest, _KnownAdapter(size)).refusal = None

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
                f"the adapter takes {self._shown(size)} of adapter memory, and pinned adapters "
                f"leave {self._shown(left)}; unload some of them, or raise --adapter-memory",
                "pinned",
            )
        self._pinned = others | {digest: size} if pinned else others
        if pinned and digest not in self._extents:
            self._wanted.add(digest)
        else:
            self._wanted.discard(digest)
        self._changed()

    def _check_pin(self, size: int, left: int, num_pinned: int) -> None:
        """Raise AdapterConflict unless the largest known adapter fits beside all pinned ones."""
        largest = max([size, *(known.size for known in self._known.values())])
        if left - size < largest or num_pinned + 1 >= self._num_slots:
            raise AdapterConflict(
                "the adapter can't be pinned: pinned adapters must leave "
                f"{self._shown(largest)} of adapter memory, as much as the largest adapter takes; "
                "unload pinned adapters, or raise --adapter-memory",
                "pinned",
            )

    def _shown(self, size: int) -> str:
        return f"{size * self._element_bytes} bytes"

    def knows(self, digest: str) -> bool:
        return digest in self._known

    def refuse(self, digest: str, reason: WeftError) -> None:
        """Serve no more requests of this adapter, if it is known, until `add` lifts that."""
        if digest in self._known:
            self._known[digest].refusal = reason

    def refusal(self, digest: str) -> WeftError | None:
        known = self._known.get(digest)
        return known.refusal if known else None

    def remove(self, digest: str) -> int | None:
        """Forget an adapter without leases. Returns its former slot if it was resident. One that is
        loading leaves its slot when the load ends."""
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
        return digest in self._extents and not self._extents[digest].loading

    def is_loading(self, digest: str) -> bool:
        return digest in self._extents and self._extents[digest].loading

    def acquire(self, digest: str, now: float) -> int:
        """Lease a resident adapter, and return its slot."""
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
        """Keep an adapter, for which a request waits, from being evicted at this time; only an
        adapter that starves may still evict it."""
        if digest in self._extents:
            self._extents[digest].last_use = now

    def num_leases(self, digest: str) -> int:
        return self._extents[digest].leases if digest in self._extents else 0

    # -- loads ---------------------------------------------------------------------------------

    def start_load(
        self, digest: str, now: float, demand: Mapping[str, int] = NO_DEMAND
    ) -> Load | None:
        """Reserve room for an absent adapter, and return the order that makes the room and loads
        the adapter; None if there is none now. `demand`: requests in the engine, by digest."""
        size = self._known[digest].size
        if self._claim.holds_back(digest, now, self._known) or (
            now == self._refused[0] and size >= self._refused[1]
        ):
            return None
        order = self._idle(now, demand, evenly=digest == self._claim.digest)
        evicted = self._choose(size, [extent for _, extent in order])
        if evicted is None:
            self._refused = (now, size)
            return None
        worth = {extent.digest: worth for worth, extent in order}
        for extent in evicted:
            self._forget(extent)
            self.num_evictions += 1
            self._floor = max(self._floor, worth[extent.digest].value)
        start, moves = self._line.open(size)
        extent = ArenaExtent(digest, self._free_slots.pop(), start, size, now, now, self._floor)
        self._extents[digest] = extent
        self._line.insert(extent)
        self._wanted.discard(digest)
        if digest == self._claim.digest:
            self._claim.digest = None
        slots, digests = tuple(e.slot for e in evicted), tuple(e.digest for e in evicted)
        return Load(digest, extent.slot, start, slots, digests, moves, size)

    def loaded(self, digest: str, load_s: float = 0.0) -> bool:
        """End a load: the image is in its extent, `load_s` seconds after the order. False if the
        adapter was removed meanwhile."""
        extent = self._extents[digest]
        extent.loading = False
        self.num_loads += 1
        known = self._known.get(digest)
        if known is None:
            self._forget(extent)
            return False
        # A single load may have met a cold disk or a busy link, so it counts only half.
        known.reload_s = (known.reload_s + load_s) / 2 if known.reload_s else load_s
        self._changed()
        return True

    def load_failed(self, digest: str) -> None:
        self._forget(self._extents[digest])

    def choose_victims(self, digest: str, now: float, quantum: float) -> list[str]:
        """Leased adapters whose leases would have to end so that `digest`, which starves, fits.

        Only those that were served for `quantum` or longer may be chosen; those served longest go
        first. Empty if no choice of them makes room yet, if none is needed, and while another
        starving adapter has the claim.
        """
        if digest in self._extents or self._claim.holds_back(digest, now, self._known):
            return []
        self._claim.stake(digest, now)
        self._changed()
        idle = [e for e in self._line if self._may_go(e)]
        leased = [e for e in self._line if e.leases and e.digest not in self._pinned]
        served = [e for e in leased if now - e.served_since >= quantum]
        served.sort(key=lambda e: e.served_since)
        chosen = self._choose(self._known[digest].size, idle + served)
        return [e.digest for e in chosen or () if e.leases]

    # -- views ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._line.capacity

    @property
    def num_moved(self) -> int:
        return self._line.num_moved

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
        """Pinned adapters whose load was not started yet; they are loaded even without requests."""
        return tuple(sorted(self._wanted))

    @property
    def used_elements(self) -> int:
        return self._line.used

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert {id(e) for e in self._line} == {id(e) for e in self._extents.values()}
        self._line.check()
        for e in self._line:
            assert e.leases >= 0
            assert not (e.loading and e.leases), "leased while loading"
            assert e.loading or e.digest in self._known, "what was removed stayed"
            assert e.digest not in self._known or e.size == self._known[e.digest].size
        slots = [e.slot for e in self._line]
        assert sorted([*slots, *self._free_slots]) == list(range(self._num_slots))
        assert self._pinned.keys() <= self._known.keys()
        assert self._wanted <= self._pinned.keys() - self._extents.keys()
        loose = [known.size for d, known in self._known.items() if d not in self._pinned]
        room = self.capacity - sum(self._pinned.values())
        assert max(loose, default=0) <= room, "one can never be loaded"
        assert not self._pinned or len(self._pinned) < self._num_slots

    def _may_go(self, extent: ArenaExtent) -> bool:
        return not (extent.loading or extent.leases or extent.digest in self._pinned)

    def _idle(
        self, now: float, demand: Mapping[str, int], evenly: bool
    ) -> list[tuple[Worth, ArenaExtent]]:
        """What may be evicted, the lowest worth first. `evenly`: even if touched at this time."""
        found: list[tuple[Worth, ArenaExtent]] = []
        for e in self._line:
            if self._may_go(e) and (evenly or e.last_use < now):
                known, wanted = self._known[e.digest], demand.get(e.digest, 0)
                facts = Candidate(
                    e.size, e.came, e.last_use, known.uses, known.reload_s, wanted, e.floor
                )
                found.append((self._policy(facts), e))
        return sorted(found, key=lambda each: each[0])

    def _choose(self, size: int, order: Sequence[ArenaExtent]) -> list[ArenaExtent] | None:
        """The first extents of `order` that must go so that there is room, and a free slot; None
        if all of them are not enough."""
        chosen = self._line.choose(size, order)
        if chosen is None or chosen or self._free_slots:
            return chosen
        return list(order[:1]) or None

    def _forget(self, extent: ArenaExtent) -> None:
        del self._extents[extent.digest]
        self._line.remove(extent)
        self._free_slots.append(extent.slot)
        self._changed()

    def _changed(self) -> None:
        """Let refused loads be tried again, as there may be room now."""
        self._refused = (-1.0, 0)
