"""Stores the contents of a registry's versions, by digest.

    blobs/sha256/DIGEST/FILES     the list of its files: whoever writes it first says what they are
    blobs/sha256/DIGEST/<file>    each of them
    blobs/sha256/DIGEST/DONE      the same list, when all are there: only then the content exists

If the registry is a folder, DIGEST is an adapter's folder like any other, and is served from there.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterUnavailable,
    RegistryUnavailable,
)
from weft.core.files import ADAPTER_FILES, MAX_BYTES, TOKENIZER_FILES
from weft.core.folders import Deadline, Folder, Roots
from weft.registry.contents import (
    MAX_ADAPTER_BYTES,
    Contents,
    Listing,
    StoredFile,
    listing_of,
    not_kept,
    opened,
)
from weft.registry.records import Version
from weft.registry.stores import Store

BLOBS = "blobs/sha256/"
FILES, DONE = "FILES", "DONE"
DOOMED = "doomed/"
BEING_REMOVED = "this content is being removed from the registry; publish it again soon"
RESCUED, SWEPT = b"rescued", b"swept"
"""The two verdicts on content that a collector wants to remove; see `weft.registry.sweep`."""
ATTEMPTS = 3
"""How many attempts in a row may fail without a further byte of a download."""


class Claim(msgspec.Struct, frozen=True):
    """The content of the keys FILES and DONE."""

    listing: Listing
    made_at: float
    """When its publication began, in seconds since 1970."""


def key_of(digest: str, name: str) -> str:
    return f"{BLOBS}{digest}/{name}"


def read_claim(store: Store, digest: str, name: str = DONE) -> Claim | None:
    """The list of a blob's files; None if it is not there. Raises RegistryUnavailable."""
    content = store.get(key_of(digest, name))
    try:
        return None if content is None else msgspec.json.decode(content, type=Claim)
    except msgspec.DecodeError as error:
        message = f"{key_of(digest, name)} is damaged: {error}"
        raise RegistryUnavailable(message, "registry") from None


def rescue(store: Store, digest: str) -> None:
    """Keep content that is about to be published from being removed. Raises RegistryUnavailable if
    its removal has begun."""
    for key in store.list(f"{DOOMED}{digest}/"):
        if key.endswith(".at"):
            verdict = key.removesuffix(".at") + ".verdict"
            if not store.put(verdict, RESCUED) and store.get(verdict) != RESCUED:
                raise RegistryUnavailable(BEING_REMOVED, "registry")


class ContentPeers(Protocol):
    """Fetches content that this node lacks from other nodes."""

    def find_listing(self, digest: str, sha256: str, addresses: Sequence[str]) -> Listing | None:
        """The list of a content's files, which must have this sha256; None if no node at these
        addresses sends it soon."""
        ...

    def fetch(self, listing: Listing, stage: Path, addresses: Sequence[str]) -> bool:
        """Write a content's files to the empty folder `stage`. False, with the folder still empty,
        if no node at these addresses sends them soon."""
        ...


class Blobs:
    """The blobs of one registry; for any thread."""

    def __init__(self, store: Store, contents: Contents | None = None) -> None:
        """Blobs are downloaded to `contents`, unless the store is a directory."""
        self._store = store
        self._contents = contents
        self._lock = threading.Lock()
        self.fetched = {"peers": 0, "store": 0}
        """Bytes downloaded so far, by source."""
        self.peers: ContentPeers | None = None
        self.holders: Callable[[str], Sequence[str]] = lambda _: ()
        """Returns the addresses of nodes that may have the content of a digest."""

    def put(
        self,
        files: Folder | Mapping[str, BinaryIO | bytes | memoryview],
        accept: Callable[[Version], object] = lambda _: None,
    ) -> Version:
        """Store the files of an adapter, given by name, unless they are stored already. Returns a
        version, which must be published under a name within an hour: later, it may be swept.
        `accept` may raise WeftError for a version that can't be published: nothing is stored then.

        Raises AdapterNotFound and AdapterInvalid for files that can't be an adapter's,
        AdapterConflict if the same weights are there with another tokenizer or chat template, and
        RegistryUnavailable.
        """
        with _streams(files) as streams:
            listing = listing_of(streams)
            version = Version(listing.digest, listing.num_bytes, listing=listing.sha256)
            accept(version)
            rescue(self._store, listing.digest)
            claim = self._claim(listing)
            if read_claim(self._store, listing.digest) is None:
                for file in listing.files:
                    streams[file.name].seek(0)
                    key = key_of(listing.digest, file.name)
                    self._store.put_file(key, streams[file.name])
                self._store.put(key_of(listing.digest, DONE), msgspec.json.encode(claim))
        return version

    def exists(self, digest: str) -> bool:
        """Whether a blob is there. Raises RegistryUnavailable."""
        return read_claim(self._store, digest) is not None

    def open(self, digest: str, holders: Sequence[str] = (), sha256: str = "") -> Folder:
        """A local folder with exactly this content. It is downloaded if need be: from another node
        (those at the addresses `holders` may have it), else from the store. With the `sha256` of
        its list of files (`Version.listing`), the store is only asked if neither this machine nor a
        node has the content. May be slow. Raises AdapterNotFound, AdapterUnavailable,
        RegistryUnavailable."""
        path, contents = self._store.folder(f"{BLOBS}{digest}/"), self._contents
        if path is not None:
            _check_sizes(path, self._read_listing(digest))
            try:
                return Folder(str(path.resolve()), Roots([str(path.resolve())]))
            except OSError as error:  # it was removed meanwhile
                message = f"the registry's content sha256:{digest} can't be opened"
                raise AdapterUnavailable(message, "lora_path") from error
        if contents is None:
            message = "this process has no folder for contents of a registry elsewhere"
            raise AdapterUnavailable(message, "lora_path")
        try:
            return self._kept(contents, digest, holders, sha256)
        except OSError as error:
            raise not_kept(error) from error

    def is_whole(self, version: Version) -> bool:
        """Whether what was downloaded of a version still has its digests; if the disk has damaged
        it, it is forgotten. To be called when it can't be loaded."""
        return self._contents is not None and self._contents.is_whole(
            version.digest, version.listing
        )

    def _kept(self, contents: Contents, digest: str, holders: Sequence[str], sha256: str) -> Folder:
        listing = contents.find_listing(digest, sha256) if sha256 else None
        if listing is None and sha256 and self.peers is not None:
            addresses = [*holders, *self.holders(digest)]
            listing = self.peers.find_listing(digest, sha256, addresses)
        listing = listing or self._read_listing(digest)
        return contents.find(listing) or self._download(contents, listing, holders)

    def _read_listing(self, digest: str) -> Listing:
        """Raises AdapterNotFound, RegistryUnavailable."""
        claim = read_claim(self._store, digest)
        if claim is None:
            raise AdapterNotFound(f"the registry has no content sha256:{digest}", "lora_path")
        return claim.listing

    def verify(self, digest: str) -> None:
        """Read a whole blob. Raises AdapterNotFound if it is not there, AdapterUnavailable if it is
        damaged, and RegistryUnavailable."""
        listing = self._read_listing(digest)
        with ExitStack() as held:
            streams: dict[str, BinaryIO] = {}
            for file in listing.files:
                stream = held.enter_context(tempfile.TemporaryFile())
                if self._store.get_file(key_of(digest, file.name), stream):
                    streams[file.name] = stream
            if listing_of(streams) != listing:
                raise AdapterUnavailable(f"the content sha256:{digest} is damaged", "lora_path")

    def _claim(self, listing: Listing) -> Claim:
        """Write the list of the blob's files, unless it is there; return the one that counts."""
        claim = Claim(listing, time.time())
        if self._store.put(key_of(listing.digest, FILES), msgspec.json.encode(claim)):
            return claim
        first = read_claim(self._store, listing.digest, FILES)
        if first is None:
            raise RegistryUnavailable(BEING_REMOVED, "registry")
        if first.listing != listing:
            differing = set(first.listing.files) ^ set(listing.files)
            names = ", ".join(sorted({file.name for file in differing}))
            raise AdapterConflict(
                f"the registry has the same weights and {ADAPTER_FILES[0]} with other files beside"
                f" them ({names}); change {ADAPTER_FILES[0]} too, such as by a field of your own",
                names.partition(",")[0],
            )
        return first

    def _download(self, contents: Contents, listing: Listing, holders: Sequence[str]) -> Folder:
        with contents.stage_of(listing) as stage:
            if (found := contents.find(listing)) is not None:
                return found
            if self.peers is not None and not any(stage.iterdir()):  # else the store goes on
                holders = [*holders, *self.holders(listing.digest)]
                if self.peers.fetch(listing, stage, holders):
                    self._count("peers", listing.num_bytes)
            for file in listing.files:
                self._fetch(listing.digest, file, stage / file.name)
            with opened(stage) as streams:
                whole = listing_of(streams) == listing
            if not whole:
                for file in listing.files:
                    (stage / file.name).unlink(missing_ok=True)
                message = f"the registry's content sha256:{listing.digest} is damaged"
                raise AdapterUnavailable(message, "lora_path")
            return contents.add(stage, listing)

    def _fetch(self, digest: str, file: StoredFile, path: Path) -> None:
        """Download one file, or the rest of it."""
        attempts = 0
        while not path.exists() or path.stat().st_size < file.num_bytes:
            before = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as stream:
                    found = self._store.get_file(key_of(digest, file.name), stream)
            except RegistryUnavailable:
                attempts = attempts + 1 if path.stat().st_size == before else 0
                if attempts == ATTEMPTS:
                    raise
                continue
            finally:
                self._count("store", path.stat().st_size - before)
            if not found or path.stat().st_size < file.num_bytes:
                message = f"{file.name} of the registry's content sha256:{digest} is not whole"
                raise AdapterUnavailable(message, "lora_path")

    def _count(self, where: str, num_bytes: int) -> None:
        with self._lock:
            self.fetched[where] += num_bytes


def _check_sizes(path: Path, listing: Listing) -> None:
    for file in listing.files:
        try:
            whole = (path / file.name).stat().st_size == file.num_bytes
        except OSError:
            whole = False
        if not whole:
            message = f"{file.name} of the registry's content sha256:{listing.digest} is damaged"
            raise AdapterUnavailable(message, "lora_path")


# -- what is put -----------------------------------------------------------------------------------


@contextmanager
def _streams(
    files: Folder | Mapping[str, BinaryIO | bytes | memoryview],
) -> Iterator[Mapping[str, BinaryIO]]:
    """Open files that nobody changes. Those of a folder are read into memory first, since it may
    belong to a stranger."""
    given = dict(read_files(files)) if isinstance(files, Folder) else files
    yield {
        name: io.BufferedReader(_Memory(memoryview(file)))
        if isinstance(file, bytes | memoryview)
        else file
        for name, file in given.items()
    }


def read_files(folder: Folder) -> Iterator[tuple[str, memoryview]]:
    """The files of an adapter in a folder, in memory. Raises what `Folder.read` does."""
    deadline = Deadline()
    for name in ADAPTER_FILES:
        view = folder.read(name, MAX_BYTES.get(name, MAX_ADAPTER_BYTES), deadline)
        if view is not None and (len(view) or name not in TOKENIZER_FILES):
            yield name, view


class _Memory(io.RawIOBase):
    """A file over memory that is not copied."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        piece = self._content[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
