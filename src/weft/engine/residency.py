"""Moves adapters between disk, host and device. Slow work runs on loader threads.

The engine's thread calls `register`, `start` and `forget`, which return at once, and `poll`
between steps, which applies what loader threads have finished. All state belongs to it: loader
threads read files and write to extents of host and device that nothing else uses.

    a load                host tier ────────────────────────────> device
                          image file ──> host tier ─────────────> device
                          folder ──> packed ──> host tier ──────> device ──> image file
                          parts, each from one of these ──> summed ──> host tier ──> device
    a registration        folder ──> packed ──> checked ──> host tier
                                         └────> image file

New content is checked before that, on a registrar's thread: whether the device computes what the
image says. What fails is not registered. And whenever an image has come to the device, its
checksum must be the one with which it was packed, or it is brought once more, from further below.

An image file holds the very content that was registered: an adapter whose folder has changed
since, or is gone, goes on being served from it. What is registered is read from its folder.
"""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch

from weft.checkpoint import AdapterFiles, AdapterImage, Summand, summand_of
from weft.core.adapters import AdapterInfo, AdapterPart
from weft.core.errors import (
    AdapterError,
    AdapterQuarantined,
    AdapterUnavailable,
    InvalidRequest,
    WeftError,
    to_wire,
)
from weft.core.messages import Hold
from weft.core.stats import (
    CHECK_RESULTS,
    LOAD_BOUNDS_S,
    LOAD_STAGES,
    AdapterStats,
    CheckResult,
    Spread,
    TierStats,
)
from weft.core.targets import ImageLayout
from weft.engine.host import Extent, Held, HostTier
from weft.engine.images import ImageStore
from weft.kernels.checksum import checksum
from weft.schedule.extents import Move
from weft.schedule.slots import AdapterSlots, Load, Moved

logger = logging.getLogger(__name__)

NUM_LOADERS = 2
NUM_REGISTRARS = 2
"""Of their own: many registrations, which are slow, hold up no load that requests wait for."""
MAX_REGISTERING = 2 * NUM_REGISTRARS
"""Registrations begun at a time: each has its image in memory until it was checked."""
MAX_PATHS = 16
"""Folders remembered for one content; the newest ones."""
_TORN = "its image did not come to adapter memory as it was packed"


class Source(Protocol):
    """Folders of adapters; any thread. See `weft.worker.packing.Packer`."""

    def read_adapter(self, path: str, expect_digest: str | None) -> AdapterFiles:
        """Raises AdapterError."""
        ...

    def pack_adapter(self, files: AdapterFiles) -> AdapterImage:
        """Raises AdapterInvalid."""
        ...

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        """Elements that the sum of adapters takes, by name. Raises InvalidRequest."""
        ...

    def sum_adapters(
        self, digest: str, parts: Sequence[tuple[AdapterImage, float]], into: torch.Tensor | None
    ) -> AdapterImage:
        """See `weft.checkpoint.sum_images`."""
        ...


class Pool(Protocol):
    """Device memory for images; see `weft.kernels.lora.AdapterPool`."""

    @property
    def element_bytes(self) -> int: ...

    def write(self, start: int, data: torch.Tensor) -> int:
        """The checksum of what is there then."""
        ...

    def install(self, slot: int, start: int, layout: ImageLayout) -> None: ...

    def clear(self, slot: int) -> None: ...


class Checker(Protocol):
    """Whether the device computes an adapter as it should; see `weft.worker.selfcheck`."""

    def check(self, image: AdapterImage, *, paced: bool) -> CheckResult:
        """On any thread; `paced`: so that steps beside it are not disturbed. Raises
        AdapterQuarantined."""
        ...


MoveImages = Callable[[Sequence[Move]], Moved]
"""See `weft.worker.protocol.Worker.move`."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A call of `register` has ended: with the image, which is not known yet, or an error."""

    call: Hold
    result: AdapterImage | WeftError
    checked: bool = False
    """See `AdapterInfo.checked`."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended; `error` None means that the adapter is resident."""

    digest: str
    error: WeftError | None


@dataclass(slots=True)
class _Known:
    """A registered adapter, or a sum of some."""

    num_bytes: int
    summand: Summand | None = None
    """None: it is a sum itself."""
    parts: tuple[AdapterPart, ...] = ()
    """Of a sum."""
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

    @property
    def kept(self) -> bool:
        """Whether its image stays on the host."""
        return self.from_memory or self.pinned


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an adapter is to be had from: `held`, or else its image file, or else its folders."""

    digest: str
    held: Held | None
    paths: tuple[str, ...]


@dataclass(slots=True)
class _Job:
    """A load under way. The loader fills `extent` if there is one."""

    load: Load
    origin: _Origin
    parts: tuple[tuple[_Origin, float], ...]
    """What is to be summed."""
    extent: Extent | None
    moved: Moved
    ordered_s: float
    stage_s: dict[str, float] = field(default_factory=dict)
    packed: list[AdapterImage] = field(default_factory=list)
    """What came from folders."""
    faults: int = 0
    """Copies to the device that went wrong."""


class _Call(NamedTuple):
    """A registration whose image is there."""

    hold: Hold
    image: AdapterImage


class _Verdict(NamedTuple):
    """Of a check, and how long it took."""

    result: CheckResult
    seconds: float
    error: AdapterQuarantined | None


class Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LOAD_BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(LOAD_BOUNDS_S, seconds)] += 1
        self._sum += seconds

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self._sum)


class Residency:
    """Owner of adapter residency; the decisions on the device are those of `AdapterSlots`."""

    def __init__(
        self,
        slots: AdapterSlots,
        pool: Pool,
        source: Source,
        host: HostTier,
        images: ImageStore | None,
        move: MoveImages,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        checker: Checker | None = None,
    ) -> None:
        """`checker` None: what is registered is not checked."""
        self.slots = slots
        self.host = host
        self._pool = pool
        self._source = source
        self._images = images
        self._move = move
        self._wake = wake
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._jobs: dict[str, _Job] = {}
        """By digest: an adapter has one load at a time."""
        self._hits = self._misses = 0
        self._checker = checker
        self._check_results: Counter[str] = Counter()
        self._check_times = Times()
        self.copy_faults = 0
        """Images that did not come to the device as they were packed."""
        self._stage_times = {stage: Times() for stage in LOAD_STAGES}
        self._done: SimpleQueue[Callable[[], Registered | LoadEnded | None]] = SimpleQueue()
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="weft-loader")
        self._registrars = ThreadPoolExecutor(NUM_REGISTRARS, thread_name_prefix="weft-registrar")
        self._to_register: deque[Callable[[], None]] = deque()
        self._num_registering = 0

    def register(self, call: Hold) -> None:
        """Read, validate, pack and check; `poll` returns a Registered with this call."""
        self._to_register.append(partial(self._register, call))
        self._begin_registrations()

    def add(
        self, image: AdapterImage, path: str | None, pinned: bool, checked: bool = False
    ) -> AdapterInfo:
        """Make an image known, from the folder `path` or (None) from memory; at once.

        Raises AdapterInvalid, AdapterConflict; what was known before then stays as it is.
        """
        self.slots.add(image.digest, image.layout.num_elements, pinned)
        known = _Known(image.num_bytes, summand_of(image))
        known = self._known.setdefault(image.digest, known)
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
        known = self._known[digest]
        if known.pinned != pinned:
            self.slots.pin(digest, pinned)
            known.pinned = pinned
            self.host.keep(digest, known.kept)

    def info(self, digest: str) -> AdapterInfo:
        """What is known of an adapter that was added."""
        known = self._known[digest]
        assert known.info is not None, "a sum"
        return replace(known.info, checked=known.checked)

    def known(self) -> set[str]:
        """All adapters that were added and not forgotten, and sums."""
        return set(self._known)

    def probe(self, image: AdapterImage) -> bool:
        """Check what comes from memory, on this thread, unless it was checked before. Whether it
        is right, as far as is known; raises AdapterQuarantined."""
        if self._is_checked(image.digest):
            return True
        if self._checker is None:
            return False
        verdict = self._verdict(self._checker, image, paced=False)
        self._judge(image, "", verdict)
        return verdict.result == "passed"

    def compose(self, digest: str, parts: Sequence[AdapterPart]) -> None:
        """Make the weighted sum of registered adapters known under `digest`, which must name it
        alone; at once, as it is made by its loads. Raises InvalidRequest, AdapterUnavailable."""
        summands: list[tuple[str, Summand]] = []
        for part in parts:
            known = self._known.get(part.ref.digest)
            if known is None or known.summand is None:
                raise AdapterUnavailable(f"adapter {part.ref.name!r} is not loaded", "adapters")
            if refusal := self.slots.refusal(part.ref.digest):
                raise refusal
            summands.append((part.ref.name, known.summand))
        if digest in self._known:
            return
        size = self._source.check_sum(summands)
        try:
            self.slots.add(digest, size)
        except AdapterError as error:
            raise InvalidRequest(f"adapters: summed, {error.message}", "adapters") from None
        self._known[digest] = _Known(size * self._pool.element_bytes, parts=tuple(parts))

    def invocation(self, digest: str) -> tuple[int, ...]:
        """See `AdapterInfo.invocation_token_ids`; empty for what is not known either."""
        known = self._known.get(digest)
        return known.info.invocation_token_ids if known and known.info else ()

    def vocab_size(self, digest: str) -> int:
        """See `AdapterInfo.vocab_size`; 0 for what is not known either."""
        known = self._known.get(digest)
        return known.info.vocab_size if known and known.info else 0

    def ask(self, digest: str) -> None:
        """A request came for an adapter: for what is counted, nothing else."""
        if self.slots.is_resident(digest):
            self._hits += 1
        else:
            self._misses += 1

    def start(self, loads: list[Load]) -> None:
        """Carry out what the scheduler ordered; `poll` returns a LoadEnded for each."""
        for load in loads:
            for slot in load.evicted_slots:
                self._pool.clear(slot)
            for digest in load.evicted:
                self._known[digest].num_evictions += 1
            moved = self._move(load.moves)
            known, origin = self._known[load.digest], self._origin(load.digest)
            parts: tuple[tuple[_Origin, float], ...] = ()
            extent = None
            if origin.held is None:
                parts = tuple((self._origin(p.ref.digest), p.scale) for p in known.parts)
                extent = self.host.reserve(known.num_bytes)
            job = _Job(load, origin, parts, extent, moved, self._clock())
            self._jobs[load.digest] = job
            self._loaders.submit(self._load, job)

    def forget(self, digest: str) -> None:
        """Free all that an adapter without leases takes, in all tiers but the disk."""
        slot = self.slots.remove(digest)
        if slot is not None:
            self._pool.clear(slot)
        self.host.forget(digest)
        self._known.pop(digest, None)

    def poll(self) -> Iterator[Registered | LoadEnded]:
        """Apply what has finished, one after another: the next is applied when it is asked for,
        so that what was registered can be added before."""
        while True:
            try:
                end = self._done.get_nowait()()
            except Empty:
                return
            if end is not None:
                yield end

    def stats(self) -> dict[str, AdapterStats]:
        """By digest: what is registered and has been on the device."""
        return {
            digest: AdapterStats(
                known.num_loads, known.num_evictions, known.last_load_s, known.stage_s
            )
            for digest, known in self._known.items()
            if known.num_loads
        }

    def tiers(self) -> dict[str, TierStats]:
        """By device, host and disk; no disk if images are not kept there."""
        slots, size = self.slots, self._pool.element_bytes
        device = TierStats(
            slots.used_elements * size,
            slots.capacity * size,
            len(slots.resident),
            self._hits,
            self._misses,
            slots.num_evictions,
        )
        tiers = {"device": device, "host": self.host.stats()}
        return tiers if self._images is None else {**tiers, "disk": self._images.stats()}

    def load_times(self) -> dict[str, Spread]:
        """Of loads and registrations, by stage."""
        return {stage: times.spread for stage, times in self._stage_times.items()}

    def check_results(self) -> dict[str, int]:
        """Of checks; empty if there are none."""
        if self._checker is None:
            return {}
        return {result: self._check_results[result] for result in CHECK_RESULTS}

    def check_times(self) -> Spread:
        """Of checks."""
        return self._check_times.spread

    def close(self) -> None:
        """End the threads, behind what they are at."""
        self._to_register.clear()
        self._registrars.shutdown(cancel_futures=True)
        self._loaders.shutdown(cancel_futures=True)
        if self.host.arena is not None:
            self.host.arena.close()

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, of the parts too."""
        self.slots.check()
        self.host.check()
        assert 0 <= self._num_registering <= MAX_REGISTERING
        assert not self._to_register or self._num_registering == MAX_REGISTERING
        assert self._known.keys() >= set(self.slots.resident) | set(self.host.digests())
        for digest in self._known:
            assert self.slots.knows(digest)
            assert self.slots.is_loading(digest) <= (digest in self._jobs)

    # -- on loader threads: each ends by handing `poll` what is left to do --------------------

    def _register(self, hold: Hold) -> None:
        stage_s: dict[str, float] = {}
        packed = None
        try:
            digest = hold.source.digest
            image = self._from_file(digest, None, stage_s) if digest else None
            if image is None:
                image = packed = self._from_folder(hold.source.path, digest, stage_s)
        except Exception as error:
            failure = _typed(error)
            self._finish(lambda: self._end_registration(Registered(hold, failure)))
            return
        call = _Call(hold, image)
        self._finish(lambda: self._packed(call, stage_s))
        self._save(packed)

    def _check(self, checker: Checker, call: _Call) -> None:
        try:
            verdict = self._verdict(checker, call.image, paced=True)
        except Exception as error:
            failure = _typed(error)
            self._finish(lambda: self._end_registration(Registered(call.hold, failure)))
        else:
            self._finish(lambda: self._registered(call, verdict))

    def _verdict(self, checker: Checker, image: AdapterImage, paced: bool) -> _Verdict:
        begin = self._clock()
        error = None
        try:
            result = checker.check(image, paced=paced)
        except AdapterQuarantined as failure:
            result, error = "failed", failure
        return _Verdict(result, self._clock() - begin, error)

    def _load(self, job: _Job) -> None:
        try:
            image = self._obtain(job, job.origin)
            job.moved.wait()
            if not self._copy(job, image):
                image = self._obtain_anew(job, image)
                if not self._copy(job, image):
                    raise AdapterUnavailable(f"the adapter can't be loaded: {_TORN}", "model")
        except Exception as error:
            failure = _unavailable(_typed(error))
            self._finish(lambda: self._failed(job, failure))
        else:
            found = image
            self._finish(lambda: self._loaded(job, found))
        for packed in job.packed:
            self._save(packed)

    def _copy(self, job: _Job, image: AdapterImage) -> bool:
        """To the device. Whether it is there as it was packed."""
        with self._timed("copy", job.stage_s):
            right = self._pool.write(job.load.start, image.data) == image.checksum
        job.faults += not right
        return right

    def _obtain(self, job: _Job, origin: _Origin) -> AdapterImage:
        image = self._sum(job) if job.parts else self._bring(origin, job, job.extent)
        return _summed_up(image)

    def _obtain_anew(self, job: _Job, image: AdapterImage) -> AdapterImage:
        """Not from the host, if it is to be had elsewhere: what it has may have changed there."""
        logger.warning("adapter %s: %s; it is loaded once more", job.load.digest[:16], _TORN)
        if not (job.origin.paths or job.parts):
            return image
        return self._obtain(job, replace(job.origin, held=None))

    def _bring(self, origin: _Origin, job: _Job, extent: Extent | None) -> AdapterImage:
        """An adapter from the nearest place that has it, into `extent` unless it is held."""
        if origin.held is not None:
            return origin.held.image
        image = self._from_file(origin.digest, extent, job.stage_s)
        if image is None:
            image = self._from_folders(origin, job.stage_s)
            job.packed.append(image)
            image = self._staged(image, extent)
        return image

    def _sum(self, job: _Job) -> AdapterImage:
        images = [(self._bring(origin, job, None), scale) for origin, scale in job.parts]
        with self._timed("pack", job.stage_s):
            return self._source.sum_adapters(job.load.digest, images, self._view(job.extent))

    def _from_file(
        self, digest: str, extent: Extent | None, stage_s: dict[str, float]
    ) -> AdapterImage | None:
        if self._images is None:
            return None
        with self._timed("read", stage_s):
            return self._images.load(digest, self._view(extent))

    def _from_folder(
        self, path: str, digest: str | None, stage_s: dict[str, float]
    ) -> AdapterImage:
        with self._timed("read", stage_s):
            files = self._source.read_adapter(path, digest)
        with self._timed("pack", stage_s):
            return _summed_up(self._source.pack_adapter(files))

    def _from_folders(self, origin: _Origin, stage_s: dict[str, float]) -> AdapterImage:
        """From the first folder that still holds this content; the last one's error if none."""
        if not origin.paths:
            raise AdapterUnavailable("an adapter of the sum was unloaded", "adapters")
        for path in origin.paths[:-1]:
            with contextlib.suppress(Exception):
                return self._from_folder(path, origin.digest, stage_s)
        return self._from_folder(origin.paths[-1], origin.digest, stage_s)

    def _staged(self, image: AdapterImage, extent: Extent | None) -> AdapterImage:
        """A copy of it in the arena, if it has a place there."""
        view = self._view(extent)
        if view is None:
            return image
        data = view[: image.num_bytes].view(image.data.dtype)
        # NumPy, as torch would wake a pool of threads, which takes the cores from a step.
        np.copyto(data.view(torch.uint8).numpy(), image.data.view(torch.uint8).numpy())
        return replace(image, data=data)

    def _view(self, extent: Extent | None) -> torch.Tensor | None:
        return None if extent is None or self.host.arena is None else self.host.arena.view(extent)

    def _stage(self, image: AdapterImage, extent: Extent) -> None:
        staged = self._staged(image, extent)
        self._finish(lambda: self._put(staged, extent))

    def _save(self, image: AdapterImage | None) -> None:
        if image is not None and self._images is not None:
            self._images.save(image)

    @contextlib.contextmanager
    def _timed(self, stage: str, stage_s: dict[str, float]) -> Iterator[None]:
        begin = self._clock()
        yield
        stage_s[stage] = stage_s.get(stage, 0.0) + self._clock() - begin

    def _finish(self, apply: Callable[[], Registered | LoadEnded | None]) -> None:
        self._done.put(apply)
        self._wake()

    # -- on the engine's thread ----------------------------------------------------------------

    def _origin(self, digest: str) -> _Origin:
        known = self._known.get(digest)
        if known is None:
            return _Origin(digest, None, ())
        return _Origin(digest, self.host.open(digest), known.paths)

    def _begin_registrations(self) -> None:
        while self._to_register and self._num_registering < MAX_REGISTERING:
            self._num_registering += 1
            self._registrars.submit(self._to_register.popleft())

    def _end_registration(self, registered: Registered) -> Registered:
        self._num_registering -= 1
        self._begin_registrations()
        return registered

    def _packed(self, call: _Call, stage_s: dict[str, float]) -> Registered | None:
        self._count(stage_s)
        checked = call.hold.source.checked or self._is_checked(call.image.digest)
        if self._checker is None or checked:
            return self._registered(call, None)
        self._registrars.submit(self._check, self._checker, call)
        return None

    def _is_checked(self, digest: str) -> bool:
        known = self._known.get(digest)
        return known is not None and known.checked

    def _registered(self, call: _Call, verdict: _Verdict | None) -> Registered:
        hold, image = call
        try:
            self._judge(image, hold.source.path, verdict)
        except WeftError as error:
            return self._end_registration(Registered(hold, error))
        checked = hold.source.checked if verdict is None else verdict.result == "passed"
        return self._end_registration(Registered(hold, image, checked))

    def _judge(self, image: AdapterImage, path: str, verdict: _Verdict | None) -> None:
        """Count a check. Raises AdapterQuarantined if it failed; should the content be known, as
        its check had been skipped or another one went on beside, nothing is served of it any
        more."""
        if verdict is None:
            return
        self._check_results[verdict.result] += 1
        self._check_times.add(verdict.seconds)
        error, digest = verdict.error, image.digest
        if error is None:
            return
        logger.error("quarantined: adapter %s %s: %s", digest[:16], path, error.message)
        if self.slots.knows(digest):
            self._known[digest].checked = False
            self.slots.refuse(digest, error)
            self._done.put(lambda: LoadEnded(digest, error))
        raise error

    def _hold(self, image: AdapterImage, kept: bool) -> None:
        """Put an image on the host; into the arena, if there is one, on a loader thread."""
        if self.host.arena is None or image.digest in self.host:
            self.host.put(image, kept)
            return
        extent = self.host.reserve(image.num_bytes)
        if extent is not None or kept:
            self.host.put(image, kept)
        if extent is not None:
            self._registrars.submit(self._stage, image, extent)

    def _put(self, image: AdapterImage, extent: Extent | None, came_s: float = 0.0) -> None:
        """Hold an image that was brought to the host, unless it was forgotten meanwhile."""
        known = self._known.get(image.digest)
        if known is None:
            self.host.cancel(extent)
        elif extent is not None or self.host.arena is None or known.kept:
            self.host.put(image, known.kept, extent, came_s)

    def _loaded(self, job: _Job, image: AdapterImage) -> LoadEnded:
        """The image is in its extent."""
        load = job.load
        self._pool.install(load.slot, load.start, image.layout)
        self._end(job)
        self._keep(job, image)
        seconds = self._clock() - job.ordered_s
        if not self.slots.loaded(load.digest, seconds):
            self._pool.clear(load.slot)
            return LoadEnded(load.digest, AdapterUnavailable("the adapter was unloaded", "model"))
        known = self._known[load.digest]
        known.num_loads += 1
        known.last_load_s, known.stage_s = seconds, job.stage_s
        return LoadEnded(load.digest, None)

    def _keep(self, job: _Job, image: AdapterImage) -> None:
        """Hold on the host what was loaded."""
        held = job.origin.held
        if held is None:
            came_s = sum(s for stage, s in job.stage_s.items() if stage != "copy")
            self._put(image, job.extent, came_s)
        elif image.data is held.image.data:
            held.image = image
        else:  # what was held is wrong
            self.host.forget(image.digest)
            self._put(image, None)

    def _failed(self, job: _Job, error: WeftError) -> LoadEnded:
        self._end(job)
        self.host.cancel(job.extent)
        self.slots.load_failed(job.load.digest)
        return LoadEnded(job.load.digest, error)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.load.digest]
        for origin in (job.origin, *(origin for origin, _ in job.parts)):
            if origin.held is not None:
                self.host.close(origin.held)
        self._count(job.stage_s)
        self.copy_faults += job.faults

    def _count(self, stage_s: dict[str, float]) -> None:
        for stage, seconds in stage_s.items():
            self._stage_times[stage].add(seconds)


def _summed_up(image: AdapterImage) -> AdapterImage:
    """With its checksum."""
    if image.checksum is not None:
        return image
    return replace(image, checksum=int(checksum(image.data)))


def _typed(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    return AdapterUnavailable(to_wire(error)[1], "lora_path")


def _unavailable(error: WeftError) -> WeftError:
    """An adapter was accepted once: whatever is wrong with it now is no fault of the request. That
    a sum can't be made is."""
    if isinstance(error, AdapterUnavailable | InvalidRequest):
        return error
    return AdapterUnavailable(f"the adapter can't be loaded again: {error.message}", error.param)
