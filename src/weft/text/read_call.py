"""The base class of the readers of a tool call, one for each format."""

from __future__ import annotations


class ReadCall:
    """Reads one call, character by character. Its arguments become JSON, which is taken away piece
    by piece: to copy all of it for each character would be slow."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: list[str] = []
        """The arguments' JSON that was not taken yet, in pieces."""
        self.done = False

    @property
    def known(self) -> bool:
        """Whether this is a call for certain."""
        return bool(self.name)

    def take(self) -> str:
        """Take the arguments' JSON that was read since the last `take`."""
        taken, self.arguments = self.arguments, []
        return "".join(taken)
