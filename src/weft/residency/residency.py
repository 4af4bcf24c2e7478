"""Moves adapters between disk, host and device. Slow work runs on loader threads.

The engine's thread calls `register`, `start` and `forget`, which return at once, and `poll`
between steps, which applies what loader threads have finished.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from weft.checkpoint import AdapterImage
from weft.core.errors import AdapterUnavailable, WeftError, to_wire
from weft.core.targets import ImageLayout
from weft.core.types import AdapterInfo
from weft.residency.host import HostCache
from weft.residency.slots import AdapterSlots, Load

NUM_LOADERS = 2

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


class Residency:
    """Owner of adapter residency; the decisions are those of `AdapterSlots`."""

    def __init__(
        self,
        slots: AdapterSlots,
        pool: Pool,
        read: Read,
        max_host_images: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.slots = slots
        self.host = HostCache(max_host_images)
        self._pool = pool
        self._read = read
        self._wake = wake
        self._paths: dict[str, str] = {}
        self._done: SimpleQueue[Callable[[], Registered | LoadEnded]] = SimpleQueue()
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="weft-loader")

    def register(self, call_id: int, path: str) -> None:
        """Read, validate and pack; `poll` returns a Registered with this call id."""
        self._loaders.submit(self._register, call_id, path)

    def start(self, loads: list[Load]) -> None:
        """Carry out what the scheduler ordered; `poll` returns a LoadEnded for each."""
        for load in loads:
            for slot in load.evicted_slots:
                self._pool.clear(slot)
            self._loaders.submit(self._load, load, self._paths[load.digest])

    def forget(self, digest: str) -> None:
        """Free all that an adapter without leases takes, in all tiers but the disk."""
        slot = self.slots.remove(digest)
        if slot is not None:
            self._pool.clear(slot)
        self.host.drop(digest)
        self._paths.pop(digest, None)

    def poll(self) -> list[Registered | LoadEnded]:
        """Apply what has finished since the last call."""
        ended: list[Registered | LoadEnded] = []
        while True:
            try:
                ended.append(self._done.get_nowait()())
            except Empty:
                return ended

    def close(self) -> None:
        self._loaders.shutdown(cancel_futures=True)

    # -- on loader threads: each ends by handing `poll` what is left to do --------------------

    def _register(self, call_id: int, path: str) -> None:
        try:
            image = self._read(path, None)
            self.host.put(image)
        except Exception as error:
            failure = _typed(error)
            self._finish(lambda: Registered(call_id, None, failure))
        else:
            self._finish(lambda: self._registered(call_id, path, image))

    def _load(self, load: Load, path: str) -> None:
        try:
            image = self.host.get(load.digest)
            if image is None:
                image = self._read(path, load.digest)
                self.host.put(image)
            self._pool.write(load.start, image.data)
            layout = image.layout
        except Exception as error:
            failure = _typed(error)
            self._finish(lambda: self._failed(load, failure))
        else:
            self._finish(lambda: self._loaded(load, layout))

    def _finish(self, apply: Callable[[], Registered | LoadEnded]) -> None:
        self._done.put(apply)
        self._wake()

    # -- on the engine's thread ----------------------------------------------------------------

    def _registered(self, call_id: int, path: str, image: AdapterImage) -> Registered:
        try:
            self.slots.add(image.digest, image.layout.num_elements)
        except WeftError as error:
            self.host.drop(image.digest)
            return Registered(call_id, None, error)
        self._paths[image.digest] = path
        info = AdapterInfo(
            image.digest, path, image.layout.max_rank, image.num_bytes, image.targets
        )
        return Registered(call_id, info, None)

    def _loaded(self, load: Load, layout: ImageLayout) -> LoadEnded:
        if self.slots.loaded(load.digest):
            self._pool.install(load.slot, load.start, layout)
            return LoadEnded(load.digest, None)
        return LoadEnded(load.digest, AdapterUnavailable("the adapter was unloaded", "model"))

    def _failed(self, load: Load, error: WeftError) -> LoadEnded:
        self.slots.load_failed(load.digest)
        return LoadEnded(load.digest, error)


def _typed(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    return AdapterUnavailable(to_wire(error)[1], "lora_path")
