"""A call of a tool as Qwen3-Coder and Qwen3.5 write it, character by character:

<function=weather>
<parameter=city>
Paris
</parameter>
</function>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.text.json_stream import is_json
from weft.text.read_call import ReadCall

_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MAX_TAG = 300
"""Characters of a tag with its name."""
_NOT_BARE = frozenset({"minLength", "maxLength", "pattern", "const", "anyOf", "oneOf", "allOf"})
_KINDS = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class XmlCall(ReadCall):
    """Reads one such call. Its arguments become JSON, parameter by parameter."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: the JSON schema of each parameter by name, by function."""
        super().__init__()
        self._schemas = schemas
        self._separator = ""
        self._tag = ""
        self._key: str | None = None
        self._value: list[str] = []

    def feed(self, char: str) -> bool:
        """Read a character. Returns whether the text may still be a call."""
        if self._key is not None:
            self._value.append(char)
            if char == ">" and "".join(self._value[-len(_END_PARAMETER) :]) == _END_PARAMETER:
                self._end_parameter()
            return True
        self._tag = (self._tag + char).lstrip()
        if not self.name:
            return self._in_tag(_FUNCTION, char)
        if self._tag == _END:
            self.arguments.append("}")
            self.done = True
            return True
        return _END.startswith(self._tag) or self._in_tag(_PARAMETER, char)

    def _in_tag(self, begin: str, char: str) -> bool:
        """Whether the tag is, or may become, `begin`, a name and ">"; keeps a whole one's name."""
        tag = self._tag
        if not tag.startswith(begin):
            return begin.startswith(tag)
        if char != ">":
            return char.isprintable() and len(tag) < _MAX_TAG
        name, self._tag = tag[len(begin) : -1], ""
        if begin == _FUNCTION:
            self.name, self.arguments = name, ["{"]
        else:
            self._key = name
        return bool(name)

    def _end_parameter(self) -> None:
        value = "".join(self._value[: -len(_END_PARAMETER)])
        value = value.removeprefix("\n").removesuffix("\n")
        assert self._key is not None
        schema = self._schemas.get(self.name, {}).get(self._key)
        key = json.dumps(self._key, ensure_ascii=False)
        self.arguments.append(f"{self._separator}{key}: {_to_json(value, schema)}")
        self._key, self._value, self._separator = None, [], ", "


def is_bare(schema: Any) -> bool:
    """Whether a model writes a value of this schema without quotes: any string, or a listed one."""
    if not isinstance(schema, dict):
        return False
    return schema.get("type") == "string" and _NOT_BARE.isdisjoint(schema)


def _to_json(value: str, schema: Any) -> str:
    """A value as JSON: a string, unless the schema allows another type and the value has it."""
    text = _PYTHON.get(value.strip(), value.strip())
    if isinstance(schema, dict) and not is_bare(schema) and is_json(text):
        kinds = _kinds(schema)
        if "string" not in kinds or _kind_of(json.loads(text)) in kinds:
            return text
    return json.dumps(value, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """The types of the values that a schema allows; empty if it does not say."""
    schema = schema if isinstance(schema, dict) else {}
    stated, branches = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if stated is not None:
        kinds = set(map(str, stated if isinstance(stated, list) else [stated]))
    elif isinstance(branches, list):
        kinds = set[str]().union(*map(_kinds, branches))
    else:
        kinds = set(map(_kind_of, listed)) if isinstance(listed, list) else set()
    return kinds | ({"integer"} if "number" in kinds else set())


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return _KINDS.get(type(value), "null")
