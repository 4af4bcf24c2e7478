"""Scheduler, blocks, slots and step inputs together, driven at random against an oracle."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import pytest
from device import (
    VOCAB,
    Device,
    FakeGrammar,
    allowed_tokens,
    expected_prompt_logprobs,
    expected_tokens,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.errors import AdapterUnavailable, InvalidRequest
from weft.core.types import (
    AdapterRef,
    EngineRequest,
    SamplingParams,
    StructuredOutputs,
    TokenEvent,
)
from weft.engine.blocks import BlockPool
from weft.engine.inputs import RowState
from weft.engine.plan import StepPlan, StepResult
from weft.engine.scheduler import Limits, Scheduler
from weft.residency.slots import AdapterSlots, Load

BLOCK = 4
WAIT_STEPS = 6
SIZES = [10, 20, 30, 40, 25, 5]
"""Elements of each adapter; the arena has 60."""


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
    ) -> None:
        limits = Limits(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=40,
            block_size=BLOCK,
            max_loras=max_loras,
            max_adapter_wait_steps=WAIT_STEPS,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({0}),
            enable_prefix_caching=caching,
        )
        self.ahead = ahead
        self.slots = AdapterSlots(capacity, 8)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks), self.slots)
        self.device = Device(RowState(rows, 40, BLOCK, VOCAB), BLOCK)
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.loads: list[Load] = []
        self.compiling: list[str] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.steps = 0

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.events[request.request_id] = []
        refused = self.scheduler.add(request, seed=0)
        self._take([refused])
        if request.params.structured_outputs and not refused:
            self.compiling.append(request.request_id)

    def step(self) -> None:
        self.steps += 1
        plan = self.scheduler.plan()
        for load in plan.loads:
            for slot in load.evicted_slots:
                self.device.installed.pop(slot, None)
        self.loads += plan.loads
        if not plan.empty:
            assert plan.num_tokens == sum(plan.counts) <= 12
            self.flights.append((plan, self.device.run(plan)))
        while len(self.flights) > (0 if plan.empty else self.ahead):
            self._take(self.scheduler.commit(*self.flights.popleft()))
        for digest in self.scheduler.take_dropped():
            self.slots.remove(digest)

    def end_load(self, index: int, ok: bool) -> None:
        load = self.loads.pop(index)
        if ok and self.slots.loaded(load.digest):
            self.device.installed[load.slot] = load.digest
            return
        if not ok:
            self.slots.load_failed(load.digest)
        gone = AdapterUnavailable("the load failed", "model")
        self._take(self.scheduler.adapter_failed(load.digest, gone))

    def end_compiling(self, index: int, ok: bool) -> None:
        name = self.compiling.pop(index)
        if ok:
            self.scheduler.grammar_ready(name, FakeGrammar())
        else:
            self._take([self.scheduler.grammar_failed(name, InvalidRequest("no", "regex"))])

    def run(self, max_steps: int = 3000) -> None:
        """Until all requests have ended; loads take a step."""
        while self.scheduler.busy or self.flights:
            for _ in range(len(self.loads)):
                self.end_load(0, ok=True)
            for _ in range(len(self.compiling)):
                self.end_compiling(0, ok=True)
            self.step()
            self.scheduler.check()
            assert self.steps < max_steps, "no progress"

    def _take(self, events: list[TokenEvent | None] | list[TokenEvent]) -> None:
        for event in events:
            if event is not None:
                ended = self.events[event.request_id]
                assert not (ended and ended[-1].finish_reason), "an event after the last one"
                ended.append(event)

    def output(self, request_id: str) -> list[int]:
        return [t for e in self.events[request_id] for t in e.token_ids]

    def verify(self, request_id: str) -> None:
        """The request ended once, with the tokens that it must have."""
        request = self.requests[request_id]
        reason = self.events[request_id][-1].finish_reason
        got = self.output(request_id)
        assert got == expected_tokens(request, len(got))
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

    def _verify_prompt_logprobs(self, request: EngineRequest) -> None:
        """They come with the first token, all of them, once."""
        events = self.events[request.request_id]
        got = [e.prompt_logprobs for e in events]
        if request.params.prompt_logprobs is None or not events[0].token_ids:
            assert got == [None] * len(events)
        else:
            assert got == [expected_prompt_logprobs(request)] + [None] * (len(events) - 1)


GRAMMAR = StructuredOutputs(regex="the one of the fake device")


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    adapter: str | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> EngineRequest:
    ref = AdapterRef("a", 1, adapter) if adapter else None
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineRequest(name, prompt, sampling, ref, bad)


class SchedulerMachine(RuleBasedStateMachine):
    ahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(ahead=self.ahead)
        self.versions = [0] * len(SIZES)
        for i, size in enumerate(SIZES):
            self.h.slots.add(digest_of(i), size)

    @rule(
        prompt=st.lists(st.integers(1, 3), min_size=1, max_size=30),
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
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: int | None,
        ignore_eos: bool,
        choice: dict[str, Any],
        prompt_logprobs: int | None,
    ) -> None:
        name = f"r{len(self.h.requests)}"
        digest = None if adapter is None else digest_of(adapter, self.versions[adapter])
        min_tokens = min(choice.get("min_tokens", 0), max_tokens)
        options = {"ignore_eos": ignore_eos, "prompt_logprobs": prompt_logprobs, **choice}
        self.h.add(
            request(name, prompt, max_tokens, digest, **options | {"min_tokens": min_tokens})
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
        if self.h.scheduler.drop_adapter(old):
            self.h.slots.remove(old)

    @invariant()
    def consistent(self) -> None:
        self.h.scheduler.check()

    def teardown(self) -> None:
        self.h.run()
        for name in self.h.requests:
            self.h.verify(name)
        assert self.h.scheduler.num_running == self.h.scheduler.num_waiting == 0
        assert self.h.scheduler._blocks.num_free == 16


class OverlappedMachine(SchedulerMachine):
    ahead = 1


_settings = settings(
    max_examples=60,
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
    h.run()
    assert h.scheduler.preemptions > 0
    for name in h.requests:
        h.verify(name)
        assert h.events[name][-1].finish_reason == "length"


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
    for step in range(n * (WAIT_STEPS + 12)):
        if step % 2 == 0:
            h.add(request(f"flood{flood}", [1, 2], 12, digest_of(0), ignore_eos=True))
            flood += 1
        if step == 5:
            for i in range(1, n):
                h.add(request(f"cold{i}", [3], 2, digest_of(i), ignore_eos=True))
        for _ in range(len(h.loads)):
            h.end_load(0, ok=True)
        h.step()
        h.scheduler.check()
        waiting -= {w for w in waiting if h.events.get(w) and h.events[w][-1].finish_reason}
    assert not waiting


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
    assert h.scheduler.grammar_failed("left", InvalidRequest("no")) is None


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
    for name in h.requests:
        h.verify(name)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [8, 40])
def test_prompt_logprobs_come_once_and_complete(ahead: int, blocks: int) -> None:
    """In chunks, with preemptions, and although the prompt is in the cache."""
    h = Harness(ahead=ahead, num_blocks=blocks)
    for i in range(6):
        h.add(request(f"r{i}", [1, 2, 3] * 4 + [i] * (i % 3), 9, ignore_eos=True))
        h.add(request(f"p{i}", [1, 2, 3] * 5, 9, ignore_eos=True, prompt_logprobs=0))
    h.run()
    assert (h.scheduler.preemptions > 0) == (blocks == 8)
    for name in h.requests:
        h.verify(name)


def test_prompt_logprobs_and_the_prefix_cache() -> None:
    """Such a request takes nothing from the cache, but others take from it."""
    h = Harness()
    for name, options in [("a", {"prompt_logprobs": 0}), ("b", {}), ("c", {"prompt_logprobs": 0})]:
        h.add(request(name, [1, 2, 3] * 5, 1, **options))
        h.run()
        h.verify(name)
    assert [h.events[name][0].num_cached_tokens for name in "abc"] == [0, 12, 0]


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
