"""How a model writes what is not plain text in its answers."""

from __future__ import annotations

from dataclasses import dataclass

from weft.api.settings import ApiSettings
from weft.text import Tokenizer
from weft.text.reasoning import END, detect_reasoning
from weft.text.tools import detect_tool_format


@dataclass(frozen=True, slots=True)
class Dialect:
    """The marks that a model uses for calls of tools and for reasoning."""

    tool_format: str | None = None
    """A key of TOOL_FORMATS, or None for a model that calls no tools."""
    reasoning: bool = False
    """Whether the model marks its reasoning."""
    end_of_reasoning: int | None = None
    """The token after which the answer begins; None if the mark is no single token."""

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, settings: ApiSettings) -> Dialect:
        """The dialect that the operator gives, or else the one that the chat template shows."""
        if tokenizer is None:
            return cls()
        template = tokenizer.chat_template or ""
        tool_format, reasoning = settings.tool_call_parser, settings.reasoning_parser is not None
        if tool_format == "auto":
            tool_format = detect_tool_format(template)
        if settings.reasoning_parser == "auto":
            reasoning = detect_reasoning(template)
        end = tokenizer.encode(END, add_special_tokens=False) if reasoning else []
        return cls(tool_format, reasoning, end[0] if len(end) == 1 else None)
