"""Tracks which images are in host memory, within a limit of bytes. It never reads their data."""

from __future__ import annotations

from dataclasses import dataclass

from weft.checkpoint.pack import AdapterImage
from weft.core.stats import TierStats
from weft.schedule.extents import Extent, Extents
from weft.schedule.policy import Candidate, Policy, Worth, lru


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
    """Its place in the host tier's memory; None: the image has memory of its own."""
    num_readers: int = 0
    gone: bool = False
    """Whether it was dropped; readers may still need its extent."""


class HostTier:
    """Decides which images are on the host. An evicted one has to be read from disk again.

    Without `extents`, images stay in the memory that they have. Images that are *kept* are never
    evicted: they come on top of `max_bytes`, or have memory of their own if no extent is free.
    """

    def __init__(
        self, max_bytes: int, extents: Extents | None = None, policy: Policy = lru
    ) -> None:
        self._max_bytes = max_bytes if extents is None else extents.num_bytes
        self._policy = policy
        self.extents = extents
        self._held: dict[str, Held] = {}
        self._readers: set[Held] = set()
        self._reserved: set[Extent] = set()
        self._num_bytes = 0
        self._loose_bytes = 0
        """Bytes of the images that are not kept."""
        self._uses: dict[str, int] = {}
        self._floor = 0.0
        self._hits = self._misses = self._evictions = 0
        self._now = 0

    def open(self, digest: str) -> Held | None:
        """Begin to read an image: until `close`, its data don't change. None: it is not here."""
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
        """Reserve room until `put` or `cancel`, evicting others if need be. None: there is none."""
        if self.extents is None or num_bytes > self.extents.num_bytes:
            return None
        while (extent := self.extents.take(num_bytes)) is None:
            if not self._evict():
                return None
        self._reserved.add(extent)
        return extent

    def cancel(self, extent: Extent | None) -> None:
        if extent is not None:
            assert self.extents is not None
            self._reserved.remove(extent)
            self.extents.give(extent)

    def put(
        self,
        image: AdapterImage,
        kept: bool = False,
        extent: Extent | None = None,
        reload_s: float = 0.0,
    ) -> None:
        """Hold an image. `extent`: where its data lie, if in the host tier's memory. `reload_s`:
        how long reading it took. If it is here already, only `kept` and the time of its last use
        change, unless it gets its extent only now."""
        now = self._tick()
        held = self._held.get(image.digest)
        if held is not None and (extent is None or held.extent is not None):
            self.cancel(extent)
            held.used = now
            self.keep(image.digest, kept)
            return
        if kept or image.num_bytes <= self._max_bytes:
            came = held.came if held else now
            self._remove(image.digest)
            if extent is not None:
                self._reserved.remove(extent)
            held = Held(image, kept, came, now, self._floor, reload_s, extent)
            self._held[image.digest] = held
            self._count(held, 1)
        self._shrink()

    def keep(self, digest: str, kept: bool) -> None:
        """Say whether an image is kept; nothing happens if it is not here."""
        held = self._held.get(digest)
        if held is not None:
            self._count(held, -1)
            held.kept = kept
            self._count(held, 1)
        self._shrink()

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
            num_bytes=self._num_bytes,
            max_bytes=self._max_bytes,
            num_adapters=len(self._held),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        held = self._held.values()
        assert self._num_bytes == sum(h.image.num_bytes for h in held)
        assert self._loose_bytes == sum(h.image.num_bytes for h in held if not h.kept)
        assert all(h.num_readers > 0 for h in self._readers)
        assert not any(h.gone for h in held)
        if self.extents is not None:
            extents = [h.extent for h in {*held, *self._readers} if h.extent is not None]
            taken = sorted([*extents, *self._reserved, *self.extents.gaps])
            assert [e.start for e in taken] == [0, *(e.start + e.size for e in taken)][:-1]
            assert sum(e.size for e in taken) == self.extents.num_bytes, "memory is lost"

    def _shrink(self) -> None:
        while self._loose_bytes > self._max_bytes and self._evict():
            pass

    def _evict(self) -> bool:
        """Evict the image that the policy chooses; False if none may go."""
        loose = [h for h in self._held.values() if not h.kept and not h.num_readers]
        if not loose:
            return False
        worth, _, digest = min((self._worth(h), h.used, h.image.digest) for h in loose)
        self._floor = max(self._floor, worth.value)
        self._remove(digest)
        self._evictions += 1
        return True

    def _worth(self, held: Held) -> Worth:
        size, uses = held.image.num_bytes, self._uses.get(held.image.digest, 0)
        return self._policy(
            Candidate(size, held.came, held.used, uses, held.reload_s, floor=held.floor)
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
        if held.extent is not None and self.extents is not None:
            self.extents.give(held.extent)

    def _tick(self) -> int:
        self._now += 1
        return self._now
