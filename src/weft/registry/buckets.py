"""A store in a bucket of S3, Google Cloud Storage, Azure, or what speaks one of their protocols."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from weft.core.errors import ConfigError, RegistryUnavailable

_PART_BYTES: Final = 16 << 20
"""What one request of a large file carries."""
_MAX_PARTS_ABOUT: Final = 4
_RETRYING_S: Final = timedelta(seconds=10)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_KINDS: Final[dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}


class BucketStore:
    """A bucket and a prefix in it. Credentials, region and endpoint come from the environment,
    under the names that its owner gives them: `AWS_...`, `GOOGLE_...`, `AZURE_...`."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigError."""
        self.uri = uri
        kind = _KINDS.get(uri.partition("://")[0])
        if kind is None:
            known = ", ".join(f"{scheme}://" for scheme in _KINDS)
            raise ConfigError(f"{uri}: a registry is a folder, or begins with {known}", "registry")
        try:
            self._bucket: ObjectStore = kind.from_url(
                uri, retry_config={"max_retries": 5, "retry_timeout": _RETRYING_S}
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{uri}: {_said(error)}", "registry") from error

    def reopen(self) -> BucketStore:
        return BucketStore(self.uri)

    def put(self, key: str, content: bytes) -> bool:
        with self._answering():
            try:
                obstore.put(self._bucket, key, content, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def put_file(self, key: str, file: BinaryIO) -> bool:
        start = file.tell()
        num_bytes = file.seek(0, os.SEEK_END) - start
        file.seek(start)
        if num_bytes <= _PART_BYTES:
            return self.put(key, file.read())
        with self._answering():
            try:
                obstore.head(self._bucket, key)
            except FileNotFoundError:
                obstore.put(
                    self._bucket,
                    key,
                    file,
                    chunk_size=_PART_BYTES,
                    max_concurrency=_MAX_PARTS_ABOUT,
                )
                return True
            return False

    def get(self, key: str) -> bytes | None:
        with self._answering():
            try:
                return bytes(obstore.get(self._bucket, key).bytes())
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise
                return None

    def get_file(self, key: str, file: BinaryIO) -> bool:
        start = file.seek(0, os.SEEK_END)
        with self._answering():
            try:
                end = obstore.head(self._bucket, key)["size"]
            except FileNotFoundError:
                return False
        for at in range(start, end, _PART_BYTES):
            with self._answering():  # not around the writing: a full disk is not the bucket's
                stop = min(at + _PART_BYTES, end)
                part = obstore.get_range(self._bucket, key, start=at, end=stop)
            file.write(part)
        return True

    def list(self, prefix: str) -> Iterator[str]:
        with self._answering():
            found = obstore.list(self._bucket, prefix.removesuffix("/")).collect()
            return iter([each["path"] for each in found])

    def delete(self, key: str) -> None:
        with self._answering():
            try:
                obstore.delete(self._bucket, key)
            except FileNotFoundError:
                return

    def folder(self, prefix: str) -> Path | None:
        return None

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """That a key is there or not is an answer, and handled before; what is left is none, such
        as a bucket that is not there."""
        try:
            yield
        except (BaseError, OSError) as error:
            message = f"the registry {self.uri} does not answer: {_said(error)}"
            raise RegistryUnavailable(message) from error


def _said(error: Exception) -> str:
    """The first line of what the client says; the others are about its inside."""
    if _lacks_bucket(error):
        return "there is no such bucket"
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def _lacks_bucket(error: Exception) -> bool:
    """Whether it is not only the key that is missing."""
    return any(f"<Code>{code}</Code>" in str(error) for code in _NO_BUCKET)
