"""Brings adapters from disk to the host and to the device, on its own threads.

    a load            host ─────────────────────────────> device
                      image file ──> host ──────────────> device
                      folder ──> packed ──> host ───────> device ──> image file
                      parts, each from one of these ──> summed ──> host ──> device
    a registration    folder ──> packed ──> image file

The checksum of every image on the device is compared with the one from when it was packed. If they
differ, the image is copied once more, from its file or folder instead of the host.

An image file holds exactly the content that was registered, so an adapter is still served if its
folder has changed or is gone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from weft.checkpoint.base import BaseWeights
from weft.checkpoint.compose import Summand, check_sum, sum_images
from weft.checkpoint.pack import AdapterImage, pack_image
from weft.checkpoint.read import AdapterFiles, read_source
from weft.checkpoint.trained_on import warning_of_four_bits
from weft.core.adapters import AdapterSource
from weft.core.config import LoraArgs
from weft.core.errors import AdapterUnavailable, InvalidRequest, WeftError, to_wire
from weft.core.folders import read_aside
from weft.core.stats import TierStats
from weft.kernels.checksum import checksum
from weft.kernels.lora import AdapterPool
from weft.kernels.quant import VALUES
from weft.models.loading import LoadedModel
from weft.schedule.extents import Extent
from weft.worker.gathered import GatheredWeights, GetShares
from weft.worker.images import ImageStore
from weft.worker.memory import HostMemory
from weft.worker.others import NO_OTHERS, OtherRanks
from weft.worker.protocol import LoadOrder, LoadResult, Origin, PackedAdapter, ProbeResult
from weft.worker.selfcheck import SelfCheck, probed, worst
from weft.worker.threads import WatchedThreads

logger = logging.getLogger(__name__)

NUM_LOADERS = 2
NUM_READERS = 8
"""Threads that read adapters to register. One whose disk does not answer holds up no other."""
NUM_REGISTRARS = 4
"""Threads that pack, probe and stage: slow work that must not hold up loads."""
_TORN = "its image did not come to adapter memory as it was packed"


class Packer:
    """Reads, validates, packs and sums adapters of one base model. Any thread."""

    def __init__(self, model: LoadedModel, args: LoraArgs, others: GetShares | None = None) -> None:
        """`model`: the whole model, or the first rank's share; then `others` gets the other ranks'
        parts of its weights."""
        self._model = model
        self._args = args
        self._shards = [replace(model.shard, rank=rank) for rank in range(model.shard.size)]
        self._base: BaseWeights = model.weights
        if others is not None:
            self._base = GatheredWeights(model, self._shards, others)

    def read_adapter(self, source: AdapterSource) -> AdapterFiles:
        """Read an adapter's files. Raises AdapterError if they can't be read or are not served, and
        if the folder or its content is not the one that `source` states."""
        table, max_rank = self._model.shard.whole, self._args.max_lora_rank
        return read_aside(lambda deadline: read_source(source, table, max_rank, deadline))

    def pack_adapter(self, files: AdapterFiles, untrained: bool = False) -> AdapterImage:
        """Validate what was read, and pack it for the kernels. `untrained`: A and B may change
        nothing. Raises AdapterInvalid."""
        if warning := warning_of_four_bits(files.config, self._keeps_sixteen_bits):
            logger.warning("adapter %s: %s", files.digest[:16], warning)
        with self._aside():
            return pack_image(
                files,
                self._model.shard.whole,
                self._model.dtype,
                self._args.max_lora_rank,
                base=self._base,
                conversion_tolerance=self._args.conversion_tolerance,
                max_added_tokens=self._args.max_added_tokens,
                shards=self._shards,
                untrained=untrained,
            )

    @property
    def _keeps_sixteen_bits(self) -> bool:
        return self._model.config.quantized is None and self._model.quantization in (None, VALUES)

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        return check_sum(parts, self._model.table, self._args.max_lora_rank, self._model.dtype)

    def sum_adapters(
        self, digest: str, parts: Sequence[tuple[AdapterImage, float]], into: torch.Tensor | None
    ) -> AdapterImage:
        """The weighted sum of images; see `sum_images`. Raises InvalidRequest."""
        table, size = self._model.table, self._model.shard.size
        return sum_images(digest, parts, table, self._model.dtype, into, size)

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """A context with a CUDA stream other than the steps', to compute from base weights."""
        if self._model.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._model.device))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Work:
    """What a thread records while it brings an adapter."""

    stage_s: dict[str, float] = field(default_factory=dict)
    packed: list[AdapterImage] = field(default_factory=list)
    """The images that were packed from folders; they have to be saved."""
    num_faults: int = 0


class AdapterLoader:
    """Reads, packs, sums, probes and copies images on its own threads. Its methods are verbs of
    `Worker`. Without `images`, there are no image files; without `self_check`, don't `probe`."""

    def __init__(
        self,
        pool: AdapterPool,
        packer: Packer,
        images: ImageStore | None,
        host: HostMemory,
        self_check: SelfCheck | None,
        others: OtherRanks = NO_OTHERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.packer = packer
        self.self_check = self_check
        self._images = images
        self._host = host
        self._others = others
        self._clock = clock
        self._loaders = WatchedThreads(NUM_LOADERS, "weft-loader")
        self._readers = WatchedThreads(NUM_READERS, "weft-reader")
        self._registrars = WatchedThreads(NUM_REGISTRARS, "weft-registrar")

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        ended: Future[PackedAdapter | WeftError] = Future()
        self._readers.submit(self._read, source, ended)
        return ended

    def probe(self, image: AdapterImage, *, paced: bool) -> Future[ProbeResult | WeftError]:
        if paced:
            return self._registrars.submit(self._probe, image, paced)
        ended: Future[ProbeResult | WeftError] = Future()
        ended.set_result(self._probe(image, paced))
        return ended

    def stage(self, image: AdapterImage, extent: Extent) -> Future[AdapterImage]:
        return self._registrars.submit(self._staged, image, extent)

    def load(self, order: LoadOrder, wait_moved: Callable[[], object]) -> Future[LoadResult]:
        """See `Worker.load`; `wait_moved` waits for the moves that must precede the copy."""
        ended: Future[LoadResult] = Future()
        self._loaders.submit(self._load, order, wait_moved, ended)
        return ended

    def disk_stats(self) -> TierStats | None:
        return self._images.stats() if self._images is not None else None

    def stuck_s(self) -> dict[str, float]:
        return {
            "loaders": self._loaders.stuck_s(),
            "readers": self._readers.stuck_s(),
            "registrars": self._registrars.stuck_s(),
        }

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._registrars.shutdown(cancel_futures=True)
        self._loaders.shutdown(cancel_futures=True)
        self._host.close()

    # -- on its threads: images are saved after the result has been set -------------------------

    def _read(self, source: AdapterSource, ended: Future[PackedAdapter | WeftError]) -> None:
        work = _Work()
        try:
            image = self._from_file(source.digest, None, work) if source.digest else None
            if image is None:
                files = self._files(source, work)
                if self._images is not None and self._images.has(files.digest):
                    image = self._from_file(files.digest, None, work)
                if image is None:
                    self._registrars.submit(self._pack, source, files, work, ended)
                    return
            ended.set_result(PackedAdapter(image, work.stage_s))
        except Exception as error:
            ended.set_result(_refused(source, error))

    def _pack(
        self,
        source: AdapterSource,
        files: AdapterFiles,
        work: _Work,
        ended: Future[PackedAdapter | WeftError],
    ) -> None:
        try:
            image = self._packed(files, work)
        except Exception as error:
            ended.set_result(_refused(source, error))
            return
        ended.set_result(PackedAdapter(image, work.stage_s))
        self._save([image])

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
            return _typed(error)
        return worst(results)

    def _load(
        self, order: LoadOrder, wait_moved: Callable[[], object], ended: Future[LoadResult]
    ) -> None:
        work = _Work()
        found: AdapterImage | WeftError
        try:
            found = self._bring_to_device(order, wait_moved, work)
        except Exception as error:
            found = _unavailable(_typed(error))
        held = order.origin.image
        anew = held is None or (isinstance(found, AdapterImage) and found.data is not held.data)
        ended.set_result(LoadResult(found, anew, work.stage_s, work.num_faults))
        self._save(work.packed)

    def _bring_to_device(
        self, order: LoadOrder, wait_moved: Callable[[], object], work: _Work
    ) -> AdapterImage:
        image = self._obtain(order, order.origin, work)
        wait_moved()
        if self._copy(order.start, image, work):
            return image
        origin = order.origin
        logger.warning("adapter %s: %s; it is loaded once more", origin.digest[:16], _TORN)
        if origin.sources or order.parts:  # its bytes on the host may have changed
            image = self._obtain(order, replace(origin, image=None), work)
        if not self._copy(order.start, image, work):
            raise AdapterUnavailable(f"the adapter can't be loaded: {_TORN}", "model")
        return image

    def _copy(self, start: int, image: AdapterImage, work: _Work) -> bool:
        """Copy an image to the device. Returns whether its checksums there are right."""
        with self._timed("copy", work):
            others = self._others.write(start, image, self._host.offset_of(image.data))
            try:
                own = self.pool.write(start, image.data_of(0))
            finally:  # a rank that still writes there would damage what comes there next
                theirs = [each.result() for each in others]
            right = (own, *theirs) == image.checksums
        work.num_faults += not right
        return right

    def _obtain(self, order: LoadOrder, origin: Origin, work: _Work) -> AdapterImage:
        if not order.parts:
            return self._with_checksums(self._bring(origin, order.extent, work))
        images = [(self._bring(part, None, work), scale) for part, scale in order.parts]
        with self._timed("pack", work):
            into = self._host.view(order.extent)
            image = self.packer.sum_adapters(origin.digest, images, into)
        return self._with_checksums(image)

    def _bring(self, origin: Origin, extent: Extent | None, work: _Work) -> AdapterImage:
        """An adapter's image from the nearest place, put into `extent` unless on the host."""
        if origin.image is not None:
            return origin.image
        image = self._from_file(origin.digest, extent, work)
        if image is None:
            image = self._from_folders(origin, work)
            work.packed.append(image)
            image = self._staged(image, extent)
        return image

    def _from_file(self, digest: str, extent: Extent | None, work: _Work) -> AdapterImage | None:
        if self._images is None:
            return None
        with self._timed("read", work):
            return self._images.load(digest, self._host.view(extent))

    def _files(self, source: AdapterSource, work: _Work) -> AdapterFiles:
        with self._timed("read", work):
            return self.packer.read_adapter(source)

    def _packed(self, files: AdapterFiles, work: _Work) -> AdapterImage:
        with self._timed("pack", work):
            return self._with_checksums(self.packer.pack_adapter(files))

    def _from_folders(self, origin: Origin, work: _Work) -> AdapterImage:
        """An adapter from the first folder that still has it; else raises the last one's error."""
        refusal: WeftError | None = None
        for source in origin.sources:
            try:
                return self._packed(self._files(source.again(origin.digest), work), work)
            except Exception as error:
                refusal = _refused(source, error)
        raise refusal or AdapterUnavailable("an adapter of the sum was unloaded", "adapters")

    def _staged(self, image: AdapterImage, extent: Extent | None) -> AdapterImage:
        """A copy of the image in its extent of the host's memory; itself if it has no extent."""
        view = self._host.view(extent)
        if view is None:
            return image
        data = view[: image.num_bytes].view(image.data.dtype)
        # NumPy, as torch would wake a pool of threads, which takes the cores from a step.
        np.copyto(data.view(view.dtype).numpy(), image.data.view(view.dtype).numpy())
        return replace(image, data=data)

    def _with_checksums(self, image: AdapterImage) -> AdapterImage:
        """The image with a checksum of each rank's part, which is computed if it is missing."""
        if image.checksums:
            return image
        ranks = range(self._others.num_ranks)
        return replace(image, checksums=tuple(int(checksum(image.data_of(r))) for r in ranks))

    def _save(self, packed: list[AdapterImage]) -> None:
        if self._images is not None:
            for image in packed:
                self._images.save(image)

    @contextlib.contextmanager
    def _timed(self, stage: str, work: _Work) -> Iterator[None]:
        begin = self._clock()
        yield
        work.stage_s[stage] = work.stage_s.get(stage, 0.0) + self._clock() - begin


def _refused(source: AdapterSource, error: Exception) -> WeftError:
    """The error as clients get it, without the folder's path, which only the log gets."""
    typed = _typed(error)
    logger.info("the adapter in %s can't be loaded: %s", source.path, typed.message)
    return typed


def _typed(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    if isinstance(error, OSError) and error.strerror:  # its text has the path
        return AdapterUnavailable(f"{type(error).__name__}: {error.strerror}", "lora_path")
    return AdapterUnavailable(to_wire(error)[1], "lora_path")


def _unavailable(error: WeftError) -> WeftError:
    """The error of a load as requests get it. The adapter was accepted once, so they are not to
    blame, unless a sum that they ask for can't be made (InvalidRequest)."""
    if isinstance(error, AdapterUnavailable | InvalidRequest):
        return error
    return AdapterUnavailable(f"the adapter can't be loaded again: {error.message}", error.param)
