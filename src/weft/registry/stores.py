"""Where a shared registry keeps its log and its blobs: the few things that it asks of a store.

A key is a relative path such as `log/00000000000000000007` or `blobs/sha256/DIGEST/DONE`. What is
written under a key never changes; it can only be deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol


class Store(Protocol):
    """A folder, a bucket or memory. All methods block, and may be called from any thread. Each
    raises RegistryUnavailable if the store does not answer; whether a `put` has happened is then
    unknown."""

    def put(self, key: str, content: bytes) -> bool:
        """Write a key that is not there yet, whole or not at all, and durably. Returns False, and
        changes nothing, if it is there."""
        ...

    def put_file(self, key: str, file: BinaryIO) -> bool:
        """As `put`, with the rest of an open file of any size."""
        ...

    def get(self, key: str) -> bytes | None:
        """What a key holds; None if it is not there."""
        ...

    def get_file(self, key: str, file: BinaryIO) -> bool:
        """Append what a key holds to an open file, from the place on where that file ends. Returns
        False if the key is not there."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, which ends with a slash, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Delete a key; one that is not there is no error."""
        ...

    def folder(self, prefix: str) -> Path | None:
        """The folder of this machine in which the keys of a prefix lie as files; None for a store
        that is elsewhere."""
        ...
