"""What all readers of a tool's call, in one format or another, have in common."""

from __future__ import annotations


class ReadCall:
    """What is read of one call, character by character. Its arguments become JSON, which is taken
    away as it comes: a copy of all of it for each character would take long."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments = ""
        """What was not taken yet."""
        self.done = False

    @property
    def known(self) -> bool:
        """Whether this is a call for certain."""
        return bool(self.name)

    def take(self) -> str:
        """More of the arguments."""
        taken, self.arguments = self.arguments, ""
        return taken
