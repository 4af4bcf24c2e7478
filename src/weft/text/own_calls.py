"""Calls of tools that are neither JSON nor XML, character by character; their arguments become
JSON."""

from __future__ import annotations

import ast
import json
import re

from weft.text.json_stream import is_json
from weft.text.read_call import ReadCall

_GEMMA_HEAD = re.compile(r"call:([\w.-]{1,256})\{")
_PYTHON_HEAD = re.compile(r"([\w.-]{1,256})\(")
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_KEY = 300
_MAX_DEPTH = 64
"""How deep values may be nested."""
_MAX_LITERAL = 10_000
"""Characters of a Python value that is no JSON."""
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_CLOSES = {"}": "{", "]": "[", ")": "("}


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
        """What comes next: "key", "value", or "end", that of a value."""
        self._in_text = False
        self._follows = False
        """Whether a comma is to be written before the next key or value."""

    def feed(self, char: str) -> bool:
        """Whether it may still be a call."""
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
        found = _GEMMA_HEAD.fullmatch(head)
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
        """Take the end of a value and what ends it. A comma is written with what follows it."""
        in_object = self._open[-1] == "{"
        if self._expected == "value" and (value or in_object):
            self._write(_as_json(value), "end")
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


class PythonCall(ReadCall):
    """A call as OLMo 3 writes it: `name(key="text", n=3)`."""

    def __init__(self) -> None:
        super().__init__()
        self._token: list[str] = []
        self._separator = ""
        self._key = ""
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Whether it may still be a call."""
        self._token.append(char)
        if not self.name:
            found = _PYTHON_HEAD.fullmatch("".join(self._token))
            if found is not None:
                self.name, self.arguments, self._token = found[1], ["{"], []
            begins = _NAME_CHAR.fullmatch(char) is not None and len(self._token) < _MAX_KEY
            return found is not None or begins
        if self._quote:
            ends = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if ends else self._quote
            return True
        return self._outside(char)

    def _outside(self, char: str) -> bool:
        """A character that is not within text."""
        if not self._key:
            token = "".join(self._token).strip()
            if char == "=":
                self._key, self._token = token[:-1].strip(), []
                return bool(self._key)
            self._token = self._token if token else []
            self.done = token == ")"
            self.arguments.append("}" if self.done else "")
            return self.done or len(self._token) < _MAX_KEY
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
        key = json.dumps(self._key, ensure_ascii=False)
        self.arguments.append(f"{self._separator}{key}: {_as_json(value)}")
        self._key, self._token, self._separator = "", [], ", "
        self.done = char == ")"
        self.arguments.append("}" if self.done else "")
        return bool(value)


def _as_json(value: str) -> str:
    """A value as JSON: what is JSON already, what Python reads as a literal, or else text."""
    if is_json(value):
        return value
    if len(value) <= _MAX_LITERAL:
        try:
            literal = ast.literal_eval(_CONSTANTS.get(value, value))
            written = json.dumps(literal, ensure_ascii=False, allow_nan=False)
            return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)
