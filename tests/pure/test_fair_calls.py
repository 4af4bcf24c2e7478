"""What each pass of an event loop does for each tenant."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from weft.core.fair_calls import FairCalls


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=9), max_size=6),
    st.integers(1, 4),
)
def test_each_pass_makes_a_few_calls_of_each_tenant(waves: list[list[str]], most: int) -> None:
    """All calls are made, each tenant's in their order, at most so many in a pass; and one that
    has fewer than that waits for no other's."""

    async def scenario() -> None:
        calls = FairCalls(most)
        made: list[tuple[str, int, int, int]] = []
        now = 0

        def call(tenant: str, number: int) -> None:
            came = now
            calls.call(tenant, lambda: made.append((tenant, number, came, now)))

        for wave in waves + [[]] * 60:
            for tenant in wave:
                call(tenant, number := len(numbers))
                numbers.append(number)
            calls.check()
            await asyncio.sleep(0)
            now += 1
        for tenant in "abc":
            own = [each for each in made if each[0] == tenant]
            assert [each[1] for each in own] == sorted(each[1] for each in own)
            passes = [each[3] for each in own]
            # What is asked for between two passes counts to the one or the other.
            assert all(passes.count(each) <= 2 * most for each in passes)
            if len(own) <= most:
                assert all(came == at for _, _, came, at in own)
        assert len(made) == len(numbers)

    numbers: list[int] = []
    asyncio.run(scenario())
