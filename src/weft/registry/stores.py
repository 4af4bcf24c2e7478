"""The protocol of a store that holds a shared registry, and the store in a folder.

A key is a relative path such as `log/00000000000000000007` or `blobs/sha256/DIGEST/DONE`. What is
written under a key never changes; it can only be deleted.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from weft.core.errors import ConfigError, RegistryReadOnly, RegistryUnavailable, for_clients

_STALE_S: Final = 24 * 3600.0
"""An unfinished file of this age was abandoned."""
_SPARE_BYTES: Final = (1 << 20, 1 << 18, 1 << 16)
"""How large the file `spare` is: the first of these for which there is room."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_REFUSALS: Final = dict.fromkeys(_FULL, "is full") | dict.fromkeys(
    _READ_ONLY, "can't be read or written"
)
"""What to say of a folder that answers, but refuses something, by the error's number."""


class Store(Protocol):
    """A folder or a bucket. All methods block, and may be called from any thread. Each
    raises RegistryUnavailable if the store does not answer; whether a `put` has happened is then
    unknown. If the store answers that it can't be written, the error is RegistryReadOnly."""

    uri: str
    """What it is called in messages."""

    def reopen(self) -> Store:
        """Another handle on the same store, which shares no cache with this one."""
        ...

    def put(self, key: str, content: bytes) -> bool:
        """Write a key that is not there yet, whole or not at all, and durably. Returns False, and
        changes nothing, if it is there."""
        ...

    def put_file(self, key: str, file: BinaryIO) -> bool:
        """As `put`, with the rest of an open file of any size. Concurrent writers of a key must
        write the same content."""
        ...

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if it is not there."""
        ...

    def get_file(self, key: str, file: BinaryIO) -> bool:
        """Append to an open file what it lacks of the key's content, from the file's length on.
        Returns False if the key is not there."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, which ends with a slash, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Delete a key; one that is not there is no error."""
        ...

    def folder(self, prefix: str) -> Path | None:
        """The local folder that has the keys of a prefix as files; None if the store is not on this
        machine's file system."""
        ...


def open_store(uri: str) -> Store:
    """Open the store of a URI: `s3://`, `gs://` or `az://` with a bucket and a prefix, or a folder,
    which is created if its parent exists. Raises ConfigError."""
    if (path := local_path(uri)) is not None:
        if not path:  # the working directory is meant by "."
            raise ConfigError("a registry is a folder or a bucket, and none is named", "registry")
        return DirectoryStore(Path(path))
    try:
        from weft.registry.buckets import BucketStore
    except ImportError as error:
        message = f"{uri}: buckets need one more package: pip install 'weft[buckets]'"
        raise ConfigError(message, "registry") from error
    return BucketStore(uri)


def is_new_folder(uri: str) -> bool:
    """Whether a registry is to be in a folder that is not there."""
    path = local_path(uri)
    return path is not None and not Path(path).is_dir()


def local_path(uri: str) -> str | None:
    """The path of the folder that a URI names; None if it names a bucket."""
    path = uri.removeprefix("file://")
    return None if "://" in path else path


class DirectoryStore:
    """A folder of a local disk, or of one that several machines mount, such as NFS. A key is
    written to a file aside, which is flushed and then linked to its place: that takes effect at
    once, and fails if the place is taken."""

    def __init__(self, root: Path) -> None:
        """Creates the folder if it is missing, but not its parents. Raises ConfigError."""
        self.uri = str(root)
        self._root = root.absolute()
        self._aside = self._root / "aside"
        if not (parent := self._root.parent).is_dir():
            message = f"the registry can't be in {root}: there is no folder {parent}"
            raise ConfigError(message, "registry")
        try:
            if not self._aside.is_dir():
                self._aside.mkdir(parents=True, exist_ok=True)
                self.keep_spare()
            for unfinished in self._aside.iterdir():
                with suppress(OSError):  # gone meanwhile, or only to be read
                    if unfinished.stat().st_mtime < time.time() - _STALE_S:
                        unfinished.unlink()
        except OSError as error:
            message = f"the registry can't be in {root}: {error.filename}: {error.strerror}"
            raise ConfigError(message, "registry") from error

    def reopen(self) -> DirectoryStore:
        return DirectoryStore(self._root)

    def put(self, key: str, content: bytes) -> bool:
        return self._written(key, lambda file: file.write(content))

    def put_file(self, key: str, file: BinaryIO) -> bool:
        return self._written(key, lambda copy: shutil.copyfileobj(file, copy, 1 << 20))

    def get(self, key: str) -> bytes | None:
        with self._answering():
            try:
                return self._path(key).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._check_there()
                return None

    def get_file(self, key: str, file: BinaryIO) -> bool:
        with self._answering():
            try:
                kept = self._path(key).open("rb")
            except FileNotFoundError:
                self._check_there()
                return False
            with kept:
                kept.seek(file.seek(0, os.SEEK_END))
                shutil.copyfileobj(kept, file, 1 << 20)
            return True

    def list(self, prefix: str) -> Iterator[str]:
        with self._answering():
            top = self._path(prefix.removesuffix("/"))
            found = [Path(f, n) for f, _, names in os.walk(top, onerror=_others) for n in names]
            self._check_there()
        # NFS hides a file that is deleted while somebody reads it behind another name.
        return (str(path.relative_to(self._root)) for path in found if path.name[0] != ".")

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._answering():
            path.unlink(missing_ok=True)
            for folder in path.relative_to(self._root).parents[:-2]:
                with suppress(OSError):
                    (self._root / folder).rmdir()

    def folder(self, prefix: str) -> Path | None:
        return self._path(prefix.removesuffix("/"))

    def keep_spare(self) -> None:
        """Take some room with a file that nobody needs, unless it is there; see `spare_room`."""
        for num_bytes in _SPARE_BYTES:
            try:
                with self._spare.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            except FileExistsError:
                return
            except OSError:  # no room for so much, or no right to write
                self.drop_spare()
            else:
                return

    def drop_spare(self) -> None:
        """Give that room back."""
        with suppress(OSError):
            self._spare.unlink()

    @property
    def _spare(self) -> Path:
        return self._root / "spare"

    def _path(self, key: str) -> Path:
        if {"", ".", ".."} & set(key.split("/")):
            raise ValueError(f"not a key: {key!r}")
        return self._root / key

    def _check_there(self) -> None:
        """Raises OSError if the folder is gone, or not mounted: its keys are not missing then."""
        self._aside.stat()

    def _written(self, key: str, write: Callable[[BinaryIO], object]) -> bool:
        path = self._path(key)
        aside = self._aside / secrets.token_hex(16)
        with self._answering():
            try:
                with aside.open("xb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                return self._linked(aside, path)
            finally:
                aside.unlink(missing_ok=True)

    def _linked(self, aside: Path, path: Path) -> bool:
        """Link a file to its place, and see to it that the place outlives a loss of power."""
        while True:
            try:
                path.hardlink_to(aside)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # Whoever deletes a folder's last file also deletes the folder, perhaps repeatedly.
                aside.stat()  # the whole store may be gone, too
                self._make_folder(path.parent)
            else:
                _flush_folder(path.parent)
                return True

    def _make_folder(self, folder: Path) -> None:
        """Create a folder within the store. The store's own is left alone: it may be unmounted."""
        if folder != self._root:
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            _flush_folder(folder.parent)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            how = _REFUSALS.get(error.errno or 0)
            kind = RegistryReadOnly if how else RegistryUnavailable
            full = f"the registry {self.uri} {how or 'does not answer'}: {self._why(error)}"
            raise kind(for_clients(how or "does not answer"), full=full) from error

    def _why(self, error: OSError) -> str:
        """What went wrong, and with which of the registry's files."""
        file, why = error.filename2 or error.filename, error.strerror or str(error)
        if not file or self._aside in (Path(file), Path(file).parent):  # the whole folder is meant
            return why
        return f"{Path(file).relative_to(self._root)}: {why}"


@contextmanager
def spare_room(store: Store) -> Iterator[None]:
    """A context in which a folder on a full disk has a little room, to remove from it what nobody
    needs: a file of the folder is deleted, and made again at the end. Raises RegistryUnavailable
    that says what to do if the room is not enough."""
    if not isinstance(store, DirectoryStore):
        yield
        return
    store.drop_spare()
    try:
        yield
    except RegistryUnavailable as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
            raise
        message = "each content takes a mark of up to 4 KB before it can be removed"
        remedy = "free 1 MB on that disk, or more for hundreds of contents, and try again"
        raise RegistryUnavailable(f"{error}; {message}: {remedy}", "registry") from error
    finally:
        store.keep_spare()


def _others(error: OSError) -> None:
    """Raise an error of a listing, which goes on without what is missing."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def probe(store: Store) -> None:
    """Prove that if several writers write the same key, one wins and all see its content at once:
    on this store, with this process's rights. Raises ConfigError and RegistryUnavailable."""
    key = f"probe/{secrets.token_hex(8)}"
    handles = [store, store.reopen()]
    contents = [f"writer {i}".encode() for i in range(4)]
    try:
        with ThreadPoolExecutor(len(contents)) as writers:
            tries = [writers.submit(handles[i % 2].put, key, c) for i, c in enumerate(contents)]
            winners = [
                content for content, one in zip(contents, tries, strict=True) if one.result()
            ]
        if len(winners) > 1 or store.put(key, b"late"):
            _refuse_store(store, "lets several writers create the same key")
        # A put that is repeated after a lost answer may find its own key.
        if any(handle.get(key) not in (winners or contents) for handle in handles):
            _refuse_store(store, "does not show what was just written")
        if any(key not in handle.list("probe/") for handle in handles):
            _refuse_store(store, "does not list what was just written")
    except ConfigError:  # but not of a store that does not answer: it would be waited for again
        store.delete(key)
        raise
    store.delete(key)
    if handles[1].get(key) is not None:
        _refuse_store(store, "shows what was just deleted")


def _refuse_store(store: Store, what: str) -> None:
    message = f"the registry {store.uri} can't be used: this file system or bucket {what}"
    raise ConfigError(message, "registry")
