"""Steps that yield several tokens of a row give each request what one at a time gives it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidRequest
from weft.core.messages import Tokens
from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.schedule.batch import Draft
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult, Words
from weft.schedule.queue import Account
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots

VOCAB = 50
BLOCK = 4
MAX_MODEL_LEN = 40
LONGEST = 20
"""Tokens of an output."""


class SeveralAtOnce(Scheduler):
    """Plans each decode with as many tokens as the next one of `widths` says."""

    widths = cycle([1])

    def _plan_decodes(self, draft: Draft, resting: frozenset[Account]) -> None:
        for seq in self.batch.running:
            if seq.lacking > 1:
                draft.chunks.append(seq)
            elif seq.known < seq.rules.known_limit and draft.num_left:
                count = min(next(self.widths), draft.num_left, seq.rules.limit - seq.known)
                while seq.known + count - 1 > len(seq.holding.blocks) * BLOCK:
                    if not self.batch.grow(seq, draft):
                        return
                draft.sequences.append(seq)
                draft.starts.append(seq.computed)
                draft.counts.append(count)
                draft.num_samples.append(count)
                draft.num_left -= count
                seq.known += count

    def commit(self, plan: StepPlan, result: StepResult) -> Tokens:
        for seq in self.batch.flights[plan.step].sequences:
            seq.look_at()
        return super().commit(plan, result)


class Refusing:
    """A grammar that takes so many tokens and no more."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def accept(self, token_id: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest("no more", "regex")

    def fill(self, words: Words) -> None:
        pass


@dataclass
class Played:
    """What the requests got, and the keys of the blocks that others could share then."""

    outputs: dict[str, list[object]]
    registered: set[bytes]


def play(
    requests: list[EngineRequest],
    refusals: dict[str, int],
    widths: list[int],
    ahead: int,
    num_blocks: int,
) -> Played:
    limits = SchedulerLimits(4, 24, MAX_MODEL_LEN, 1, 1.0, VOCAB, frozenset({0}))
    cache = Cache(num_blocks, BLOCK)
    scheduler = SeveralAtOnce(limits, cache, AdapterSlots(1, 1))
    scheduler.widths = cycle(widths)
    for request in requests:
        assert scheduler.add(request) is None
    for name, count in refusals.items():
        scheduler.grammar_ended(name, Refusing(count))
    prompts = {r.request_id: len(r.prompt_ids) for r in requests}
    yields = {name: random.Random(name).choices(range(VOCAB), k=LONGEST) for name in prompts}
    rows: dict[int, str] = {}
    events: dict[str, list[TokenEvent]] = {name: [] for name in prompts}
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    for now in range(2000):
        plan = scheduler.plan(float(now))
        rows.update({a.row: a.request_id for a in plan.admitted})
        tokens: list[int] = []
        entries = zip(plan.rows, plan.starts, plan.counts, plan.num_samples, strict=True)
        for row, start, count, n in entries:
            end = start + count + 1 - prompts[rows[row]]
            tokens += yields[rows[row]][end - n : end]
        logprobs = [TokenLogprob(float(token), 1, []) for token in tokens]
        prompt_logprobs = {
            i: [TokenLogprob(0.0, 2, [])] * min(count, prompts[rows[row]] - 1 - start)
            for i, (row, start, count) in enumerate(
                zip(plan.rows, plan.starts, plan.counts, strict=True)
            )
        }
        if not plan.empty:
            flights.append((plan, StepResult(tokens, [*logprobs], prompt_logprobs)))
        while len(flights) > (0 if plan.empty else ahead):
            for event in scheduler.commit(*flights.popleft()):
                events[event.request_id].append(event)
        scheduler.check()
        if not scheduler.busy and not flights:
            registered = {key for key in cache._key_of if key is not None}
            return Played({n: got_by(e) for n, e in events.items()}, registered)
    raise AssertionError("no progress")


def got_by(events: list[TokenEvent]) -> list[object]:
    """What a client sees, whatever comes together."""
    assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
    assert [e.prompt_logprobs for e in events[1:]] == [None] * (len(events) - 1)
    logprobs = [p for e in events if e.logprobs for p in e.logprobs]
    tokens = [token for e in events for token in e.token_ids]
    assert [p.logprob for p in logprobs] == tokens
    last = events[-1]
    asked = events[0].prompt_logprobs
    return [tokens, last.finish_reason, last.stop_reason, last.error, asked and len(asked)]


@st.composite
def asks(draw: st.DrawFn) -> tuple[list[EngineRequest], dict[str, int]]:
    """Requests, and after how many tokens the grammars of some of them refuse."""
    requests, refusals = [], {}
    for i in range(draw(st.integers(1, 6))):
        name, form = f"r{i}", draw(st.sampled_from([None, None, "x"]))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, LONGEST - 2)),
            stop_token_ids=draw(st.sampled_from([(), tuple(range(1, VOCAB, 7))])),
            ignore_eos=draw(st.booleans()),
            structured_outputs=StructuredOutputs(regex=form) if form else None,
            logprobs=0,
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        bad = draw(st.sampled_from([(), ((1, 2), (3, 4, 5))]))
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=14))
        requests.append(EngineRequest(name, prompt, params, bad_token_ids=bad, seed=0))
        if form:
            refusals[name] = draw(st.integers(0, LONGEST))
    return requests, refusals


@pytest.mark.parametrize("ahead", [0, 1])
@given(asks=asks(), widths=st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_several_are_as_one_at_a_time(
    ahead: int, asks: tuple[list[EngineRequest], dict[str, int]], widths: list[int]
) -> None:
    requests, refusals = asks
    alone = play(requests, refusals, [1], 0, 100)
    assert play(requests, refusals, widths, ahead, 100) == alone
    scarce = play(requests, refusals, widths, ahead, 12)  # with preemptions
    assert scarce.outputs == alone.outputs
