"""A histogram for one thread: no lock, no labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Bounds:
    """Inclusive upper bounds of buckets, ascending; shared by the histograms that have them."""

    __slots__ = ("texts", "values")

    def __init__(self, *values: float) -> None:
        self.values = values
        self.texts = (*map(floatToGoString, values), "+Inf")
        """The bounds as Prometheus writes them."""


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Bounds, counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`counts` are the counts of each bucket so far, and `total` the sum of the values. Without
        counts, nothing was counted."""
        self._bounds = bounds
        self._counts = list(counts) or [0] * len(bounds.texts)
        self.sum = total

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds.values, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of an upper bound and the number of values up to it. The last one counts all
        values."""
        return list(zip(self._bounds.texts, map(float, accumulate(self._counts)), strict=True))
