"""The folder of the local sockets at which the two ends of a link meet."""

from __future__ import annotations

from weft.core.locked_folder import LockedFolder

PREFIX = "weft-link-"


class SocketFolder(LockedFolder):
    """A folder for sockets."""

    def __init__(self) -> None:
        super().__init__(PREFIX)

    def address(self, name: str) -> str:
        """A ZeroMQ address in the folder."""
        return f"ipc://{self.path}/{name}"
