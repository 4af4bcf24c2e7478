"""Scheduler, blocks, slots and step inputs together, driven at random against an oracle."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device import (
    VOCAB,
    Activation,
    Device,
    FakeGrammar,
    allowed_tokens,
    expected_prompt_logprobs,
    expected_tokens,
    expected_vector,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.adapters import AdapterRef
from weft.core.errors import AdapterUnavailable, InvalidRequest
from weft.core.requests import EngineRequest, Pooling, TokenEvent
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.pace import ASSUMED_TOKEN_S
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import find_invocation
from weft.schedule.slots import AdapterSlots, Load
from weft.worker.inputs import RowState

BLOCK = 4
WAIT = 6.0
"""A step takes a second here."""
SIZES = [10, 20, 30, 40, 25, 5]
"""Elements of each adapter; the arena has 60."""


TALK = [1, 2, 3, 1, 3, 2, 1, 1, 2, 2, 1, 3, 3, 1, 2, 1]
"""What many prompts begin with."""


def digest_of(adapter: int, version: int = 0) -> str:
    return hashlib.sha256(f"{adapter}.{version}".encode()).hexdigest()


class Harness:
    """A scheduler on the fake device; `ahead` steps are in flight between plan and commit."""

    def __init__(
        self,
        *,
        ahead: int = 0,
        num_blocks: int = 16,
        rows: int = 4,
        budget: int = 12,
        max_loras: int = 3,
        capacity: int = 60,
        caching: bool = True,
        weights: dict[str, float] | None = None,
        chunk_delay: float | None = None,
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=40,
            max_loras=max_loras,
            max_adapter_wait=WAIT,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({0}),
            max_chunk_delay=chunk_delay,
        )
        self.ahead = ahead
        self.max_num_seqs = rows
        self.slots = AdapterSlots(capacity, 8)
        cache = Cache(num_blocks, BLOCK, share_prefixes=caching)
        self.scheduler = Scheduler(limits, cache, self.slots, weights)
        self.device = Device(RowState(rows, 40, BLOCK, VOCAB), BLOCK)
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.loads: list[Load] = []
        self.replaced: set[str] = set()
        """Adapters that are forgotten after their last request."""
        self.compiling: list[str] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.active_from: dict[str, Activation] = {}
        self.begun: dict[str, tuple[int, float]] = {}
        """Step of each request's first admission, and its wait for its adapter until then."""
        self.aborted: set[str] = set()
        self.steps = 0

    def add(self, request: EngineRequest, active_from: Activation = 0) -> None:
        self.requests[request.request_id] = request
        self.active_from[request.request_id] = active_from
        self.events[request.request_id] = []
        refused = self.scheduler.add(request, active_from)
        self._take([refused])
        if request.params.structured_outputs and not refused:
            self.compiling.append(request.request_id)

    def step(self) -> StepPlan:
        self.steps += 1
        lacks_one = {s.row for s in self.scheduler.batch.running if s.lacking == 1}
        plan = self.scheduler.plan(float(self.steps))
        self._check_chunks(plan, lacks_one - {admitted.row for admitted in plan.admitted})
        for load in plan.loads:
            self.device.start(load)
        self.loads += plan.loads
        for admitted in plan.admitted:
            self.begun.setdefault(admitted.request_id, (self.steps, admitted.adapter_wait_s))
        if not plan.empty:
            assert plan.num_tokens == sum(plan.counts) <= 12
            assert len(plan.rows) <= self.max_num_seqs
            self.flights.append((plan, self.device.run(plan)))
        while len(self.flights) > (0 if plan.empty else self.ahead):
            self._take(self.scheduler.commit(*self.flights.popleft()))
        self.forget_replaced()
        return plan

    def _check_chunks(self, plan: StepPlan, decoding: set[int]) -> None:
        """Prompts beside decodes stay within what the pace allows."""
        pace = self.scheduler.pace
        if pace and decoding.intersection(plan.rows):
            each = zip(plan.rows, plan.counts, strict=True)
            assert sum(count for row, count in each if row not in decoding) <= pace.most

    def forget_replaced(self) -> None:
        gone = {digest for digest in self.replaced if not self.scheduler.uses_adapter(digest)}
        for digest in gone:
            self.slots.remove(digest)
        self.replaced -= gone

    def step_loaded(self) -> StepPlan:
        """A step before which all loads have ended."""
        for _ in range(len(self.loads)):
            self.end_load(0, ok=True)
        plan = self.step()
        self.scheduler.check()
        return plan

    def end_load(self, index: int, ok: bool) -> None:
        load = self.loads.pop(index)
        if ok and self.slots.loaded(load.digest):
            self.device.install(load)
            return
        if not ok:
            self.slots.load_failed(load.digest)
        gone = AdapterUnavailable("the load failed", "model")
        self._take(self.scheduler.adapter_failed(load.digest, gone))

    def end_compiling(self, index: int, ok: bool) -> None:
        name = self.compiling.pop(index)
        if ok:
            self._take([self.scheduler.grammar_ended(name, FakeGrammar())])
        else:
            self._take([self.scheduler.grammar_ended(name, InvalidRequest("no", "regex"))])

    def run(self, max_steps: int = 3000) -> None:
        """Until all requests have ended; loads take a step."""
        while self.scheduler.busy or self.flights:
            for _ in range(len(self.compiling)):
                self.end_compiling(0, ok=True)
            self.step_loaded()
            assert self.steps < max_steps, "no progress"

    def _take(self, events: Iterable[TokenEvent | None]) -> None:
        for event in events:
            if event is not None:
                ended = self.events[event.request_id]
                assert not (ended and ended[-1].finish_reason), "an event after the last one"
                ended.append(event)

    def output(self, request_id: str) -> list[int]:
        """All of it, what the request came with included."""
        new = [t for e in self.events[request_id] for t in e.token_ids]
        return self.requests[request_id].output_ids + new

    def verify_all(self) -> None:
        for request_id in self.requests:
            self.verify(request_id)

    def verify(self, request_id: str) -> None:
        """The request ended once, with the tokens that it must have."""
        request = self.requests[request_id]
        if request.pooling is not None:
            self._verify_vector(request)
            return
        reason = self.events[request_id][-1].finish_reason
        got = self.output(request_id)
        assert got == expected_tokens(request, len(got), self.active_from[request_id])
        self._verify_prompt_logprobs(request)
        if reason == "length":
            limit = min(40, len(request.prompt_ids) + (request.params.max_tokens or 40))
            assert len(request.prompt_ids) + len(got) == limit
        elif reason == "stop":
            assert got[-1] == 0
            earlier = allowed_tokens(request, got[:-1])
            assert len(got) > request.params.min_tokens or earlier == {0}
        else:
            assert reason in ("abort", "error")
        params = request.params
        assert 0 not in got[:-1] or (params.ignore_eos and not params.structured_outputs)

    def _verify_vector(self, request: EngineRequest) -> None:
        """There is one event: the vector that it must have, or an error."""
        (event,) = self.events[request.request_id]
        assert event.token_ids == []
        if event.finish_reason in ("abort", "error"):
            assert event.vector is None
            return
        assert event.vector is not None
        expected = expected_vector(request, self.active_from[request.request_id])
        assert np.frombuffer(event.vector, "<f4") == pytest.approx([expected])

    def _verify_prompt_logprobs(self, request: EngineRequest) -> None:
        """They come with the first token, all of them, once."""
        events = self.events[request.request_id]
        got = [e.prompt_logprobs for e in events]
        params = request.params
        if params.prompt_logprobs is None or request.output_ids or not events[0].token_ids:
            assert got == [None] * len(events)
        else:
            expected = expected_prompt_logprobs(request, self.active_from[request.request_id])
            assert got == [expected] + [None] * (len(events) - 1)


GRAMMAR = StructuredOutputs(regex="the one of the fake device")


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    adapter: str | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
    tenant: str = "",
    pooling: Pooling | None = None,
    **params: object,
) -> EngineRequest:
    ref = AdapterRef("a", 1, adapter) if adapter else None
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineRequest(name, prompt, sampling, ref, bad, tenant, seed=0, pooling=pooling)


class SchedulerMachine(RuleBasedStateMachine):
    ahead = 0
    chunk_delay: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(ahead=self.ahead, chunk_delay=self.chunk_delay)
        self.versions = [0] * len(SIZES)
        for i, size in enumerate(SIZES):
            self.h.slots.add(digest_of(i), size)

    @rule(
        shared=st.integers(0, 16),
        prompt=st.lists(st.integers(1, 3), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        adapter=st.none() | st.integers(0, len(SIZES) - 1),
        ignore_eos=st.booleans(),
        choice=st.just({})
        | st.fixed_dictionaries(
            {},
            optional={
                "structured_outputs": st.just(GRAMMAR),
                "min_tokens": st.integers(1, 12),
                "allowed_token_ids": st.sets(st.integers(0, 5), min_size=2).map(tuple),
                "bad": st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)).map(
                    tuple
                ),
            },
        ),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        invocation=st.sampled_from([(), (), (1, 2), (3,), (1, 1)]),
        pooling=st.sampled_from([None, None, None, "last", "mean"]),
    )
    def submit(
        self,
        shared: int,
        prompt: list[int],
        max_tokens: int,
        adapter: int | None,
        ignore_eos: bool,
        choice: dict[str, Any],
        prompt_logprobs: int | None,
        tenant: str,
        invocation: tuple[int, ...],
        pooling: Pooling | None,
    ) -> None:
        name = f"r{len(self.h.requests)}"
        prompt = TALK[:shared] + prompt
        digest = None if adapter is None else digest_of(adapter, self.versions[adapter])
        active_from = find_invocation(prompt, invocation) if invocation else 0
        min_tokens = min(choice.get("min_tokens", 0), max_tokens)
        options = {"ignore_eos": ignore_eos, "prompt_logprobs": prompt_logprobs, **choice}
        if pooling is not None:
            options, min_tokens = {"pooling": pooling}, 0
        self.h.add(
            request(
                name,
                prompt,
                max_tokens,
                digest,
                tenant=tenant,
                **options | {"min_tokens": min_tokens},
            ),
            active_from,
        )

    @rule(index=st.integers(0, 100), ok=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.h.compiling)
    def end_compiling(self, index: int, ok: bool) -> None:
        self.h.end_compiling(index % len(self.h.compiling), ok)

    @rule()
    def step(self) -> None:
        self.h.step()

    @rule(index=st.integers(0, 1000))
    @precondition(lambda self: self.h.requests)
    def abort(self, index: int) -> None:
        name = f"r{index % len(self.h.requests)}"
        self.h._take([self.h.scheduler.abort(name)])

    @rule(index=st.integers(0, 1000))
    @precondition(lambda self: any(self.h.events.values()))
    def move(self, index: int) -> None:
        """A request goes on as another one that comes with its output."""
        begun = [name for name, events in self.h.events.items() if events]
        name = begun[index % len(begun)]
        if self.h.events[name][-1].finish_reason is None:
            self.abort(list(self.h.requests).index(name))
            moved = replace(
                self.h.requests[name],
                request_id=f"r{len(self.h.requests)}",
                output_ids=self.h.output(name),
            )
            self.h.add(moved, self.h.active_from[name])

    @rule(index=st.integers(0, 100), ok=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.h.loads)
    def end_load(self, index: int, ok: bool) -> None:
        self.h.end_load(index % len(self.h.loads), ok)

    @rule(adapter=st.integers(0, len(SIZES) - 1))
    def replace(self, adapter: int) -> None:
        """A new version under the same name; the old one is dropped when it has drained."""
        old = digest_of(adapter, self.versions[adapter])
        self.versions[adapter] += 1
        self.h.slots.add(digest_of(adapter, self.versions[adapter]), SIZES[adapter])
        self.h.replaced.add(old)
        self.h.forget_replaced()

    @invariant()
    def consistent(self) -> None:
        self.h.scheduler.check()

    def teardown(self) -> None:
        self.h.run()
        self.h.verify_all()
        assert self.h.scheduler.num_running == self.h.scheduler.num_waiting == 0
        assert self.h.scheduler._cache.num_free == 16


class OverlappedMachine(SchedulerMachine):
    """With five tokens of prompts at most beside decodes."""

    ahead = 1
    chunk_delay = 5.5 * ASSUMED_TOKEN_S


_settings = settings(
    max_examples=400 if "EXHAUSTIVE" in os.environ else 10,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPlain = SchedulerMachine.TestCase
TestPlain.settings = _settings
TestOverlapped = OverlappedMachine.TestCase
TestOverlapped.settings = _settings


@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_loses_nothing(ahead: int) -> None:
    h = Harness(ahead=ahead, num_blocks=11)
    for i in range(4):
        h.add(request(f"r{i}", [1 + i] * 9, 20, ignore_eos=True))
    while not h.scheduler.totals.preemptions:
        assert not h.scheduler.batch.stranded(9)
        h.step()
    assert h.scheduler.batch.stranded(9) == ("r2",), "the youngest that had begun made way"
    h.run()
    assert not h.scheduler.batch.stranded(9)
    h.verify_all()
    assert all(events[-1].finish_reason == "length" for events in h.events.values())


@pytest.mark.parametrize("ahead", [0, 1])
def test_prefix_is_shared_within_a_version_only(ahead: int) -> None:
    h = Harness(ahead=ahead, num_blocks=40)
    for i in range(2):
        h.slots.add(digest_of(i), 10)
    prompt = [1, 2, 3] * 4
    for adapter, cached in [(None, 0), (0, 0), (0, 8), (1, 0), (None, 8), (1, 8)]:
        name = f"r{len(h.requests)}"
        h.add(request(name, prompt, 3, None if adapter is None else digest_of(adapter)))
        h.run()
        h.verify(name)
        assert h.events[name][-1].num_cached_tokens == cached


def _ask(h: Harness, prompt: list[int], adapter: int | None, active_from: Activation) -> int:
    """Run one request; how many of its tokens came from the prefix cache."""
    name = f"r{len(h.requests)}"
    digest = None if adapter is None else digest_of(adapter)
    h.add(request(name, prompt, 2, digest, ignore_eos=True), active_from)
    h.run()
    h.verify(name)
    return h.events[name][-1].num_cached_tokens


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("budget", [3, 12])
def test_the_base_s_part_is_shared_by_all(ahead: int, budget: int) -> None:
    """Blocks before the position at which an adapter becomes active: on a block's edge, inside a
    block, at the prompt's beginning, at its last token, nowhere."""
    h = Harness(ahead=ahead, num_blocks=80, budget=budget)
    for i in range(3):
        h.slots.add(digest_of(i), 10)
    talk = TALK[:14]
    for adapter, active_from, cached in [
        (0, 8, 0),
        (0, 8, 12),  # its own part too
        (1, 8, 8),
        (None, 0, 8),
        (1, 10, 8),  # the same tokens, another position: not what it computed from 8 on
        (1, 11, 8),
        (1, 11, 12),
        (2, 12, 12),
        (2, 13, 12),
        (2, 0, 0),
        (2, 1, 0),
        (2, None, 12),
        (None, 0, 12),
    ]:
        assert _ask(h, talk, adapter, active_from) == cached, (adapter, active_from)


def test_an_adapter_that_becomes_active_again_later() -> None:
    """A second turn: what the first one's answer was computed with is no part of the base's."""
    h = Harness(num_blocks=80)
    h.slots.add(digest_of(0), 10)
    turn = TALK[:10]
    assert _ask(h, turn, 0, 5) == 0
    turn = turn + h.output("r0") + TALK[:8]
    assert _ask(h, turn, 0, 5) == 8, "still the first turn's activation"
    assert _ask(h, turn, 0, 14) == 4
    assert _ask(h, turn, None, 0) == 12


def test_both_parts_go_into_one_step() -> None:
    h = Harness()
    h.slots.add(digest_of(0), 10)
    _ask(h, [9], 0, 0)
    h.add(request("r", TALK[:11], 1, digest_of(0)), 6)
    h.step()
    h.verify("r")
    assert h.events["r"]


@pytest.mark.parametrize(("budget", "together"), [(24, True), (21, False)])
def test_a_prompt_goes_on_behind_its_snapshot(budget: int, together: bool) -> None:
    """In the same step, if it ends there: by way of the snapshot, which then is not copied."""
    limits = SchedulerLimits(2, budget, 40, 1, WAIT, VOCAB, frozenset())
    cache = Cache(16, BLOCK, 2, num_snapshots=2)
    scheduler = Scheduler(limits, cache, AdapterSlots(60, 8))
    scheduler.add(request("r", [1 + i % 7 for i in range(22)]))
    plan = scheduler.plan(0.0)
    assert plan.counts == ([20, 2] if together else [20])
    [(state, number)] = plan.snapshots
    inputs = RowState(2, 40, BLOCK, VOCAB).build(plan)
    assert inputs.state_S is not None
    if together:
        assert inputs.source_S is not None
        assert inputs.source_S.tolist() == [state, number]
        assert inputs.state_S.tolist() == [number, state]
        assert inputs.snapshots == ()
    else:
        assert (inputs.state_S.tolist(), inputs.source_S) == ([state], None)
        assert inputs.snapshots == ((state, number),)


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_hold_no_more_sequences_than_rows(ahead: int) -> None:
    """Though one has two parts in a step; with preemptions, and the prompt's log-probabilities."""
    h = Harness(ahead=ahead, rows=3, num_blocks=11)
    h.slots.add(digest_of(0), 10)
    for i in range(9):
        options = {"prompt_logprobs": 0} if i % 2 else {}
        prompt = TALK[: 2 + i % 3]
        h.add(request(f"r{i}", prompt, 20, digest_of(0), ignore_eos=True, **options), i % 3)
    h.run()
    assert h.scheduler.totals.preemptions > 0
    h.verify_all()


def test_an_adapter_that_is_nowhere_active_is_not_waited_for() -> None:
    h = Harness()
    h.slots.add(digest_of(0), 10)
    h.add(request("r", TALK[:9], 2, digest_of(0), ignore_eos=True), None)
    h.step()
    h.step()
    h.verify("r")
    assert h.events["r"][-1].finish_reason == "length"
    assert not h.loads
    assert not h.scheduler.uses_adapter(digest_of(0))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("capacity", "max_loras"), [(10, 8), (100, 1)])
def test_no_adapter_starves(ahead: int, capacity: int, max_loras: int) -> None:
    """Room for one adapter; a flood on the first one; each of the others is served in time."""
    h = Harness(ahead=ahead, num_blocks=40, capacity=capacity, max_loras=max_loras)
    n = 5
    for i in range(n):
        h.slots.add(digest_of(i), 10)
    flood = 0
    waiting = {f"cold{i}" for i in range(1, n)}
    for step in range(n * (int(WAIT) + 12)):
        if step % 2 == 0:
            h.add(request(f"flood{flood}", [1, 2], 12, digest_of(0), ignore_eos=True))
            flood += 1
        if step == 5:
            for i in range(1, n):
                h.add(request(f"cold{i}", [3], 2, digest_of(i), ignore_eos=True))
        h.step_loaded()
        waiting -= {w for w in waiting if h.events.get(w) and h.events[w][-1].finish_reason}
    assert not waiting


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (2, 1),
        pytest.param(5, 1, marks=pytest.mark.exhaustive),
        (5, 2),
        pytest.param(7, 3, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("short_of", ["memory", "max_loras"])
def test_adapters_take_turns(ahead: int, n: int, k: int, short_of: str) -> None:
    """Adapters whose requests never end by themselves, with room for k of n: in every span of
    ceil(n / k) times (the longest wait, a prompt and a load) each is admitted, and each gets
    tokens in every turn."""
    room = (k * 10, 8) if short_of == "memory" else (n * 10, k)
    h = Harness(ahead=ahead, num_blocks=100, rows=8, capacity=room[0], max_loras=room[1])
    last = dict.fromkeys((f"r{i}" for i in range(n)), 0)
    for i in range(n):
        h.slots.add(digest_of(i), 10)
        h.add(request(f"r{i}", [1 + i] * 5, 30, digest_of(i), ignore_eos=True))
    bound = -(-n // k) * (WAIT + 6)
    for step in range(200):
        h.step_loaded()
        for seq in h.scheduler.batch.running:
            last[seq.request_id] = step
        for name, admitted in last.items():
            if not (h.events[name] and h.events[name][-1].finish_reason):
                assert step - admitted <= bound
    assert all(h.events[name][-1].finish_reason == "length" for name in last)
    assert h.scheduler.totals.preemptions <= n * 30 / (WAIT - 2)
    for name in last:
        h.verify(name)


def test_a_large_adapter_gets_the_room_of_several() -> None:
    """Three small adapters in streams that never end leave it no room unless they yield."""
    h = Harness(num_blocks=100, rows=6, capacity=30)
    for i, size in enumerate([10, 10, 10, 30]):
        h.slots.add(digest_of(i), size)
    for step in range(60):
        h.add(request(f"s{step}", [1], 6, digest_of(step % 3), ignore_eos=True))
        if step == 10:
            h.add(request("large", [2], 3, digest_of(3), ignore_eos=True))
        h.step_loaded()
    assert h.begun["large"][0] - 10 <= 2 * WAIT + 6


def test_short_requests_drain_and_are_not_preempted() -> None:
    """An adapter that has to yield takes no new requests for half of the longest wait."""
    h = Harness(num_blocks=100, capacity=10)
    for i in range(2):
        h.slots.add(digest_of(i), 10)
    for step in range(40):
        h.add(request(f"hot{step}", [1], 2, digest_of(0), ignore_eos=True))
        if step == 10:
            h.add(request("cold", [2], 2, digest_of(1), ignore_eos=True))
        h.step_loaded()
    assert h.begun["cold"][0] - 10 <= WAIT
    assert h.scheduler.totals.preemptions == 0


def test_a_long_prompt_gets_a_token_before_it_yields() -> None:
    """Without the prefix cache a prompt of more steps than a turn has would begin anew for ever."""
    h = Harness(num_blocks=100, rows=4, budget=2, capacity=10, caching=False)
    for i in range(2):
        h.slots.add(digest_of(i), 10)
        h.add(request(f"r{i}", [1] * 30, 4, digest_of(i), ignore_eos=True))
    h.run(400)
    assert h.scheduler.totals.preemptions <= sum(len(h.output(name)) for name in h.requests)
    assert h.steps <= 8 * (15 + 5)
    h.verify_all()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("num_blocks", "again"), [(40, False), (12, True)])
def test_parked_requests_keep_their_blocks(ahead: int, num_blocks: int, again: bool) -> None:
    """Nothing is computed twice where blocks suffice, and where they don't, all still end."""
    h = Harness(ahead=ahead, num_blocks=num_blocks, capacity=10, caching=False)
    for i in range(2):
        h.slots.add(digest_of(i), 10)
        h.add(request(f"r{i}", [1 + i] * 5, 30, digest_of(i), ignore_eos=True))
    computed = 0
    for _ in range(400):
        computed += h.step_loaded().num_tokens
    assert h.scheduler.totals.preemptions > 2
    h.verify_all()
    needed = sum(5 + len(h.output(name)) - 1 for name in h.requests)
    assert (computed > needed) == again


@pytest.mark.parametrize("caching", [False, True])
def test_no_turn_ends_before_a_token(caching: bool) -> None:
    """A prompt of more steps than the longest wait, and an older request that waits for long."""
    h = Harness(num_blocks=100, budget=2, capacity=10, caching=caching)
    for i in range(2):
        h.slots.add(digest_of(i), 10)
    h.add(request("older", [1], 30, digest_of(0), ignore_eos=True))
    h.add(request("long", [2] * 30, 4, digest_of(1), ignore_eos=True))
    while h.scheduler.totals.preemptions < 2:
        h.step_loaded()
    assert h.begun["long"][0] + 14 <= h.steps
    assert h.output("long")
    h.run()
    h.verify_all()


def test_the_wait_for_an_adapter_is_reported() -> None:
    h = Harness()
    h.slots.add(digest_of(0), 10)
    h.add(request("cold", [1], 9, digest_of(0), ignore_eos=True))
    for _ in range(4):
        h.step()
    h.add(request("later", [1], 9, digest_of(0), ignore_eos=True))
    h.step()
    h.end_load(0, ok=True)
    h.step()
    h.add(request("warm", [1], 9, digest_of(0), ignore_eos=True))
    h.step()
    assert h.begun == {"cold": (6, 5.0), "later": (6, 2.0), "warm": (7, 0.0)}
    h.run()


def _served(h: Harness, tenant: str) -> float:
    """Weighted tokens that a tenant's requests got: prompts when they begin, output as it comes."""
    return sum(
        len(h.requests[name].prompt_ids) + 2 * len(h.output(name))
        for name in h.begun
        if h.requests[name].tenant == tenant
    )


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_backlogged_tenants_are_served_by_weight(ahead: int, weight: float) -> None:
    """One sends long requests, the other many short ones. Their service differs by at most twice
    what can be in the batch at once (the bound of the paper: 2 max(L_input, 2 M))."""
    h = Harness(ahead=ahead, num_blocks=60, rows=4, budget=12, weights={"b": weight}, caching=False)
    for i in range(80):
        h.add(request(f"a{i}", [1] * 12, 20, tenant="a", ignore_eos=True))
    for i in range(500):
        h.add(request(f"b{i}", [2] * 2, 4, tenant="b", ignore_eos=True))
    bound = 2 * max(12, 2 * 4 * 20)
    for _ in range(400):
        h.step()
        assert abs(_served(h, "a") - _served(h, "b") / weight) <= bound
    assert h.scheduler.num_waiting > 50
    assert {r.tenant for n, r in h.requests.items() if n not in h.begun} == {"a", "b"}
    assert _served(h, "a") > 2 * bound


def test_a_flood_does_not_hold_up_another_tenant() -> None:
    """A thousand requests wait; another tenant's begins with the next row that becomes free."""
    h = Harness(rows=4, num_blocks=60)
    for i in range(1000):
        h.add(request(f"flood{i}", [1, 2], 8, tenant="flood", ignore_eos=True))
    for step in range(200):
        if step % 20 == 10:
            h.add(request(f"other{step}", [3], 4, tenant="other", ignore_eos=True))
            came = step + 1
        h.step()
        if step % 20 == 19 and step > 10:
            assert h.begun[f"other{step - 9}"][0] - came <= 8
    h.scheduler.check()
    for name in list(h.requests):
        h._take([h.scheduler.abort(name)])
    h.scheduler.check()
    assert not h.scheduler.busy


def test_what_is_computed_again_is_not_charged_again() -> None:
    h = Harness(num_blocks=11, caching=False)
    for i in range(4):
        h.add(request(f"r{i}", [1 + i] * 9, 20, ignore_eos=True, tenant="a"))
    h.add(request("b", [9], 1, tenant="b"))
    h.run()
    assert h.scheduler.totals.preemptions > 0
    (account,) = [a for a in h.scheduler.batch.waiting.accounts if a.name == "a"]
    assert account.counter == 4 * (9 + 2 * 20)


def test_requests_pass_one_that_waits_for_its_grammar() -> None:
    h = Harness()
    h.add(request("slow", [1], 3, structured_outputs=GRAMMAR))
    h.add(request("base", [1, 2], 3, ignore_eos=True))
    for _ in range(4):
        h.step()
    assert h.events["base"][-1].finish_reason == "length"
    assert not h.events["slow"]
    h.end_compiling(0, ok=True)
    h.run()
    h.verify("slow")


def test_a_grammar_that_fails_or_comes_too_late() -> None:
    h = Harness()
    h.add(request("wrong", [1], 3, structured_outputs=GRAMMAR))
    h.add(request("left", [1], 3, structured_outputs=GRAMMAR))
    h._take([h.scheduler.abort("left")])
    h.end_compiling(0, ok=False)
    assert [e.finish_reason for e in h.events["left"]] == ["abort"]
    assert h.events["wrong"][0].error == ("invalid_request_error", "no", "regex")
    h.end_compiling(0, ok=True)
    assert not h.scheduler.busy
    assert h.scheduler.grammar_ended("left", InvalidRequest("no")) is None


def test_paced_requests_hold_up_nobody() -> None:
    """Overlapped, a request with a grammar runs in every second step, one without in each."""
    h = Harness(ahead=1)
    h.add(request("paced", [1], 12, ignore_eos=True, bad=((1, 2), (3, 4, 5))))
    h.add(request("free", [2], 12, ignore_eos=True))
    for _ in range(13):
        h.step()
    assert len(h.output("free")) == 12
    assert len(h.output("paced")) == 6
    h.run()
    h.verify_all()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [8, 40])
def test_prompt_logprobs_come_once_and_complete(ahead: int, blocks: int) -> None:
    """In chunks, with preemptions, and although the prompt is in the cache."""
    h = Harness(ahead=ahead, num_blocks=blocks)
    for i in range(6):
        h.add(request(f"r{i}", [1, 2, 3] * 4 + [i] * (i % 3), 9, ignore_eos=True))
        h.add(request(f"p{i}", [1, 2, 3] * 5, 9, ignore_eos=True, prompt_logprobs=0))
    h.run()
    assert (h.scheduler.totals.preemptions > 0) == (blocks == 8)
    h.verify_all()


def test_prompt_logprobs_and_the_prefix_cache() -> None:
    """Such a request takes nothing from the cache, but others take from it."""
    h = Harness()
    for name, options in [("a", {"prompt_logprobs": 0}), ("b", {}), ("c", {"prompt_logprobs": 0})]:
        h.add(request(name, [1, 2, 3] * 5, 1, **options))
        h.run()
        h.verify(name)
    assert [h.events[name][0].num_cached_tokens for name in "abc"] == [0, 12, 0]


@pytest.mark.parametrize("ahead", [0, 1])
def test_pooled_requests_come_in_chunks_are_preempted_and_use_the_cache(ahead: int) -> None:
    h = Harness(ahead=ahead, num_blocks=8)
    for i in range(6):
        h.add(request(f"r{i}", [1, 2, 3] * 4 + [i] * (i % 3), 9, ignore_eos=True))
        h.add(request(f"p{i}", [1, 2, 3] * 5, pooling="mean" if i % 2 else "last"))
    h.run()
    assert h.scheduler.totals.preemptions > 0
    h.verify_all()
    h = Harness(ahead=ahead)
    for name, pooling in [("a", "mean"), ("b", "last"), ("c", "mean"), ("d", "last")]:
        h.add(request(name, [1, 2, 3] * 5, pooling=pooling))
        h.run()
        h.verify(name)
    assert [h.events[name][0].num_cached_tokens for name in "abcd"] == [0, 12, 0, 12]


def test_a_pooled_prompt_may_fill_the_context() -> None:
    h = Harness()
    for name, count in (("fits", 40), ("too long", 41)):
        h.add(request(name, [1] * count, pooling="last"))
        h.run()
        h.verify(name)
    assert h.events["fits"][0].finish_reason == "stop"
    (error,) = [h.events["too long"][0].error]
    assert error is not None and error[0] == "context_length_exceeded" and error[2] == "prompt"


def test_base_requests_pass_a_waiting_adapter() -> None:
    h = Harness()
    h.slots.add(digest_of(0), 10)
    h.add(request("cold", [1], 2, digest_of(0)))
    h.add(request("base", [1, 2], 3, ignore_eos=True))
    for _ in range(4):
        h.step()  # the load never ends
    assert h.events["base"][-1].finish_reason == "length"
    assert not h.events["cold"]


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": (1, VOCAB)}),
        ("allowed_token_ids", {"allowed_token_ids": (VOCAB, 1)}),
        ("bad_words", {"bad": ((VOCAB,),)}),
        ("bad_words", {"bad": ((1, -1),)}),
        ("bad_words", {"bad": ((),)}),
        ("bad_words", {"bad": tuple((i,) for i in range(VOCAB))}),
        ("bad_words", {"bad": ((3,), (4,)), "allowed_token_ids": (3, 4)}),
        ("min_tokens", {"allowed_token_ids": (0, 4), "stop_token_ids": (4,), "min_tokens": 1}),
        ("min_tokens", {"bad": tuple((i,) for i in range(1, VOCAB)), "min_tokens": 1}),
    ],
)
def test_choices_that_cannot_be(param: str, options: dict[str, Any]) -> None:
    """Token ids out of range, and rules that leave no token: refused, and nothing runs."""
    h = Harness()
    h.add(request("r", [1], 2, **options))
    (event,) = h.events["r"]
    assert event.error is not None
    assert (event.error[0], event.error[2]) == ("invalid_request_error", param)
    assert not h.scheduler.busy


@pytest.mark.parametrize(
    ("output_ids", "options"),
    [
        ([VOCAB], {}),
        ([-1], {}),
        ([1, 2], {"max_tokens": 2}),
        ([1] * 39, {"max_tokens": 100}),
        ([1, 0], {}),
        ([1, 7, 2], {"stop_token_ids": (7,), "ignore_eos": True}),
        ([0], {"ignore_eos": True, "structured_outputs": GRAMMAR}),
    ],
)
def test_output_that_cannot_go_on(output_ids: list[int], options: dict[str, Any]) -> None:
    """Output of another engine that is out of range, or has ended already, is refused."""
    h = Harness()
    h.add(replace(request("r", [1], **options), output_ids=output_ids))
    (event,) = h.events["r"]
    assert event.error is not None
    assert (event.error[0], event.error[2]) == ("invalid_request_error", "output_ids")
    assert not h.scheduler.busy


def test_output_that_the_form_does_not_allow() -> None:
    class Refusing(FakeGrammar):
        def accept(self, token_id: int) -> None:
            raise InvalidRequest("not that", "regex")

    h = Harness()
    asked = request("r", [1], 4, structured_outputs=GRAMMAR)
    h.add(replace(asked, output_ids=[3, 4]))
    event = h.scheduler.grammar_ended("r", Refusing())
    assert event is not None
    assert event.error == ("invalid_request_error", "output_ids: not that", "output_ids")


def test_output_of_another_engine_counts_as_output() -> None:
    """It is in the prefix cache like any tokens, but what is reported there is of the prompt."""
    h = Harness(num_blocks=40)
    asked = request("whole", [1, 2, 3], 20, ignore_eos=True)
    h.add(asked)
    h.run()
    output = h.output("whole")
    h.add(replace(asked, request_id="rest", output_ids=output[:15]))
    h.run()
    h.verify("rest")
    assert h.output("rest") == output
    assert h.events["rest"][-1].num_cached_tokens == 3
    assert h.scheduler.totals.cached_tokens == 16


def test_refusals_are_events() -> None:
    h = Harness()
    for name, prompt, digest in [
        ("empty", [], None),
        ("range", [1, VOCAB], None),
        ("long", [1] * 40, None),
        ("gone", [1], digest_of(9)),
    ]:
        h.add(request(name, prompt, 2, digest))
        (event,) = h.events[name]
        assert event.finish_reason == "error" and event.error is not None
    assert not h.scheduler.busy
