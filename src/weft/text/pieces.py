"""What parsers make of a model's text: pieces of reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

_PART_CHARS = 1 << 12

TextKind = Literal["content", "reasoning"]


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one call. The first piece of each index has `id` and `name`."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    """More of the arguments' JSON, as the model wrote it."""


@dataclass(slots=True)
class TextDelta:
    """A piece of the message's text."""

    kind: TextKind
    text: str


@dataclass(slots=True)
class Piece:
    """What a piece of the model's text adds to the message, in its order."""

    parts: list[TextDelta | ToolCallDelta] = field(default_factory=list)

    def write(self, kind: TextKind, text: str) -> None:
        """Add text at the end, to the last part if that is of the same kind."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, TextDelta) and last.kind == kind:
            last.text += text
        elif text:
            self.parts.append(TextDelta(kind, text))

    @property
    def content(self) -> str:
        return self._written("content")

    @property
    def reasoning(self) -> str:
        return self._written("reasoning")

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def _written(self, kind: TextKind) -> str:
        texts = (part for part in self.parts if isinstance(part, TextDelta))
        return "".join(part.text for part in texts if part.kind == kind)


def in_parts(text: str) -> Iterator[str]:
    """A text in parts of limited length. Parsers copy the rest of a part at each mark, so a whole
    text with many marks would take long."""
    return (text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS))


def held(text: str, mark: str) -> int:
    """How many characters at the text's end may be the beginning of `mark`."""
    for num_chars in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num_chars]):
            return num_chars
    return 0
