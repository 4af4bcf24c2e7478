"""Decides which adapters get room on the device when not all that are wanted fit.

An adapter may lack room in adapter memory, or a place among the `max_loras` of a batch. While an
adapter has both, all of its requests are admitted, past older ones whose adapters have not. For
the latter:

    passed over ──(half of max_adapter_wait)──> those that have had the device longest, and as long
                                                as this one waits, take no new requests: they drain
                ──(max_adapter_wait)──────────> what still runs of them is parked, once it has got
                                                a token out of its turn; no other adapter gets room
                                                before this one

So with n adapters of one size in demand and room for k, each has its turn within ceil(n / k) times
(max_adapter_wait + the time of a prompt and of a load). A request is parked only after its adapter
has had the device for `max_adapter_wait`, and the request at least one token.

An adapter that has waited for `max_adapter_wait` is *starving*. It is *granted* its turn when there
is room for it, or a place in the batch, until its first request uses it. Another adapter *yields*
to it while that one has to drain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from weft.schedule.queue import Account
from weft.schedule.sequence import AdapterUse, Sequence
from weft.schedule.slots import AdapterSlots, Load


@dataclass(slots=True)
class _Wait:
    """How long an adapter's requests have been passed over because it was not available."""

    since: float | None = None
    """Since when they are passed over; None while they are not."""
    earlier_s: float = 0.0

    def seconds(self, now: float) -> float:
        return self.earlier_s if self.since is None else self.earlier_s + now - self.since

    def end(self, now: float) -> None:
        self.earlier_s, self.since = self.seconds(now), None


class Turns:
    """Owner of the demand for adapters, of their leases, and of which adapter yields to which.

    max_loras: adapters in one batch. max_wait: `max_adapter_wait`, in the unit of `begin`'s now.
    """

    def __init__(self, slots: AdapterSlots, max_loras: int, max_wait: float) -> None:
        self._slots = slots
        self._max_loras = max_loras
        self._max_wait = max_wait
        self._now = 0.0
        self._demand: Counter[str] = Counter()
        """Requests in the engine, by adapter digest."""
        self._leases: Counter[str] = Counter()
        self._leased_since: dict[str, float] = {}
        """Since when adapters have had leases, the longest first."""
        self._waits: dict[str, _Wait] = {}
        """Adapters that have been passed over since they came into demand."""
        self._short: dict[str, Account] = {}
        """Adapters that found no room when rows were last free, and a tenant that wants each."""
        self._starving: list[str] = []
        """Starving adapters, in the order in which they get room."""
        self._granted: set[str] = set()
        self._yielding: dict[str, str] = {}
        """Adapter that makes room -> the one that it makes room for."""
        self._passed: set[str] = set()
        """Adapters whose requests are passed over in this step."""
        self._loads: list[Load] = []
        """Loads to start with this step."""

    # -- requests ------------------------------------------------------------------------------

    def arrive(self, use: AdapterUse) -> None:
        if use.digest is not None:
            self._demand[use.digest] += 1
            if wait := self._waits.get(use.digest):
                use.waited_before = wait.seconds(self._now)

    def depart(self, use: AdapterUse) -> None:
        """Count a request that leaves the engine. Steps in flight may still need its lease."""
        digest = use.digest
        if digest is not None:
            self._demand[digest] -= 1
            if not self._demand[digest]:
                del self._demand[digest]
                self._reopen(digest)
                self._granted.discard(digest)
                self._waits.pop(digest, None)

    def in_use(self, digest: str) -> bool:
        """Whether any request in the engine wants the adapter, or there is a lease of it."""
        return digest in self._demand or digest in self._leases

    def lease(self, use: AdapterUse, num_tokens: int) -> float:
        """Lease the adapter of a request that is admitted with `num_tokens` tokens. Returns for how
        long the request was passed over because of its adapter."""
        digest = use.digest
        if digest is None:
            return 0.0
        use.slot = self._slots.acquire(digest, self._now)
        use.began_at = num_tokens
        self._leases[digest] += 1
        self._leased_since.setdefault(digest, self._now)
        self._granted.discard(digest)
        wait = self._waits.get(digest)
        if wait is None:
            return 0.0
        if wait.since is not None:
            self.settle(digest)
        return wait.earlier_s - use.waited_before

    def end_lease(self, use: AdapterUse) -> None:
        """Give back the lease, if there is one: no step in flight needs it any more."""
        if use.slot >= 0 and use.digest is not None:
            self._slots.release(use.digest, self._now)
            self._leases[use.digest] -= 1
            if not self._leases[use.digest]:
                del self._leases[use.digest], self._leased_since[use.digest]
            use.slot = -1

    def settle(self, digest: str) -> None:
        """End an adapter's wait, as it has its turn or can't be loaded: none yields to it now."""
        if wait := self._waits.get(digest):
            wait.end(self._now)
        self._reopen(digest)

    @property
    def lacks_room(self) -> bool:
        """Whether an adapter is kept out by a lack of room, or of a place in the batch."""
        return bool(self._short)

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def leased(self) -> tuple[str, ...]:
        return tuple(self._leases)

    # -- admission, within one step ------------------------------------------------------------

    def begin(self, now: float, running: list[Sequence]) -> list[Sequence]:
        """Begin a step. Returns the running requests that have to make way for a starving adapter,
        except those that got no token since their admission, which might else never end."""
        self._now = now
        self._passed = set()
        self._loads = []
        for digest in self._granted:
            self._slots.touch(digest, now)  # not evicted before it is used
        if not self._short:
            self._starving.clear()
            self._yielding.clear()
            return []
        self._make_room(running)
        victims = {v for v, claimant in self._yielding.items() if claimant in self._starving}
        yielding = [seq for seq in running if seq.digest in victims]
        return [seq for seq in yielding if len(seq.tokens) > seq.adapter.began_at]

    def look_again(self) -> None:
        """Forget which adapters lack room: as rows are free, `ready` will find out again."""
        self._short = {}

    def ready(self, seq: Sequence) -> bool:
        """Whether its adapter lets requests like this one run now; starts its load if need be."""
        digest = seq.digest
        if digest is None:
            return True
        if digest in self._passed:
            return False
        if digest not in self._yielding:
            if digest in self._leases or self._claim(digest):
                return True
            if self._slots.is_loading(digest):
                self._granted.add(digest)
            else:
                self._short[digest] = seq.account
        self._passed.add(digest)
        wait = self._waits.setdefault(digest, _Wait())
        if wait.since is None:
            wait.since = self._now
        return False

    def prefetch(self, digest: str | None) -> bool:
        """Start the load of an adapter whose request can't be admitted yet anyway. Returns whether
        the adapter itself would let it run now."""
        if digest is None:
            return True
        return digest not in self._yielding and (digest in self._leases or self._claim(digest))

    def end(self) -> list[Load]:
        """End the planning of a step, and return the loads to start with it."""
        for digest in self._slots.wanted:
            self._load(digest)
        return self._loads

    def _claim(self, digest: str) -> bool:
        """Whether an adapter without leases can have one now. If it is absent and there is room,
        its load is started. While others starve, only adapters that were granted a turn may."""
        resident = self._slots.is_resident(digest)
        if digest not in self._granted:
            if self._starving:
                return False
            if not resident:
                self._load(digest)
            else:
                self._slots.touch(digest, self._now)
        return resident and len(self._leases) < self._max_loras

    def _load(self, digest: str) -> bool:
        """Start the load of an absent adapter, unless it is loading. False if there is no room."""
        if self._slots.is_loading(digest):
            return True
        load = self._slots.start_load(digest, self._now, self._demand)
        if load is None:
            return False
        self._loads.append(load)
        self._reopen(digest)
        return True

    # -- making room ---------------------------------------------------------------------------

    def _make_room(self, running: list[Sequence]) -> None:
        """Give room to adapters that have waited for too long, or have others yield to them."""
        self._yielding = {v: c for v, c in self._yielding.items() if c in self._short}
        waited = self._waited()
        longest = self._max_wait
        soon = [d for d, seconds in waited.items() if longest / 2 <= seconds < longest]
        late = [d for d, seconds in waited.items() if seconds >= longest]
        self._starving = self._in_turn(late, running)
        starving = self._starving.copy()
        while starving and self._grant(starving[0]):
            del starving[0]
        claimants = {c for victim, c in self._yielding.items() if victim in self._leases}
        for digest in [d for d in starving + soon if d not in claimants]:
            if waited[digest] >= longest:
                victims = self._choose_victims(digest)
            else:
                victims = self._longest_there(digest, waited[digest])
            if not victims:
                break
            self._yielding.update(dict.fromkeys(victims, digest))

    def _waited(self) -> dict[str, float]:
        """Seconds for which requests have been passed over, by adapter that found no room."""
        waits = ((digest, self._waits.get(digest)) for digest in self._short)
        return {d: self._now - w.since for d, w in waits if w and w.since is not None}

    def _in_turn(self, digests: list[str], running: Iterable[Sequence]) -> list[str]:
        """Starving adapters in the order in which they get room: first those whose tenants have
        the fewest adapters running, then those that have waited longest."""
        if not digests:
            return []
        in_use = {(s.account, s.digest) for s in running if s.digest}
        held = Counter(account for account, _ in in_use)
        return sorted(digests, key=lambda d: (held[self._short[d]], self._waits[d].since))

    def _grant(self, digest: str) -> bool:
        if self._slots.is_resident(digest):
            others = len(self._leases) + len(self._granted - {digest})
            granted = others < self._max_loras
        elif any(self._slots.is_resident(other) for other in self._granted):
            return False  # it would be evicted before it is used
        else:
            granted = self._load(digest)
        if granted:
            self._granted.add(digest)
        return granted

    def _choose_victims(self, digest: str) -> list[str]:
        """Adapters that have had their time, and whose leaving would make room for `digest`."""
        if self._slots.is_resident(digest):
            return self._longest_there(digest, self._max_wait)
        return self._slots.choose_victims(digest, self._now, self._max_wait)

    def _longest_there(self, digest: str, tenure: float) -> list[str]:
        """In a list, the adapter that has had leases longest of those that may yield to `digest`
        and don't yield already; [] if none has had them for `tenure`, or if none need yield."""
        resident = self._slots.is_resident(digest)
        if resident and len(self._leases) < self._max_loras:
            return []
        spared = self._yielding.keys() | (() if resident else self._slots.pinned)
        for victim, since in self._leased_since.items():
            if self._now - since < tenure:
                break
            if victim not in spared:
                return [victim]
        return []

    def _reopen(self, digest: str) -> None:
        """End the yielding of other adapters to this one."""
        for victim in [v for v, claimant in self._yielding.items() if claimant == digest]:
            del self._yielding[victim]

    def check(self, uses: Iterable[AdapterUse]) -> None:
        """Raise AssertionError unless all invariants hold, those of the slots included. `uses`:
        those of all requests that arrived and have not departed."""
        self._slots.check()
        assert Counter(use.digest for use in uses if use.digest is not None) == self._demand
        assert len(self._leases) <= self._max_loras
        for digest, leases in self._leases.items():
            assert leases == self._slots.num_leases(digest) > 0
        assert self._leases.keys() == self._leased_since.keys()
        since = list(self._leased_since.values())
        assert since == sorted(since)
        assert self._waits.keys() | self._granted <= self._demand.keys()
        assert not self._granted & self._leases.keys()
        assert self._yielding.keys().isdisjoint(self._yielding.values())
        assert self._demand or not self._yielding
