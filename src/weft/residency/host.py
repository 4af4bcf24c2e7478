"""The host cache: images of adapters in memory, bounded in number."""

from __future__ import annotations

from dataclasses import dataclass

from weft.checkpoint import AdapterImage
from weft.residency.policy import Policy, lru


@dataclass(slots=True)
class _Entry:
    image: AdapterImage
    kept: bool
    came: int
    used: int


class HostCache:
    """An image that was put out of the cache is read again from its folder.

    Those that are kept never go, and come on top of `max_images`.
    """

    def __init__(self, max_images: int, policy: Policy = lru) -> None:
        self._max_images = max_images
        self._policy = policy
        self._entries: dict[str, _Entry] = {}
        self._now = 0

    def get(self, digest: str) -> AdapterImage | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        entry.used = self._tick()
        return entry.image

    def put(self, image: AdapterImage, kept: bool = False) -> None:
        """Take an image in, or change whether it is kept."""
        now = self._tick()
        old = self._entries.get(image.digest)
        self._entries[image.digest] = _Entry(image, kept, old.came if old else now, now)
        loose = [digest for digest, entry in self._entries.items() if not entry.kept]
        if len(loose) > self._max_images:
            del self._entries[min(loose, key=self._key)]

    def drop(self, digest: str) -> None:
        self._entries.pop(digest, None)

    def digests(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def _key(self, digest: str) -> int:
        entry = self._entries[digest]
        return self._policy(entry.came, entry.used)

    def _tick(self) -> int:
        self._now += 1
        return self._now
