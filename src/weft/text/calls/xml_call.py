"""Reads, character by character, a tool call whose parameters stand between marks. Qwen3-Coder and
Qwen3.5 write it like this:

<function=weather>
<parameter=city>
Paris
</parameter>
</function>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from weft.text.calls.read_call import ReadCall
from weft.text.calls.template import split
from weft.text.calls.values import by_schema, is_text
from weft.text.pieces import held

_NAME = re.compile(r"[\w.-]+")
_MAX_TAG = 300
"""Characters of a tag with its name."""


class XmlStyle(NamedTuple):
    """The marks of a family, without the white space beside them."""

    begin: str
    """The mark before the name; empty if a name stands by itself."""
    after_name: str
    before_key: str
    after_key: tuple[str, ...]
    """The marks between a key and its value."""
    padding: str
    """A line break on both sides of a value that is no part of it, or nothing."""
    after_value: str
    end: str

    @classmethod
    @cache
    def of(cls, call: str, parameter: str) -> XmlStyle:
        """The style of the templates of a call and of a parameter."""
        begin, _, after_name, _, end = split(call)
        before_key, _, after_key, _, after_value = split(parameter)
        padding = "\n" if after_key.endswith("\n") else ""
        return cls(
            *(begin.strip(), after_name.strip(), before_key.strip(), tuple(after_key.split())),
            *(padding, after_value.strip(), end.strip()),
        )


class XmlCall(ReadCall):
    """Reads one such call. Strings are passed on as they come, other values when they are whole."""

    def __init__(self, style: XmlStyle, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: the JSON schemas of parameters, by function and then by parameter."""
        super().__init__()
        self._style = style
        self._schemas = schemas
        self._candidate = ""
        """A name that stands by itself, until a mark shows that it is one."""
        self._tag = ""
        self._key: str | None = None
        self._marks: list[str] = []
        """The marks that must still come between the key and its value."""
        self._value: list[str] = []
        """What was read of a value, and is not passed on yet."""
        self._is_text = False
        self._has_begun = False
        """Whether some of a text's value was passed on."""
        self._num_parameters = 0

    @property
    def unread(self) -> str:
        return self._tag[:-1]

    def feed(self, char: str) -> bool:
        style = self._style
        if self._in_value:
            self._value.append(char)
            end = style.after_value
            if char == end[-1] and "".join(self._value[-len(end) :]).endswith(end):
                self._end_parameter()
            return True
        self._tag = (self._tag + char).lstrip()
        if self._key is not None:
            return self._between()
        if self.name or self._candidate:
            return self._next()
        if not style.begin:
            return self._bare_name(char)
        name = self._found(style.begin, style.after_name)
        if name is None:
            return self._may_be(style.begin)
        self._begin_call(name)
        return bool(name)

    @property
    def _in_value(self) -> bool:
        return self._key is not None and not self._marks

    def _found(self, begin: str, end: str) -> str | None:
        """What stands between `begin` and `end` in a tag that is whole."""
        tag = self._tag
        whole = tag.startswith(begin) and tag.endswith(end) and len(tag) >= len(begin + end)
        return tag[len(begin) : -len(end)].strip() if whole else None

    def _may_be(self, begin: str) -> bool:
        """Whether the tag may become one that begins like this."""
        tag = self._tag
        if not tag.startswith(begin):
            return begin.startswith(tag)
        return tag[len(begin) :].isprintable() and len(tag) < _MAX_TAG

    def _bare_name(self, char: str) -> bool:
        tag = self._tag
        if tag and (char == "<" or char.isspace()):
            self._candidate = tag[:-1]
            self._tag = tag[-1].strip()
            return bool(self._candidate)
        return len(tag) < _MAX_TAG and (not tag or _NAME.fullmatch(tag) is not None)

    def _begin_call(self, name: str) -> None:
        self.name, self.arguments, self._tag = name, ["{"], ""

    def _next(self) -> bool:
        """Whether the tag is, or may become, the end of the call or the next key."""
        style, tag = self._style, self._tag
        if not self.name and tag in (style.end, style.before_key):
            self._begin_call(self._candidate)
        self._tag = tag
        if tag == style.end:
            self._tag = ""
            self.arguments.append("}")
            self.done = True
            return True
        key = self._found(style.before_key, style.after_key[0])
        if key is None:
            return style.end.startswith(tag) or self._may_be(style.before_key)
        self._key, self._tag, self._marks = key, "", [*style.after_key[1:]]
        if not self._marks:
            self._begin_value()
        return bool(key)

    def _between(self) -> bool:
        """Whether the tag is, or may become, the next mark between a key and its value."""
        if self._tag != self._marks[0]:
            return self._marks[0].startswith(self._tag)
        self._tag = ""
        self._marks.pop(0)
        if not self._marks:
            self._begin_value()
        return True

    def _begin_value(self) -> None:
        key = json.dumps(self._key, ensure_ascii=False)
        self._is_text, self._has_begun = is_text(self._schema), False
        quote = '"' if self._is_text else ""
        self.arguments.append(f"{', ' if self._num_parameters else ''}{key}: {quote}")
        self._num_parameters += 1

    @property
    def _schema(self) -> Any:
        return self._schemas.get(self.name, {}).get(self._key or "")

    def _end_parameter(self) -> None:
        style = self._style
        value = "".join(self._value)[: -len(style.after_value)].removesuffix(style.padding)
        if self._is_text:
            self.arguments.append(f'{self._escaped(value)}"')
        else:
            self.arguments.append(by_schema(value.removeprefix(style.padding), self._schema))
        self._key, self._value = None, []

    def _escaped(self, text: str) -> str:
        """More of a text's value, as it stands in JSON."""
        if text and not self._has_begun:
            text, self._has_begun = text.removeprefix(self._style.padding), True
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def take(self) -> str:
        if self._in_value and self._is_text:
            text, end = "".join(self._value), self._style.after_value
            num_given = len(text) - max(held(text, end), held(text, self._style.padding + end))
            self.arguments.append(self._escaped(text[:num_given]))
            self._value = [text[num_given:]]
        return super().take()

    def cut_off(self) -> None:
        if self._in_value and not self._is_text:
            self.arguments.append("".join(self._value).strip())
