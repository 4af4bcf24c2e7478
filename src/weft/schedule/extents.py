"""Finds free space for an adapter, on the host and in the device's arena.

The device's arena is a line of extents, which may be moved to make room for another one:

    |  a  |   b   |......free......|  c (loading)  |  d  |..free..|
    └───────── a stretch ──────────┘               └ a stretch ───┘

Moves are carried out in order with steps, but loads are not. So extents that are loading can't be
moved, and what lies between two of them is a *stretch*.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN = 4096
"""Extents on the host begin and end at multiples of this, in bytes."""


class Move(NamedTuple):
    """Order to copy an image of `size` elements within the arena; its two places may overlap."""

    slot: int
    source: int
    dest: int
    size: int


@dataclass(slots=True, eq=False)
class ArenaExtent:
    """Where an adapter is on the device, and who uses it there."""

    digest: str
    slot: int
    start: int
    size: int
    came: float
    last_use: float
    floor: float
    loading: bool = True
    leases: int = 0
    served_since: float = math.inf
    """When its first lease since it came began."""

    @property
    def stop(self) -> int:
        return self.start + self.size


class _Stretch(NamedTuple):
    """What lies between two barriers, [start, stop): extents that may move, and free elements."""

    start: int
    stop: int
    extents: list[ArenaExtent]

    @property
    def free(self) -> int:
        return self.stop - self.start - sum(e.size for e in self.extents)

    def gaps(self) -> list[int]:
        """Free elements before each extent, and behind the last."""
        edges = [self.start, *(e.stop for e in self.extents)]
        starts = [*(e.start for e in self.extents), self.stop]
        return [start - edge for edge, start in zip(edges, starts, strict=True)]


class _Window(NamedTuple):
    """Consecutive gaps of a stretch that together hold an adapter once the extents between them
    are moved. The smallest tuple is the best: fewest elements moved, then least room left over."""

    moved: int
    free: int
    start: int
    extents: list[ArenaExtent]


class ArenaLine:
    """Owner of the order of the extents in an arena of `capacity` elements."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._extents: list[ArenaExtent] = []
        """In the order of their places."""
        self.used = 0
        """Elements that are taken."""
        self.num_moved = 0
        """Elements moved so far."""

    def __iter__(self) -> Iterator[ArenaExtent]:
        return iter(self._extents)

    def insert(self, extent: ArenaExtent) -> None:
        insort(self._extents, extent, key=lambda e: e.start)
        self.used += extent.size

    def remove(self, extent: ArenaExtent) -> None:
        self._extents.remove(extent)
        self.used -= extent.size

    def choose(self, size: int, order: Sequence[ArenaExtent]) -> list[ArenaExtent] | None:
        """The first extents of `order` that must go so that `size` elements are free in one
        stretch. None if all of them are not enough.

            order       c  a  e  b          those of least worth first
            stretches   |  a  | b |....|  (d loads)  |  c  |..|  e  |

        A stretch gives up its extents in that order until there is room: here `a` in the first one,
        or `c` and `e` in the second. The stretch is chosen whose most valuable lost extent is worth
        least: the first one.
        """
        best: tuple[int, list[ArenaExtent]] | None = None
        for stretch in self._stretches():
            free = stretch.free
            gone: list[tuple[int, ArenaExtent]] = []
            for i, extent in enumerate(order):
                if free >= size:
                    break
                if stretch.start <= extent.start < stretch.stop:
                    gone.append((i, extent))
                    free += extent.size
            if free < size:
                continue
            dearest = gone[-1][0] if gone else -1
            for entry in reversed(gone[:-1]):  # those that later, larger ones made unnecessary
                if free - entry[1].size >= size:
                    gone.remove(entry)
                    free -= entry[1].size
            if best is None or dearest < best[0]:
                best = dearest, [extent for _, extent in gone]
        return best[1] if best else None

    def open(self, size: int) -> tuple[int, tuple[Move, ...]]:
        """Make a gap of at least `size` elements; one stretch must have that room. Returns the
        gap's start and the moves that make it. All moves go left, so in order none overwrites
        another's source."""
        window = min(w for stretch in self._stretches() for w in _windows(stretch, size))
        start = window.start
        moves: list[Move] = []
        for e in window.extents:
            moves.append(Move(e.slot, e.start, start, e.size))
            e.start = start
            start = e.stop
        self.num_moved += window.moved
        return start, tuple(moves)

    def _stretches(self) -> Iterator[_Stretch]:
        start, extents = 0, list[ArenaExtent]()
        for e in self._extents:
            if e.loading:
                yield _Stretch(start, e.start, extents)
                start, extents = e.stop, []
            else:
                extents.append(e)
        yield _Stretch(start, self.capacity, extents)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        stop = 0
        for e in self._extents:
            assert e.start >= stop, "extents overlap"
            stop = e.stop
        assert stop <= self.capacity
        assert self.used == sum(e.size for e in self._extents)


def _windows(stretch: _Stretch, size: int) -> Iterator[_Window]:
    """For each gap, the shortest window that ends there and has `size` free elements, if any."""
    gaps, extents = stretch.gaps(), stretch.extents
    first = moved = free = 0
    for last, gap in enumerate(gaps):
        free += gap
        while free - gaps[first] >= size and first < last:
            free -= gaps[first]
            moved -= extents[first].size
            first += 1
        if free >= size:
            start = extents[first - 1].stop if first else stretch.start
            yield _Window(moved, free, start, extents[first:last])
        if last < len(extents):
            moved += extents[last].size


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
        gap = min(
            (gap for gap in self.gaps if gap.size >= size), key=lambda gap: gap.size, default=None
        )
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
