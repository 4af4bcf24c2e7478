"""Brings adapters from disk to the host and to the device, on its own threads.

    a load            host ─────────────────────────────> device
                      image file ──> host ──────────────> device
                      folder ──> packed ──> host ───────> device ──> image file
                      parts, each from one of these ──> summed ──> host ──> device

How adapters get to the host is in `weft.worker.reading`.

The checksum of every image on the device is compared with the one from when it was packed. If they
differ, the image is copied once more, from its file or folder instead of the host.

An image file holds exactly the content that was registered, so an adapter is still served if its
folder has changed or is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterSource
from weft.core.errors import AdapterUnavailable, InvalidRequest, WeftError
from weft.core.stats import TierStats
from weft.kernels.lora import AdapterPool
from weft.schedule.extents import Extent
from weft.worker.memory import HostMemory
from weft.worker.others import NO_OTHERS, OtherRanks
from weft.worker.protocol import LoadOrder, LoadResult, Origin, PackedAdapter, ProbeResult
from weft.worker.reading import AdapterReader, LoadNotes, typed
from weft.worker.selfcheck import SelfCheck, probed, worst
from weft.worker.threads import WatchedThreads

logger = logging.getLogger(__name__)

NUM_LOADERS = 2
_TORN = "its image did not come to adapter memory as it was packed"


class AdapterLoader:
    """Reads, packs, sums, probes and copies images on its own threads. Its methods are verbs of
    `Worker`. Without `self_check`, don't `probe`."""

    def __init__(
        self,
        pool: AdapterPool,
        reader: AdapterReader,
        host: HostMemory,
        self_check: SelfCheck | None,
        others: OtherRanks = NO_OTHERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.packer = reader.packer
        self.self_check = self_check
        self._reader = reader
        self._host = host
        self._others = others
        self._clock = clock
        self._loaders = WatchedThreads(NUM_LOADERS, "weft-loader")

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        return self._reader.pack(source)

    def probe(self, image: AdapterImage, *, paced: bool) -> Future[ProbeResult | WeftError]:
        if paced:
            return self._reader.registrars.submit(self._probe, image, paced)
        ended: Future[ProbeResult | WeftError] = Future()
        ended.set_result(self._probe(image, paced))
        return ended

    def stage(self, image: AdapterImage, extent: Extent) -> Future[AdapterImage]:
        return self._reader.registrars.submit(self._staged, image, extent)

    def load(self, order: LoadOrder, wait_moved: Callable[[], object]) -> Future[LoadResult]:
        """See `Worker.load`; `wait_moved` waits for the moves that must precede the copy."""
        self._reader.forget_ahead()  # requests come, so that the start is over
        ended: Future[LoadResult] = Future()
        self._loaders.submit(self._load, order, wait_moved, ended)
        return ended

    def disk_stats(self) -> TierStats | None:
        return self._reader.disk_stats()

    def stuck_s(self) -> dict[str, float]:
        return {"loaders": self._loaders.stuck_s(), **self._reader.stuck_s()}

    def close(self) -> None:
        self._reader.close()
        self._loaders.shutdown(cancel_futures=True)
        self._host.close()

    # -- on its threads: images are saved after the result has been set -------------------------

    def _probe(self, image: AdapterImage, paced: bool) -> ProbeResult | WeftError:
        assert self.self_check is not None, "there are no checks"
        try:
            offset = self._host.offset_of(image.data)
            others = self._others.probe(image, offset, paced=paced)
            mine = replace(image, data=image.data_of(0))
            results: list[ProbeResult | WeftError] = []
            results.append(probed(self.self_check, mine, paced, self._clock))
            results += [other.result() for other in others]
        except Exception as error:
            return typed(error)
        return worst(results)

    def _load(
        self, order: LoadOrder, wait_moved: Callable[[], object], ended: Future[LoadResult]
    ) -> None:
        notes = LoadNotes()
        found: AdapterImage | WeftError
        try:
            found = self._bring_to_device(order, wait_moved, notes)
        except Exception as error:
            found = _unavailable(typed(error))
        held = order.origin.image
        anew = held is None or (isinstance(found, AdapterImage) and found.data is not held.data)
        ended.set_result(LoadResult(found, anew, notes.stage_s, notes.num_faults))
        self._reader.save(notes.packed)

    def _bring_to_device(
        self, order: LoadOrder, wait_moved: Callable[[], object], notes: LoadNotes
    ) -> AdapterImage:
        image = self._obtain(order, order.origin, notes)
        wait_moved()
        if self._copy(order.start, image, notes):
            return image
        origin = order.origin
        logger.warning("adapter %s: %s; it is loaded once more", origin.digest[:16], _TORN)
        if origin.sources or order.parts:  # its bytes on the host may have changed
            image = self._obtain(order, replace(origin, image=None), notes)
        if not self._copy(order.start, image, notes):
            raise AdapterUnavailable(f"the adapter can't be loaded: {_TORN}", "model")
        return image

    def _copy(self, start: int, image: AdapterImage, notes: LoadNotes) -> bool:
        """Copy an image to the device. Returns whether its checksums there are right."""
        with self._reader.timed("copy", notes):
            others = self._others.write(start, image, self._host.offset_of(image.data))
            try:
                own = self.pool.write(start, image.data_of(0))
            finally:  # a rank that still writes there would damage what comes there next
                theirs = [each.result() for each in others]
            right = (own, *theirs) == image.checksums
        notes.num_faults += not right
        return right

    def _obtain(self, order: LoadOrder, origin: Origin, notes: LoadNotes) -> AdapterImage:
        if not order.parts:
            return self._reader.with_checksums(self._bring(origin, order.extent, notes))
        images = [(self._bring(part, None, notes), scale) for part, scale in order.parts]
        with self._reader.timed("pack", notes):
            into = self._host.view(order.extent)
            image = self.packer.sum_adapters(origin.digest, images, into)
        return self._reader.with_checksums(image)

    def _bring(self, origin: Origin, extent: Extent | None, notes: LoadNotes) -> AdapterImage:
        """An adapter's image from the nearest place, put into `extent` unless on the host."""
        if origin.image is not None:
            return origin.image
        image = self._reader.from_file(origin.digest, self._host.view(extent), notes)
        if image is None:
            image = self._reader.from_folders(origin, notes)
            notes.packed.append(image)
            image = self._staged(image, extent)
        return image

    def _staged(self, image: AdapterImage, extent: Extent | None) -> AdapterImage:
        """A copy of the image in its extent of the host's memory; itself if it has no extent."""
        view = self._host.view(extent)
        if view is None:
            return image
        data = view[: image.num_bytes].view(image.data.dtype)
        # NumPy, as torch would wake a pool of threads, which takes the cores from a step.
        np.copyto(data.view(view.dtype).numpy(), image.data.view(view.dtype).numpy())
        return replace(image, data=data)


def _unavailable(error: WeftError) -> WeftError:
    """The error of a load as requests get it. The adapter was accepted once, so they are not to
    blame, unless a sum that they ask for can't be made (InvalidRequest)."""
    if isinstance(error, AdapterUnavailable | InvalidRequest):
        return error
    return AdapterUnavailable(f"the adapter can't be loaded again: {error.message}", error.param)
