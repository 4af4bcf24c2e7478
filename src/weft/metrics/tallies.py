"""Figures by adapter, for thousands of adapters, in a bounded number of series.

A Prometheus counter must not decrease, and readers use its increase. So each event is counted once,
as it happens: in its adapter's own series if there is one, else in the series `other`. Counts are
never moved between series later. The busiest adapters have series of their own; which these are is
decided again at most once in `PERIOD_S`, at a scrape:

    without ──(it is among the busiest)──> own ──(others are busier)──> leaving ──> without
    counts in `other`                      counts here                  frozen, still shown

- Until all places have been taken once, an adapter has its series from its first event on.
- A leaving series is shown for one more period, so that every reader sees its last value; its
  place is free only afterwards. New events count in `other` from the moment it is frozen.
- A series that returns goes on where it ended, as long as its end is remembered (the last
  `MAX_FORMER` are). Otherwise it begins at 0, which readers know as the restart of a counter, and
  the scrape that decides so shows that 0.

So the increases of all series add up to the truth, at any time, while the sum of the *values* at
one moment lacks the series that are gone: `sum(rate(...))` is exact, and for totals since the
start there are the metrics without that label.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from weft.metrics.exposition import Bounds, Histogram

OTHER = "other"
"""The label of everything that has no series of its own. An adapter of that name never gets one."""
MAX_OWN = 100
PERIOD_S = 60.0
HALF_LIFE_S = 300.0
"""Seconds after which a request counts half when the busiest adapters are chosen."""
HOLD = 2.0
"""An adapter that has a series keeps it unless another is this many times as busy."""
LEAVE_SHARE = 0.1
"""The largest share of adapters' own series that leave at a time. Traffic that is spread evenly
over thousands of adapters must not turn over all of them every minute."""
MAX_FORMER = 10_000
MAX_SCORED = 20_000

_FIRST_TOKEN_S = Bounds(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PER_TOKEN_S = Bounds(0.01, 0.02, 0.05, 0.1, 0.25)
_QUEUE_S = Bounds(0.01, 0.1, 1.0, 10.0)


@dataclass(slots=True, eq=False)
class Tally:
    """The counts of one label's series."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    evictions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    per_token_s: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(_QUEUE_S))


class Tallies:
    """The tallies of a base model and its adapters. For one thread; the caller's clock, in
    seconds, is passed in. `check()` states the invariants."""

    def __init__(self, base: str, max_own: int = MAX_OWN) -> None:
        """`base` is the base model's label, which no adapter has."""
        self._base_label = base
        self._max_own = max_own
        self._base = Tally()
        self._other = Tally()
        self._own: dict[str, Tally] = {}
        self._leaving: dict[str, Tally] = {}
        self._former: dict[str, Tally] = {}
        """The last values of series that are gone, the oldest first."""
        self._score: dict[str, float] = {}
        """How many requests each adapter had of late."""
        self._selected_s: float | None = None

    def arrived(self, name: str | None) -> None:
        """A request came for an adapter, or for the base (None)."""
        if name is not None and (name in self._score or len(self._score) < MAX_SCORED):
            self._score[name] = self._score.get(name, 0.0) + 1.0

    def of(self, name: str | None) -> Tally:
        """The tally in which an event of this adapter (None: the base) counts now. Callers must not
        keep it."""
        if name is None:
            return self._base
        tally = self._own.get(name)
        if tally is not None:
            return tally
        if self._former or not self._num_free or name == OTHER:
            return self._other
        return self._begin(name)

    def shown(self, now_s: float) -> list[tuple[str, Tally]]:
        """All series of a scrape, as pairs of a label and a tally."""
        if self._selected_s is None:
            self._selected_s = now_s
        elif now_s - self._selected_s >= PERIOD_S:
            self._select(now_s - self._selected_s)
            self._selected_s = now_s
        named = (*self._own.items(), *self._leaving.items())
        return [(self._base_label, self._base), (OTHER, self._other), *named]

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._own) + len(self._leaving) <= self._max_own
        assert len(self._former) <= MAX_FORMER and len(self._score) <= MAX_SCORED
        assert not self._own.keys() & self._leaving.keys()
        assert not self._former.keys() & (self._own.keys() | self._leaving.keys())
        assert OTHER not in self._own and OTHER not in self._leaving

    @property
    def _num_free(self) -> int:
        return self._max_own - len(self._own) - len(self._leaving)

    def _begin(self, name: str) -> Tally:
        self._own[name] = self._former.pop(name) if name in self._former else Tally()
        return self._own[name]

    def _select(self, elapsed_s: float) -> None:
        """Let go of what was leaving, fill places with the busiest, and say who leaves next."""
        self._former.update(self._leaving)
        self._leaving = {}
        while len(self._former) > MAX_FORMER:
            del self._former[next(iter(self._former))]
        self._fade(0.5 ** (elapsed_s / HALF_LIFE_S))
        wanted = heapq.nlargest(self._max_own, self._score.keys() - {OTHER}, key=self._weight)
        coming = [name for name in wanted if name not in self._own]
        num_free = self._num_free
        for name in coming[:num_free]:
            self._begin(name)
        num_leaving = min(max(len(coming) - num_free, 0), math.ceil(self._max_own * LEAVE_SHARE))
        for name in heapq.nsmallest(num_leaving, self._own.keys(), key=self._weight):
            self._leaving[name] = self._own.pop(name)

    def _weight(self, name: str) -> tuple[float, str]:
        """The key by which adapters are sorted by traffic: recent requests, then the name."""
        return self._score.get(name, 0.0) * (HOLD if name in self._own else 1.0), name

    def _fade(self, factor: float) -> None:
        busiest = heapq.nlargest(MAX_SCORED // 2, self._score.items(), key=lambda item: item[1])
        self._score = {name: s * factor for name, s in busiest if s * factor > 0.01}
