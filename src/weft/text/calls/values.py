"""Turns values of arguments that are not written as JSON into JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from weft.text.json_stream import is_json

_NOT_BARE = frozenset({"minLength", "maxLength", "pattern", "const", "anyOf", "oneOf", "allOf"})
_KINDS = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_LITERAL = 10_000
"""The most characters of a Python literal that is no JSON."""
_MAX_TEXT = 1 << 18
"""The most characters of a literal that begins with a quote. A text takes a tenth of the time that
a list of as many characters takes."""
_RAW = str.maketrans({"\n": "\\n", "\r": "\\r", "\0": "\\0"})
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PADDED = re.compile(r"-?0[0-9]{1,18}")
_ZEROS = re.compile(r"0+(?=[0-9])")
_KNOWN = "\\'\"abfnrtvxuUN01234567\n"
"""What may follow a backslash in Python."""


def is_bare(schema: Any) -> bool:
    """Whether a model writes a value of this schema without quotes: any string, or a listed one."""
    if not isinstance(schema, dict):
        return False
    return schema.get("type") == "string" and _NOT_BARE.isdisjoint(schema)


def is_text(schema: Any) -> bool:
    """Whether a value of this schema is text, whatever it looks like. Without a schema, it is."""
    return not isinstance(schema, dict) or is_bare(schema)


def by_schema(value: str, schema: Any) -> str:
    """A value as JSON: a string, unless the schema allows another type and the value has it."""
    text = None if is_text(schema) else literal(value.strip())
    if text is not None:
        kinds = _kinds(schema)
        if "string" not in kinds or _kind_of(json.loads(text)) in kinds:
            return text
    return json.dumps(value, ensure_ascii=False)


def by_itself(value: str) -> str:
    """A value as JSON, without a schema: what it looks like, or else text."""
    return literal_or_quoted(value) or json.dumps(value, ensure_ascii=False)


def literal_or_quoted(value: str) -> str | None:
    """A value as JSON: the literal that it looks like, or the text between quotes, even if it has
    more quotes, which are not escaped; None if it is neither."""
    text = literal(_ZEROS.sub("", value, count=1) if _PADDED.fullmatch(value) else value)
    if text is None and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        text = json.dumps(value[1:-1], ensure_ascii=False)
    return text


def literal(value: str) -> str | None:
    """A value that is JSON already, or that Python reads as a literal, as JSON; None if it is
    neither. JSON's constants may stand within a literal. Text in quotes may go over several
    lines."""
    if is_json(value):
        return value
    if len(value) > (_MAX_TEXT if value[:1] in ("'", '"') else _MAX_LITERAL):
        return None
    escaped = _ESCAPE.sub(lambda pair: ("" if pair[1] in _KNOWN else "\\") + pair[0], value)
    for text in dict.fromkeys((escaped, escaped.translate(_RAW))):
        try:
            found = ast.literal_eval(_Constants().visit(ast.parse(text, mode="eval")))
            listed = sorted(found, key=repr) if isinstance(found, set) else found
            written = json.dumps(listed, ensure_ascii=False, allow_nan=False)
            return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, Warning):
            pass
    return None


class _Constants(ast.NodeTransformer):
    """Puts the values of JSON's constants in the place of their names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


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
