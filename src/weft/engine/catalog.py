"""What the engine knows of adapters: what each one is, and where it can be read from.

To register new content, it is read, packed, and probed on the device: the serving kernels must
compute what the image says. Content that fails is not registered.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from weft.checkpoint.compose import Summand, summand_of
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo, AdapterPart, AdapterSource
from weft.core.errors import AdapterError, AdapterUnavailable, InvalidRequest, WeftError
from weft.core.messages import Hold
from weft.core.stats import CHECK_RESULTS, AdapterStats, Spread, StageTimes, Times
from weft.engine.host import Held, HostTier
from weft.schedule.extents import Extent
from weft.schedule.slots import AdapterSlots
from weft.worker.protocol import Origin, PackedAdapter, ProbeResult, Worker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_PATHS = 16
"""How many folders are remembered for one content; the newest ones are."""
MAX_REGISTERING = 8
"""The most registrations under way: each keeps its image in memory until it is checked."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration has ended, with an error or an image that is still to be added."""

    call: Hold
    result: AdapterImage | WeftError
    checked: bool = False


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended; `error` None means that the adapter is resident."""

    digest: str
    error: WeftError | None


Ended = Registered | LoadEnded


class Inbox:
    """A queue by which other threads leave work to the engine's thread, which does it between two
    steps. So only that thread touches the state of adapters."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Other threads call `wake` when they have left something to do."""
        self._wake = wake
        self._left: SimpleQueue[Callable[[], Ended | None]] = SimpleQueue()

    def expect(self, future: Future[Result], apply: Callable[[Result], Ended | None]) -> None:
        """Have `apply` called with the future's result once it is there; never if cancelled."""

        def leave(done: Future[Result]) -> None:
            if not done.cancelled():
                self._left.put(lambda: apply(done.result()))
                self._wake()

        future.add_done_callback(leave)

    def put(self, ended: Ended) -> None:
        """Leave an end that is known already. For the engine's thread, so it does not `wake`."""
        self._left.put(lambda: ended)

    def empty(self) -> Iterator[Ended]:
        """Do all that is left to do and yield the ends. Each is done only when the iterator is
        asked for it, so that the caller can first add what was registered before."""
        while True:
            try:
                ended = self._left.get_nowait()()
            except Empty:
                return
            if ended is not None:
                yield ended


@dataclass(slots=True)
class KnownAdapter:
    """A registered adapter, or a weighted sum of registered adapters."""

    num_bytes: int
    summand: Summand | None = None
    """None: it is a sum itself."""
    parts: tuple[AdapterPart, ...] = ()
    sources: tuple[AdapterSource, ...] = ()
    """Where it may be read again, newest first; any of these may have changed or be gone."""
    from_memory: bool = False
    """Whether it was ever registered from memory, without a folder."""
    pinned: bool = False
    info: AdapterInfo | None = None
    """Its facts as reported, except `checked`; None: it is a sum."""
    checked: bool = False
    stats: AdapterStats = field(default_factory=AdapterStats)

    @property
    def kept(self) -> bool:
        """Whether its image must stay on the host."""
        return self.from_memory or self.pinned


class Catalog:
    """Owner of what is known of adapters. It keeps `slots` and `host` in step with that."""

    def __init__(self, slots: AdapterSlots, host: HostTier, worker: Worker, inbox: Inbox) -> None:
        self.slots = slots
        self.host = host
        self.known: dict[str, KnownAdapter] = {}
        self._worker = worker
        self._inbox = inbox

    def add(
        self, image: AdapterImage, source: AdapterSource | None, pinned: bool, checked: bool = False
    ) -> AdapterInfo:
        """Make an image known at once. `source`: its folder; None: it comes from memory. Raises
        AdapterInvalid, AdapterConflict; then nothing changes."""
        self.slots.add(image.digest, image.layout.num_elements, pinned)
        known = KnownAdapter(image.num_bytes, summand_of(image))
        known = self.known.setdefault(image.digest, known)
        known.pinned = pinned
        known.checked |= checked
        if source is None:
            known.from_memory = True
        else:
            self.add_source(image.digest, source)
        self._hold(image, known.kept)
        known.info = AdapterInfo(
            digest=image.digest,
            path=source.path if source else "",
            max_rank=image.layout.max_rank,
            num_bytes=image.num_bytes,
            targets=image.targets,
            conversion_error=image.conversion_error,
            conversion_worst=image.conversion_worst,
            invocation_token_ids=image.invocation,
            vocab_size=image.layout.vocab_size,
        )
        return self.info(image.digest)

    def add_source(self, digest: str, source: AdapterSource) -> None:
        """From now on, read a known adapter from this folder first."""
        known = self.known[digest]
        others = [other for other in known.sources if other.path != source.path]
        known.sources = (source.again(), *others[: MAX_PATHS - 1])

    def pin(self, digest: str, pinned: bool) -> None:
        """Pin a known adapter, or unpin it. Raises AdapterConflict if too much would be pinned."""
        known = self.known[digest]
        if known.pinned != pinned:
            self.slots.pin(digest, pinned)
            known.pinned = pinned
            self.host.keep(digest, known.kept)

    def info(self, digest: str) -> AdapterInfo:
        """The facts of an adapter that was added with `add`."""
        known = self.known[digest]
        assert known.info is not None, "a sum"
        return replace(known.info, checked=known.checked)

    def compose(self, digest: str, parts: Sequence[AdapterPart]) -> None:
        """Make the weighted sum of registered adapters known under `digest`, which must be unique
        to it. Only its loads compute it. Raises InvalidRequest, AdapterUnavailable."""
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
        facts = self._worker.facts
        num_bytes = size * facts.element_bytes * facts.num_ranks
        self.known[digest] = KnownAdapter(num_bytes, parts=tuple(parts))

    def forget(self, digest: str) -> None:
        """Forget an adapter without leases, and free its memory on the device and the host."""
        slot = self.slots.remove(digest)
        if slot is not None:
            self._worker.clear((slot,))
        self.host.forget(digest)
        self.known.pop(digest, None)

    def is_checked(self, digest: str) -> bool:
        known = self.known.get(digest)
        return known is not None and known.checked

    def refuse(self, digest: str, error: WeftError) -> None:
        """Serve this content no more until it is added again; nothing happens if it is unknown."""
        if digest in self.known:
            self.known[digest].checked = False
            self.slots.refuse(digest, error)
            self._inbox.put(LoadEnded(digest, error))

    def open(self, digest: str) -> tuple[Origin, Held | None]:
        """Where to load an adapter from. A Held image stays as it is until `HostTier.close`."""
        known = self.known.get(digest)
        if known is None:
            return Origin(digest, None, ()), None
        held = self.host.open(digest)
        return Origin(digest, held.image if held else None, known.sources), held

    def put(self, image: AdapterImage, extent: Extent | None, came_s: float = 0.0) -> None:
        """Hold an image that a load brought to the host in `came_s` seconds, unless its adapter was
        forgotten meanwhile."""
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
        """Put an image on the host. If it can have an extent, a copy there replaces it later."""
        if self.host.extents is None or image.digest in self.host:
            self.host.put(image, kept)
            return
        extent = self.host.reserve(image.num_bytes)
        if extent is not None or kept:
            self.host.put(image, kept)
        if extent is not None:
            staged = self._worker.stage(image, extent)
            self._inbox.expect(staged, lambda image: self.put(image, extent))


class Registrations:
    """Owner of the registrations that wait or are under way, and of the counts of probes."""

    def __init__(
        self, catalog: Catalog, worker: Worker, inbox: Inbox, stage_times: StageTimes
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._inbox = inbox
        self._stage_times = stage_times
        self._waiting: deque[Hold] = deque()
        self._num_begun = 0
        self._results: Counter[str] = Counter()
        self._check_times = Times()

    def register(self, call: Hold) -> None:
        """Begin a registration, or let it wait until others have ended."""
        self._waiting.append(call)
        self._begin()

    def probe(self, image: AdapterImage) -> bool:
        """Probe an image that comes from memory, at once, unless it was checked before. Returns
        whether a probe has shown it to be right. Raises AdapterQuarantined if it is wrong."""
        if self._catalog.is_checked(image.digest):
            return True
        if not self._worker.facts.has_checks:
            return False
        return self._judge(image.digest, "", self._worker.probe(image, paced=False).result())

    def results(self) -> dict[str, int]:
        """The number of probes by result (CHECK_RESULTS); empty if the worker makes none."""
        if not self._worker.facts.has_checks:
            return {}
        return {result: self._results[result] for result in CHECK_RESULTS}

    def check_times(self) -> Spread:
        """How long probes took."""
        return self._check_times.spread

    def close(self) -> None:
        """Begin no more registrations."""
        self._waiting.clear()

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert 0 <= self._num_begun <= MAX_REGISTERING
        assert not self._waiting or self._num_begun == MAX_REGISTERING

    def _begin(self) -> None:
        while self._waiting and self._num_begun < MAX_REGISTERING:
            self._num_begun += 1
            call = self._waiting.popleft()
            packed = self._worker.pack(call.source)
            self._inbox.expect(packed, partial(self._packed, call))

    def _packed(self, call: Hold, packed: PackedAdapter | WeftError) -> Registered | None:
        if isinstance(packed, WeftError):
            return self._end(Registered(call, packed))
        self._stage_times.add(packed.stage_s)
        image, checked = packed.image, call.source.checked
        if checked or not self._worker.facts.has_checks or self._catalog.is_checked(image.digest):
            return self._end(Registered(call, image, checked))
        probed = self._worker.probe(image, paced=True)
        self._inbox.expect(probed, partial(self._probed, call, image))
        return None

    def _probed(
        self, call: Hold, image: AdapterImage, verdict: ProbeResult | WeftError
    ) -> Registered:
        try:
            passed = self._judge(image.digest, call.source.path, verdict)
        except WeftError as error:
            return self._end(Registered(call, error))
        return self._end(Registered(call, image, passed))

    def _judge(self, digest: str, path: str, verdict: ProbeResult | WeftError) -> bool:
        """Count a probe's result. Returns whether it passed; else it was skipped. Raises the error
        of a probe that could not be made. If it failed, raises AdapterQuarantined, and content that
        is known already, since another probe of it passed or was skipped, is not served any more.
        """
        if isinstance(verdict, WeftError):
            raise verdict
        self._results[verdict.result] += 1
        self._check_times.add(verdict.seconds)
        error = verdict.error
        if error is None:
            return verdict.result == "passed"
        logger.error("quarantined: adapter %s %s: %s", digest[:16], path, error.message)
        self._catalog.refuse(digest, error)
        raise error

    def _end(self, registered: Registered) -> Registered:
        self._num_begun -= 1
        self._begin()
        return registered
