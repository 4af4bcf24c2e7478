"""Extents of one piece of the host's memory: pure bookkeeping."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

ALIGN = 4096
"""Extents begin and end at multiples of this, in bytes."""


class Extent(NamedTuple):
    """Bytes [start, start + size) of a piece of memory."""

    start: int
    size: int


class Extents:
    """Owner of which bytes of a piece of memory are taken."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.gaps = [Extent(0, num_bytes)] if num_bytes else []
        """What is free, in order; no gap touches another."""

    @property
    def num_free(self) -> int:
        return sum(gap.size for gap in self.gaps)

    def take(self, num_bytes: int) -> Extent | None:
        """Take an extent from the smallest gap that is large enough; None if there is none."""
        size = -(-num_bytes // ALIGN) * ALIGN
        gap = min((gap for gap in self.gaps if gap.size >= size), key=_size, default=None)
        if gap is None:
            return None
        self.gaps.remove(gap)
        if gap.size > size:
            insort(self.gaps, Extent(gap.start + size, gap.size - size))
        return Extent(gap.start, size)

    def give(self, extent: Extent) -> None:
        """Give back an extent that was taken."""
        start, stop = extent.start, extent.start + extent.size
        for gap in [g for g in self.gaps if g.start + g.size == start or g.start == stop]:
            self.gaps.remove(gap)
            start, stop = min(start, gap.start), max(stop, gap.start + gap.size)
        insort(self.gaps, Extent(start, stop - start))


def _size(gap: Extent) -> int:
    return gap.size
