"""The folder of the local sockets at which the two ends of a link meet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "weft-link-"
_LOCK = "lock"


class SocketFolder:
    """A folder for sockets that only this user can enter. It is locked while its process lives, so
    that what a killed process left is known, and removed when the next one is made."""

    def __init__(self) -> None:
        remove_left_behind()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def address(self, name: str) -> str:
        """A ZeroMQ address in the folder."""
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """Any number of repetitions does no harm."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def remove_left_behind() -> None:
    """Remove the folders of this user whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, in use, or just being made
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
