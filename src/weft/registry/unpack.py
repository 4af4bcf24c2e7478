"""Unpacks an adapter from one file: a tar, or a safetensors file that holds its configuration.

Both come from strangers. Of a tar only the files that an adapter has are written, under names of
our own; links, devices and sparse files are refused, and what unpacking reads is bounded at each
step: an archive of a few bytes can stand for headers and contents of any size.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
from msgspec import Struct, field

from weft.core.errors import AdapterInvalid
from weft.core.files import ADAPTER_FILES, CONFIG_FILE, MAX_BYTES, TOKENIZER_FILES, WEIGHTS_FILE
from weft.registry.contents import CHUNK

CONFIG_KEY = "adapter_config"
"""Where the metadata of a safetensors file that is a whole adapter has the JSON of its config."""
MAX_MEMBERS = 1000
"""Entries of a tar, also of those that are no files of an adapter."""
MAX_ENTRY_BYTES = 256 << 10
"""What the headers of one entry may take."""
MAX_METADATA_BYTES = 18 << 20
"""The largest header of a safetensors file that is looked into."""

_GZIP, _TAR_MAGIC_AT, _TAR_MAGIC = b"\x1f\x8b", 257, b"ustar"


def unpack(packed: Path, into: Path, max_bytes: int) -> None:
    """Unpack the adapter in `packed`, a file that nobody else writes to, into an empty folder.

    Files of a tar lie in one folder of it, at the top or below; what else it holds is passed over.
    Raises AdapterInvalid, naming the entry or `body`.
    """
    with packed.open("rb") as file:
        head = file.read(512)
        file.seek(0)
        if head.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as inner:
                _unpack_tar(_Bounded(inner, max_bytes), into)
        elif head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC):
            _unpack_tar(_Bounded(file, max_bytes), into)
        else:
            config = _config_inside(file)
            (into / CONFIG_FILE).write_bytes(config)
            packed.rename(into / WEIGHTS_FILE)


def _refuse(why: str, name: str = "body") -> NoReturn:
    raise AdapterInvalid(why, name)


# -- tar -------------------------------------------------------------------------------------------


class _Bounded(io.RawIOBase):
    """A stream that is read forward, and gives no more than `budget` bytes until that is set anew,
    nor more than `max_bytes` in all. tarfile reads what headers say, however much that is."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._at = 0
        self.budget = MAX_ENTRY_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Only forward, past the rest of an entry, which does not count as read by headers."""
        if whence != io.SEEK_SET or offset < self._at:
            _refuse("the tar's headers contradict each other")
        while self._at < offset:
            if not self._take(min(CHUNK, offset - self._at)):
                break
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self.budget:
            _refuse("a header of the tar is too large")
        piece = self._take(size)
        self.budget -= len(piece)
        return piece

    def _take(self, size: int) -> bytes:
        if size > self._left:
            _refuse(f"the tar holds more than {self._max_bytes} bytes")
        try:
            piece = self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            _refuse(f"the tar can't be unpacked: {error}")
        self._left -= len(piece)
        self._at += len(piece)
        return piece


def _unpack_tar(stream: _Bounded, into: Path) -> None:
    folders: set[str] = set()
    for name, folder, member in _members(stream):
        folders.add(folder)
        if len(folders) > 1:
            _refuse("the tar holds files of adapters in several folders", name)
        if (into / name).exists():
            _refuse(f"the tar holds {name} twice", name)
        if member.size > MAX_BYTES.get(name, member.size):
            _refuse(f"{name}: larger than {MAX_BYTES[name]} bytes", name)
        stream.seek(member.offset_data)
        with (into / name).open("wb") as file:
            left = member.size
            while left:
                stream.budget = CHUNK
                piece = stream.read(min(CHUNK, left))
                if not piece:
                    _refuse("the tar ends too early", name)
                file.write(piece)
                left -= len(piece)


def _members(stream: _Bounded) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """The files of an adapter: the name of each, the folder that it is in, and where it is."""
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for _ in range(MAX_MEMBERS):
                stream.budget = MAX_ENTRY_BYTES
                member = tar.next()
                if member is None:
                    return
                if (found := _place(member)) is not None:
                    yield *found, member
    except (tarfile.TarError, ValueError) as error:  # for a sparse file whose map is no numbers
        _refuse(f"the tar can't be unpacked: {error}")
    _refuse(f"the tar holds more than {MAX_MEMBERS} entries")


def _place(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """The name and the folder of an entry; None for one that is passed over."""
    shown = member.name.encode("ascii", "backslashreplace").decode()[:160]
    parts = [part for part in member.name.split("/") if part != "."]
    if member.name.startswith("/") or ".." in parts or "\\" in member.name:
        _refuse(f"the tar names {shown!r}, which leads out of it", "body")
    if member.isdir():
        return None
    if not member.isreg() or member.issparse():
        _refuse(f"{shown!r} in the tar is a link, a device or sparse; only plain files are taken")
    name = parts[-1] if parts else ""
    if name not in ADAPTER_FILES or (not member.size and name in TOKENIZER_FILES):
        return None
    return name, "/".join(parts[:-1])


# -- safetensors -----------------------------------------------------------------------------------


class _Metadata(Struct):
    adapter_config: str | None = None
    """The text of adapter_config.json."""


class _Header(Struct):
    """What is looked into of a safetensors file's header. The rest is passed over without being
    made into objects, which would hold up other threads."""

    metadata: _Metadata = field(default_factory=_Metadata, name="__metadata__")


def _config_inside(file: BinaryIO) -> bytes:
    """The config in the metadata of a safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    what = "a tar, a tar.gz nor a safetensors file"
    if not 2 <= length <= MAX_METADATA_BYTES:
        _refuse(f"the body is neither {what}")
    try:
        header = msgspec.json.decode(file.read(length), type=_Header)
    except (ValueError, RecursionError):
        _refuse(f"the body is neither {what}")
    config = header.metadata.adapter_config
    if config is None or len(config) > MAX_BYTES[CONFIG_FILE]:
        _refuse(
            f"the metadata of a safetensors file must hold the text of {CONFIG_FILE} as"
            f" {CONFIG_KEY!r}; or send a tar of the adapter's folder",
            CONFIG_KEY,
        )
    return config.encode()


# -- packing ---------------------------------------------------------------------------------------


def tar_of(files: Mapping[str, BinaryIO]) -> Iterator[bytes]:
    """The pieces of a tar of an adapter's open files, in this order."""
    for name, file in files.items():
        info = tarfile.TarInfo(name)
        info.size = file.seek(0, io.SEEK_END)
        file.seek(0)
        yield info.tobuf(tarfile.GNU_FORMAT)
        while piece := file.read(CHUNK):
            yield piece
        yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
