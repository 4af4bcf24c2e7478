"""With guesses, each request gets the tokens that it gets without them, in fewer steps."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InvalidRequest, WeftError
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.schedule.cache import Cache
from weft.schedule.guesses import MAX_GUESSES, WIDTH, Guesser
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots

BLOCK, MAX_MODEL_LEN, ROWS = 4, 64, 6
VOID = 9
"""What a row samples whose context is not the request's own text."""


@dataclass
class Device:
    """Samples the next token of each request's text, as long as it was given that text."""

    texts: dict[str, list[int]]
    rows: dict[int, str] = field(default_factory=dict)
    inputs: dict[str, dict[int, int]] = field(default_factory=dict)
    """By request and position: the tokens whose keys and values are there."""
    known: dict[int, int] = field(default_factory=dict)
    """By row: the tokens that it was admitted with."""
    last: dict[int, int] = field(default_factory=dict)
    """By row: what it sampled last."""

    def run(self, plan: StepPlan) -> StepResult:
        for a in plan.admitted:
            self.rows[a.row] = a.request_id
            self.known[a.row] = len(a.token_ids)
            self.inputs[a.request_id] = dict(enumerate(a.token_ids))
        fed = {(row, position): token for row, position, token in plan.fed}
        tokens: list[list[int]] = []
        before = dict(self.last)
        entries = zip(plan.rows, plan.starts, plan.counts, plan.num_samples, strict=True)
        for row, start, count, num in entries:
            inputs, text = self.inputs[self.rows[row]], self.texts[self.rows[row]]
            if (row, start) in fed:
                inputs[start] = fed[row, start]
            elif start >= self.known[row]:
                inputs[start] = before[row]
            end = start + count
            if num:
                right = [inputs.get(i) for i in range(end)] == text[:end]
                tokens.append([text[end] if right else VOID])
                self.last[row] = tokens[-1][0]
        return StepResult(tokens)


def play(
    requests: list[EngineRequest],
    texts: dict[str, list[int]],
    speculative: str,
    ahead: int,
    num_blocks: int,
    fails_at: int = -1,
) -> tuple[dict[str, tuple[list[int], str | None]], int]:
    """The output of each request, and the number of steps."""
    limits = SchedulerLimits(
        ROWS, 24, MAX_MODEL_LEN, 1, 1.0, VOID + 1, frozenset({0}), speculative=speculative
    )
    scheduler = Scheduler(limits, Cache(num_blocks, BLOCK), AdapterSlots(1, 1))
    for request in requests:
        assert scheduler.add(request) is None
    device = Device(texts)
    events: dict[str, list[TokenEvent]] = {name: [] for name in texts}
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    for now in range(2000):
        plan = scheduler.plan(float(now))
        if not plan.empty:
            assert len(plan.rows) <= ROWS + 1
            flights.append((plan, device.run(plan)))
        if now >= fails_at >= 0 and flights and len(set(flights[0][0].rows)) > 1:
            fails_at = -1
            scheduler.fail([planned for planned, _ in flights], WeftError("void"))
            flights.clear()
        while len(flights) > (0 if plan.empty else ahead):
            for event in scheduler.commit(*flights.popleft()):
                events[event.request_id].append(event)
        scheduler.check()
        if not scheduler.busy and not flights:
            outputs = {
                name: ([t for e in got for t in e.token_ids], got[-1].finish_reason)
                for name, got in events.items()
            }
            assert scheduler.totals.generated_tokens == sum(len(o) for o, _ in outputs.values())
            return outputs, now
    raise AssertionError("no progress")


@st.composite
def asks(draw: st.DrawFn) -> tuple[list[EngineRequest], dict[str, list[int]]]:
    """Requests, and the text of each, prompt included, that repeats itself."""
    requests, texts = [], {}
    for i in range(draw(st.integers(1, 4))):
        pattern = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
        text = (pattern * (MAX_MODEL_LEN + 1))[: MAX_MODEL_LEN + 1]
        for position in draw(st.lists(st.integers(0, MAX_MODEL_LEN), max_size=6)):
            text[position] = draw(st.integers(1, 6))
        num_prompt = draw(st.integers(1, 24))
        if draw(st.booleans()):
            text[draw(st.integers(num_prompt, MAX_MODEL_LEN))] = 0  # where it ends
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 32)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            speculative=draw(st.sampled_from([None, None, "off"])),
        )
        name = f"r{i}"
        requests.append(EngineRequest(name, text[:num_prompt], params, seed=0))
        texts[name] = text
    return requests, texts


@pytest.mark.parametrize("ahead", [0, 1])
@settings(max_examples=25)
@given(asks=asks(), fails_at=st.integers(-1, 20))
def test_outputs_are_those_without_guesses(
    ahead: int, asks: tuple[list[EngineRequest], dict[str, list[int]]], fails_at: int
) -> None:
    requests, texts = asks
    alone, _ = play(requests, texts, "off", 0, 100)
    for name, (output, _) in alone.items():
        prompt = next(len(r.prompt_ids) for r in requests if r.request_id == name)
        assert output == texts[name][prompt : prompt + len(output)]
    assert play(requests, texts, "ngram", ahead, 100)[0] == alone
    assert play(requests, texts, "ngram", ahead, 17, fails_at)[0] == alone  # with preemptions


@pytest.mark.parametrize("ahead", [0, 1])
def test_text_that_repeats_takes_fewer_steps(ahead: int) -> None:
    text = [1, 2, 3, 4, 5] * 13
    request = EngineRequest("r", text[:12], SamplingParams(max_tokens=40, temperature=0.0), seed=0)
    _, without = play([request], {"r": text}, "off", ahead, 100)
    _, steps = play([request], {"r": text}, "ngram", ahead, 100)
    assert steps <= without / 2


def test_text_that_does_not_repeat_has_no_guesses() -> None:
    guesser = Guesser(40)
    assert guesser.guess(list(range(50)), 0, 7) == []
    assert not guesser.guessing


def test_the_number_of_guesses_follows_their_success() -> None:
    guesser, tokens = Guesser(20), [1, 2, 3, 4] * 5
    sizes = []
    for _ in range(4):
        guesses = guesser.guess(tokens, 0, 100)
        sizes.append(len(guesses))
        tokens += [*guesses, (tokens + guesses)[-4]]
        for i in range(len(guesses)):
            assert guesser.fits(
                len(tokens) - 1 - len(guesses) + i, tokens[: len(tokens) - len(guesses) + i]
            )
        assert guesser.settle() == (len(guesses), len(guesses))
    assert sizes == [3, 5, MAX_GUESSES, MAX_GUESSES]
    assert guesser.guess(tokens, 0, 100)
    assert not guesser.fits(len(tokens), [*tokens, 9])
    assert guesser.settle() == (MAX_GUESSES, 0)
    assert guesser.guess([*tokens, 9], 0, 100) == []  # nothing like this stands further up


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"structured_outputs": StructuredOutputs(regex="x")},
        {"speculative": "off"},
    ],
    ids=str,
)
def test_some_requests_are_not_guessed_at(options: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=20, **options)  # type: ignore[arg-type]
    limits = SchedulerLimits(ROWS, 24, 64, 1, 1.0, 10, frozenset({0}), speculative="ngram")
    scheduler = Scheduler(limits, Cache(40, BLOCK), AdapterSlots(1, 1))
    scheduler.add(EngineRequest("r", [1, 2, 3] * 4, params, seed=0))
    if params.structured_outputs is None:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, StepResult([[1]]))
        assert scheduler.plan(1.0).fed == []


def test_a_word_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(speculative="medusa")
    assert caught.value.param == "speculative"


def test_after_a_miss_it_waits_for_tokens_that_it_would_have_guessed() -> None:
    guesser, pattern, waits = Guesser(8), [1, 2, 3, 4], []
    tokens = pattern * 2
    for unknown in range(100, 106):
        came = 0
        while not guesser.guess(tokens, 0, MAX_GUESSES):
            tokens.append(pattern[came % 4])
            came += 1
        waits.append(came)
        assert not guesser.fits(len(tokens), [*tokens, unknown])
        assert guesser.settle()[1] == 0
        tokens.append(unknown)
    needed = [0, 2, 4, 8, 8, 8]
    assert all(0 <= came - at_least <= 7 for came, at_least in zip(waits, needed, strict=True))


@pytest.mark.parametrize("num_words", [2, 4, 16])
@pytest.mark.parametrize("length", [100, 2000])
def test_guesses_that_are_seldom_right_cost_little(num_words: int, length: int) -> None:
    """A step with guesses holds up the next one, which costs a token unless a guess was right."""
    rng, cost, num_tokens = random.Random(num_words), 0, 0
    while num_tokens < 2000:
        text = [rng.randrange(num_words) for _ in range(length)]
        guesser, tokens = Guesser(WIDTH), text[:WIDTH]
        while len(tokens) < len(text) - MAX_GUESSES - 1:
            guesses = guesser.guess(tokens, 0, MAX_GUESSES)
            tokens.append(text[len(tokens)])
            if guesses:
                for _ in guesses:
                    if not guesser.fits(len(tokens) - 1, tokens):
                        break
                    tokens.append(text[len(tokens)])
                cost += 1 - guesser.settle()[1]
        num_tokens += len(tokens)
    assert cost <= 0.03 * num_tokens
