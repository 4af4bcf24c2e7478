"""Downloads adapters from the web and from buckets, as a tar or as a folder of files."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from weft.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    ConfigError,
    RegistryUnavailable,
)
from weft.core.files import ADAPTER_FILES, MAX_BYTES, WEIGHT_FILES
from weft.registry.allowed import WEB, Allowed, shown
from weft.registry.contents import listing_of, opened
from weft.registry.stores import open_store
from weft.registry.unpack import unpack

Get: TypeAlias = Callable[[str, Path, int], bool]
"""Downloads a URI to a new file, within a limit of bytes; False if there is nothing at the URI."""

ATTEMPTS = 5
"""How often a download from a bucket is started or continued."""
_TARS = (".tar", ".tar.gz", ".tgz")
_CHECKSUM = re.compile(r"sha256=([0-9a-f]{64})")


def download(uri: str, allowed: Allowed, stage: Path, max_bytes: int) -> Path:
    """The folder in `stage` into which an adapter was downloaded.

    Raises AdapterPathRefused (not allowed), AdapterNotFound, AdapterInvalid (no adapter, or another
    than its checksum says), AdapterUnavailable (the server or the bucket does not answer).
    """
    parts = allowed.check(uri)
    checksum = _checksum(parts.fragment)
    get = _web(allowed) if parts.scheme in WEB else _from_bucket
    place = uri.partition("#")[0]
    files = stage / "adapter"
    files.mkdir()
    if parts.path.endswith(_TARS):
        packed = stage / "packed"
        if not get(place, packed, max_bytes):
            raise AdapterNotFound(f"there is nothing at {shown(uri)}", "lora_path")
        with packed.open("rb") as tar:
            _compare(checksum, hashlib.file_digest(tar, "sha256").hexdigest(), uri)
        unpack(packed, files, max_bytes)
        return files
    if parts.query:
        message = f"{shown(uri)}: only the URI of a {', '.join(_TARS)} may have a query"
        raise AdapterInvalid(message, "lora_path")
    for name in ADAPTER_FILES:
        file = files / name
        if not get(f"{place.rstrip('/')}/{name}", file, MAX_BYTES.get(name, max_bytes)):
            if name in WEIGHT_FILES:
                message = f"there is no {name} at {shown(uri)}, which is no {', '.join(_TARS)}"
                raise AdapterNotFound(message, "lora_path")
            file.unlink(missing_ok=True)
    if checksum:
        with opened(files) as streams:
            _compare(checksum, listing_of(streams).digest, uri)
    return files


def _checksum(fragment: str) -> str:
    found = _CHECKSUM.fullmatch(fragment)
    if fragment and found is None:
        message = "what follows # in a URI must be sha256= and 64 hexadecimal digits"
        raise AdapterInvalid(message, "lora_path")
    return found[1] if found else ""


def _compare(wanted: str, found: str, uri: str) -> None:
    if wanted and wanted != found:
        raise AdapterInvalid(f"{shown(uri)} has the checksum {found}, not {wanted}", "lora_path")


def _web(allowed: Allowed) -> Get:
    from weft.registry.fetch import Web  # it takes its time to import

    return Web(allowed).download


def _from_bucket(uri: str, into: Path, max_bytes: int) -> bool:
    """A `Get` for buckets, with the credentials of this process."""
    folder, _, key = uri.rpartition("/")
    try:
        store, why = open_store(folder), ""
    except ConfigError as error:
        raise AdapterUnavailable(error.message, "lora_path") from error
    with io.BufferedRandom(_Limited(into, max_bytes)) as file:
        for _ in range(ATTEMPTS):
            try:
                return store.get_file(key, file)
            except RegistryUnavailable as error:
                why = error.message
    raise AdapterUnavailable(f"{shown(uri)} can't be fetched: {why}", "lora_path")


class _Limited(io.FileIO):
    """A new file that does not grow beyond a size."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, "x+b")
        self._max_bytes = max_bytes

    def write(self, content: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(content) > self._max_bytes:
            message = f"it is larger than {self._max_bytes} bytes, which an adapter may have here"
            raise AdapterInvalid(message, "lora_path")
        return super().write(content)
