"""What each pass of an event loop does for each tenant."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from weft.core.fair_calls import FairCalls


class Passes:
    """Calls by a FairCalls, with what is noted of each when it is made."""

    def __init__(self, most_each: int, most_alone: int) -> None:
        self.calls = FairCalls(most_each, most_alone)
        self.now = 0
        """The pass that the loop is in."""
        self.made: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """Number, pass in which it was asked for and pass in which it was made, of each tenant."""
        self.num_calls = 0

    def ask(self, tenant: str) -> None:
        self.num_calls += 1
        number, came = self.num_calls, self.now
        self.calls.call(tenant, lambda: self.made[tenant].append((number, came, self.now)))

    async def end_pass(self) -> None:
        self.calls.check()
        await asyncio.sleep(0)
        self.now += 1

    async def end(self, most_waiting: int) -> None:
        """Go on until all calls are made, each tenant's in their order."""
        for _ in range(most_waiting):
            await self.end_pass()
        assert sum(map(len, self.made.values())) == self.num_calls
        assert all(own == sorted(own) for own in self.made.values())


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=9), max_size=6),
    st.integers(1, 4),
)
def test_each_pass_makes_a_few_calls_of_each_tenant(waves: list[list[str]], most: int) -> None:
    """All calls are made, each tenant's in their order, at most so many in a pass; and one that
    has fewer than that waits for no other's."""

    async def scenario() -> None:
        passes = Passes(most, 10 * most)
        for tenant in "abc":
            passes.calls.enter(tenant)
        for wave in waves:
            for tenant in wave:
                passes.ask(tenant)
            await passes.end_pass()
        await passes.end(60)
        for own in passes.made.values():
            at = [each[2] for each in own]
            # What is asked for between two passes counts to the one or the other.
            assert all(at.count(each) <= 2 * most for each in at)
            if len(own) <= most:
                assert all(came == made for _, came, made in own)

    asyncio.run(scenario())


async def test_who_waits_no_more_takes_no_turn() -> None:
    calls = FairCalls(1, 1)
    taken: list[int] = []

    async def take(number: int) -> None:
        await calls.turn("a")
        taken.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == [0, 1, 3]


@given(
    st.integers(1, 60), st.integers(1, 4), st.integers(0, 8), st.integers(0, 3), st.integers(0, 3)
)
def test_a_tenant_that_is_alone_has_more(
    num_calls: int, most: int, more: int, alone: int, shared: int
) -> None:
    """So many of its calls are made in each pass while no other is there: for some passes at
    first, and after another one has come, asked, and gone. That one waits for nobody."""

    async def scenario() -> None:
        passes = Passes(most, most + more)
        passes.calls.enter("a")
        for _ in range(num_calls):
            passes.ask("a")
        expected = min(num_calls, most + more)

        async def go_on(num_passes: int, limit: int) -> None:
            nonlocal expected
            for _ in range(num_passes):
                assert len(passes.made["a"]) == expected
                await passes.end_pass()
                expected = min(num_calls, expected + limit)

        await go_on(alone, most + more)
        passes.calls.enter("b")
        passes.ask("b")
        assert len(passes.made["b"]) == 1
        await go_on(shared, most)
        passes.calls.leave("b")
        await go_on(60, most + more)
        await passes.end(0)

    asyncio.run(scenario())
