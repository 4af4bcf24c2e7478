"""Reads, character by character, a tool call as Gemma writes it."""

from __future__ import annotations

import json
import re

from weft.text.calls.read_call import ReadCall
from weft.text.calls.values import by_itself
from weft.text.pieces import held

_HEAD = re.compile(r"call:([\w.-]{1,256})\{")
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_KEY = 300
_MAX_DEPTH = 64
"""How deep values may be nested."""
_CLOSES = {"}": "{", "]": "["}


class GemmaCall(ReadCall):
    """A call as Gemma writes it, with a mark for quotes: `call:name{key:"text",n:3,o:{k:[1]}}`."""

    def __init__(self, quote: str) -> None:
        """`quote`: the mark that stands before and after text."""
        super().__init__()
        self._quote = quote
        self._token: list[str] = []
        """What was read of a key, a value or text that has not ended."""
        self._open: list[str] = []
        self._expected = "key"
        """What comes next: "key", "value", or "end" for the end of a value."""
        self._in_text = False
        self._follows = False
        """Whether a comma is to be written before the next key or value."""

    def feed(self, char: str) -> bool:
        self._token.append(char)
        if self._in_text:
            return self._text()
        if not self.name:
            return self._head(char)
        token = "".join(self._token).lstrip()
        self._token = self._token if token else []
        if token and self._quote.startswith(token) and self._expected != "end":
            if token == self._quote:
                self._token, self._in_text = [], True
            return True
        if self._expected == "key" and char == ":":
            return self._key(token[:-1].strip())
        if self._expected == "value" and char in "{[" and len(token) == 1:
            return self._begin(char)
        if char in ",}]":
            return self._end(token[:-1].strip(), char)
        return len(token) < _MAX_KEY if self._expected != "end" else not token

    def _head(self, char: str) -> bool:
        head = "".join(self._token)
        found = _HEAD.fullmatch(head)
        if found is not None:
            self.name = found[1]
            return self._begin("{")
        if len(head) <= len("call:"):
            return "call:".startswith(head)
        return _NAME_CHAR.fullmatch(char) is not None and len(head) < _MAX_KEY

    def _begin(self, char: str) -> bool:
        self._open.append(char)
        self._write(char, "key" if char == "{" else "value")
        return len(self._open) <= _MAX_DEPTH

    def _text(self) -> bool:
        if self._token[-1] != self._quote[-1]:
            return True
        if "".join(self._token[-len(self._quote) :]) == self._quote:
            self._in_text = False
            text = "".join(self._token[: -len(self._quote)])
            if self._expected == "key":
                self._token = list(text)
                return True
            self._write(json.dumps(text, ensure_ascii=False), "end")
        return True

    def _key(self, key: str) -> bool:
        self._write(f"{json.dumps(key, ensure_ascii=False)}: ", "value")
        return bool(key)

    def _end(self, value: str, char: str) -> bool:
        """Take the end of a value, and the character that ends it. A comma is written only together
        with what follows it."""
        in_object = self._open[-1] == "{"
        if self._expected == "value" and (value or in_object):
            self._write(by_itself(value), "end")
        elif value:
            return False
        if char == ",":
            self._token, self._expected = [], "key" if in_object else "value"
            return True
        if self._open.pop() != _CLOSES[char]:
            return False
        self._follows = False
        self._write(char, "end")
        self.done = not self._open
        return True

    def _write(self, text: str, expected: str) -> None:
        """Add a key, or all or the beginning or end of a value, to the arguments."""
        self.arguments.append(f", {text}" if self._follows else text)
        self._token, self._expected, self._follows = [], expected, expected == "end"

    def cut_off(self) -> None:
        if self._in_text and self._expected == "value":
            text = "".join(self._token)
            text = text[: len(text) - held(text, self._quote)]
            self._write(json.dumps(text, ensure_ascii=False)[:-1], "end")
