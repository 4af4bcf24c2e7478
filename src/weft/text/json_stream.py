"""Parses the JSON in a model's output, character by character."""

from __future__ import annotations

import json
import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?"
)
_LITERALS = ("true", "false", "null")
_SPACE = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH, _LOW = r"\\u[dD][89abAB]\w\w", r"\\u[dD][c-fC-F]\w\w"
_NO_ESCAPE = r"\\u(?=\w{0,3}\W)"
_NOT_LOW = rf"[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F])|{_NO_ESCAPE}"
_PARTS = re.compile(
    rf"[^\\]+|\\[^u]|{_HIGH}{_LOW}|(?P<half>{_LOW}|{_HIGH}(?={_NOT_LOW}))"
    rf"|\\u(?![dD][89a-fA-F])\w{{4}}|{_NO_ESCAPE}"
)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value. NaN and Infinity, which Python reads too, are none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class WholePairs:
    """Replaces each escaped half of a surrogate pair, in JSON that comes in pieces, by U+FFFD: most
    readers of JSON refuse a half."""

    def __init__(self) -> None:
        self._rest = ""
        """An incomplete escape, or a half whose other half may follow."""

    def feed(self, text: str) -> str:
        """The text that is complete now."""
        text, end = self._rest + text, 0
        given: list[str] = []
        while found := _PARTS.match(text, end):
            given.append("\\ufffd" if found["half"] else found[0])
            end = found.end()
        self._rest = text[end:]
        return "".join(given)

    def flush(self) -> str:
        """The rest, when the text has ended."""
        rest, self._rest = self._rest, ""
        return rest


class JsonObject:
    """Follows one JSON object: says whether a character may come next, and where in the object it
    is.

    Between its keys' colons and commas `in_value` is true, and `key` is the key, as JSON text
    with quotes, of the outermost object.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected = "object"
        self._token = ""
        self._key: list[str] = []
        self.key = ""
        self.in_value = False
        self.done = False

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._stack)

    def feed(self, char: str) -> bool:
        """Read a character. Returns whether the text so far is an object, or begins one."""
        if self._expected in ("string", "key string"):
            return self._in_string(char)
        if self._token:
            return self._in_token(char)
        if char in _SPACE:
            return self._expected != "object" and not self.done
        return self._between(char)

    def _between(self, char: str) -> bool:
        expected = self._expected
        if char in "}]":
            return self._close(char)
        if expected == "object":
            return char == "{" and self._open(char)
        if char == '"' and expected in ("key", "key or end", "value", "value or end"):
            self._expected = "key string" if expected.startswith("key") else "string"
            if self.depth == 1 and expected.startswith("key"):
                self._key = [char]
            self._token = char
            return True
        if expected == "colon":
            self._expected = "value"
            self.in_value = self.in_value or self.depth == 1
            return char == ":"
        if expected == "comma or end":
            self._expected = "key" if self._stack[-1] == "{" else "value"
            self.in_value = self.in_value and self.depth > 1
            return char == ","
        if expected not in ("value", "value or end"):
            return False
        if char in "{[":
            return self._open(char)
        self._token = char
        return self._may_be_token(char)

    def _open(self, char: str) -> bool:
        self._stack.append(char)
        self._expected = "key or end" if char == "{" else "value or end"
        return True

    def _close(self, char: str) -> bool:
        opened = {"}": "{", "]": "["}[char]
        empty = "key or end" if char == "}" else "value or end"
        if not self._stack or self._stack[-1] != opened:
            return False
        if self._expected not in ("comma or end", empty):
            return False
        self._stack.pop()
        self._expected = "comma or end"
        self.done = not self._stack
        self.in_value = self.in_value and not self.done and self.depth > 0
        return True

    def _in_string(self, char: str) -> bool:
        """`_token` is what decides: a quote, or an escape that isn't complete."""
        is_key = self._expected == "key string"
        is_outermost = is_key and self.depth == 1
        if is_outermost:
            self._key.append(char)
        if self._token == '"':
            if char == '"':
                self.key = "".join(self._key) if is_outermost else self.key
                self._token = ""
                self._expected = "colon" if is_key else "comma or end"
            elif char == "\\":
                self._token = char
            return char >= " "
        self._token += char
        if self._token[1] != "u":
            self._token, valid = '"', char in '"\\/bfnrt'
            return valid
        valid = len(self._token) == 2 or char in _HEX
        if len(self._token) == 6:
            self._token = '"'
        return valid

    def _in_token(self, char: str) -> bool:
        """One character inside a number or a literal, which end with the character after them."""
        if char in _SPACE or char in ",]}":
            complete = self._token in _LITERALS or _NUMBER.fullmatch(self._token)
            self._token = ""
            self._expected = "comma or end"
            return bool(complete) and self.feed(char)
        self._token += char
        return self._may_be_token(self._token)

    def _may_be_token(self, token: str) -> bool:
        if any(literal.startswith(token) for literal in _LITERALS):
            return True
        return len(token) < 400 and _NUMBER_BEGINNING.fullmatch(token) is not None
