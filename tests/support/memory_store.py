"""A registry's store in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import BinaryIO


class MemoryStore:
    """A store for one process, which is gone with it."""

    uri = "memory"

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._lock = Lock()

    def reopen(self) -> MemoryStore:
        return self

    def put(self, key: str, content: bytes) -> bool:
        with self._lock:
            if key in self._contents:
                return False
            self._contents[key] = content
            return True

    def put_file(self, key: str, file: BinaryIO) -> bool:
        return self.put(key, file.read())

    def get(self, key: str) -> bytes | None:
        return self._contents.get(key)

    def get_file(self, key: str, file: BinaryIO) -> bool:
        content = self.get(key)
        if content is None:
            return False
        file.write(content[file.seek(0, os.SEEK_END) :])
        return True

    def list(self, prefix: str) -> Iterator[str]:
        with self._lock:
            return iter([key for key in self._contents if key.startswith(prefix)])

    def delete(self, key: str) -> None:
        with self._lock:
            self._contents.pop(key, None)

    def folder(self, prefix: str) -> Path | None:
        return None
