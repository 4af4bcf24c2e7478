"""The base class of the readers of a tool call, one for each syntax."""

from __future__ import annotations


class ReadCall:
    """Reads one call, character by character. Its arguments become JSON, which is taken away piece
    by piece: to copy all of it for each character would be slow."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: list[str] = []
        """The arguments' JSON that was not taken yet, in pieces."""
        self.done = False

    def feed(self, char: str) -> bool:
        """Read a character. Returns whether the text so far may still be a call."""
        raise NotImplementedError

    @property
    def known(self) -> bool:
        """Whether this is a call for certain."""
        return bool(self.name)

    @property
    def unread(self) -> str:
        """What was read last and is no part of the call. It is asked for when a known call has
        refused a character."""
        return ""

    def take(self) -> str:
        """Take the arguments' JSON that was read since the last `take`."""
        taken, self.arguments = self.arguments, []
        return "".join(taken)

    def cut_off(self) -> None:
        """The output ends within this call: add what was read of a value that is not complete."""
