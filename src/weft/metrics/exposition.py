"""Histograms for one thread, and Prometheus' text format. A scrape of thousands of lines takes
milliseconds, in which nothing else runs on the event loop, so the lines are written directly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
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


Labels = str
"""`name="value"` pairs joined by commas. The empty string means no labels."""
Samples = Iterable[tuple[Labels, float]]


def labels(**values: str) -> Labels:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Exposition:
    """Metric families in the order in which they are added."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, samples: Samples) -> None:
        self._add(name, "gauge", text, samples)

    def counter(self, name: str, text: str, samples: Samples) -> None:
        """Add a counter. `name` comes without its suffix `_total`."""
        self._add(f"{name}_total", "counter", text, samples)

    def histogram(self, name: str, text: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        self._head(name, "histogram", text)
        lines = self._lines
        for given, histogram in samples:
            count = 0.0
            before = f"{name}_bucket{{{given}," if given else f"{name}_bucket{{"
            for bound, count in histogram.buckets():
                lines.append(f'{before}le="{bound}"}} {count!r}')
            braced = f"{{{given}}}" if given else ""
            lines.append(f"{name}_count{braced} {count!r}")
            lines.append(f"{name}_sum{braced} {histogram.sum!r}")

    def encode(self) -> bytes:
        return "".join(line + "\n" for line in self._lines).encode()

    def _add(self, name: str, kind: str, text: str, samples: Samples) -> None:
        self._head(name, kind, text)
        for given, value in samples:
            braced = f"{{{given}}}" if given else ""
            self._lines.append(f"{name}{braced} {float(value)!r}")

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
