"""The queue of waiting requests, in the order in which tenants are served. Pure, no clock.

Each tenant has a counter: the tokens that it was served, divided by its weight. The tenant with the
lowest counter comes first, and each tenant's requests in order of arrival (virtual token counters:
Sheng et al., "Fairness in Serving Large Language Models", 2024, arXiv 2401.00588). A tenant whose
first request begins to wait is lifted to just below the lowest counter of those that wait already:
it gets no credit for the time when it was away, but comes first once. So two tenants that always
have requests waiting are served alike, whatever either sends; with one tenant alone this is first
come, first served.

Requests of one tenant for one adapter are a *lane*, as they can be passed over together:

    heap of lanes, by (counter, arrival of the first)
      ├─ lane (acme, sql)      r3 r7 r8
      ├─ lane (acme, base)     r4
      └─ lane (globex, legal)  r1 r2 r5 r6

An entry of the heap may be too low, but never too high: counters only grow, and so does the arrival
of a lane's first request, except when a request is put back, which makes a new entry. An entry is
corrected when it comes to the top. So a request is added, found and removed in O(log n).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from weft.core.tenants import Tenant

HEAD_START = 1.0
"""How far below the lowest counter a tenant is lifted when its first request waits. So this request
is served next, and not only when another tenant has had more."""
MAX_IDLE = 1000
"""The most tenants without requests whose counters are kept."""


@dataclass(slots=True, eq=False)
class Account:
    """A tenant's open requests, and the service that it has had."""

    name: str
    weight: float = 1.0
    max_seats: int | None = None
    """How many of its requests may run at a time; None: any number."""
    counter: float = 0.0
    """Service divided by weight; only the differences between tenants have a meaning."""
    num_open: int = 0
    """Requests that wait or run."""
    num_waiting: int = 0

    @property
    def num_seats(self) -> int:
        """Requests that run."""
        return self.num_open - self.num_waiting

    @property
    def at_cap(self) -> bool:
        return self.max_seats is not None and self.num_seats >= self.max_seats

    def charge(self, service: float) -> None:
        self.counter += service / self.weight


class Waiter(Protocol):
    """A request that may wait. Its fields don't change while it does."""

    @property
    def order(self) -> int:
        """The request's place by arrival; no two requests have the same."""

    @property
    def digest(self) -> str | None: ...

    @property
    def account(self) -> Account: ...


T = TypeVar("T", bound=Waiter)


@dataclass(slots=True, eq=False)
class _Lane(Generic[T]):
    account: Account
    digest: str | None
    orders: list[int] = field(default_factory=list)
    items: dict[int, T] = field(default_factory=dict)
    at: int = 0
    """How many of its first requests the current walk has passed over."""
    entered: int = -1
    """The order in its valid entry of the heap; entries with another order are void."""

    def __lt__(self, other: _Lane[T]) -> bool:
        """The heap compares lanes only if one is empty and void, so any order will do."""
        return False


class FairQueue(Generic[T]):
    """Requests that wait. `check()` states the invariants."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: those of some tenants; all others have 1."""
        self._weights = dict(weights or {})
        self._tenants: dict[str, Tenant] = {}
        self._accounts: dict[str, Account] = {}
        self._num_idle = 0
        self._lanes: dict[tuple[str, str | None], _Lane[T]] = {}
        self._heap: list[tuple[float, int, _Lane[T]]] = []
        self._size = 0
        self._last: Account | None = None
        """The tenant whose request was the last to leave the queue when it became empty."""
        self.num_waiting_tenants = 0

    # -- tenants -------------------------------------------------------------------------------

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Let these tenants share by their weights and within their caps. All other names are one
        tenant, except that open requests keep theirs. Without any tenants, each name is one."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        for account in self._accounts.values():
            self._set_up(account)

    def _set_up(self, account: Account) -> None:
        tenant = self._tenants.get(account.name)
        account.max_seats = tenant.caps.max_seats if tenant else None
        account.weight = tenant.weight if tenant else self._weights.get(account.name, 1.0)

    @property
    def num_tenants(self) -> int:
        return len(self._accounts)

    @property
    def shared(self) -> bool:
        """Whether there are tenants who share seats."""
        return bool(self._tenants)

    @property
    def contended(self) -> bool:
        """Whether seats are shared, and several tenants want them."""
        return bool(self._tenants) and len(self._accounts) - self._num_idle > 1

    @property
    def accounts(self) -> tuple[Account, ...]:
        return tuple(self._accounts.values())

    def open(self, tenant: str) -> Account:
        """Count one more request of a tenant, until `close` when the request ends."""
        name = tenant if tenant in self._tenants or not self._tenants else ""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
            self._set_up(account)
        elif not account.num_open:
            self._num_idle -= 1
        account.num_open += 1
        return account

    def close(self, account: Account) -> None:
        """Count one request fewer. It must have left the queue."""
        account.num_open -= 1
        if not account.num_open:
            self._num_idle += 1
            if self._num_idle > MAX_IDLE:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the half of the idle tenants with the lowest counters. One that comes back would
        most often be lifted beyond its old counter anyway."""
        idle = [account for account in self._accounts.values() if not account.num_open]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: len(idle) - MAX_IDLE // 2]:
            del self._accounts[account.name]
        self._num_idle = MAX_IDLE // 2

    def _floor(self, comer: Account) -> float:
        """The counter to which `comer` is lifted when it begins to wait. If nobody waits and seats
        are shared, it is the counter of the tenant from which it may get some."""
        lane = self._first()
        if lane is not None:
            return lane.account.counter
        others = [a for a in self._accounts.values() if a is not comer] if self._tenants else []
        if seated := [a for a in others if a.num_seats]:
            return max(seated, key=lambda a: a.num_seats / a.weight).counter
        return self._last.counter if self._last else 0.0

    # -- requests ------------------------------------------------------------------------------

    def push(self, item: T) -> None:
        """Put a request at its place by arrival: at the end, or back to where it was."""
        account = item.account
        if not account.num_waiting:
            account.counter = max(account.counter, self._floor(account) - HEAD_START)
            self.num_waiting_tenants += 1
        account.num_waiting += 1
        self._size += 1
        key = (account.name, item.digest)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(account, item.digest)
        lane.items[item.order] = item
        insort(lane.orders, item.order)
        if lane.orders[0] == item.order:
            self._enter(lane)

    def remove(self, item: T) -> None:
        """Take out a request; not during a walk."""
        lane = self._lanes[item.account.name, item.digest]
        self._take(lane, bisect_left(lane.orders, item.order))

    def walk(self) -> Walk[T]:
        return Walk(self)

    def of_adapter(self, digest: str) -> list[T]:
        return [item for item in self if item.digest == digest]

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d for _, d in self._lanes if d is not None))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for lane in self._lanes.values():
            yield from lane.items.values()

    def _take(self, lane: _Lane[T], index: int) -> None:
        del lane.items[lane.orders.pop(index)]
        if not lane.orders:
            del self._lanes[lane.account.name, lane.digest]
        self._size -= 1
        lane.account.num_waiting -= 1
        if not lane.account.num_waiting:
            self.num_waiting_tenants -= 1
        if not self._size:
            self._last = lane.account

    def _enter(self, lane: _Lane[T]) -> None:
        lane.entered = lane.orders[lane.at]
        heappush(self._heap, (lane.account.counter, lane.entered, lane))
        if len(self._heap) > 2 * len(self._lanes) + 64:
            self._drop_void()

    def _drop_void(self) -> None:
        valid = {
            id(lane): (counter, order, lane)
            for counter, order, lane in self._heap
            if order == lane.entered and lane.orders
        }
        self._heap = list(valid.values())
        heapify(self._heap)

    def _first(self) -> _Lane[T] | None:
        """The lane whose turn it is, among those that the current walk has not finished."""
        heap = self._heap
        while heap:
            counter, order, lane = heap[0]
            if lane.entered != order:
                heappop(heap)
            elif lane.at >= len(lane.orders):
                heappop(heap)
                lane.entered = -1
            elif lane.orders[lane.at] == order and lane.account.counter == counter:
                return lane
            else:
                lane.entered = lane.orders[lane.at]
                heapreplace(heap, (lane.account.counter, lane.entered, lane))
        return None

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold; not during a walk."""
        assert self._size == sum(len(lane.orders) for lane in self._lanes.values())
        waiting: dict[str, int] = {}
        for (name, digest), lane in self._lanes.items():
            assert lane.account is self._accounts[name] and lane.digest == digest
            assert lane.orders and sorted(lane.items) == lane.orders
            assert lane.at == 0
            waiting[name] = waiting.get(name, 0) + len(lane.orders)
            entries = [e for e in self._heap if e[2] is lane and e[1] == lane.entered]
            assert entries, "a lane that is never found"
            due = (lane.account.counter, lane.orders[0])
            assert all(entry[:2] <= due and entry[1] <= due[1] for entry in entries)
        for name, account in self._accounts.items():
            assert account.num_waiting == waiting.get(name, 0) <= account.num_open
        assert self.num_waiting_tenants == len(waiting)
        assert self._num_idle == sum(not a.num_open for a in self._accounts.values()) <= MAX_IDLE


class Walk(Generic[T]):
    """A pass over a queue. Each time it goes on to the request whose turn it is by then.

    A request is passed over unless it is taken. After the walk, those passed over are still queued:

        with queue.walk() as walk:
            for item in walk:
                walk.take()    # it leaves the queue
                walk.skip()    # or: pass over it and the rest of its lane
    """

    def __init__(self, queue: FairQueue[T]) -> None:
        self._queue = queue
        self._lane: _Lane[T] | None = None
        self._moved: list[_Lane[T]] = []

    def __enter__(self) -> Walk[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._moved:
            lane.at = 0
            if lane.orders and lane.entered != lane.orders[0]:
                self._queue._enter(lane)

    def __iter__(self) -> Walk[T]:
        return self

    def __next__(self) -> T:
        run = self.run(1)
        if not run:
            raise StopIteration
        return run[0]

    def run(self, most: int) -> list[T]:
        """The next requests, up to `most` of one lane, before another's turn; [] at the end."""
        lane = self._lane = self._queue._first()
        if lane is None:
            return []
        if not lane.at:
            self._moved.append(lane)
        begin, end = lane.at, min(lane.at + most, len(lane.orders))
        if end - begin > 1 and (others := self._queue._heap[1:3]):
            counter, order, _ = min(others)
            if counter <= lane.account.counter:
                end = bisect_left(lane.orders, order, begin + 1, end)
        lane.at = end
        return [lane.items[order] for order in lane.orders[begin:end]]

    def take(self) -> None:
        """Take the item that was returned last out of the queue."""
        assert self._lane is not None
        self._lane.at -= 1
        self._queue._take(self._lane, self._lane.at)

    def skip(self) -> None:
        """Pass over the rest of the lane of the item that was returned last."""
        assert self._lane is not None
        self._lane.at = len(self._lane.orders)
