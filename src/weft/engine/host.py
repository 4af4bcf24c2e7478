"""The host tier: images of adapters in memory, bounded in bytes."""

from __future__ import annotations

import mmap
import os
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.checkpoint import AdapterImage
from weft.core.stats import TierStats
from weft.schedule.policy import Candidate, Policy, Worth, lru

ALIGN = 4096
"""Of extents, in bytes."""


class Extent(NamedTuple):
    start: int
    size: int


class Arena:
    """One piece of memory, from which images take extents. Only `view` is for any thread."""

    def __init__(
        self, memory: torch.Tensor, release: Callable[[torch.Tensor], None] = lambda _: None
    ) -> None:
        """memory: bytes, 1-D. release: called with it by `close`."""
        self._memory = memory
        self._release = release
        self._gaps = [Extent(0, len(memory))] if len(memory) else []
        """In order; none touches another."""

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    @property
    def num_free(self) -> int:
        return sum(gap.size for gap in self._gaps)

    def view(self, extent: Extent) -> torch.Tensor:
        return self._memory[extent.start : extent.start + extent.size]

    def take(self, num_bytes: int) -> Extent | None:
        """From the smallest gap that is large enough; None: there is none."""
        size = -(-num_bytes // ALIGN) * ALIGN
        gap = min((gap for gap in self._gaps if gap.size >= size), key=_size, default=None)
        if gap is None:
            return None
        self._gaps.remove(gap)
        if gap.size > size:
            insort(self._gaps, Extent(gap.start + size, gap.size - size))
        return Extent(gap.start, size)

    def give(self, extent: Extent) -> None:
        start, stop = extent.start, extent.start + extent.size
        for gap in [g for g in self._gaps if g.start + g.size == start or g.start == stop]:
            self._gaps.remove(gap)
            start, stop = min(start, gap.start), max(stop, gap.start + gap.size)
        insort(self._gaps, Extent(start, stop - start))

    def close(self) -> None:
        """Release the memory; nothing may use it any more."""
        self._release(self._memory)


def _size(gap: Extent) -> int:
    return gap.size


def default_bytes() -> int:
    """For images on the host: 4 GiB, but at most an eighth of its memory."""
    return min(4 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)


def pinned_arena(num_bytes: int) -> Arena:
    """An arena that a CUDA device reads at full speed.

    In one piece, at the start: torch's own allocator rounds up to powers of two, and what it pins
    while the device works stalls the driver. Raises RuntimeError, OSError.
    """
    num_bytes = -(-num_bytes // ALIGN) * ALIGN
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pinned = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(pinned.data_ptr(), num_bytes, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes failed with {status}")
    return Arena(pinned, lambda memory: cudart.cudaHostUnregister(memory.data_ptr()))


@dataclass(slots=True, eq=False)
class Held:
    """An image on the host."""

    image: AdapterImage
    kept: bool
    came: int
    used: int
    floor: float
    """See `Candidate.floor`."""
    reload_s: float
    extent: Extent | None
    """Of the arena; None: its data have memory of their own."""
    num_readers: int = 0
    gone: bool = False
    """Dropped, but for its extent, which readers need."""


class HostTier:
    """What is put out of it is read from disk again. For the engine's thread.

    Without an arena images stay in the memory that they have. Those that are *kept* never go:
    they come on top of `max_bytes`, or take memory of their own when the arena is full.
    """

    def __init__(self, max_bytes: int, arena: Arena | None = None, policy: Policy = lru) -> None:
        self._max_bytes = max_bytes if arena is None else arena.num_bytes
        self._policy = policy
        self.arena = arena
        self._held: dict[str, Held] = {}
        self._readers: set[Held] = set()
        self._reserved: set[Extent] = set()
        self._num_bytes = 0
        self._loose_bytes = 0
        """Of those that are not kept."""
        self._uses: dict[str, int] = {}
        self._floor = 0.0
        self._hits = self._misses = self._evictions = 0
        self._now = 0

    def open(self, digest: str) -> Held | None:
        """Read an image: until `close`, its data stay as they are."""
        self._uses[digest] = self._uses.get(digest, 0) + 1
        held = self._held.get(digest)
        if held is None:
            self._misses += 1
            return None
        self._hits += 1
        held.used, held.floor = self._tick(), self._floor
        held.num_readers += 1
        self._readers.add(held)
        return held

    def close(self, held: Held) -> None:
        held.num_readers -= 1
        if not held.num_readers:
            self._readers.remove(held)
            if held.gone:
                self._give(held)

    def reserve(self, num_bytes: int) -> Extent | None:
        """Room in the arena for an image to come, which `put` or `cancel` ends; None: none."""
        if self.arena is None or num_bytes > self.arena.num_bytes:
            return None
        while (extent := self.arena.take(num_bytes)) is None:
            if not self._evict():
                return None
        self._reserved.add(extent)
        return extent

    def cancel(self, extent: Extent | None) -> None:
        if extent is not None:
            assert self.arena is not None
            self._reserved.remove(extent)
            self.arena.give(extent)

    def put(
        self,
        image: AdapterImage,
        kept: bool = False,
        extent: Extent | None = None,
        reload_s: float = 0.0,
    ) -> None:
        """Hold an image, whose data lie in `extent` if that is given, or change whether it is kept.

        An image that is there already stays, unless it only now got its place in the arena.
        reload_s: seconds that it took to come.
        """
        now = self._tick()
        held = self._held.get(image.digest)
        if held is not None and (extent is None or held.extent is not None):
            self.cancel(extent)
            self._count(held, -1)
            held.kept, held.used = kept, now
            self._count(held, 1)
        elif kept or image.num_bytes <= self._max_bytes:
            came = held.came if held else now
            self._remove(image.digest)
            if extent is not None:
                self._reserved.remove(extent)
            held = Held(image, kept, came, now, self._floor, reload_s, extent)
            self._held[image.digest] = held
            self._count(held, 1)
        while self._loose_bytes > self._max_bytes and self._evict():
            pass

    def keep(self, digest: str, kept: bool) -> None:
        """Say whether an image is kept; nothing happens if it is not here."""
        held = self._held.get(digest)
        if held is not None:
            self._count(held, -1)
            held.kept = kept
            self._count(held, 1)
        while self._loose_bytes > self._max_bytes and self._evict():
            pass

    def forget(self, digest: str) -> None:
        """Drop an image for good."""
        self._remove(digest)
        self._uses.pop(digest, None)

    def __contains__(self, digest: object) -> bool:
        return digest in self._held

    def digests(self) -> tuple[str, ...]:
        return tuple(self._held)

    def stats(self) -> TierStats:
        return TierStats(
            self._num_bytes,
            self._max_bytes,
            len(self._held),
            self._hits,
            self._misses,
            self._evictions,
        )

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        held = self._held.values()
        assert self._num_bytes == sum(h.image.num_bytes for h in held)
        assert self._loose_bytes == sum(h.image.num_bytes for h in held if not h.kept)
        assert all(h.num_readers > 0 for h in self._readers)
        assert not any(h.gone for h in held)
        if self.arena is not None:
            extents = [h.extent for h in {*held, *self._readers} if h.extent is not None]
            taken = sorted([*extents, *self._reserved, *self.arena._gaps])
            assert [e.start for e in taken] == [0, *(e.start + e.size for e in taken)][:-1]
            assert sum(e.size for e in taken) == self.arena.num_bytes, "memory is lost"

    # -- inside --------------------------------------------------------------------------------

    def _evict(self) -> bool:
        """Put out what the policy says; False when nothing may go."""
        loose = [h for h in self._held.values() if not h.kept and not h.num_readers]
        if not loose:
            return False
        worth, _, digest = min((self._worth(h), h.used, h.image.digest) for h in loose)
        self._floor = max(self._floor, worth.value)
        self._remove(digest)
        self._evictions += 1
        return True

    def _worth(self, held: Held) -> Worth:
        image = held.image
        uses = self._uses.get(image.digest, 0)
        return self._policy(
            Candidate(
                image.num_bytes,
                held.came,
                held.used,
                uses,
                held.reload_s,
                floor=held.floor,
            )
        )

    def _remove(self, digest: str) -> None:
        held = self._held.pop(digest, None)
        if held is None:
            return
        self._count(held, -1)
        held.gone = True
        if not held.num_readers:
            self._give(held)

    def _count(self, held: Held, sign: int) -> None:
        size = sign * held.image.num_bytes
        self._num_bytes += size
        self._loose_bytes += 0 if held.kept else size

    def _give(self, held: Held) -> None:
        if held.extent is not None and self.arena is not None:
            self.arena.give(held.extent)

    def _tick(self) -> int:
        self._now += 1
        return self._now
