"""Parses a model's text into reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.text.json_stream import JsonObject
from weft.text.own_calls import GemmaCall, PythonCall
from weft.text.read_call import ReadCall
from weft.text.reasoning import REASONING
from weft.text.tools import TOOL_FORMATS
from weft.text.xml_call import XmlCall

ALL_MARKS = (
    *(mark for style in REASONING.values() for mark in style.marks),
    *(mark for style in TOOL_FORMATS.values() for mark in style.marks),
)
"""All marks that a parser may have to find in a text."""


_ARGUMENTS = ('"arguments"', '"parameters"')
_NAMES = ('"name"', '"tool_name"')
_NAMED_CALL = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\n?")
_NAME_CHARS = re.compile(r"[\w.\-\[\]]{0,256}\n?")
_NAME_MARKS = ("[CALL_ID]", "[ARGS]")
_PART_CHARS = 1 << 12
_LONG = 64
"""White space of more characters than this waits aside, so that no piece searches it again."""

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


class ChatParser:
    """Splits one output. It may be fed in pieces of any size, which change only the timing.

    Feed all text, then flush. For text to have its marks, the detokenizer must not skip those
    that are special tokens: give `marks` to it. Of the output, only these are left out:

    - the mark of reasoning, such as `<think>`, at the beginning, with white space before and a line
      break after it
    - the mark at its end, such as `</think>`, with a line break before and up to two after it
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
        self._reasoning = None if reasoning is None else REASONING[reasoning]
        self._starts_in_reasoning = starts_in_reasoning
        self._step = self._answer if self._reasoning is None else self._begin
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
        self._call: _Call | None = None
        self._is_blank = True
        """Whether no content has come since the last call."""
        self.num_tool_calls = 0
        self.has_reasoning = False
        """Whether the output begins with reasoning, even if it is empty."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that the text must contain, even those that are special tokens."""
        thinking = self._reasoning.marks if self._reasoning else ()
        return thinking + (self._format.marks if self._format else ())

    def feed(self, text: str) -> Piece:
        piece = Piece()
        for part in in_parts(text):
            self._spaces.append(part)
            if len(self._spaces) == 1 or not part.isspace():
                self._run(piece, final=False)
        return piece

    def flush(self, piece: Piece | None = None) -> Piece:
        """The output has ended: add what was held back to the piece."""
        return self._run(piece or Piece(), final=True)

    def _run(self, piece: Piece, final: bool) -> Piece:
        self._text, self._spaces = "".join([self._text, *self._spaces]), []
        while self._step(piece, final):
            pass
        if len(self._text) > _LONG and self._text.isspace():
            self._text, self._spaces = "", [self._text]
        return piece

    # Each step takes what it can from the text, and returns whether another step can follow.

    def _begin(self, piece: Piece, final: bool) -> bool:
        assert self._reasoning is not None
        text, begin = self._text.lstrip(), self._reasoning.begin
        if text.startswith(begin):
            self._text = text[len(begin) :]
            self._step = self._begin_thinking
        elif begin.startswith(text) and not final:
            return False
        else:
            self._step = self._begin_thinking if self._starts_in_reasoning else self._answer
        return True

    def _begin_thinking(self, piece: Piece, final: bool) -> bool:
        self.has_reasoning = True
        if self._text:
            self._text = self._text.removeprefix("\n")
            self._step = self._think
        return bool(self._text)

    def _think(self, piece: Piece, final: bool) -> bool:
        assert self._reasoning is not None
        end = self._reasoning.end
        before, found, after = self._text.partition(end)
        if found:
            piece.write("reasoning", before.removesuffix("\n"))
            self._text = after
            self._step = self._begin_answer
            return True
        num_held = max(held(self._text, end), held(self._text, "\n" + end))
        piece.write("reasoning", self._take(len(self._text) - (0 if final else num_held)))
        return False

    def _begin_answer(self, piece: Piece, final: bool) -> bool:
        rest = self._text.removeprefix("\n").removeprefix("\n")
        if not rest and len(self._text) < 2 and not final:
            return False
        self._text = rest
        self._step = self._answer
        return True

    def _answer(self, piece: Piece, final: bool) -> bool:
        style, text = self._format, self._text
        if style is None:
            self._write(piece, len(text))
            return False
        if self._at_start and style.bare:
            begin = len(text) - len(text.lstrip())
            if begin == len(text) and not final:
                return False
            self._at_start = False
            if text[begin : begin + 1] == "{":
                return self._begin_call(begin)
        if self._at_start and style.syntax == "named":
            found = self._named_at_start(final)
            if found is not None:
                return found
        begin = text.find(style.begin)
        if begin >= 0:
            before = len(text[:begin].rstrip())
            self._write(piece, before)
            return self._begin_call(begin - before + len(style.begin))
        if final:
            self._write(piece, len(text) if text.strip() or self._is_content else 0)
            self._text = ""
        else:
            self._write(piece, len(text[: len(text) - held(text, style.begin)].rstrip()))
        return False

    def _named_at_start(self, final: bool) -> bool | None:
        """Whether another step can go on where an output may begin with the name of a tool, on a
        line of its own; None if it begins otherwise."""
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

    def _open_call(self, piece: Piece, final: bool) -> bool:
        assert self._format is not None
        self._mark += self._take(len(self._text) - len(self._text.lstrip()))
        if not self._text:
            return final and self._no_call(piece)
        char = self._text[0]
        if self._format.lists and char == "[" and not self._in_list:
            self._in_list = True
            self._mark += self._take(1)
            return True
        self._call = self._new_call(char)
        if self._call is None:
            return self._no_call(piece)
        self._step = self._read_call
        return True

    def _new_call(self, char: str) -> _Call | None:
        """A reader for a call that begins with this character; None if there is no such call."""
        assert self._format is not None
        syntax = self._format.syntax
        if syntax == "gemma":
            return GemmaCall(self._format.quote)
        if syntax == "python":
            return PythonCall()
        if syntax == "named":
            return _NamedCall()
        if char == "{":
            return _JsonCall()
        if syntax == "xml" and char == "<":
            return XmlCall(self._schemas)
        return _NamedCall() if self._format.lists and not self._in_list else None

    def _no_call(self, piece: Piece) -> bool:
        """What was read is no call: it is content, or may hold the beginning of another call."""
        if self._call is None or not self._call.known:
            mark = self._mark.rstrip()
            piece.write("content", mark)
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
        if not call.known:
            self._raw.append(read)
        elif not was_known:
            self._is_blank = True
            call_id = f"call_{secrets.token_hex(12)}"
            delta = ToolCallDelta(self.num_tool_calls, call_id, call.name, call.take())
            piece.parts.append(delta)
            self.num_tool_calls += 1
        elif more := call.take():
            piece.parts.append(ToolCallDelta(self.num_tool_calls - 1, None, None, more))
        if call.done:
            self._call = None
            self._step = self._close_call
            return True
        return (stopped or final) and self._no_call(piece)

    def _close_call(self, piece: Piece, final: bool) -> bool:
        assert self._format is not None
        text = self._text.lstrip()
        num_spaces = len(self._text) - len(text)
        end = "]" if self._in_list else self._format.end
        separator = "," if self._in_list else self._format.separator
        if separator and text.startswith(separator):
            return self._begin_call(num_spaces + len(separator))
        if end and text.startswith(end):
            self._take(num_spaces + len(end))
            if self._in_list and self._format.end:
                self._in_list = False
                return True
        elif self._format.syntax == "python" and text and not end.startswith(text[: len(end)]):
            return self._begin_call(num_spaces)  # another call on the next line
        elif not text or end.startswith(text):
            if not final:
                return False
            self._take(len(self._text) if text else 0)  # the output was cut inside the mark
        return self._end_calls()

    def _end_calls(self) -> bool:
        """Read what follows as an answer again."""
        self._in_list = self._at_start = False
        self._step = self._answer
        return True

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        return taken

    def _write(self, piece: Piece, num_chars: int) -> None:
        piece.write("content", self._take(num_chars))
        self._is_blank = self._is_blank and not num_chars
        self._at_start = self._at_start and not num_chars


class _JsonCall(ReadCall):
    """A call as one JSON object, character by character."""

    def __init__(self) -> None:
        super().__init__()
        self._json = JsonObject()
        self._name_json: list[str] = []
        self._seen: set[str] = set()
        self._has_arguments = False

    @property
    def known(self) -> bool:
        return bool(self.name) and self._has_arguments

    def feed(self, char: str) -> bool:
        """Whether it may still be a call."""
        was_in_value = self._json.in_value
        if not self._json.feed(char) or not self._note(char, was_in_value):
            return False
        self.done = self._json.done and self.known
        return self.done or not self._json.done

    def _note(self, char: str, was_in_value: bool) -> bool:
        json_, key = self._json, self._json.key
        if json_.in_value and not was_in_value:
            new = key not in self._seen
            same = [names for names in (_ARGUMENTS, _NAMES) if key in names]
            self._seen |= set(same[0]) if same else {key}
            return new
        if was_in_value and key in _NAMES:
            if json_.in_value:
                self._name_json.append(char)
                return True
            name = json.loads("".join(self._name_json))
            self.name = name if isinstance(name, str) and name.isprintable() else ""
            return bool(self.name)
        if json_.in_value and key in _ARGUMENTS:
            return self._note_argument(char)
        return True

    def _note_argument(self, char: str) -> bool:
        if self._json.depth == 1 and char != "}":
            return char.isspace()  # beside the arguments; there are none but objects
        self.arguments.append(char)
        self._has_arguments = self._has_arguments or char == "{"
        return self._has_arguments


class _NamedCall(ReadCall):
    """A call as a name, perhaps with an id, and its arguments: `name[ARGS]{...}`."""

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._json = JsonObject()

    def feed(self, char: str) -> bool:
        """Whether it may still be a call."""
        if not self.name and char == "{":
            named = _NAMED_CALL.fullmatch(self._head)
            if named is None:
                return False
            self.name = named[1]
        if not self.name:
            self._head += char
            mark = self._head[self._head.rfind("[") :] if "[" in self._head else "["
            begins = "]" in mark or any(each.startswith(mark) for each in _NAME_MARKS)
            return begins and _NAME_CHARS.fullmatch(self._head) is not None
        if not self._json.feed(char):
            return False
        self.arguments.append(char)
        self.done = self._json.done
        return True


_Call = _JsonCall | _NamedCall | XmlCall | GemmaCall | PythonCall


def in_parts(text: str) -> Iterator[str]:
    """A text in parts, of which parsers copy the rest at each mark."""
    return (text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS))


def held(text: str, mark: str) -> int:
    """How many characters at the text's end may be the beginning of `mark`."""
    for num_chars in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num_chars]):
            return num_chars
    return 0
