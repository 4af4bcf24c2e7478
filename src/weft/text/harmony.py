"""Parses what gpt-oss writes: messages with headers, which are reasoning, content or calls.

<|channel|>analysis<|message|>They ask for the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>
"""

from __future__ import annotations

import re
import secrets
from typing import Literal

from weft.text.pieces import Piece, TextKind, ToolCallDelta, held, in_parts
from weft.text.tools import TOOL_FORMATS

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)([\w.-]+)")
_REASONING = re.compile(r"<\|channel\|>\s*analysis\b")
_HEADER_BEGINS = (_CHANNEL, "to=", _START)
_MAX_HEADER = 1024


class HarmonyParser:
    """Splits one output, in pieces of any size; how it is cut changes nothing but the timing.

    Messages of the channel `analysis` are reasoning. Those to a function are calls, if the request
    has tools. All others are content, and so is text without a header. Headers and marks are left
    out.
    """

    def __init__(self, reads_calls: bool, either: bool = False) -> None:
        """`either`: the answer is either calls or a text, so that nothing follows a text."""
        self._reads_calls = reads_calls
        self._either = either
        self._text = ""
        self._in_header = True
        self._needs_mark = True
        """Whether a header begins with a mark here, as at the start and after an end."""
        self._field: TextKind | Literal["call"] = "content"
        """The kind of the message that is being read."""
        self.num_tool_calls = 0
        self.has_reasoning = False
        """Whether any message is reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that must show in the text, also where they are special tokens."""
        return TOOL_FORMATS["harmony"].marks

    def feed(self, text: str) -> Piece:
        piece = Piece()
        for part in in_parts(text):
            self._text += part
            self._run(piece, final=False)
        return piece

    def flush(self, piece: Piece | None = None) -> Piece:
        """Add to the piece what was held back, when the end of the output has come."""
        return self._run(piece or Piece(), final=True)

    def _run(self, piece: Piece, final: bool) -> Piece:
        while self._header(piece, final) if self._in_header else self._body(piece, final):
            pass
        return piece

    def _header(self, piece: Piece, final: bool) -> bool:
        if self._needs_mark and not self._may_be_header(final):
            return self._begin_content()
        header, found, rest = self._text.partition(_MESSAGE)
        if len(header) - (0 if found else held(header, _MESSAGE)) > _MAX_HEADER:
            return self._begin_content()
        if not found:
            return False
        self._text = rest
        self._in_header = False
        recipient = _RECIPIENT.search(header)
        self._field = "reasoning" if _REASONING.search(header) else "content"
        if recipient is not None and self._reads_calls:
            self._field = "call"
            call_id = f"call_{secrets.token_hex(12)}"
            piece.parts.append(ToolCallDelta(self.num_tool_calls, call_id, recipient[1], ""))
            self.num_tool_calls += 1
        self.has_reasoning = self.has_reasoning or self._field == "reasoning"
        return True

    def _begin_content(self) -> bool:
        """Read what comes as content without a header."""
        self._in_header, self._field = False, "content"
        return True

    def _may_be_header(self, final: bool) -> bool:
        text = self._text.lstrip()
        if any(text.startswith(begin) for begin in _HEADER_BEGINS):
            return True
        return not (final and text) and any(begin.startswith(text) for begin in _HEADER_BEGINS)

    def _body(self, piece: Piece, final: bool) -> bool:
        marks = () if self._either and self._field == "content" else _ENDS
        ends = [(at, end) for end in marks if (at := self._text.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            self._give(piece, self._text[:at])
            self._text = self._text[at + len(end) :]
            self._in_header, self._needs_mark = True, end != _START
            return True
        num_held = 0 if final else max((held(self._text, end) for end in marks), default=0)
        num_given = len(self._text) - num_held
        self._give(piece, self._text[:num_given])
        self._text = self._text[num_given:]
        return False

    def _give(self, piece: Piece, text: str) -> None:
        if self._field != "call":
            piece.write(self._field, text)
        elif text:
            piece.parts.append(ToolCallDelta(self.num_tool_calls - 1, None, None, text))
