"""Reads, character by character, tool calls whose arguments are JSON."""

from __future__ import annotations

import json

from weft.text.calls.read_call import ReadCall
from weft.text.calls.template import CallHead
from weft.text.json_stream import JsonObject

_ARGUMENTS = ('"arguments"', '"parameters"')
_NAMES = ('"name"', '"tool_name"')
_MAX_HEAD = 512


class JsonCall(ReadCall):
    """A call as one JSON object, which has a name and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._json = JsonObject()
        self._name_json: list[str] = []
        self._seen: set[str] = set()
        self._has_arguments = False

    @property
    def known(self) -> bool:
        return bool(self.name) and self._has_arguments

    def feed(self, char: str) -> bool:
        was_in_value = self._json.in_value
        if not self._json.feed(char) or not self._note(char, was_in_value):
            return False
        self.done = self._json.done and self.known
        return self.done or not self._json.done

    def _note(self, char: str, was_in_value: bool) -> bool:
        """Note what the last character says of the name and the arguments. Returns whether this may
        still be a call. `was_in_value`: whether it was in a value before this character."""
        json_, key = self._json, self._json.key
        if json_.in_value and not was_in_value:  # no key may come twice, nor with its other name
            new = key not in self._seen
            same = [names for names in (_ARGUMENTS, _NAMES) if key in names]
            self._seen |= set(same[0]) if same else {key}
            return new
        if was_in_value and key in _NAMES:
            if json_.in_value:
                self._name_json.append(char)
                return True
            name = json.loads("".join(self._name_json))
            self.name = name if isinstance(name, str) and name.isprintable() else ""
            return bool(self.name)
        if json_.in_value and key in _ARGUMENTS:
            return self._note_argument(char)
        return True

    def _note_argument(self, char: str) -> bool:
        if self._json.depth == 1 and char != "}":
            return char.isspace()  # arguments must be an object, so this is beside them
        self.arguments.append(char)
        self._has_arguments = self._has_arguments or char == "{"
        return self._has_arguments


class NamedCall(ReadCall):
    """A call as a name between marks, and its arguments: `name[ARGS]{...}`. The call ends with its
    arguments; marks after them are read elsewhere."""

    def __init__(self, head: CallHead) -> None:
        super().__init__()
        self._head = head
        self._read = ""
        self._json = JsonObject()

    def feed(self, char: str) -> bool:
        if not self.name and char == "{":
            found = self._head.whole.fullmatch(self._read)
            self.name = found["name"] if found else ""
        if not self.name:
            self._read += char
            return (
                len(self._read) < _MAX_HEAD and self._head.begun.fullmatch(self._read) is not None
            )
        if not self._json.feed(char):
            return False
        self.arguments.append(char)
        self.done = self._json.done
        return True
