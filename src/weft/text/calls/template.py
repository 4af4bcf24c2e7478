"""Templates of calls: the text of a call as a family writes it, where braces stand for what differs
from call to call, such as `{name}`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

_MARK = re.compile(r"</?[^\s<>{}=\"]+>|\[[A-Z_]+\]")
_PLACE = re.compile(r"(\{[a-z]+\})")
_PIECE = re.compile(r"\s+|\{[a-z]+\}|[()]|.")
_READ = {"{name}": r"(?P<name>[\w.-]{1,256})", "{id}": r"[\w-]*", "{n}": r"\d*"}
_BEGUN = {"{name}": r"[\w.-]{1,256}"}
_OPTIONAL = {"(": "(?:", ")": ")?"}


def marks_of(template: str) -> tuple[str, ...]:
    """The marks in a template, in their order. Each may be a single token of the model."""
    return tuple(_MARK.findall(template))


def split(template: str) -> list[str]:
    """The template cut at its braces. Texts are at the even places, and braces between them."""
    return _PLACE.split(template)


class CallHead(NamedTuple):
    """What stands before the arguments of a call."""

    whole: re.Pattern[str]
    """Matches a head; its group `name` is the name of the tool."""
    begun: re.Pattern[str]
    """Matches all that may become a head."""

    @classmethod
    @cache
    def of(cls, template: str) -> CallHead:
        """The head that a template begins with, up to `{arguments}`. A part in parentheses may be
        missing, and white space may be longer, shorter or missing."""
        pieces = _PIECE.findall(template.partition("{arguments}")[0])
        whole = "".join(_OPTIONAL.get(p) or _read(p) for p in pieces)
        return cls(re.compile(rf"{whole}\s*"), re.compile(rf"{_begun(pieces)}\s*"))


def _read(piece: str) -> str:
    """The pattern of a piece of a template: of white space, of braces or of one character."""
    return r"\s*" if piece.isspace() else _READ.get(piece, re.escape(piece))


def _begun(pieces: list[str]) -> str:
    """The pattern that matches every text which these pieces may begin with."""
    if not pieces:
        return ""
    first, *rest = pieces
    if first != "(":
        return f"(?:{_BEGUN.get(first) or _read(first)}{_begun(rest)})?"
    end = rest.index(")")
    return f"(?:{_begun(rest[:end] + rest[end + 1 :])}|{_begun(rest[end + 1 :])})"


def tail_of(template: str) -> list[str]:
    """What stands after `{arguments}`, without white space, mark by mark."""
    return re.findall(rf"{_MARK.pattern}|[^\s<\[]+", template.partition("{arguments}")[2])


# Parts of xgrammar's structural tags.


def sequence_of(*elements: dict[str, Any]) -> dict[str, Any]:
    """These parts one after the other. Texts beside each other become one."""
    flat: list[dict[str, Any]] = []
    for element in elements:
        flat += element["elements"] if element.get("type") == "sequence" else [element]
    merged: list[dict[str, Any]] = []
    for element in flat:
        if "value" in element and merged and "value" in merged[-1]:
            merged[-1] = text_part(merged[-1]["value"] + element["value"])
        elif element != text_part(""):
            merged.append(element)
    return {"type": "sequence", "elements": merged or [text_part("")]}


def text_part(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def mark_part(mark: str) -> dict[str, Any]:
    """A mark: the special token of that name, or text if the tokenizer has no such token."""
    return {"mark": mark}


def marked_parts(text: str) -> list[dict[str, Any]]:
    """A text of a template, mark by mark."""
    parts, end = list[dict[str, Any]](), 0
    for found in _MARK.finditer(text):
        parts += [text_part(text[end : found.start()]), mark_part(found[0])]
        end = found.end()
    return [part for part in (*parts, text_part(text[end:])) if part != text_part("")]
