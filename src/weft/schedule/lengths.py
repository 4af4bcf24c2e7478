"""Decides how many tokens are guessed for each request in a step, by what guesses cost and win.

Each guess is a row of the step, and all requests in the batch wait for it. On a GPU eight rows take
hardly longer than one, and on a CPU they may take eight times as long. So the time of steps is
measured while they run, and guesses are made where they shorten the time per token, on average over
the requests:

    seconds of the step, K guesses in all  x  mean of 1 / (1 + guesses that are right)

A smaller mean also means more tokens per second for all requests together; and if guesses help
only a few of them, it takes into account that the others wait.

Expectations may be wrong. So there is a *budget* of time, counted in steps without guesses. The
time that guesses cost beyond what they won is taken from it. It grows by a hundredth of a step with
each step; while it is negative, nothing is guessed.
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
"""After how many steps since the last measured step without guesses the next one is forced."""
FEW = 4
"""Of up to this many times, the shortest is taken instead of the mean, as the first ones may be of
a device that is not warm yet."""
NEAR = 50.0
"""By how much less a measured step counts in estimates for a very different batch size."""
ASSUMED_START, ASSUMED_GUESS = 0.05, 0.01
"""What guesses add to a step, together and each, until that was measured; in times of a step
without guesses. Both are small: too high a cost would never be tried and corrected."""
ASSUMED_AT = 1, 8
"""The assumption counts as one measurement, half of it at each of these numbers of guesses."""
WORTH = 0.97
"""Guesses must be expected to take no more than this part of the time without them."""
ALLOWED = 0.01
"""The part of the time that guesses may cost."""
FIRST_BUDGET, MOST_BUDGET = 1.0, 4.0
"""The budget at first, and the most that is saved up, in steps."""
LONGEST = 3.0
"""Times are limited to this many times the expected one, as the machine may have had other work,
and to this fraction of it, as the step may have ended while the host was held up."""


class StepTimes:
    """Owner of the measured times of decode steps. Older ones count less."""

    def __init__(self) -> None:
        self.now = 0
        """The number of measured steps, which serves as a clock."""
        self._plain_at, self._num_plain = -STALE, 0
        """When a step without guesses was last measured, after the first few; and their number."""
        self._plain: dict[int, tuple[int, float, float]] = {}
        """Of steps without guesses, by number of requests: when one was last measured, the sum of
        their weights, and their mean in seconds."""
        self._added = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weighted sums over steps with x guesses that added y seconds: of 1, x, y, x² and x y."""
        self._added_at = 0
        self._largest = 0.0
        """The largest number of guesses lately."""

    @property
    def stale(self) -> bool:
        """Whether the last measured step without guesses was long ago; never if no steps are
        measured at all."""
        return self.now - self._plain_at > STALE

    def plain(self, num_seqs: int) -> float:
        """The expected seconds of a step of `num_seqs` without guesses; 0 if none was measured."""
        weight = total = 0.0
        for size, (at, sum_of_weights, mean) in self._plain.items():
            share = 1.0 + NEAR * abs(size - num_seqs) / max(size, num_seqs)
            near = sum_of_weights * KEPT ** (self.now - at) / share
            weight += near
            total += near * mean
        return total / weight if weight else 0.0

    def added(self, plain_s: float) -> tuple[float, float]:
        """What guesses add to a step that takes `plain_s` without them: seconds for having any, and
        seconds for each. By least squares, where the assumption counts as one measurement."""
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
        request if that is more. The cost of many more is unknown."""
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
    """A step with guesses whose tokens are not counted yet."""

    num_seqs: int
    num_guesses: int
    added_s: float
    """The seconds that the guesses have added so far."""
    num_before: int
    """How many tokens had been generated before it."""


class GuessLengths:
    """Owner of the numbers of guesses, and of the budget."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._times = StepTimes()
        self._budget = FIRST_BUDGET
        self._open: _GuessedStep | None = None

    def choose(self, most_rows: int) -> dict[int, int]:
        """How many tokens to guess in the next step for the running requests, by their rows in the
        batch. The step has at most `most_rows` rows. None while requests wait for rows."""
        if not self._batch.num_guessed_at:
            return {}
        running = self._batch.running
        room = most_rows - len(running)
        if room <= 0 or self._batch.waiting or self._budget < 0 or self._times.stale:
            return {}
        chances = {}
        for seq in running:
            guesser, known = seq.rules.guesser, seq.known
            if guesser is not None and seq.lacking == 1 and known < seq.rules.known_limit:
                places = seq.holding.room - known
                found = guesser.chances(seq.tokens, known - len(seq.tokens))
                if found:  # without places, it gets one more block now, or in the next step
                    chances[seq.row] = found[:places] if places > 0 else found
        return self.best(chances, len(running), room) if chances else {}

    def best(self, chances: Mapping[int, list[float]], num_seqs: int, room: int) -> dict[int, int]:
        """How many tokens to guess for each request, by row, in a step of `num_seqs` requests and
        up to `room` guesses. `chances`: see `Guesser.chances`."""
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
        """Measure a step that has just ended, `seconds` after the one before; its tokens are not
        committed yet."""
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
        """Count what the guesses of a step have won, and what they added, `more_s` included."""
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
    """By how much each guess shortens the time of a token of its request, as a part of a step, and
    the request's row. Each further guess for a request wins less than the one before."""
    wins = []
    for row, of_request in chances.items():
        tokens = 1.0
        for chance in of_request:
            wins.append((1 / tokens - 1 / (tokens + chance), row))
            tokens += chance
    return wins
