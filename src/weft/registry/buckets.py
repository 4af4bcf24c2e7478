"""A store in a bucket of S3, Google Cloud Storage, Azure, or what speaks one of their protocols."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
)
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from weft.core.errors import ConfigError, RegistryReadOnly, RegistryUnavailable, for_clients

_PART_BYTES: Final = 16 << 20
"""What one request of a large file carries."""
_SMALL_BYTES: Final = 64 << 10
_MAX_PARTS_ABOUT: Final = 4
_RETRYING_S: Final = timedelta(seconds=10)
_ANSWER_S: Final = timedelta(seconds=15)
"""How long a bucket may say nothing, before its answer or within it. It is longer than all retries,
so that a request is not repeated after it."""
_CLIENT_OPTIONS: Final = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_only"),
    *("http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url"),
    *("proxy_ca_certificate", "proxy_excludes", "root_certificate", "randomize_addresses"),
    *("read_timeout", "timeout", "user_agent"),
)
"""Those of obstore's `ClientConfig` that a variable may have."""
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
            open_bucket = partial(
                kind.from_url, uri, retry_config={"max_retries": 5, "retry_timeout": _RETRYING_S}
            )
            options: Any = {"read_timeout": _ANSWER_S, **_client_options(uri)}
            self._bucket: ObjectStore = open_bucket(client_options=options)
            self._patient: ObjectStore = open_bucket()
            """For large bodies: no answer can come while one is sent over a slow line."""
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{uri}: {_said(error)}", "registry") from error

    def reopen(self) -> BucketStore:
        return BucketStore(self.uri)

    def put(self, key: str, content: bytes) -> bool:
        with self._answering():
            try:
                bucket = self._bucket if len(content) <= _SMALL_BYTES else self._patient
                obstore.put(bucket, key, content, mode="create")
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
                    self._patient,
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
            denied = isinstance(error, PermissionDeniedError)
            kind = RegistryReadOnly if denied else RegistryUnavailable
            how = "refuses access" if denied else "does not answer"
            full = f"the registry {self.uri} {how}: {_said(error)}"
            raise kind(for_clients(how), full=full) from error


def _client_options(uri: str) -> dict[str, str]:
    """What the environment says of connections. Obstore takes it from there only if it is given no
    option of this kind."""
    prefix = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}[uri.partition("://")[0]]
    given = {name: os.environ.get(prefix + name.upper()) for name in _CLIENT_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def _said(error: Exception) -> str:
    """The first line of what the client says; the others are about its inside."""
    if _lacks_bucket(error):
        return "there is no such bucket"
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def _lacks_bucket(error: Exception) -> bool:
    """Whether it is not only the key that is missing."""
    return any(f"<Code>{code}</Code>" in str(error) for code in _NO_BUCKET)
