"""Reads adapters and packs them for the kernels, on threads of its own.

    folder ──> packed ──> image file        the first time
    folder ──> digest, image file           later: the folder has the content of an image file
    image file                              where the content that is meant is known

While an engine starts, it reads ahead those adapters that it will be asked for first.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Lock

import torch

from weft.checkpoint.base import BaseWeights
from weft.checkpoint.compose import Summand, check_sum, sum_images
from weft.checkpoint.pack import AdapterImage, pack_image
from weft.checkpoint.read import AdapterFiles, read_source
from weft.checkpoint.trained_on import warning_of_four_bits
from weft.core.adapters import AdapterSource
from weft.core.config import LoraArgs
from weft.core.errors import AdapterUnavailable, WeftError, to_wire
from weft.core.files import WEIGHT_FILES
from weft.core.folders import Folder, FolderState, Roots, read_aside
from weft.core.stats import TierStats
from weft.kernels.checksum import checksum
from weft.kernels.quant import VALUES
from weft.models.loading import LoadedModel
from weft.worker.gathered import GatheredWeights, OtherShares
from weft.worker.images import ImageStore
from weft.worker.protocol import Origin, PackedAdapter
from weft.worker.threads import WatchedThreads

logger = logging.getLogger(__name__)

NUM_READERS = 8
"""Threads that read adapters to register. One whose disk does not answer holds up no other."""
NUM_REGISTRARS = 4
"""Threads that pack, probe and stage: slow work that must not hold up loads."""


class Packer:
    """Reads, validates, packs and sums adapters of one base model. Any thread."""

    def __init__(
        self, model: LoadedModel, args: LoraArgs, others: OtherShares | None = None
    ) -> None:
        """`model`: the whole model, or the first rank's share; then `others` has the other ranks'
        shares."""
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
        with aside(self._model.device):
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
    def num_ranks(self) -> int:
        """How many ranks' parts an image has."""
        return len(self._shards)

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


def aside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context with a CUDA stream other than the steps', to compute from base weights."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class LoadNotes:
    """What a thread records while it brings an adapter."""

    stage_s: dict[str, float] = field(default_factory=dict)
    packed: list[AdapterImage] = field(default_factory=list)
    """The images that were packed from folders; they have to be saved."""
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class _ReadAhead:
    """An adapter that was read before it was asked for."""

    packed: PackedAdapter
    state: FolderState | None
    """That of the folder before it was read; None: the content that is meant is known."""


class AdapterReader:
    """Reads adapters from folders and image files, and packs them. Without `images`, there are no
    image files. Its methods are for any thread, but for `read_ahead`, `forget_ahead` and `pack`,
    which are for one at a time."""

    def __init__(
        self,
        packer: Packer,
        images: ImageStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.packer = packer
        self._images = images
        self._clock = clock
        self._readers = WatchedThreads(NUM_READERS, "weft-reader")
        self.registrars = WatchedThreads(NUM_REGISTRARS, "weft-registrar")
        self._ahead: dict[AdapterSource, Future[_ReadAhead | None]] = {}
        """Those read ahead and not yet asked for; None for one that could not be read, or that
        there was no room for."""
        self._bytes_ahead, self._lock = 0, Lock()
        """The bytes of all images that were read ahead."""

    def read_ahead(self, sources: Iterable[AdapterSource], max_bytes: int) -> None:
        """Read adapters that `pack` will soon be asked for, until their images take `max_bytes` or
        a little more."""
        for source in dict.fromkeys(sources):
            ended: Future[_ReadAhead | None] = Future()
            self._ahead[source] = ended
            self._readers.submit(self._read_early, source, max_bytes, ended)

    def forget_ahead(self) -> None:
        """Drop what was read ahead and not asked for, and read no more of it."""
        for ahead in self._ahead.values():
            ahead.cancel()
        self._ahead.clear()

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        """See `Worker.pack`."""
        ended: Future[PackedAdapter | WeftError] = Future()
        ahead = self._ahead.pop(source, None)
        if ahead is None:
            self._readers.submit(self._read, source, ended)
        else:
            ahead.add_done_callback(lambda done: self._take_soon(source, done.result(), ended))
        return ended

    def disk_stats(self) -> TierStats | None:
        return self._images.stats() if self._images is not None else None

    def stuck_s(self) -> dict[str, float]:
        return {"readers": self._readers.stuck_s(), "registrars": self.registrars.stuck_s()}

    def close(self) -> None:
        self.forget_ahead()
        self._readers.shutdown(cancel_futures=True)
        self.registrars.shutdown(cancel_futures=True)

    # -- for the caller's thread ---------------------------------------------------------------

    def from_file(
        self, digest: str, into: torch.Tensor | None, notes: LoadNotes
    ) -> AdapterImage | None:
        """The image from its file, read into `into` (bytes) if given; None if there is none."""
        if self._images is None:
            return None
        with self.timed("read", notes):
            return self._images.load(digest, into)

    def from_folders(self, origin: Origin, notes: LoadNotes) -> AdapterImage:
        """An adapter from the first folder that still has it; else raises the last one's error."""
        refusal: WeftError | None = None
        for source in origin.sources:
            try:
                return self._packed(self._files(source.again(origin.digest), notes), notes)
            except Exception as error:
                refusal = _refused(source, error)
        raise refusal or AdapterUnavailable("an adapter of the sum was unloaded", "adapters")

    def save(self, packed: Sequence[AdapterImage]) -> None:
        """Write image files."""
        if self._images is not None:
            for image in packed:
                self._images.save(image)

    def with_checksums(self, image: AdapterImage) -> AdapterImage:
        """The image with a checksum of each rank's part, which is computed if it is missing."""
        if image.checksums:
            return image
        ranks = range(self.packer.num_ranks)
        return replace(image, checksums=tuple(int(checksum(image.data_of(r))) for r in ranks))

    @contextlib.contextmanager
    def timed(self, stage: str, notes: LoadNotes) -> Iterator[None]:
        """A context whose seconds are noted as those of a stage."""
        begin = self._clock()
        yield
        notes.stage_s[stage] = notes.stage_s.get(stage, 0.0) + self._clock() - begin

    # -- on its threads: images are saved after the result has been set -------------------------

    def _read(self, source: AdapterSource, ended: Future[PackedAdapter | WeftError]) -> None:
        notes = LoadNotes()
        try:
            image, files = self._find(source, notes)
            if image is not None:
                ended.set_result(PackedAdapter(image, notes.stage_s))
            else:
                self.registrars.submit(self._pack, source, files, notes, ended)
        except Exception as error:
            ended.set_result(_refused(source, error))

    def _find(
        self, source: AdapterSource, notes: LoadNotes
    ) -> tuple[AdapterImage, None] | tuple[None, AdapterFiles]:
        """An adapter's image from its file, or what its folder has if there is no such file."""
        if source.digest:
            image = self.from_file(source.digest, None, notes)
            if image is not None:
                return image, None
        files = self._files(source, notes)
        if self._images is not None and self._images.has(files.digest):
            image = self.from_file(files.digest, None, notes)
            if image is not None:
                return image, None
        return None, files

    def _pack(
        self,
        source: AdapterSource,
        files: AdapterFiles,
        notes: LoadNotes,
        ended: Future[PackedAdapter | WeftError],
    ) -> None:
        try:
            image = self._packed(files, notes)
        except Exception as error:
            ended.set_result(_refused(source, error))
            return
        ended.set_result(PackedAdapter(image, notes.stage_s))
        self.save([image])

    def _read_early(
        self, source: AdapterSource, max_bytes: int, ended: Future[_ReadAhead | None]
    ) -> None:
        """Read an adapter, and wait until it is packed, so that few are under way."""
        if not ended.set_running_or_notify_cancel():  # it was forgotten
            return
        if self._bytes_ahead >= max_bytes:
            ended.set_result(None)
            return
        notes = LoadNotes()
        try:
            state = _state_of(source)
            image, files = self._find(source, notes)
            if image is None:
                image = self.registrars.submit(self._packed, files, notes).result()
                notes.packed.append(image)
        except Exception:  # `pack` will say why
            ended.set_result(None)
            return
        with self._lock:
            self._bytes_ahead += image.num_bytes
        ended.set_result(_ReadAhead(PackedAdapter(image, notes.stage_s), state))
        self.save(notes.packed)

    def _take_soon(
        self,
        source: AdapterSource,
        ahead: _ReadAhead | None,
        ended: Future[PackedAdapter | WeftError],
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the threads have been closed
            self._readers.submit(self._take, source, ahead, ended)

    def _take(
        self,
        source: AdapterSource,
        ahead: _ReadAhead | None,
        ended: Future[PackedAdapter | WeftError],
    ) -> None:
        """Answer with what was read ahead, unless the folder has changed since."""
        with contextlib.suppress(WeftError, OSError):
            if ahead is not None and ahead.state == _state_of(source):
                ended.set_result(ahead.packed)
                return
        self._read(source, ended)

    def _files(self, source: AdapterSource, notes: LoadNotes) -> AdapterFiles:
        with self.timed("read", notes):
            return self.packer.read_adapter(source)

    def _packed(self, files: AdapterFiles, notes: LoadNotes) -> AdapterImage:
        with self.timed("pack", notes):
            return self.with_checksums(self.packer.pack_adapter(files))


def _state_of(source: AdapterSource) -> FolderState | None:
    """The state of a source's folder; None if the source states the content."""
    if source.digest is not None:
        return None

    def state(_: object) -> FolderState:
        with Folder(source.path, Roots([source.root])) as folder:
            return folder.state(WEIGHT_FILES)

    return read_aside(state)


def _refused(source: AdapterSource, error: Exception) -> WeftError:
    """The error as clients get it, without the folder's path, which only the log gets."""
    found = typed(error)
    logger.info("the adapter in %s can't be loaded: %s", source.path, found.message)
    return found


def typed(error: Exception) -> WeftError:
    """The error of a load as clients may get it: with a type, and without paths."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, OSError) and error.strerror:  # its text has the path
        return AdapterUnavailable(f"{type(error).__name__}: {error.strerror}", "lora_path")
    return AdapterUnavailable(to_wire(error)[1], "lora_path")
