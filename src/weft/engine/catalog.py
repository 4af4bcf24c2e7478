"""What the engine knows of adapters: where each is to be had from, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.checkpoint.compose import Summand, summand_of
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo, AdapterPart
from weft.core.errors import AdapterError, AdapterUnavailable, InvalidRequest, WeftError
from weft.engine.host import Held, HostTier
from weft.engine.inbox import Inbox, LoadEnded
from weft.schedule.extents import Extent
from weft.schedule.slots import AdapterSlots
from weft.worker.protocol import Origin, Worker

MAX_PATHS = 16
"""Folders remembered for one content; the newest ones."""


@dataclass(slots=True)
class KnownAdapter:
    """A registered adapter, or a sum of some."""

    num_bytes: int
    summand: Summand | None = None
    """None: it is a sum itself."""
    parts: tuple[AdapterPart, ...] = ()
    """What a sum is made of."""
    paths: tuple[str, ...] = ()
    """Where it may be read again, newest first: any of them may have changed since, or be gone."""
    from_memory: bool = False
    """Whether a registration of it has no folder."""
    pinned: bool = False
    info: AdapterInfo | None = None
    """What is told of it; None: it is a sum."""
    checked: bool = False
    """See `AdapterInfo.checked`."""
    num_loads: int = 0
    num_evictions: int = 0
    last_load_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds of its last load, by stage."""

    @property
    def kept(self) -> bool:
        """Whether its image stays on the host."""
        return self.from_memory or self.pinned


class Catalog:
    """Owner of what is known of adapters, in the slots' and the host's books too."""

    def __init__(self, slots: AdapterSlots, host: HostTier, worker: Worker, inbox: Inbox) -> None:
        self.slots = slots
        self.host = host
        self.known: dict[str, KnownAdapter] = {}
        self._worker = worker
        self._inbox = inbox

    def add(
        self, image: AdapterImage, path: str | None, pinned: bool, checked: bool = False
    ) -> AdapterInfo:
        """Make an image known, from the folder `path` or (None) from memory; at once.

        Raises AdapterInvalid, AdapterConflict; what was known before then stays as it is.
        """
        self.slots.add(image.digest, image.layout.num_elements, pinned)
        known = KnownAdapter(image.num_bytes, summand_of(image))
        known = self.known.setdefault(image.digest, known)
        known.pinned = pinned
        known.checked |= checked
        if path is None:
            known.from_memory = True
        else:
            others = [other for other in known.paths if other != path]
            known.paths = (path, *others[: MAX_PATHS - 1])
        self._hold(image, known.kept)
        known.info = AdapterInfo(
            image.digest,
            path or "",
            image.layout.max_rank,
            image.num_bytes,
            image.targets,
            image.conversion_error,
            image.conversion_worst,
            image.invocation,
            image.layout.vocab_size,
        )
        return self.info(image.digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Pin a known adapter, or unpin it. Raises AdapterConflict if too much would be pinned."""
        known = self.known[digest]
        if known.pinned != pinned:
            self.slots.pin(digest, pinned)
            known.pinned = pinned
            self.host.keep(digest, known.kept)

    def info(self, digest: str) -> AdapterInfo:
        """What is known of an adapter that was added."""
        known = self.known[digest]
        assert known.info is not None, "a sum"
        return replace(known.info, checked=known.checked)

    def compose(self, digest: str, parts: Sequence[AdapterPart]) -> None:
        """Make the weighted sum of registered adapters known under `digest`, which must name it
        alone; at once, as it is made by its loads. Raises InvalidRequest, AdapterUnavailable."""
        summands: list[tuple[str, Summand]] = []
        for part in parts:
            known = self.known.get(part.ref.digest)
            if known is None or known.summand is None:
                raise AdapterUnavailable(f"adapter {part.ref.name!r} is not loaded", "adapters")
            if refusal := self.slots.refusal(part.ref.digest):
                raise refusal
            summands.append((part.ref.name, known.summand))
        if digest in self.known:
            return
        size = self._worker.check_sum(summands)
        try:
            self.slots.add(digest, size)
        except AdapterError as error:
            raise InvalidRequest(f"adapters: summed, {error.message}", "adapters") from None
        num_bytes = size * self._worker.facts.element_bytes
        self.known[digest] = KnownAdapter(num_bytes, parts=tuple(parts))

    def forget(self, digest: str) -> None:
        """Free all that an adapter without leases takes, in all tiers but the disk."""
        slot = self.slots.remove(digest)
        if slot is not None:
            self._worker.clear((slot,))
        self.host.forget(digest)
        self.known.pop(digest, None)

    def invocation(self, digest: str) -> tuple[int, ...]:
        """An adapter's `AdapterInfo.invocation_token_ids`; empty for what is not known, too."""
        known = self.known.get(digest)
        return known.info.invocation_token_ids if known and known.info else ()

    def vocab_size(self, digest: str) -> int:
        """An adapter's `AdapterInfo.vocab_size`; 0 for what is not known, too."""
        known = self.known.get(digest)
        return known.info.vocab_size if known and known.info else 0

    def is_checked(self, digest: str) -> bool:
        known = self.known.get(digest)
        return known is not None and known.checked

    def refuse(self, digest: str, error: WeftError) -> None:
        """If this content is known, serve nothing of it any more, until it is added again."""
        if digest in self.known:
            self.known[digest].checked = False
            self.slots.refuse(digest, error)
            self._inbox.put(LoadEnded(digest, error))

    def open(self, digest: str) -> tuple[Origin, Held | None]:
        """Where an adapter is to be had from. What is held stays until the host's `close`."""
        known = self.known.get(digest)
        if known is None:
            return Origin(digest, None, ()), None
        held = self.host.open(digest)
        return Origin(digest, held.image if held else None, known.paths), held

    def put(self, image: AdapterImage, extent: Extent | None, came_s: float = 0.0) -> None:
        """Hold an image that was brought to the host, unless it was forgotten meanwhile."""
        known = self.known.get(image.digest)
        if known is None:
            self.host.cancel(extent)
        elif extent is not None or self.host.extents is None or known.kept:
            self.host.put(image, known.kept, extent, came_s)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, of the parts too."""
        self.slots.check()
        self.host.check()
        assert self.known.keys() >= set(self.slots.resident) | set(self.host.digests())
        assert all(map(self.slots.knows, self.known))

    def _hold(self, image: AdapterImage, kept: bool) -> None:
        """Put an image on the host; if it is to have a place there, a copy of it comes later."""
        if self.host.extents is None or image.digest in self.host:
            self.host.put(image, kept)
            return
        extent = self.host.reserve(image.num_bytes)
        if extent is not None or kept:
            self.host.put(image, kept)
        if extent is not None:
            staged = self._worker.stage(image, extent)
            self._inbox.expect(staged, lambda image: self.put(image, extent))
