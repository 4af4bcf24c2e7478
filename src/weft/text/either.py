"""Answers that are either calls of tools or a text of some form: what models may write, and how
that is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.core.sampling import StructuredOutputs
from weft.text.chat_parser import ChatParser, Piece
from weft.text.tools import TOOL_FORMATS, as_tag, calls_part

_HEADS: dict[str, tuple[dict[str, str], ...]] = {
    "cohere": ({"type": "token", "token": "<|START_RESPONSE|>"},),
    "harmony": (
        {"type": "token", "token": "<|channel|>"},
        {"type": "const_string", "value": "final"},
        {"type": "token", "token": "<|message|>"},
    ),
}
"""What models write before an answer that is no call. Without it they would hardly ever choose
one, as the mark that they know is missing."""
_THOUGHTS = (
    {"type": "token", "token": "<|channel|>"},
    {"type": "const_string", "value": "analysis"},
    {"type": "token", "token": "<|message|>"},
    {"type": "regex", "pattern": "([^<]|<+[^<|])*"},
    {"type": "token", "token": "<|end|>"},
    {"type": "token", "token": "<|start|>"},
    {"type": "const_string", "value": "assistant"},
)
"""A message of harmony's that is reasoning, and the beginning of the next."""


def calls_or(
    form: StructuredOutputs, tools: list[dict[str, Any]], format: str, one_call: bool = False
) -> StructuredOutputs:
    """The form of an answer that is either calls of `tools`, with `one_call` a single one, or a
    text of the given form. Raises InvalidRequest as `tools_schema` does."""
    text = {"type": "sequence", "elements": [*_HEADS.get(format, ()), {"type": "form"}]}
    part = {"type": "or", "elements": [calls_part(tools, format, None, one_call), text]}
    if format == "harmony":
        thoughts = {"type": "sequence", "elements": [*_THOUGHTS]}
        optional = {"type": "optional", "content": thoughts}
        part = {"type": "sequence", "elements": [optional, part]}
    return replace(form, around=as_tag(part), never_first=begins_of_calls(tools, format))


def begins_of_calls(tools: list[dict[str, Any]], format: str) -> tuple[str, ...]:
    """What tells calls from text at the beginning of an answer; nothing with harmony, whose
    messages have headers."""
    style = TOOL_FORMATS[format]
    if style.syntax == "named":
        return tuple(f"{tool['function']['name']}\n" for tool in tools)
    if style.bare:
        return (f'{{"{style.name}"',)
    return () if format == "harmony" else (style.begin,)


class EitherParser(ChatParser):
    """As ChatParser, for an answer that is either calls or text. What it begins with decides, and
    nothing in a text is a call."""

    def __init__(
        self,
        tool_format: str,
        reasoning: str | None,
        starts_in_reasoning: bool,
        schemas: Mapping[str, Mapping[str, Any]],
        begins: tuple[str, ...],
    ) -> None:
        """`begins`: what an answer of calls begins with, one of them."""
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
