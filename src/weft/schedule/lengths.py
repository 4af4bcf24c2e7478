"""Decides how many tokens are guessed of each request in a step, by what guesses take and bring.

Each guess is a row of the step, and everybody in the batch waits for it. On a GPU eight rows take
hardly longer than one, and on a CPU they may take eight times as long. So the time of steps is
measured while they run, and guesses are made where they shorten what a token takes on average over
the requests:

    seconds of the step, K guesses in all  x  mean of 1 / (1 + guesses that are right)

What makes this mean smaller also raises the tokens per second of all requests together, and where
guesses help only a few of them, it weighs what the others wait.

Expectations may be wrong. So there is a *budget* of time, counted in steps without guesses, from
which goes what guesses have cost beyond what they brought. It grows by a hundredth of a step with
each step; while it is used up, nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from weft.core.units import MAX_GUESSES
from weft.schedule.batch import Batch
from weft.schedule.plan import StepPlan

MEMORY = 32
"""After how many steps a measurement has lost most of its weight."""
KEPT = 1.0 - 1.0 / MEMORY
STALE = 4 * MEMORY
"""After how many steps without one, a step without guesses is made and measured."""
FEW = 4
"""So many times are too few for a mean, as the first ones may be of a device that is not warm yet:
the shortest is taken."""
NEAR = 50.0
"""How much less a step counts for what one of very different size takes."""
ASSUMED_START, ASSUMED_GUESS = 0.05, 0.01
"""What guesses, and each of them, add to a step until it was measured, in steps without them. It is
little, as too much would never be tried and corrected."""
ASSUMED_AT = 1, 8
"""The numbers of guesses for which this counts as one measurement, together."""
WORTH = 0.97
"""Guesses must be expected to take no more than this part of the time without them."""
ALLOWED = 0.01
"""The part of the time that guesses may cost."""
FIRST_BUDGET, MOST_BUDGET = 1.0, 4.0
"""The budget at first, and the most that is saved up, in steps."""
LONGEST = 3.0
"""A step that took more times as long as expected is counted as this: the machine had other work.
Likewise one that took a smaller part: it ended while the host was held up."""


class StepTimes:
    """Owner of what is known of how long steps of decodes take. What is old counts less, whatever
    was measured since."""

    def __init__(self) -> None:
        self.now = 0
        """Steps that were measured."""
        self._plain_at, self._num_plain = -STALE, 0
        """When a step without guesses was measured last, once a few were, and how many were."""
        self._plain: dict[int, tuple[int, float, float]] = {}
        """For numbers of requests, of steps without guesses: when one was measured last, the sum of
        their weights, and their mean in seconds."""
        self._added = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Of steps with guesses, weighted sums: of 1, of the number of guesses, of what they add in
        seconds, of the number squared, and of the number times what they add."""
        self._added_at = 0
        self._largest = 0.0
        """The largest number of guesses lately."""

    @property
    def stale(self) -> bool:
        """Whether it was long ago that a step without guesses was measured. Where no steps are
        measured at all, it never is."""
        return self.now - self._plain_at > STALE

    def plain(self, num_seqs: int) -> float:
        """Seconds of a step without guesses; 0 if none was measured."""
        weight = total = 0.0
        for size, (at, sum_of_weights, mean) in self._plain.items():
            share = 1.0 + NEAR * abs(size - num_seqs) / max(size, num_seqs)
            near = sum_of_weights * KEPT ** (self.now - at) / share
            weight += near
            total += near * mean
        return total / weight if weight else 0.0

    def added(self, plain_s: float) -> tuple[float, float]:
        """What guesses add to a step that takes `plain_s` without them: seconds for all of them,
        and for each. Least squares, and what was assumed counts as one measurement."""
        kept = KEPT ** (self.now - self._added_at)
        num, x, y, xx, xy = (kept * each for each in self._added)
        for at in ASSUMED_AT:
            share, seconds = 1 / len(ASSUMED_AT), plain_s * (ASSUMED_START + ASSUMED_GUESS * at)
            num, x, y = num + share, x + share * at, y + share * seconds
            xx, xy = xx + share * at * at, xy + share * at * seconds
        each_s = max(0.0, (xy - x * y / num) / (xx - x * x / num))
        return y / num - each_s * x / num, each_s

    def reach(self, num_seqs: int) -> int:
        """The most guesses that a step may have: twice as many as steps had lately, or one for each
        request. What many more would take is not known."""
        if not self.now:
            return num_seqs * MAX_GUESSES
        kept = 0.5 ** ((self.now - self._added_at) / STALE)
        return max(num_seqs, int(2 * kept * self._largest))

    def add_plain(self, num_seqs: int, seconds: float) -> None:
        self._num_plain += 1
        if self._num_plain >= FEW:
            self._plain_at = self.now
        at, weight, mean = self._plain.get(num_seqs, (self.now, 0.0, seconds))
        weight = weight * KEPT ** (self.now - at) + 1
        if weight <= FEW:
            mean = min(mean, seconds)
        self._plain[num_seqs] = self.now, weight, mean + (_near(seconds, mean) - mean) / weight

    def add_guesses(self, num: int, added_s: float) -> None:
        kept = KEPT ** (self.now - self._added_at)
        new = 1, num, added_s, num * num, num * added_s
        n, x, y, xx, xy = (kept * old + each for old, each in zip(self._added, new, strict=True))
        self._largest = max(num, self._largest * 0.5 ** ((self.now - self._added_at) / STALE))
        self._added, self._added_at = (n, x, y, xx, xy), self.now


class _GuessedStep(NamedTuple):
    """A step with guesses of which it is not known yet what they won."""

    num_seqs: int
    num_guesses: int
    added_s: float
    """What the guesses have added so far."""
    num_before: int
    """How many tokens had been generated ahead of it."""


class GuessLengths:
    """Owner of the numbers of guesses, and of the budget."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._times = StepTimes()
        self._budget = FIRST_BUDGET
        self._open: _GuessedStep | None = None

    def choose(self, most_rows: int) -> dict[int, int]:
        """How many tokens to guess of the running requests in the next step, by their rows in the
        batch. The step has at most `most_rows` rows. While requests wait for some, nobody is
        guessed at."""
        if not self._batch.num_guessed_at:
            return {}
        running = self._batch.running
        room = most_rows - len(running)
        if room <= 0 or self._batch.waiting or self._budget < 0 or self._times.stale:
            return {}
        chances = {}
        for seq in running:
            guesser, known = seq.rules.guesser, seq.known
            if guesser is not None and known - seq.computed == 1 and known < seq.rules.known_limit:
                places = seq.holding.room - known
                found = guesser.chances(seq.tokens, known - len(seq.tokens))
                if found:  # without places, it gets one more block now, or in the next step
                    chances[seq.row] = found[:places] if places > 0 else found
        return self.best(chances, len(running), room) if chances else {}

    def best(self, chances: Mapping[int, list[float]], num_seqs: int, room: int) -> dict[int, int]:
        """How many tokens to guess of each request, in a step of `num_seqs` with room for so many
        rows more. `chances`: for each guess, that it is right and all before it are."""
        plain_s = self._times.plain(num_seqs) or 1.0
        start_s, each_s = self._times.added(plain_s)
        inverses, least, best_num = float(num_seqs), WORTH * plain_s * num_seqs, 0
        room = min(room, self._times.reach(num_seqs))
        wins = sorted(_wins(chances), reverse=True)[:room]
        for num, (win, _) in enumerate(wins, 1):
            inverses -= win
            took = (plain_s + max(0.0, start_s + each_s * num)) * inverses
            if took < least:
                least, best_num = took, num
        return Counter(row for _, row in wins[:best_num])

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended, which took so long, from the end of the one before, and of which the
        tokens are not taken yet."""
        self._times.now += 1
        num_seqs = len(plan.rows) - plan.num_guesses
        before, self._open = self._open, None
        is_plain = plan.decodes and not plan.awaited
        if before is None and is_plain:
            self._times.add_plain(num_seqs, seconds)
            self._spend(-ALLOWED)
            return
        plain_s = self._times.plain(num_seqs)
        if before is not None:  # the step behind guesses waited for those that were right
            self._settle(before, _near(seconds, plain_s) - plain_s if is_plain else 0.0)
        if plan.decodes and plan.awaited and plain_s:
            start_s, each_s = self._times.added(plain_s)
            expected_s = plain_s + max(0.0, start_s + each_s * plan.num_guesses)
            added_s = _near(seconds, expected_s) - plain_s
            num_before = self._batch.totals.generated_tokens
            self._open = _GuessedStep(num_seqs, plan.num_guesses, added_s, num_before)

    def _settle(self, step: _GuessedStep, more_s: float) -> None:
        """It is known what a step's guesses have won, and that they have added so much more."""
        added_s = step.added_s + more_s
        num_won = self._batch.totals.generated_tokens - step.num_before - step.num_seqs
        lost = added_s / self._times.plain(step.num_seqs) - num_won / step.num_seqs
        self._spend(lost - ALLOWED)
        self._times.add_guesses(step.num_guesses, added_s)

    def _spend(self, steps: float) -> None:
        self._budget = min(self._budget - steps, MOST_BUDGET)


def _near(seconds: float, expected_s: float) -> float:
    return min(max(seconds, expected_s / LONGEST), expected_s * LONGEST)


def _wins(chances: Mapping[int, list[float]]) -> list[tuple[float, int]]:
    """By how much each guess shortens what a token of its request takes, and the request's row.
    Each further guess at a request wins less than the one before it."""
    wins = []
    for row, of_request in chances.items():
        tokens = 1.0
        for chance in of_request:
            wins.append((1 / tokens - 1 / (tokens + chance), row))
            tokens += chance
    return wins
