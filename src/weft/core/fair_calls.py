"""Runs tenants' work on the event loop in turns, so that none waits for all work of another."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

Call = Callable[[], object]


class FairCalls:
    """Makes calls on the running event loop: in each pass of the loop, a few for each tenant.

    A pass of the loop runs everything that is ready, so without this, each tenant would wait for
    all that another has ready. Here, the rest of a tenant's calls waits, in order:

        ready at once    a1 a2 a3 a4 a5 a6   b1
        passes           a1 a2 b1 │ a3 a4 │ a5 a6        with two of each tenant

    Tenants enter before their calls, and leave after them. A tenant that is alone keeps only
    newcomers waiting, so it has more calls made in a pass: fewer passes for the same calls cost
    less.
    """

    def __init__(self, most_each: int, most_alone: int) -> None:
        self._most_each = most_each
        self._most_alone = most_alone
        self._made: dict[str, int] = {}
        """How many calls of each tenant this pass has made."""
        self._waiting: dict[str, deque[Call]] = {}
        self._there: Counter[str] = Counter()
        """How often each tenant has entered and not left."""

    def enter(self, tenant: str) -> None:
        """The tenant counts as present until it has left as often as it entered."""
        self._there[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._there[tenant] -= 1
        if not self._there[tenant]:
            del self._there[tenant]

    def call(self, tenant: str, call: Call) -> None:
        """Make this call now, or in a later pass if the tenant has had its calls in this one."""
        made = self._made.get(tenant, 0)
        if made < self._most(tenant) and tenant not in self._waiting:
            if not self._made:
                asyncio.get_running_loop().call_soon(self._begin)
            self._made[tenant] = made + 1
            call()
        else:
            self._waiting.setdefault(tenant, deque()).append(call)

    async def turn(self, tenant: str) -> None:
        """Wait until a call would be made."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            if not turn.done():  # somebody still waits
                turn.set_result(None)

        self.call(tenant, take)
        await turn

    def _most(self, tenant: str) -> int:
        num_others = len(self._there) - (tenant in self._there)
        return self._most_each if num_others else self._most_alone

    def _begin(self) -> None:
        """A pass begins."""
        loop = asyncio.get_running_loop()
        self._made = {}
        now: list[Call] = []
        for tenant, calls in list(self._waiting.items()):
            self._made[tenant] = count = min(self._most(tenant), len(calls))
            now += [calls.popleft() for _ in range(count)]
            if not calls:
                del self._waiting[tenant]
        if self._made:
            loop.call_soon(self._begin)
        for call in now:
            try:
                call()
            except Exception as error:  # as the loop does with its own
                loop.call_exception_handler({"message": f"{call} failed", "exception": error})

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert all(self._waiting.values())
        assert self._made.keys() >= self._waiting.keys()
        assert all(0 < count <= self._most_alone for count in self._made.values())
        assert all(count > 0 for count in self._there.values())
