"""Keeps downloaded and uploaded adapters in a folder of this machine, within a limit of bytes.

    ROOT/contents/DIGEST-LISTING/   the files of one content, complete and never changed, and FILES,
                                    the list of them
    ROOT/stage/...                  what is under way

A content gets its place by a rename, so that processes may share the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from msgspec import Struct

from weft.core.config import MAX_RANK
from weft.core.errors import AdapterError, AdapterInvalid, AdapterNotFound, AdapterUnavailable
from weft.core.files import ADAPTER_FILES, CONFIG_FILE, MAX_BYTES, WEIGHTS_FILE, content_digest
from weft.core.folders import Folder, Roots, home_folder

if TYPE_CHECKING:
    from weft.checkpoint.read import AdapterFiles

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
"""How many bytes are read, hashed or written at a time."""
MAX_ADAPTER_BYTES = 4 << 30
"""How large an adapter that comes from elsewhere may be by default, packed or not."""
STALE_S = 24 * 3600.0
"""Unfinished downloads that nobody has continued for this long are removed."""
LISTING = "FILES"
MAX_LISTING_BYTES = 1 << 16
_DIGEST, _KEY = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")


class StoredFile(Struct, frozen=True, array_like=True):
    """One file of a content."""

    name: str
    num_bytes: int
    sha256: str


class Listing(Struct, frozen=True):
    """The files of one content, in the order of ADAPTER_FILES, and its digest."""

    digest: str
    files: tuple[StoredFile, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for names that no adapter has: others may lead out of its folder."""
        if not _DIGEST.fullmatch(self.digest) or {f.name for f in self.files} - {*ADAPTER_FILES}:
            raise ValueError("it lists what is no adapter")

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """The hash of this list as JSON. Unlike `digest`, it also covers the tokenizer's files."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def key(self) -> str:
        """A name for exactly these files."""
        return content_key(self.digest, self.sha256)


def content_key(digest: str, listing: str) -> str:
    """The `Listing.key` of a content whose list of files has this sha256."""
    return f"{digest}-{listing[:16]}"


def parse_listing(said: bytes, digest: str, sha256: str) -> Listing | None:
    """Parse a list of a content's files from an untrusted source; None unless it has this
    sha256."""
    if hashlib.sha256(said).hexdigest() != sha256:
        return None
    with suppress(msgspec.DecodeError):
        listing = msgspec.json.decode(said, type=Listing)
        return listing if listing.digest == digest else None
    return None


def listing_of(files: Mapping[str, BinaryIO]) -> Listing:
    """The listing of open files by name, which are read from their start to their end and must not
    change. Raises AdapterNotFound unless both of WEIGHT_FILES are among them, and AdapterInvalid
    for a file that no adapter has or that is too large."""
    for name in files:
        if name not in ADAPTER_FILES:
            raise AdapterInvalid(f"{name}: no adapter has a file of this name", name)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise AdapterNotFound(f"the adapter has no file {name}", name)
    stored = [_stored(name, files[name]) for name in ADAPTER_FILES if name in files]
    config, weights = files[CONFIG_FILE], files[WEIGHTS_FILE]
    config.seek(0)
    weights.seek(0)
    num_bytes = next(file.num_bytes for file in stored if file.name == WEIGHTS_FILE)
    digest = content_digest(config.read(), _pieces(weights), num_bytes)
    return Listing(digest, tuple(stored))


def _stored(name: str, file: BinaryIO) -> StoredFile:
    sha, num_bytes, most = hashlib.sha256(), 0, MAX_BYTES.get(name)
    file.seek(0)
    for piece in _pieces(file):
        sha.update(piece)
        num_bytes += len(piece)
        if most is not None and num_bytes > most:
            raise AdapterInvalid(f"{name}: larger than {most} bytes", name)
    return StoredFile(name, num_bytes, sha.hexdigest())


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(CHUNK):
        yield piece


def check_files(files: AdapterFiles) -> None:
    """Raise AdapterInvalid unless these can be the files of an adapter for some base. Whether they
    fit a certain base is checked by its engine."""
    from weft.checkpoint.kinds import parse_config  # numpy takes its time to import
    from weft.checkpoint.read import parse_stored

    parse_config(files.config, MAX_RANK)
    parse_stored(files.weights)


def _check_folder(folder: Path) -> None:
    """As `check_files`, of a folder of our own, whose weights are mapped and not read."""
    from weft.checkpoint.read import AdapterFiles

    with (folder / WEIGHTS_FILE).open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise AdapterInvalid(f"{WEIGHTS_FILE}: it is empty", WEIGHTS_FILE)
        weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    check_files(AdapterFiles((folder / CONFIG_FILE).read_bytes(), memoryview(weights)))


@contextmanager
def opened(folder: Path) -> Iterator[dict[str, BinaryIO]]:
    """The files of an adapter that lie in a folder of our own, open for reading."""
    files: dict[str, BinaryIO] = {}
    try:
        for name in ADAPTER_FILES:
            with suppress(FileNotFoundError):
                files[name] = (folder / name).open("rb")
        yield files
    finally:
        for file in files.values():
            file.close()


def cache_folder(images: str | None = None) -> Path | None:
    """The folder for contents, in `images` (--adapter-cache-dir) or by default; None for `none`,
    and where there is no home folder."""
    if images == "none":
        return None
    if images is not None:
        return Path(images) / "contents"
    cache = home_folder("XDG_CACHE_HOME", ".cache")
    return cache and cache / "weft" / "contents"


class Contents:
    """The folder of contents; for any thread. Beyond `max_bytes`, the contents that were opened
    longest ago are removed."""

    def __init__(
        self,
        root: Path | None,
        max_bytes: int = 32 << 30,
        used: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """`root` is created when needed; None means a temporary folder that is removed with this
        object. `used` returns the digests that this process serves, which are never removed."""
        self._given = root
        self._max_bytes = max_bytes
        self._used = used
        self._lock = threading.RLock()

    @cached_property
    def _root(self) -> Path:
        with self._lock:
            if (root := self._given) is None:
                root = Path(tempfile.mkdtemp(prefix="weft-contents-"))
                weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
            for name in ("contents", "stage"):
                (root / name).mkdir(parents=True, exist_ok=True)
            _clear(root / "stage")
            return root.resolve()

    def find(self, listing: Listing) -> Folder | None:
        """The folder with exactly these files, if it is here."""
        path = self._root / "contents" / listing.key
        try:
            for file in listing.files:
                if (path / file.name).stat().st_size != file.num_bytes:
                    shutil.rmtree(path, ignore_errors=True)  # the machine went down meanwhile
                    return None
            os.utime(path)
            return Folder(str(path), Roots([str(path)]))
        except OSError:
            return None

    def find_listing(self, digest: str, sha256: str) -> Listing | None:
        """A content's list of files, if the content is here and the list has this sha256."""
        said = self.read_piece(content_key(digest, sha256), LISTING, 0, MAX_LISTING_BYTES)
        return None if said is None else parse_listing(said, digest, sha256)

    def is_whole(self, digest: str, sha256: str) -> bool:
        """Whether a content's files are still those of its list, whose hash is `sha256`. If not,
        the content is removed, so that it is downloaded again."""
        listing = self.find_listing(digest, sha256)
        if listing is None:
            return False
        path = self._root / "contents" / listing.key
        try:
            with opened(path) as files:
                whole = listing_of(files) == listing
        except (OSError, AdapterError):
            whole = False
        if not whole:
            shutil.rmtree(path, ignore_errors=True)
        return whole

    def read_piece(self, key: str, name: str, start: int, num_bytes: int) -> bytes | None:
        """At most `num_bytes` of the file `name` (LISTING: the list of files) of the content with
        this `Listing.key`, from `start` on; None if the content is not here."""
        if not _KEY.fullmatch(key) or name not in (*ADAPTER_FILES, LISTING) or start < 0:
            return None
        try:
            with (self._root / "contents" / key / name).open("rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except OSError:
            return None

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """An empty folder that is removed at the end of the context. Raises AdapterUnavailable if
        it can't be created."""
        try:
            folder = tempfile.TemporaryDirectory(dir=self._root / "stage", prefix="new-")
        except OSError as error:
            raise not_kept(error) from error
        with folder as path:
            yield Path(path)

    @contextmanager
    def stage_of(self, listing: Listing) -> Iterator[Path]:
        """The folder in which this content is assembled, by one caller at a time; others wait. Its
        files stay after the context, so that a download can continue, unless `add` took them over,
        or the disk failed: they would only take what room is left."""
        path = self._root / "stage" / listing.key
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.mkdir(exist_ok=True)
            os.utime(path)  # somebody goes on with it
            try:
                yield path
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise

    def keep(self, files: Path) -> Folder:
        """Take over a folder of `stage`, with an adapter's files and nothing else. Raises
        AdapterNotFound, AdapterInvalid, and AdapterUnavailable if there is no room."""
        with opened(files) as streams:
            listing = listing_of(streams)
        _check_folder(files)
        return self.add(files, listing)

    def add(self, stage: Path, listing: Listing) -> Folder:
        """Take over a staged folder that has these files. Raises AdapterUnavailable if there is no
        room."""
        self._make_room(listing)
        if self.find(listing) is None:
            (stage / LISTING).write_bytes(msgspec.json.encode(listing))
            with suppress(OSError):  # another process was quicker
                stage.rename(self._root / "contents" / listing.key)
        shutil.rmtree(stage, ignore_errors=True)
        folder = self.find(listing)
        if folder is None:
            raise AdapterUnavailable("the adapter's files can't be kept on this machine")
        return folder

    def _make_room(self, listing: Listing) -> None:
        with self._lock:
            _clear(self._root / "stage")
            found: list[tuple[float, int, Path]] = []
            for path in (self._root / "contents").iterdir():
                with suppress(OSError):  # another process removed it
                    files = (file for file in path.iterdir() if file.name != LISTING)
                    size = sum(file.stat().st_size for file in files)
                    found.append((path.stat().st_mtime, size, path))
            total = sum(size for _, size, _ in found) + listing.num_bytes
            used = self._used()
            for _, size, path in sorted(found):
                if total <= self._max_bytes:
                    return
                if path.name != listing.key and path.name.partition("-")[0] not in used:
                    shutil.rmtree(path, ignore_errors=True)
                    total -= size
            if total > self._max_bytes:
                raise AdapterUnavailable(
                    f"adapters from elsewhere would take {total} bytes on this machine with this"
                    f" one, and may take {self._max_bytes}: raise --adapter-cache-bytes"
                )


def not_kept(error: OSError) -> AdapterUnavailable:
    """The error for an adapter that can't be stored on this machine. It goes to clients, so only
    the log says where."""
    logger.warning("adapters can't be kept: %s", error)
    message = f"the adapter's files can't be kept on this machine: {error.strerror}"
    return AdapterUnavailable(message, "lora_path")


def _clear(stage: Path) -> None:
    """Remove files of dead processes, and of downloads that nobody has continued."""
    for path in stage.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - STALE_S:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
