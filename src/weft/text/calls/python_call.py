"""Reads, character by character, a tool call that is written as a call in Python."""

from __future__ import annotations

import json
import re

from weft.text.calls.read_call import ReadCall
from weft.text.calls.values import by_itself, literal, literal_or_quoted

_HEAD = re.compile(r"([\w.-]{1,256})\(")
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_KEY = 300
_MAX_DEPTH = 64
"""How deep values may be nested."""
_CLOSES = {"}": "{", "]": "[", ")": "("}
_AFTER_TEXT = ",:)]}"


class PythonCall(ReadCall):
    """A call as OLMo 3, LFM2 and Llama 4 write it: `name(key="text", n=3)`.

    LFM2 does not escape quotes within a text. So a quote ends a text only if the character after it
    can follow a text.
    """

    def __init__(self, strict: bool = False) -> None:
        """`strict`: what is read may also be text, as no mark says that it is a call. It is taken
        for a call only if all of it is one, with identifiers as keys and literals as values."""
        super().__init__()
        self._strict = strict
        self._token: list[str] = []
        self._separator = ""
        self._key = ""
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False
        self._may_end = False
        """Whether a quote was read that ends the text, unless the text goes on."""

    @property
    def known(self) -> bool:
        return bool(self.name) and (self.done or not self._strict)

    def feed(self, char: str) -> bool:
        self._token.append(char)
        if not self.name:
            found = _HEAD.fullmatch("".join(self._token))
            if found is not None:
                self.name, self.arguments, self._token = found[1], ["{"], []
            begins = _NAME_CHAR.fullmatch(char) is not None and len(self._token) < _MAX_KEY
            return found is not None or begins
        if self._quote and not (self._may_end and char in _AFTER_TEXT):
            return self._in_text(char)
        self._quote, self._may_end = "", False
        return self._outside(char)

    def _in_text(self, char: str) -> bool:
        if not (self._may_end and char.isspace()):
            self._may_end = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
        return True

    def _outside(self, char: str) -> bool:
        """Read a character that is not within text. Returns whether this may still be a call."""
        if not self._key:
            token = "".join(self._token).strip()
            if char == "=":
                self._key, self._token = token[:-1].strip(), []
                return bool(self._key)
            self._token = self._token if token else []
            self.done = token == ")"
            self.arguments.append("}" if self.done else "")
            may_be = not self._strict or not token or token.isidentifier()
            return self.done or (may_be and len(self._token) < _MAX_KEY)
        if char in "\"'":
            self._quote = char
        elif char in "{[(":
            self._open.append(char)
        elif not self._open and char in ",)":
            return self._end_argument(char)
        elif char in _CLOSES and (not self._open or self._open.pop() != _CLOSES[char]):
            return False
        return len(self._open) <= _MAX_DEPTH

    def _end_argument(self, char: str) -> bool:
        value = "".join(self._token[:-1]).strip()
        written = literal_or_quoted(value) if self._strict else by_itself(value)
        if written is None:
            return False
        key = json.dumps(self._key, ensure_ascii=False)
        self.arguments.append(f"{self._separator}{key}: {written}")
        self._key, self._token, self._separator = "", [], ", "
        self.done = char == ")"
        self.arguments.append("}" if self.done else "")
        return bool(value)

    def cut_off(self) -> None:
        if self._quote and not self._open:
            text = literal("".join(self._token).strip() + ("" if self._may_end else self._quote))
            key = json.dumps(self._key, ensure_ascii=False)
            if text is not None:
                self.arguments.append(f"{self._separator}{key}: {text[:-1]}")
