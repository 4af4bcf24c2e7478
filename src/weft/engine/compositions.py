"""Weighted sums of adapters: which of them the engine knows."""

from __future__ import annotations

from weft.core.adapters import AdapterPart
from weft.engine.residency import Residency
from weft.schedule.scheduler import Scheduler

MAX_KNOWN = 256
"""Sums that are known at a time, besides those in use."""


class Compositions:
    """Lets scheduler and residency know the sums that requests name, as adapters like others, and
    forget those used least recently. One in use is forgotten after its last request."""

    def __init__(self, scheduler: Scheduler, residency: Residency) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._parts: dict[str, tuple[AdapterPart, ...]] = {}
        """By digest, those used last at the end."""

    def use(self, digest: str, parts: tuple[AdapterPart, ...]) -> None:
        """A request for this sum has come. Raises InvalidRequest, AdapterUnavailable."""
        self._residency.compose(digest, parts)
        self._scheduler.keep_adapter(digest)
        self._parts.pop(digest, None)
        self._parts[digest] = parts
        if len(self._parts) > MAX_KNOWN:
            self._drop(next(iter(self._parts)))

    def drop_those_of(self, digest: str) -> None:
        """Forget the sums that this adapter is part of."""
        for own, parts in list(self._parts.items()):
            if any(part.ref.digest == digest for part in parts):
                self._drop(own)

    def drop_all(self) -> None:
        for own in list(self._parts):
            self._drop(own)

    def _drop(self, digest: str) -> None:
        del self._parts[digest]
        if self._scheduler.drop_adapter(digest):
            self._residency.forget(digest)
