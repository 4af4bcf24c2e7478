"""Moves adapters between disk, host and device. Slow work runs on loader threads.

The engine's thread calls `register`, `start` and `forget`, which return at once, and `poll`
between steps, which applies what loader threads have finished. All state belongs to it: loader
threads read files and write to extents of the device that nothing else uses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from weft.checkpoint import AdapterImage
from weft.core.errors import AdapterUnavailable, WeftError, to_wire
from weft.core.targets import ImageLayout
from weft.core.types import AdapterInfo, AdapterStats
from weft.residency.host import HostCache
from weft.residency.policy import Policy, lru
from weft.residency.slots import AdapterSlots, Load

NUM_LOADERS = 2
MAX_PATHS = 16
"""Folders remembered for one content; the newest ones."""

Read = Callable[[str, str | None], AdapterImage]
"""(path, digest that it must have or None) -> image. Raises AdapterError."""


class Pool(Protocol):
    """Device memory for images; see `weft.kernels.lora.AdapterPool`."""

    def write(self, start: int, data: torch.Tensor) -> None: ...

    def install(self, slot: int, start: int, layout: ImageLayout) -> None: ...

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Registered:
    """A call of `register` has ended, with one of `info` and `error`."""

    call_id: int
    info: AdapterInfo | None
    error: WeftError | None


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended; `error` None means that the adapter is resident."""

    digest: str
    error: WeftError | None


@dataclass(slots=True)
class _Known:
    """A registered adapter."""

    paths: tuple[str, ...] = ()
    """Where it may be read again, newest first: any of them may have changed since, or be gone."""
    from_memory: bool = False
    """Whether a registration of it has no folder."""
    pinned: bool = False
    num_loads: int = 0
    num_evictions: int = 0
    last_load_s: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether its image stays on the host."""
        return self.from_memory or self.pinned


class Residency:
    """Owner of adapter residency; the decisions are those of `AdapterSlots`."""

    def __init__(
        self,
        slots: AdapterSlots,
        pool: Pool,
        read: Read,
        max_host_images: int,
        wake: Callable[[], None] = lambda: None,
        policy: Policy = lru,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self.host = HostCache(max_host_images, policy)
        self._pool = pool
        self._read = read
        self._wake = wake
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._done: SimpleQueue[Callable[[], Registered | LoadEnded]] = SimpleQueue()
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="weft-loader")

    def register(
        self,
        call_id: int,
        path: str,
        pinned: bool = False,
        expect_digest: str | None = None,
    ) -> None:
        """Read, validate and pack; `poll` returns a Registered with this call id."""
        self._loaders.submit(self._register, call_id, path, pinned, expect_digest)

    def add(self, image: AdapterImage, path: str | None, pinned: bool) -> AdapterInfo:
        """Make an image known, from the folder `path` or (None) from memory; at once.

        Raises AdapterInvalid, AdapterConflict; what was known before then stays as it is.
        """
        self.slots.add(image.digest, image.layout.num_elements, pinned)
        known = self._known.setdefault(image.digest, _Known())
        known.pinned = pinned
        if path is None:
            known.from_memory = True
        else:
            others = [other for other in known.paths if other != path]
            known.paths = (path, *others[: MAX_PATHS - 1])
        self.host.put(image, known.kept)
        return AdapterInfo(
            image.digest, path or "", image.layout.max_rank, image.num_bytes, image.targets
        )

    def start(self, loads: list[Load]) -> None:
        """Carry out what the scheduler ordered; `poll` returns a LoadEnded for each."""
        for load in loads:
            for slot in load.evicted_slots:
                self._pool.clear(slot)
            for digest in load.evicted:
                self._known[digest].num_evictions += 1
            paths, image = self._known[load.digest].paths, self.host.get(load.digest)
            self._loaders.submit(self._load, load, paths, image, self._clock())

    def forget(self, digest: str) -> None:
        """Free all that an adapter without leases takes, in all tiers but the disk."""
        slot = self.slots.remove(digest)
        if slot is not None:
            self._pool.clear(slot)
        self.host.drop(digest)
        self._known.pop(digest, None)

    def poll(self) -> list[Registered | LoadEnded]:
        """Apply what has finished since the last call."""
        ended: list[Registered | LoadEnded] = []
        while True:
            try:
                ended.append(self._done.get_nowait()())
            except Empty:
                return ended

    def stats(self) -> dict[str, AdapterStats]:
        """By digest: what is registered and has been on the device."""
        return {
            digest: AdapterStats(known.num_loads, known.num_evictions, known.last_load_s)
            for digest, known in self._known.items()
            if known.num_loads
        }

    def close(self) -> None:
        self._loaders.shutdown(cancel_futures=True)

    # -- on loader threads: each ends by handing `poll` what is left to do --------------------

    def _register(self, call_id: int, path: str, pinned: bool, expect_digest: str | None) -> None:
        try:
            image = self._read(path, expect_digest)
        except Exception as error:
            failure = _typed(error)
            self._finish(lambda: Registered(call_id, None, failure))
        else:
            self._finish(lambda: self._registered(call_id, path, pinned, image))

    def _load(
        self, load: Load, paths: tuple[str, ...], image: AdapterImage | None, ordered_s: float
    ) -> None:
        try:
            found = image or self._read_again(paths, load.digest)
            self._pool.write(load.start, found.data)
        except Exception as error:
            failure = _unavailable(_typed(error))
            self._finish(lambda: self._failed(load, failure))
        else:
            self._finish(lambda: self._loaded(load, found, ordered_s))

    def _read_again(self, paths: tuple[str, ...], digest: str) -> AdapterImage:
        """From the first folder that still holds this content; the last one's error if none."""
        for path in paths[:-1]:
            with contextlib.suppress(Exception):
                return self._read(path, digest)
        return self._read(paths[-1], digest)

    def _finish(self, apply: Callable[[], Registered | LoadEnded]) -> None:
        self._done.put(apply)
        self._wake()

    # -- on the engine's thread ----------------------------------------------------------------

    def _registered(self, call_id: int, path: str, pinned: bool, image: AdapterImage) -> Registered:
        try:
            return Registered(call_id, self.add(image, path, pinned), None)
        except WeftError as error:
            return Registered(call_id, None, error)

    def _loaded(self, load: Load, image: AdapterImage, ordered_s: float) -> LoadEnded:
        if not self.slots.loaded(load.digest):
            return LoadEnded(load.digest, AdapterUnavailable("the adapter was unloaded", "model"))
        self._pool.install(load.slot, load.start, image.layout)
        known = self._known[load.digest]
        known.num_loads += 1
        known.last_load_s = self._clock() - ordered_s
        self.host.put(image, known.kept)
        return LoadEnded(load.digest, None)

    def _failed(self, load: Load, error: WeftError) -> LoadEnded:
        self.slots.load_failed(load.digest)
        return LoadEnded(load.digest, error)


def _typed(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    return AdapterUnavailable(to_wire(error)[1], "lora_path")


def _unavailable(error: WeftError) -> AdapterUnavailable:
    """It was accepted once: whatever is wrong with it now is no fault of the request."""
    if isinstance(error, AdapterUnavailable):
        return error
    return AdapterUnavailable(f"the adapter can't be loaded again: {error.message}", error.param)
