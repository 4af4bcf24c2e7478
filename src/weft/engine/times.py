"""Histograms of seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from weft.core.stats import LOAD_BOUNDS_S, LOAD_STAGES, Spread


class Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LOAD_BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(LOAD_BOUNDS_S, seconds)] += 1
        self._sum += seconds

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self._sum)


class StageTimes:
    """A histogram for each stage of loads and registrations."""

    def __init__(self) -> None:
        self._times = {stage: Times() for stage in LOAD_STAGES}

    def add(self, stage_s: Mapping[str, float]) -> None:
        for stage, seconds in stage_s.items():
            self._times[stage].add(seconds)

    @property
    def spreads(self) -> dict[str, Spread]:
        return {stage: times.spread for stage, times in self._times.items()}
