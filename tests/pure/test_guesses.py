"""With guesses, each request gets the tokens that it gets without them, in fewer steps."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InvalidRequest, WeftError
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.core.units import MAX_GUESSES, NUM_DRAFTS
from weft.schedule.cache import Cache
from weft.schedule.drafts import HeadGuesser
from weft.schedule.guesses import WIDTH, TextGuesser
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots

BLOCK, MAX_MODEL_LEN, ROWS = 4, 64, 6
VOID = 9
"""What a row samples whose context is not the request's own text."""


Token = tuple[str, int]
"""The salt of the request that computed it, and the token."""


@dataclass
class States:
    """What tokens have made of each recurrent state: the list of these tokens. As on a device, it
    has those of decodes alone, and of guesses only what is kept for the next step."""

    held: dict[int, list[Token]] = field(default_factory=dict)
    """By state or snapshot."""
    kept: dict[tuple[int, int], Token] = field(default_factory=dict)
    """By state and position, the last few positions."""
    running: list[Token] = field(default_factory=list)
    last: tuple[int, int] = -1, 0
    """State and number of tokens of the entry before."""

    def take(self, state: int, start: int, tokens: list[Token], lag: int) -> list[Token]:
        """What an entry of the plan reads of the state behind its last token."""
        is_guess = self.last == (state, 1)
        if not is_guess:
            held = self.held.get(state, []) if start else []
            lacking = [self.kept[state, p % MAX_GUESSES] for p in range(start - lag, start)]
            self.running = held + lacking
        assert len(self.running) == start
        for position, token in enumerate(tokens, start):
            self.running.append(token)
            self.kept[state, position % MAX_GUESSES] = token
        if not is_guess:
            self.held[state] = list(self.running)
        self.last = state, len(tokens)
        return self.running


@dataclass
class Device:
    """Samples the next token of each request's text, as long as it was given that text."""

    texts: dict[str, list[int]]
    salts: dict[str, str]
    states: States = field(default_factory=States)
    state_of: dict[int, int] = field(default_factory=dict)
    """By row."""
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
            self.state_of[a.row] = a.state
            if a.restored >= 0:
                self.states.held[a.state] = self.states.held[a.restored]
        lags, snapshots = dict(plan.lags), dict(plan.snapshots)
        self.states.last = -1, 0
        fed = {(row, position): token for row, position, token in plan.fed}
        tokens: list[int] = []
        before = dict(self.last)
        entries = zip(plan.rows, plan.starts, plan.counts, plan.num_samples, strict=True)
        for row, start, count, num in entries:
            inputs, text = self.inputs[self.rows[row]], self.texts[self.rows[row]]
            if (row, start) in fed:
                inputs[start] = fed[row, start]
            elif start >= self.known[row]:
                inputs[start] = before[row]
            end = start + count
            right = [inputs.get(i) for i in range(end)] == text[:end]
            if (state := self.state_of[row]) >= 0:
                salt = self.salts[self.rows[row]]
                new = [(salt, inputs[i]) for i in range(start, end)]
                read = self.states.take(state, start, new, lags.pop(state, 0))
                right = right and read == [(salt, token) for token in text[:end]]
                if state in snapshots:
                    self.states.held[snapshots.pop(state)] = list(read)
            if num:
                tokens.append(text[end] if right else VOID)
                self.last[row] = tokens[-1]
        assert not lags and not snapshots
        drafts = {entry: self.drafts(plan, entry, places) for entry, places in plan.drafted}
        return StepResult(tokens, drafts=drafts)

    def drafts(self, plan: StepPlan, entry: int, places: int) -> list[int]:
        """What comes in the text behind the last token of the row that counts, but for some."""
        row, end = plan.rows[entry], plan.starts[entry] + 1
        inputs, text = self.inputs[self.rows[row]], self.texts[self.rows[row]]
        assert end <= places
        following = zip(plan.rows[entry + 1 :], plan.starts[entry + 1 :], strict=True)
        for _ in (start for other, start in following if other == row):
            if inputs[end] != text[end]:
                break
            end += 1
        behind = range(end + 1, min(end + 1 + NUM_DRAFTS, len(text)))
        return [VOID if i % 5 == 0 else text[i] for i in behind]


def play(
    requests: list[EngineRequest],
    texts: dict[str, list[int]],
    speculative: str,
    ahead: int,
    num_blocks: int,
    num_states: int = 0,
    fails_at: int = -1,
    parks_at: int = -1,
) -> tuple[dict[str, tuple[list[int], str | None]], int]:
    """The output of each request, and the number of steps."""
    limits = SchedulerLimits(
        ROWS, 24, MAX_MODEL_LEN, 1, 1.0, VOID + 1, frozenset({0}), speculative=speculative
    )
    cache = Cache(num_blocks, BLOCK, num_states, num_snapshots=3 if num_states else 0)
    scheduler = Scheduler(limits, cache, AdapterSlots(1, 1))
    for request in requests:
        assert scheduler.add(request) is None
    device = Device(texts, {request.request_id: request.cache_salt for request in requests})
    events: dict[str, list[TokenEvent]] = {name: [] for name in texts}
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    names: dict[int, set[str]] = {}
    """The requests of each step: one alone would end with a step that fails."""
    for now in range(2000):
        if now == parks_at and scheduler.batch.running:
            scheduler.batch.park(scheduler.batch.running[-1])
        plan = scheduler.plan(float(now))
        if not plan.empty:
            assert len(plan.rows) <= ROWS + 1
            flights.append((plan, device.run(plan)))
            names[plan.step] = {device.rows[row] for row in plan.rows}
        ended = {name for name, got in events.items() if got and got[-1].finish_reason}
        if now >= fails_at >= 0 and flights and len(names[flights[0][0].step] - ended) > 1:
            fails_at = -1
            scheduler.fail([planned for planned, _ in flights], WeftError("void"))
            flights.clear()
        while len(flights) > (0 if plan.empty or plan.awaited else ahead):
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
        if texts and draw(st.booleans()):  # it begins as another one does
            same = draw(st.integers(1, 24))
            text[:same] = texts["r0"][:same]
        if draw(st.booleans()):
            text[draw(st.integers(num_prompt, MAX_MODEL_LEN))] = 0  # where it ends
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 32)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            speculative=draw(st.sampled_from([None, None, "off"])),
        )
        name = f"r{i}"
        salt = draw(st.sampled_from(["", "", "salt"]))
        requests.append(EngineRequest(name, text[:num_prompt], params, seed=0, cache_salt=salt))
        texts[name] = text
    return requests, texts


@pytest.mark.parametrize("num_states", [0, ROWS + 2], ids=["attention", "states"])
@pytest.mark.parametrize("ahead", [0, 1])
@settings(max_examples=25 if "EXHAUSTIVE" in os.environ else 12)
@given(asks=asks(), fails_at=st.integers(-1, 20), parks_at=st.integers(-1, 20))
def test_outputs_are_those_without_guesses(
    ahead: int,
    num_states: int,
    asks: tuple[list[EngineRequest], dict[str, list[int]]],
    fails_at: int,
    parks_at: int,
) -> None:
    """With recurrent states, each has the tokens of its own request alone, whatever was guessed."""
    requests, texts = asks
    alone, _ = play(requests, texts, "off", 0, 100)
    for name, (output, _) in alone.items():
        prompt = next(len(r.prompt_ids) for r in requests if r.request_id == name)
        assert output == texts[name][prompt : prompt + len(output)]
    troubles = num_states, fails_at, parks_at
    for how in ("ngram", "mtp"):
        assert play(requests, texts, how, ahead, 100, num_states)[0] == alone
        assert play(requests, texts, how, ahead, 100, *troubles)[0] == alone
        assert play(requests, texts, how, ahead, 17, *troubles)[0] == alone  # with preemptions


@pytest.mark.parametrize("ahead", [0, 1])
def test_text_that_repeats_takes_fewer_steps(ahead: int) -> None:
    text = [1, 2, 3, 4, 5] * 13
    request = EngineRequest("r", text[:12], SamplingParams(max_tokens=40, temperature=0.0), seed=0)
    _, without = play([request], {"r": text}, "off", ahead, 100)
    _, steps = play([request], {"r": text}, "ngram", ahead, 100)
    assert steps <= without / 2


@pytest.mark.parametrize("ahead", [0, 1])
def test_drafts_of_the_model_take_fewer_steps(ahead: int) -> None:
    """Four of five drafts are right, also where no blocks are held for them."""
    text = [i * i % 7 + 1 for i in range(MAX_MODEL_LEN + 1)]
    request = EngineRequest("r", text[:12], SamplingParams(max_tokens=40, temperature=0.0), seed=0)
    _, without = play([request], {"r": text}, "off", ahead, 100)
    _, steps = play([request], {"r": text}, "mtp", ahead, 100)
    assert steps <= without / 2


def test_chances_of_drafts_follow_those_that_were_right() -> None:
    """And where none were made for long, they are to be tried again."""
    guesser, tokens = HeadGuesser(10), [0]

    def draft(right: int, times: int) -> float:
        for _ in range(times):
            guesser.offer(len(tokens), [right] * NUM_DRAFTS)
            guesses = guesser.guess(tokens, 0, 7)
            tokens.append(1)
            for _ in guesses:
                if not guesser.fits(len(tokens) - 1, tokens):
                    break
                tokens.append(1)
            assert guesser.settle() == (NUM_DRAFTS, right * NUM_DRAFTS)
        return sum(guesser.chances(tokens, 0)) / NUM_DRAFTS

    assert draft(1, 20) > 0.75
    assert draft(0, 40) < 0.2
    for _ in range(200):
        guesser.chances(tokens, 0)
    assert guesser.chances(tokens, 0)[0] > 0.3


def test_drafts_are_guesses_behind_the_tokens_that_they_follow() -> None:
    """As far as the request's vocabulary, which may be smaller than the head's, and the room go."""
    guesser = HeadGuesser(10)
    guesser.offer(3, [4, 9, 5, 10, 2])
    assert guesser.guess([1, 2, 3], 0, 7) == [4, 9, 5]
    assert guesser.guess([1, 2, 3], 0, 2) == [4, 9]
    assert guesser.guess([1, 2, 3], 1, 7) == []
    assert guesser.guess([1, 2, 3, 4], 0, 7) == []


def test_a_server_without_the_model_s_head_refuses_to_draft() -> None:
    limits = SchedulerLimits(ROWS, 24, 64, 1, 1.0, 10, frozenset({0}), speculative="ngram")
    scheduler = Scheduler(limits, Cache(40, BLOCK), AdapterSlots(1, 1))
    params = SamplingParams(max_tokens=20, speculative="mtp")
    event = scheduler.add(EngineRequest("r", [1, 2, 3], params, seed=0))
    assert event is not None and event.error is not None
    assert "--speculative mtp" in event.error[1] and event.error[2] == "speculative"


def test_text_that_does_not_repeat_has_no_guesses() -> None:
    guesser = TextGuesser(40)
    assert guesser.chances(list(range(50)), 0) == []
    assert not guesser.guessing


def test_a_guess_goes_on_as_the_text_does() -> None:
    guesser, tokens = TextGuesser(8), [1, 2, 3, 4] * 3
    assert len(guesser.chances(tokens, 0)) == MAX_GUESSES
    assert guesser.guess(tokens, 0, 5) == [1, 2, 3, 4, 1]
    assert guesser.guessing
    for token in (1, 2):
        assert guesser.fits(len(tokens), [*tokens, token])
        tokens.append(token)
    assert not guesser.fits(len(tokens), [*tokens, 9])
    assert guesser.settle() == (5, 2)
    guesser.chances(tokens, 1)
    assert guesser.guess(tokens, 1, 2) == [4, 1]  # behind one that only the device knows


@pytest.mark.parametrize("num_words", [2, 4])
def test_chances_are_how_often_guesses_would_have_been_right(num_words: int) -> None:
    """Random words are right by chance, however many were right before them."""
    rng = random.Random(num_words)
    text = [rng.randrange(num_words) for _ in range(3000)]
    guesser = TextGuesser(WIDTH)
    found = [guesser.chances(text[:end], 0) for end in range(WIDTH, len(text))]
    first = [chances[0] for chances in found[500:]]
    assert sum(first) / len(first) == pytest.approx(1 / num_words, rel=0.15)


def test_chances_follow_the_text() -> None:
    """They are high within text that repeats itself, and fall where it does not go on."""
    guesser, tokens, pattern = TextGuesser(30), list(range(30)), list(range(30))
    for unknown in range(100, 120):
        tokens += [unknown, *pattern]
    within = guesser.chances(tokens[:-5], 0)
    assert within[0] > 0.9 and within == sorted(within, reverse=True)
    for unknown in range(200, 220):
        tokens += [0, 1, 2, unknown]
    assert guesser.chances([*tokens, 0, 1, 2], 0)[0] < 0.5


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
        scheduler.commit(plan, StepResult([1]))
        assert scheduler.plan(1.0).fed == []


def test_a_word_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(speculative="medusa")
    assert caught.value.param == "speculative"
