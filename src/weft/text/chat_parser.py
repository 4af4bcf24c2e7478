"""Parses a model's text into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from weft.text.calls.gemma_call import GemmaCall
from weft.text.calls.json_call import JsonCall, NamedCall
from weft.text.calls.python_call import PythonCall
from weft.text.calls.read_call import ReadCall
from weft.text.calls.template import CallHead, tail_of
from weft.text.calls.xml_call import XmlCall, XmlStyle
from weft.text.pieces import Piece, ToolCallDelta, held, in_parts
from weft.text.reasoning import REASONING
from weft.text.thinking import AnswerEnd, Thoughts
from weft.text.tools import TOOL_FORMATS

ALL_MARKS = (
    *(mark for style in REASONING.values() for mark in style.marks),
    *(mark for style in TOOL_FORMATS.values() for mark in style.marks),
)
"""All marks that a parser may have to find in a text."""

_LONG = 64
"""White space of more characters than this is kept aside, so that no piece searches it again."""


class ChatParser:
    """Splits one output. It may be fed in pieces of any size, which change only the timing.

    Feed all text, then flush. For text to have its marks, the detokenizer must not skip those
    that are special tokens: give `marks` to it. Of the output, only these are left out:

    - the mark of reasoning, such as `<think>`, at the beginning, with white space before and a line
      break after it
    - the mark at its end, such as `</think>`, with a line break before and up to two after it
    - marks around an answer, such as `<answer>` and `</answer>`, with the white space beside them
    - marks around calls, with the white space beside them, and what a call has but name and
      arguments; also the mark after a call that is cut off at the end of the output

    A call is passed on as soon as its name and the beginning of its arguments are known. Text that
    turns out before that not to be a call is content, unchanged; so is text after a call's valid
    JSON. Text is held back while it may be part of a mark, or of a call that is not certain yet.

    `reasoning`: a name in REASONING. `starts_in_reasoning`: the prompt ends with its first mark
    (see `opens_reasoning`). `schemas`: the JSON schemas of tools' parameters, by tool and
    parameter; only formats that write values other than as JSON, or names without marks, need them.
    """

    def __init__(
        self,
        tool_format: str | None,
        reasoning: str | None,
        starts_in_reasoning: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._schemas = schemas or {}
        self._format = None if tool_format is None else TOOL_FORMATS[tool_format]
        self._thinking: Thoughts | None = None
        if reasoning is not None:
            ends = self._format.begins if self._format and self._format.ends_reasoning else ()
            self._thinking = Thoughts(reasoning, starts_in_reasoning, ends)
        self._step = self._answer
        self._text = ""
        self._spaces: list[str] = []
        """White space that waits behind the text, once there is a lot, for what comes after it."""
        self._at_start = True
        """Whether nothing but reasoning has come so far."""
        self._mark = ""
        """The text before the call that is being read: content, if that turns out to be no call."""
        self._raw: list[str] = []
        """The text of that call so far, in pieces."""
        self._in_list = False
        self._call: ReadCall | None = None
        self._closers: list[str] = []
        """What may still come after the call that was read."""
        self._end: AnswerEnd | None = None
        self._is_blank = True
        """Whether no content has come since the last call."""
        self.num_tool_calls = 0

    @property
    def has_reasoning(self) -> bool:
        """Whether the output begins with reasoning, even if it is empty."""
        return self._thinking is not None and self._thinking.has_reasoning

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that the text must contain, even those that are special tokens."""
        thinking = self._thinking.style.marks if self._thinking else ()
        return thinking + (self._format.marks if self._format else ())

    def feed(self, text: str) -> Piece:
        """Read more of the output. Returns what has become certain."""
        piece = Piece()
        for part in in_parts(text):
            self._spaces.append(part)
            if len(self._spaces) == 1 or not part.isspace():
                self._run(piece, final=False)
        return piece

    def flush(self, piece: Piece | None = None) -> Piece:
        """The output has ended: add what was held back to the piece."""
        piece = self._run(piece or Piece(), final=True)
        if self._end is not None:
            piece.write("content", self._end.flush())
        return piece

    def _run(self, piece: Piece, final: bool) -> Piece:
        self._text, self._spaces = "".join([self._text, *self._spaces]), []
        while not self._thinks(piece, final) and self._step(piece, final):
            pass
        if len(self._text) > _LONG and self._text.isspace():
            self._text, self._spaces = "", [self._text]
        return piece

    def _thinks(self, piece: Piece, final: bool) -> bool:
        """Whether the answer has not begun yet."""
        thinking = self._thinking
        if thinking is None or thinking.is_over:
            return False
        self._text, is_over = thinking.read(self._text, piece, final)
        if is_over and thinking.has_marked_answer:
            self._end = AnswerEnd(thinking.style.after_answer)
        return not is_over

    # Each step takes what it can from the text, and returns whether another step can follow.

    def _answer(self, piece: Piece, final: bool) -> bool:
        style, text = self._format, self._text
        if style is None:
            self._write(piece, len(text))
            return False
        if self._at_start and style.bare and style.syntax != "named":
            begin = len(text) - len(text.lstrip())
            if begin == len(text) and not final:
                return False
            self._at_start = False
            if text[begin : begin + 1] == (style.opening or "{"):
                return self._begin_call(begin)
        if self._at_start and style.bare and style.syntax == "named":
            found = self._named_at_start(final)
            if found is not None:
                return found
        marks = (*style.begins, style.lead) if style.lead else style.begins
        begins = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if begins:
            begin, mark = min(begins)
            before = len(text[:begin].rstrip())
            self._write(piece, before)
            self._begin_call(begin - before + len(mark))
            return mark != style.lead or self._begin_with(mark)
        if final:
            self._write(piece, len(text) if text.strip() or self._is_content else 0)
            self._text = ""
        else:
            num_held = max(held(text, mark) for mark in marks)
            self._write(piece, len(text[: len(text) - num_held].rstrip()))
        return False

    def _named_at_start(self, final: bool) -> bool | None:
        """For formats in which an output may begin with a tool's name on a line of its own. Returns
        whether another step can follow, or None if the output does not begin like that."""
        text = self._text.lstrip()
        lines = [f"{name}\n" for name in self._schemas]
        if any(text.startswith(line) for line in lines):
            return self._begin_call(len(self._text) - len(text))
        if not final and any(line.startswith(text) for line in lines):
            return False
        self._at_start = False
        return None

    @property
    def _is_content(self) -> bool:
        """Whether white space is content: after a call it belongs to the marks."""
        return not (self.num_tool_calls and self._is_blank)

    def _begin_call(self, num_chars: int) -> bool:
        self._mark = self._take(num_chars)
        self._raw = []
        self._step = self._open_call
        return True

    def _begin_with(self, lead: str) -> bool:
        """Read a call that begins with the text `lead`, and has no mark before it."""
        self._call = self._new_call(lead[0])
        assert self._call is not None
        self._step = self._read_call
        return all(self._call.feed(char) for char in lead)

    def _open_call(self, piece: Piece, final: bool) -> bool:
        assert self._format is not None
        self._mark += self._take(len(self._text) - len(self._text.lstrip()))
        if not self._text:
            return final and self._no_call(piece)
        char = self._text[0]
        if self._format.layout != "each" and char == "[" and not self._in_list:
            self._in_list = True
            self._mark += self._take(1)
            return True
        self._call = self._new_call(char)
        if self._call is None:
            return self._no_call(piece)
        self._step = self._read_call
        return True

    def _new_call(self, char: str) -> ReadCall | None:
        """A reader for a call that begins with this character; None if there is no such call."""
        style = self._format
        assert style is not None
        if char == "{" and (style.syntax == "json" or self._in_list):
            return JsonCall()
        if style.syntax == "gemma":
            return GemmaCall(style.quote)
        if style.syntax == "python":
            return PythonCall(strict=style.bare)
        if style.syntax == "xml":
            return XmlCall(XmlStyle.of(style.call, style.parameter), self._schemas)
        if style.syntax == "named" or (style.reads and not self._in_list):
            return NamedCall(CallHead.of(style.reads or style.call))
        return None

    def _no_call(self, piece: Piece) -> bool:
        """What was read is no call: it is content, or may hold the beginning of another call."""
        if self._call is None or not self._call.known:
            mark = self._mark.rstrip()
            self._say(piece, mark)
            self._is_blank = False
            # White space behind it may belong to the mark of the next call.
            self._text = "".join([self._mark[len(mark) :], *self._raw, self._text])
        self._call = None
        return self._end_calls()

    def _read_call(self, piece: Piece, final: bool) -> bool:
        call = self._call
        assert call is not None
        was_known, num_read = call.known, 0
        while num_read < len(self._text) and not call.done and call.feed(self._text[num_read]):
            num_read += 1
        stopped = num_read < len(self._text)
        read = self._take(num_read)
        if final and not stopped and not call.done:
            call.cut_off()
        if not call.known:
            self._raw.append(read)
        elif not was_known:
            self._is_blank = True
            if self._end is not None:
                piece.write("content", self._end.flush())
            call_id = f"call_{secrets.token_hex(12)}"
            delta = ToolCallDelta(self.num_tool_calls, call_id, call.name, call.take())
            piece.parts.append(delta)
            self.num_tool_calls += 1
        elif more := call.take():
            piece.parts.append(ToolCallDelta(self.num_tool_calls - 1, None, None, more))
        if call.done:
            self._call = None
            named = isinstance(call, NamedCall)
            self._closers = tail_of(self._format.call) if named and self._format else []
            self._step = self._close_call
            return True
        if stopped and call.known:
            self._text = call.unread + self._text
        return (stopped or final) and self._no_call(piece)

    def _close_call(self, piece: Piece, final: bool) -> bool:
        style = self._format
        assert style is not None
        text = self._text.lstrip()
        num_spaces = len(self._text) - len(text)
        separator = "," if self._in_list else style.separator
        if self._closers:
            end = self._closers[0]
        elif separator and text.startswith(separator):
            return self._begin_call(num_spaces + len(separator))
        else:
            end = "]" if self._in_list else style.end
        if end and text.startswith(end):
            self._take(num_spaces + len(end))
            if self._closers:
                self._closers.pop(0)
                return True
            if self._in_list and style.end:
                self._in_list = False
                return True
        elif not text or end.startswith(text):
            if not final:
                return False
            self._take(len(self._text) if text else 0)  # the output was cut inside the mark
        elif self._closers:
            self._closers.pop(0)  # it is missing
            return True
        elif style.layout == "run" and not self._in_list:
            return self._begin_call(num_spaces)  # another call follows
        return self._end_calls()

    def _end_calls(self) -> bool:
        """Read what follows as an answer again."""
        self._in_list = self._at_start = False
        self._closers = []
        self._step = self._answer
        return True

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        return taken

    def _say(self, piece: Piece, text: str) -> None:
        piece.write("content", text if self._end is None else self._end.feed(text))

    def _write(self, piece: Piece, num_chars: int) -> None:
        self._say(piece, self._take(num_chars))
        self._is_blank = self._is_blank and not num_chars
        self._at_start = self._at_start and not num_chars
