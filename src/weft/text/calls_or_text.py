"""Answers that are either calls of tools or a text of some form: what models may write, and how
that is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.core.sampling import StructuredOutputs
from weft.text.calls.forms import as_tag, calls_part
from weft.text.calls.template import mark_part, sequence_of, text_part
from weft.text.chat_parser import ChatParser
from weft.text.pieces import Piece
from weft.text.tools import TOOL_FORMATS

_CHANNEL, _MESSAGE = mark_part("<|channel|>"), mark_part("<|message|>")
_HEADS: dict[str, tuple[dict[str, Any], ...]] = {
    "cohere": (mark_part("<|START_RESPONSE|>"),),
    "harmony": (_CHANNEL, text_part("final"), _MESSAGE),
    "solar_open": (mark_part("<|content|>"),),
}
"""What models write before an answer that is no call. Without it they would hardly ever choose
one, as the mark that they know is missing."""
_THOUGHTS = sequence_of(
    _CHANNEL,
    text_part("analysis"),
    _MESSAGE,
    {"type": "regex", "pattern": "([^<]|<+[^<|])*"},
    mark_part("<|end|>"),
    mark_part("<|start|>"),
    text_part("assistant"),
)
"""A message of harmony's that is reasoning, and the beginning of the next."""


def calls_or(
    form: StructuredOutputs, tools: list[dict[str, Any]], format: str, one_call: bool = False
) -> StructuredOutputs:
    """The form of an answer that is either calls of `tools`, with `one_call` a single one, or a
    text of the given form. Raises InvalidRequest as `tools_schema` does."""
    text = sequence_of(*_HEADS.get(format, ()), {"type": "form"})
    part = {"type": "or", "elements": [calls_part(tools, format, None, one_call), text]}
    if format == "harmony":
        part = sequence_of({"type": "optional", "content": _THOUGHTS}, part)
    return replace(form, around=as_tag(part), never_first=begins_of_calls(tools, format))


def begins_of_calls(tools: list[dict[str, Any]], format: str) -> tuple[str, ...]:
    """The texts that calls of the tools begin with. Harmony needs none to tell calls from text, as
    its messages have headers."""
    style = TOOL_FORMATS[format]
    if style.bare and style.syntax == "named":
        return tuple(f"{tool['function']['name']}\n" for tool in tools)
    if style.bare and style.syntax == "python":
        return tuple(f"[{tool['function']['name']}(" for tool in tools)
    if style.bare:
        return ('{"name"',)
    return () if format == "harmony" else style.begins


class EitherParser(ChatParser):
    """As ChatParser, for an answer that is either calls or text. What it begins with decides, and
    nothing in a text is a call."""

    def __init__(
        self,
        tool_format: str | None,
        reasoning: str | None,
        starts_in_reasoning: bool,
        schemas: Mapping[str, Mapping[str, Any]],
        begins: tuple[str, ...],
    ) -> None:
        """`begins`: an answer of calls begins with one of these texts."""
        super().__init__(tool_format, reasoning, starts_in_reasoning, schemas)
        self._begins = begins
        self._decided = False

    def _answer(self, piece: Piece, final: bool) -> bool:
        if not self._decided:
            text = self._text.lstrip()
            if not final and any(begin.startswith(text) for begin in self._begins):
                return False
            self._decided = True
            if not text.startswith(self._begins):
                self._format = None
        return super()._answer(piece, final)
