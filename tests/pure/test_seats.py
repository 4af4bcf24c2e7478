"""Tenants share the batch: seats, blocks and the tokens of a step go to them by their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_scheduler import Harness, SchedulerMachine, request

from weft.core.tenants import Caps, Tenant
from weft.schedule import shares
from weft.schedule.queue import FairQueue

BOTH = [Tenant("a"), Tenant("b")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests here are of a few tokens, and make way sooner."""
    monkeypatch.setattr(shares, "MIN_RUN", 3)
    monkeypatch.setattr(shares, "SLICE", 8.0)
    yield


class SharingMachine(SchedulerMachine):
    """Whatever is parked for others, requests end with the tokens that they must have."""

    ahead = 1

    def __init__(self) -> None:
        super().__init__()
        self.h.scheduler.set_tenants(BOTH)

    @rule(weight=st.sampled_from([0.5, 1.0, 3.0]), cap=st.sampled_from([None, 1, 2]))
    def set_tenants(self, weight: float, cap: int | None) -> None:
        self.h.scheduler.set_tenants([Tenant("a", weight, Caps(max_seats=cap)), Tenant("b")])


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(SchedulerMachine.TestCase.settings, max_examples=10, deadline=None)


def seats(h: Harness) -> Counter[str]:
    return Counter(seq.account.name for seq in h.scheduler.batch.running)


def counters(h: Harness) -> dict[str, float]:
    h.scheduler.batch.charge_running()
    return {a.name: a.counter for a in h.scheduler.batch.waiting.accounts}


loads = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step of its arrival
        st.sampled_from("abc"),
        st.integers(1, 14),  # tokens of the prompt
        st.integers(1, 24),  # and of the answer
    ),
    min_size=1,
    max_size=40,
)


SHORT_OF_BLOCKS = [
    *[(0, "a", 3, 17), (0, "a", 2, 17), (4, "a", 1, 6), (4, "b", 4, 19), (25, "b", 1, 1)],
    (0, "a", 1, 17),
]
"""When the last request comes, a's decodes wait until the step has those of b. One of them then
needs a block, and none is free."""


@settings(max_examples=25, deadline=None)
@example(SHORT_OF_BLOCKS, 0, 4, 12)
@given(loads, st.sampled_from([0, 1]), st.sampled_from([2, 4]), st.sampled_from([12, 30, 60]))
def test_nobody_starves(
    load: list[tuple[int, str, int, int]], ahead: int, cap: int, blocks: int
) -> None:
    """All requests end, with their tokens, within the steps that their tokens take one by one; no
    cap is exceeded, and a tenant alone has nothing parked but for want of blocks."""
    h = Harness(ahead=ahead, num_blocks=blocks, rows=4, caching=False)
    h.scheduler.set_tenants([Tenant("a", 2.0), Tenant("b", caps=Caps(max_seats=cap))])
    for step in range(31):
        for n, (at, tenant, prompt, output) in enumerate(load):
            if at == step:
                h.add(request(f"{n}", [1 + n % 3] * prompt, output, tenant=tenant, ignore_eos=True))
        h.step()
        h.scheduler.check()
        held = seats(h)
        assert held.total() <= 4 and held["b"] <= cap
    h.run(max_steps=31 + 4 * sum(prompt + output for *_, prompt, output in load))
    h.verify_all()
    if blocks == 60 and len({tenant for _, tenant, *_ in load}) == 1:
        assert h.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_second_tenant_has_its_share_at_once(weight: float) -> None:
    h = Harness(rows=8, num_blocks=200, budget=12, ahead=1, caching=False)
    h.scheduler.set_tenants([Tenant("a"), Tenant("b", weight)])
    for i in range(30):
        h.add(request(f"a{i}", [1] * 2, 38, tenant="a", ignore_eos=True))
    for _ in range(8):
        h.step()
    assert seats(h) == {"a": 8}
    for i in range(30):
        h.add(request(f"b{i}", [2] * 2, 30, tenant="b", ignore_eos=True))
    came = h.steps
    for _ in range(13):
        h.step()
    assert h.begun["b0"][0] - came <= 3
    expected = 8 * weight / (1 + weight)
    assert abs(seats(h)["b"] - expected) <= 1 and seats(h).total() == 8
    parked = h.scheduler.totals.preemptions
    assert expected - 1 <= parked <= expected + 1
    for _ in range(5):
        h.step()
    assert h.scheduler.totals.preemptions <= parked + 1, "nobody is parked to and fro"
    h.run()
    h.verify_all()


def test_a_burst_keeps_a_tenant_without_seats_waiting_for_one_step() -> None:
    """Though none of the burst's requests has run for as long as it may."""
    h = Harness(rows=4, num_blocks=200, budget=64, ahead=0, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(12):
        h.add(request(f"a{i}", [1] * 2, 30, tenant="a", ignore_eos=True))
    h.step()
    assert seats(h) == {"a": 4}
    h.add(request("b0", [2] * 2, 4, tenant="b", ignore_eos=True))
    came = h.steps
    h.step()
    h.step()
    assert h.begun["b0"][0] - came <= 2
    h.run()
    h.verify_all()


def test_a_burst_at_a_moment_when_nobody_is_there_gets_no_credit_for_that() -> None:
    """It does not go before a tenant that was served for long before, and returns."""
    h = Harness(rows=4, num_blocks=200, budget=64, ahead=0, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(10):
        h.add(request(f"b{i}", [2] * 2, 30, tenant="b", ignore_eos=True))
        h.run()
    for i in range(12):
        h.add(request(f"a{i}", [1] * 2, 30, tenant="a", ignore_eos=True))
    h.step()
    h.add(request("b", [2] * 2, 4, tenant="b", ignore_eos=True))
    came = h.steps
    h.step()
    h.step()
    assert h.begun["b"][0] - came <= 2


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_has_few_seats_gets_another_at_once(ahead: int) -> None:
    """Whenever they come, beside a queue of somebody who has all the others; and also where both
    have been served alike."""
    h = Harness(rows=8, num_blocks=200, budget=12, ahead=ahead, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(30):
        h.add(request(f"a{i}", [1] * 2, 38, tenant="a", ignore_eos=True))
    for i in range(12):
        for _ in range(i % 4 + 2):
            h.step()
        h.add(request(f"b{i}", [2] * 2, 3, tenant="b", ignore_eos=True))
        h.step()
        assert h.begun[f"b{i}"][0] == h.steps
    h.run()
    h.verify_all()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("prompt", "tokens"), [(3, 3), (8, 12)])
def test_many_seats_rest_where_a_short_request_begins(ahead: int, prompt: int, tokens: int) -> None:
    """All of the tenant's decodes do, but not for a longer prompt, and not again in the next nine
    steps."""
    h = Harness(rows=8, num_blocks=200, budget=12, ahead=ahead, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(30):
        h.add(request(f"a{i}", [1] * 2, 40, tenant="a", ignore_eos=True))
    for _ in range(5):
        h.step()
    for i, expected in enumerate((tokens, min(7 + prompt, 12), tokens)):
        h.add(request(f"b{i}", [2] * prompt, 1, tenant="b", ignore_eos=True))
        begins, next_one = h.step(), h.step()
        assert begins.num_tokens == expected
        assert set(range(8)) - set(begins.rows) <= set(next_one.rows)
        for _ in range(7 * i):
            h.step()
    h.run()
    h.verify_all()


def test_nobody_rests_for_a_request_that_can_not_begin() -> None:
    """There is a seat for it, and then there are no blocks."""
    h = Harness(rows=8, num_blocks=8, ahead=0, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(7):
        h.add(request(f"a{i}", [1], 3, tenant="a", ignore_eos=True))
    h.step()
    h.add(request("b", [2] * 6, 2, tenant="b", ignore_eos=True))
    assert h.step().num_tokens == 7
    h.run()
    h.verify_all()


def test_nobody_rests_where_all_have_few_seats() -> None:
    h = Harness(rows=9, num_blocks=200, ahead=0, caching=False)
    h.scheduler.set_tenants([Tenant(name) for name in "abcd"])
    for i in range(2):
        for name in "abcd":
            h.add(request(f"{name}{i}", [1], 30, tenant=name, ignore_eos=True))
    h.step()
    h.add(request("e", [2] * 2, 2, tenant="e", ignore_eos=True))
    assert h.step().num_tokens == 8 + 2


def test_without_tenants_nobody_makes_way() -> None:
    h = Harness(rows=4, num_blocks=60, caching=False)
    for i in range(8):
        h.add(request(f"{i}", [1] * 2, 20, tenant="ab"[i // 4], ignore_eos=True))
    h.run()
    assert h.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_more_tenants_than_seats_take_turns(ahead: int) -> None:
    h = Harness(rows=2, num_blocks=80, ahead=ahead, caching=False)
    names = "abcdef"
    h.scheduler.set_tenants([Tenant(name) for name in names])
    for name in names:
        for i in range(4):
            h.add(request(f"{name}{i}", [1], 39, tenant=name, ignore_eos=True))
    for _ in range(60):
        h.step()
    assert {name for name in names if h.output(f"{name}0")} == set(names)
    served = counters(h)
    assert max(served.values()) - min(served.values()) <= 4 * 8.0
    h.run()


def test_full_load_is_served_by_weight() -> None:
    """One has long prompts, the other long answers, and their lengths differ by far."""
    h = Harness(rows=6, num_blocks=90, ahead=1, caching=False)
    h.scheduler.set_tenants([Tenant("a", 2.0), Tenant("b")])
    for i in range(400):
        h.add(request(f"a{i}", [1] * 30, 2, tenant="a", ignore_eos=True))
        h.add(request(f"b{i}", [2] * 2, 30, tenant="b", ignore_eos=True))
    h.step()
    before = counters(h)
    for _ in range(4):
        for _ in range(50):
            h.step()
        now = counters(h)
        a, b = now["a"] - before["a"], now["b"] - before["b"]
        assert abs(a - b) <= 0.1 * max(a, b) + 8.0, (a, b)
        before = now


def test_blocks_are_shared_too() -> None:
    """One tenant's few requests fill the cache, with seats left; the other's find room in it."""
    h = Harness(rows=8, num_blocks=24, ahead=1, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(6):
        h.add(request(f"a{i}", [1] * 14, 26, tenant="a", ignore_eos=True))
    for _ in range(20):
        h.step()
    for i in range(4):
        h.add(request(f"b{i}", [2] * 12, 10, tenant="b", ignore_eos=True))
    came = h.steps
    for _ in range(6):
        h.step()
    assert h.begun["b0"][0] - came <= 5
    while h.events["b0"][-1].finish_reason is None:
        h.step()
        assert seats(h)["b"] >= 1 or h.events["b0"][-1].finish_reason, "it was put back"
    h.run()
    h.verify_all()


def test_long_prompts_leave_room_in_a_step() -> None:
    h = Harness(rows=8, num_blocks=200, budget=4, ahead=1, caching=False)
    h.scheduler.set_tenants(BOTH)
    for i in range(6):
        h.add(request(f"a{i}", [1] * 38, 1, tenant="a", ignore_eos=True))
    for _ in range(6):
        h.step()
    h.add(request("b", [2] * 3, 2, tenant="b", ignore_eos=True))
    came = h.steps
    while not h.output("b"):
        h.step()
    assert h.steps - came <= 5
    h.run()


def test_names_that_nobody_configured_are_one_tenant() -> None:
    queue: FairQueue[object] = FairQueue({"x": 5.0})  # type: ignore[type-var]
    assert queue.open("x").weight == 5.0 and queue.open("y") is not queue.open("z")
    queue.set_tenants([Tenant("a", 2.0, Caps(max_seats=1))])
    account = queue.open("made up")
    assert account is queue.open("too") and account.name == "" and account.weight == 1.0
    own = queue.open("a")
    assert own.weight == 2.0 and own.at_cap, "one runs: it does not wait"
    queue.set_tenants([])
    assert not own.at_cap and own.weight == 1.0 and queue.open("other").name == "other"
