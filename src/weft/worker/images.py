"""The disk tier: images as files, so that an adapter is parsed and packed once.

    magic | checksum | header's length | header: JSON | zeros | data, from a multiple of PAGE on

A file is named by the adapter's digest and by a key of all else that its bytes depend on: the
base, the dtype, the layout, this format. It appears by a rename, so that processes may share a
folder. A file that is not exactly as it was written is deleted, never served.

Files are read, not mapped: if a mapped file is truncated, the process is killed, and reading into
allocated memory takes no longer than mapping.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

from weft.checkpoint.pack import AdapterImage, allocate
from weft.core.errors import ConfigError
from weft.core.folders import home_folder, open_beneath
from weft.core.stats import TierStats
from weft.core.targets import ImageLayout, TargetTable

logger = logging.getLogger(__name__)

FORMAT = 1
MAGIC = b"weftimg\n"
PAGE = 4096
CHUNK = 1 << 20
"""Bytes read at a time: their checksum is made while they are in the CPU's cache."""
PAUSE_S = 0.004
"""The pause after each CHUNK that is written while steps run."""
MAX_HEADER_BYTES = 64 << 20
SUFFIX, PART = ".image", ".part"
STALE_S = 3600.0
"""A file that is unfinished after this time was left by a process that died."""

_PREFIX = len(MAGIC) + 4 + 8

Bytes = npt.NDArray[np.uint8]


def default_folder() -> Path:
    """The folder for images in the user's cache folder. Raises ConfigError when there is none."""
    folder = home_folder("XDG_CACHE_HOME", ".cache")
    if folder is None:
        message = "--adapter-cache-dir has no default, as there is no HOME and no XDG_CACHE_HOME"
        raise ConfigError(message, "adapter_cache_dir")
    return folder / "weft" / "adapters"


def fingerprint(table: TargetTable, weights: Path | None, *more: str) -> str:
    """A hash that identifies a base model: of its projections and, as some adapters are packed from
    the base's weights, of its weight files' paths, sizes and times. `more`: further texts."""
    files: list[tuple[str, int, int]] = []
    if weights is not None:
        for path in sorted(weights.glob("*.safetensors")):
            stat = path.stat()
            files.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    said = json.dumps([asdict(table), files, more], default=sorted)
    return hashlib.sha256(said.encode()).hexdigest()


class _Unfit(Exception):
    """A file is not the image that its name says."""


class ImageStore:
    """Image files of one base model, in a folder that may have those of others. For any thread. No
    error of the folder is raised: the first one is logged, all are counted, and adapters are then
    read from their own folders."""

    def __init__(
        self,
        folder: Path,
        base: str,
        dtype: torch.dtype,
        max_bytes: int,
        num_ranks: int = 1,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """base: its `fingerprint`. max_bytes: of all files in the folder; beyond it, the least
        recently used are removed. num_ranks: how many ranks' parts an image has. is_busy: whether
        steps run; writing then makes pauses."""
        self._is_busy = is_busy
        self._folder = folder
        self._num_ranks = num_ranks
        self._dtype = dtype
        self._max_bytes = max_bytes
        names = [[field.name for field in fields(kind)] for kind in (AdapterImage, ImageLayout)]
        said = json.dumps([FORMAT, names, base, str(dtype), num_ranks])
        self._key = hashlib.sha256(said.encode()).hexdigest()
        self._lock = threading.Lock()
        self._stats = TierStats(0, max_bytes, 0)
        self._warned = False
        with self._troubles("looked into"):
            if folder.is_dir():
                self._bound()

    def load(self, digest: str, into: torch.Tensor | None = None) -> AdapterImage | None:
        """The image of an adapter, or None. Its data are read into `into` (bytes) if that is given,
        else into new memory. Raises MemoryError."""
        path = self._path(digest)
        image = None
        try:
            with self._open(path) as file:
                image = self._read(file, digest, into)
                os.utime(file.fileno())
        except FileNotFoundError:
            pass
        except _Unfit as error:
            logger.warning("%s is dropped: %s", path, error)
            self._count(errors=1)
            with self._troubles("removed from"):
                path.unlink(missing_ok=True)
                self._bound()
        except OSError as error:
            self._trouble("read", error)
        self._count(hits=1) if image else self._count(misses=1)
        return image

    def has(self, digest: str) -> bool:
        """Whether there is a file for an adapter, intact or not."""
        try:
            return self._path(digest).exists()
        except OSError as error:
            self._trouble("looked into", error)
            return False

    def save(self, image: AdapterImage) -> None:
        """Write an image, unless it has a file already. Its data must not change meanwhile."""
        path = self._path(image.digest)
        if image.num_bytes > self._max_bytes or self.has(image.digest):
            return
        with self._troubles("written to"):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(PART, ".", self._folder)
            part = Path(name)
            try:
                with io.FileIO(handle, "wb") as file:
                    size = self._write(file, image)
                part.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
            self._count(num_adapters=1, num_bytes=size)
            if self._stats.num_bytes > self._max_bytes:
                self._bound()

    def stats(self) -> TierStats:
        """Figures; files and bytes are of the whole folder, as far as this process knows."""
        return self._stats

    # -- one file ------------------------------------------------------------------------------

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}-{self._key[:16]}{SUFFIX}"

    def _open(self, path: Path) -> io.FileIO:
        """Open a regular file for reading. Raises _Unfit for anything else, OSError."""
        try:
            return io.FileIO(open_beneath(self._folder, path.name), "rb")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL):
                raise _Unfit("it is no regular file") from None
            raise

    def _write(self, file: io.FileIO, image: AdapterImage) -> int:
        """Write an image. Returns the size of the file in bytes."""
        said = {"key": self._key, **vars(image), "layout": vars(image.layout)}
        del said["data"]
        header = json.dumps(said).encode()
        data = _bytes(image.data)
        start = _data_start(header)
        checksum = zlib.crc32(header)
        file.seek(start)
        for begin in range(0, len(data), CHUNK):
            chunk = data[begin : begin + CHUNK]
            checksum = _add(chunk, checksum)
            _write_all(file, chunk.data)
            if self._is_busy():
                time.sleep(PAUSE_S)
        file.seek(0)
        _write_all(file, memoryview(_prefix(checksum, len(header)) + header))
        return start + len(data)

    def _read(self, file: io.FileIO, digest: str, into: torch.Tensor | None) -> AdapterImage:
        prefix = file.read(_PREFIX)
        length = int.from_bytes(prefix[-8:], "little")
        if not prefix.startswith(MAGIC) or length > MAX_HEADER_BYTES:
            raise _Unfit("it is no image")
        header = file.read(length)
        try:
            said = json.loads(header)
            key = said.pop("key")
            image = _record(AdapterImage, {**said, "data": torch.empty(0)})
            num_elements = self._num_ranks * image.layout.num_elements
            num_bytes = num_elements * self._dtype.itemsize
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise _Unfit("its header is malformed") from None
        if (key, image.digest) != (self._key, digest):
            raise _Unfit("it is another image")
        start = _data_start(header)
        if os.fstat(file.fileno()).st_size != start + num_bytes:
            raise _Unfit("it has another size")
        data = allocate(num_bytes, torch.uint8) if into is None else into[:num_bytes]
        file.seek(start)
        if _prefix(_fill(data, file, zlib.crc32(header)), length) != prefix:
            raise _Unfit("its checksum is wrong")
        found: AdapterImage = replace(image, data=data.view(self._dtype))
        return found

    # -- the folder ----------------------------------------------------------------------------

    def _bound(self) -> None:
        """Count the files in the folder, and remove the oldest ones beyond the bound."""
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                stat = path.stat()
                if path.suffix == SUFFIX:
                    found.append((stat.st_mtime, stat.st_size, path))
                elif path.suffix == PART and stat.st_mtime < time.time() - STALE_S:
                    path.unlink()
        found.sort()
        total, removed = sum(size for _, size, _ in found), 0
        while total > self._max_bytes:
            _, size, path = found[removed]
            path.unlink(missing_ok=True)
            total -= size
            removed += 1
        with self._lock:
            self._stats = replace(
                self._stats,
                num_bytes=total,
                num_adapters=len(found) - removed,
                evictions=self._stats.evictions + removed,
            )

    @contextlib.contextmanager
    def _troubles(self, done: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except OSError as error:
            self._trouble(done, error)

    def _trouble(self, done: str, error: OSError) -> None:
        self._count(errors=1)
        if not self._warned:
            self._warned = True
            logger.warning(
                "the adapter cache %s can't be %s: %s; serving goes on without it",
                self._folder,
                done,
                error.strerror or error,
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **counts)


def _bytes(data: torch.Tensor) -> Bytes:
    return data.view(torch.uint8).numpy()


def _prefix(checksum: int, header_length: int) -> bytes:
    return MAGIC + checksum.to_bytes(4, "little") + header_length.to_bytes(8, "little")


def _data_start(header: bytes) -> int:
    return -(-(_PREFIX + len(header)) // PAGE) * PAGE


def _add(chunk: Bytes, checksum: int) -> int:
    """The checksum continued by a chunk: CRC-32 of the sum of each page's 64-bit words. It detects
    any change within one word of a page, and pages that are lost, zeroed or exchanged, at memory
    speed; CRC-32 of all bytes takes five times as long."""
    whole = len(chunk) - len(chunk) % PAGE
    words = chunk[:whole].view(np.uint64).reshape(-1, PAGE // 8)
    checksum = zlib.crc32(np.add.reduce(words, axis=1).data, checksum)
    return zlib.crc32(chunk[whole:].data, checksum)


def _fill(data: torch.Tensor, file: io.FileIO, checksum: int) -> int:
    """Fill `data` from the file. Returns the continued checksum. Raises _Unfit if it is short."""
    target = _bytes(data)
    for begin in range(0, len(target), CHUNK):
        chunk = target[begin : begin + CHUNK]
        length = 0
        while count := file.readinto(chunk[length:].data):
            length += count
        if length < len(chunk):
            raise _Unfit("it was truncated")
        checksum = _add(chunk, checksum)
    return checksum


def _write_all(file: io.FileIO, content: memoryview) -> None:
    while len(content):
        content = content[file.write(content) :]


_hints = cache(get_type_hints)


def _record(kind: Any, said: Any) -> Any:
    """A value of type `kind` from its JSON: dataclasses become objects of theirs again, and lists
    become tuples."""
    if get_origin(kind) is UnionType:
        kind = next((each for each in get_args(kind) if is_dataclass(each)), None)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(said, dict):
        hints = _hints(kind)
        return kind(**{name: _record(hints[name], value) for name, value in said.items()})
    if isinstance(said, list):
        inner = (*get_args(kind), None)[0]
        return tuple(_record(inner, value) for value in said)
    return said
