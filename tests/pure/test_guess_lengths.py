"""Guesses are made where they save time, whatever steps take; on simulated step times."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from dealing import deal
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.schedule.cache import Cache
from weft.schedule.lengths import GuessLengths
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots

NUM_PROMPT, NUM_TOKENS = 32, 800


@dataclass(frozen=True)
class Times:
    """Milliseconds that parts of a step take, as the scheduler can't know them."""

    step: float
    row: float
    guess: float
    guesses: float = 0.0
    """What any guesses take, however many."""
    host: float = 0.1
    """To plan and launch a step, which the device waits for after guesses."""

    def of_step(self, num_seqs: int, num_guesses: int) -> float:
        more = self.guesses + self.guess * num_guesses if num_guesses else 0.0
        return self.step + self.row * num_seqs + more


GPU = Times(4.4, 0.01, 0.03, host=0.4)
CPU = Times(2.3, 0.12, 0.12)
HYBRID = Times(3.8, 0.2, 0.25, guesses=2.0)
"""A model with recurrent states on a CPU."""
ROWS = Times(0.3, 1.0, 1.0)
"""A device on which eight rows take nearly eight times as long as one."""
DEVICES = {"gpu": GPU, "cpu": CPU, "hybrid": HYBRID, "rows": ROWS}


@dataclass
class Outcome:
    ended: list[float] = field(default_factory=list)
    """When each request ended, in milliseconds."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When each step ended, and how many guesses it had."""

    @property
    def mean(self) -> float:
        return sum(self.ended) / len(self.ended)


def play(
    texts: list[list[int]],
    speculative: str,
    times_at: Callable[[float], Times],
    noise: Callable[[], float] = lambda: 1.0,
    fixed: int | None = None,
) -> Outcome:
    """Have a device give each request its text, with the steps overlapped as `Loop` does it.
    `times_at`: what steps take that begin then. `fixed`: how many tokens to guess each time."""
    longest = max(map(len, texts))
    limits = SchedulerLimits(64, 4096, longest, 1, 1.0, 1 << 20, frozenset(), speculative)
    cache = Cache(len(texts) * (longest // 16 + 2), 16)
    scheduler = Scheduler(limits, cache, AdapterSlots(1, 1))
    if fixed is not None:
        scheduler.lengths = FixedLengths(fixed, scheduler)
    for i, text in enumerate(texts):
        params = SamplingParams(max_tokens=len(text) - NUM_PROMPT, temperature=0.0)
        assert scheduler.add(EngineRequest(str(i), text[:NUM_PROMPT], params, seed=0)) is None
    names: dict[int, int] = {}
    host = device = ended = 0.0
    flights: deque[tuple[StepPlan, StepResult, float]] = deque()
    outcome = Outcome()
    while scheduler.busy or flights:
        plan = StepPlan(0, [], [], [], [], 0, [], [], [], [])
        if not (flights and flights[-1][0].awaited):
            plan = scheduler.plan(host)
        if not plan.empty:
            names |= {a.row: int(a.request_id) for a in plan.admitted}
            entries = zip(plan.rows, plan.starts, plan.counts, strict=True)
            tokens = [[*texts[names[row]], 0][start + count] for row, start, count in entries]
            times = times_at(host)
            host += times.host
            num_seqs = len(plan.rows) - plan.num_guesses
            took = noise() * times.of_step(num_seqs, plan.num_guesses)
            device = max(device, host) + took
            flights.append((plan, StepResult(tokens), device))
        while len(flights) > (0 if plan.empty else 1):
            planned, result, end = flights.popleft()
            host = max(host, end)
            scheduler.lengths.measure(planned, (host - ended) / 1000)
            ended = host
            outcome.steps.append((ended, planned.num_guesses))
            for event in scheduler.commit(planned, result):
                if event.finish_reason:
                    outcome.ended.append(ended)
    scheduler.check()
    return outcome


class FixedLengths(GuessLengths):
    """Guesses so many tokens wherever there is a guess."""

    def __init__(self, num: int, scheduler: Scheduler) -> None:
        super().__init__(scheduler.batch)
        self._num = num

    def measure(self, plan: StepPlan, seconds: float) -> None:
        pass

    def best(self, chances: dict[int, list[float]], num_seqs: int, room: int) -> dict[int, int]:
        return {
            row: min(self._num, len(each), room // len(chances)) for row, each in chances.items()
        }


def words(rng: random.Random, num_words: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return [rng.randrange(num_words) for _ in range(num_tokens)]


def copied(rng: random.Random, changed: float) -> list[int]:
    """A text that quotes itself, but for a part of the tokens."""
    text = [rng.randrange(1 << 19) for _ in range(NUM_TOKENS // 4)]
    while len(text) < NUM_TOKENS:
        start = rng.randrange(len(text) - 60)
        quoted = text[start : start + rng.randrange(10, 200)]
        text += [rng.randrange(1 << 19) if rng.random() < changed else t for t in quoted]
    return text[:NUM_TOKENS]


def pattern(rng: random.Random) -> list[int]:
    return ([rng.randrange(1 << 19) for _ in range(20)] * NUM_TOKENS)[:NUM_TOKENS]


TEXTS: dict[str, Callable[[random.Random], list[int]]] = {
    "2 words": lambda rng: words(rng, 2),
    "4 words": lambda rng: words(rng, 4),
    "16 words": lambda rng: words(rng, 16),
    "random": lambda rng: words(rng, 1 << 19),
    "quotes": lambda rng: copied(rng, 0.0),
    "edits": lambda rng: copied(rng, 0.1),
    "other words": lambda rng: copied(rng, 0.4),
    "pattern": pattern,
}


@settings(max_examples=12)
@given(
    kinds=st.lists(st.sampled_from(sorted(TEXTS)), min_size=1, max_size=4),
    step=st.floats(0.1, 5.0),
    row=st.floats(0.0, 2.0),
    guess=st.floats(0.0, 2.0),
    guesses=st.floats(0.0, 2.0),
    host=st.floats(0.0, 0.5),
    seed=st.integers(0, 9),
)
def test_guesses_never_cost_much(
    kinds: list[str],
    step: float,
    row: float,
    guess: float,
    guesses: float,
    host: float,
    seed: int,
) -> None:
    """Whether guesses take less than rows of other requests, or twice as long; and whether a step
    with any of them takes three times as long."""
    rng = random.Random(seed)
    times = Times(step, row, guess * row, guesses * step, host)
    texts = [TEXTS[kind](rng) for kind in kinds]
    without, guessed = (play(texts, mode, lambda _: times).mean for mode in ("off", "ngram"))
    assert without / guessed >= 0.97


@pytest.mark.parametrize(
    "kind", ["4 words", pytest.param("16 words", marks=pytest.mark.exhaustive), "other words"]
)
@pytest.mark.parametrize(("device", "num_texts"), deal(DEVICES, [1, 4]))
def test_texts_that_do_not_repeat_lose_nothing(device: str, num_texts: int, kind: str) -> None:
    """On a noisy machine, too, on which some steps take ten times as long."""
    rng = random.Random(1)
    texts = [TEXTS[kind](rng) for _ in range(num_texts)]
    for noise in (False, True):
        rounds = []
        for mode in ("off", "ngram"):
            chance = random.Random(2)

            def slower(chance: random.Random = chance) -> float:
                return 10.0 if chance.random() < 0.005 else 1 + 0.2 * chance.random()

            times = DEVICES[device]
            rounds.append(play(texts, mode, lambda _, t=times: t, slower if noise else one))
        assert rounds[0].mean / rounds[1].mean >= (0.95 if noise else 0.97)


def one() -> float:
    return 1.0


@pytest.mark.parametrize("kind", ["pattern", "edits"])
@pytest.mark.parametrize(("device", "num_texts"), deal(DEVICES, [1, 4]))
def test_no_fixed_length_is_much_better(kind: str, device: str, num_texts: int) -> None:
    rng = random.Random(1)
    texts = [TEXTS[kind](rng) for _ in range(num_texts)]
    times = DEVICES[device]
    found = play(texts, "ngram", lambda _: times).mean
    fixed = [play(texts, "ngram", lambda _: times, fixed=num).mean for num in (0, 1, 3, 7)]
    assert found <= 1.12 * min(fixed)


def test_guesses_pay_on_one_device_and_not_on_another() -> None:
    """All guesses at three requests in eight are right."""
    rng = random.Random(1)
    texts = [*(pattern(rng) for _ in range(3)), *(words(rng, 1 << 19) for _ in range(5))]
    on_gpu, on_rows = (play(texts, "ngram", lambda _, t=times: t) for times in (GPU, ROWS))
    assert sum(num for _, num in on_gpu.steps) > 0.8 * 3 * NUM_TOKENS * 7 / 8
    assert sum(1 for _, num in on_rows.steps if num) < 0.05 * NUM_TOKENS


def test_lengths_follow_what_steps_take() -> None:
    """Rows get expensive for a while."""
    rng = random.Random(1)
    texts = [words(rng, 2, 2000)]
    since, until = 400.0, 1100.0
    steps = play(texts, "ngram", lambda now: ROWS if since <= now < until else CPU).steps

    def guessed(begin: float, end: float) -> float:
        """The part of the steps between that had guesses."""
        nums = [num for at, num in steps if begin <= at < end]
        return sum(1 for num in nums if num) / len(nums)

    assert guessed(100, since) > 0.5
    assert guessed(since + 300, until) < 0.1
    assert guessed(until + 200, 1e9) > 0.5
