"""Which content is wanted, and by whom. Pure: a set of names for each digest, no counts.

    hold ──> held ──(its last holder releases it)──> draining ──(no request uses it)──> forgotten
              ^───────────────(held again)──────────────┘

To repeat a `hold` or a `release` changes nothing, so all of it can be said again to a new engine.
"""

from __future__ import annotations

from collections.abc import Callable


class Holders:
    """Owner of who holds what. `check()` states the invariants."""

    def __init__(self) -> None:
        self._pins: dict[str, dict[str, bool]] = {}
        """By digest: each holder, and whether it pins the content."""
        self._draining: set[str] = set()

    def hold(self, digest: str, holder: str, pinned: bool = False) -> None:
        """Let `holder` hold this content; if it does so already, only its pin changes."""
        self._pins.setdefault(digest, {})[holder] = pinned
        self._draining.discard(digest)

    def release(self, digest: str, holder: str) -> None:
        """Let `holder` hold it no longer. The content drains if that was its last holder."""
        pins = self._pins.get(digest, {})
        if pins.pop(holder, None) is not None and not pins:
            del self._pins[digest]
            self._draining.add(digest)

    def is_held(self, digest: str) -> bool:
        return digest in self._pins

    def is_pinned(self, digest: str) -> bool:
        """Whether anybody who holds it pins it."""
        return any(self._pins.get(digest, {}).values())

    def would_be_pinned(self, digest: str, holder: str, pinned: bool) -> bool:
        """What `is_pinned` is going to say after `hold` with these arguments."""
        pins = self._pins.get(digest, {})
        return pinned or any(other for name, other in pins.items() if name != holder)

    def take_drained(self, in_use: Callable[[str], bool]) -> list[str]:
        """Take the content that nobody holds and no request uses any more, to forget it now."""
        if not self._draining:
            return []
        drained = sorted(digest for digest in self._draining if not in_use(digest))
        self._draining.difference_update(drained)
        return drained

    def known(self) -> set[str]:
        """All content that is held or drains."""
        return self._pins.keys() | self._draining

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert all(self._pins.values()), "held by nobody, and not draining"
        assert not self._pins.keys() & self._draining, "held, and draining"
