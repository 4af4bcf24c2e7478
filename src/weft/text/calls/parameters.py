"""Writes the parameters of tools as parts of xgrammar's structural tags, for formats in which they
are not JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from weft.core.errors import InvalidRequest
from weft.text.calls.template import mark_part, marked_parts, sequence_of, split, text_part
from weft.text.calls.values import is_bare

_MAX_CHARS = 1 << 17
"""Twice what a form may have when it is compiled. Without this limit, a form that is too long would
be written to its end before it is refused. That may take very long, as a value is written once more
for each optional property before it, at every level of nesting."""
_LEAST_CHARS = 48
"""The fewest characters that a value or a property takes."""
_MAX_DEPTH = 32
_MAX_KEY = 256
_KEYS = {
    ":": re.compile(r"[^:,}\]]+"),
    "=": re.compile(r"[^=)][^=]*"),
    ">": re.compile(r"[^>]+"),
    '"': re.compile(r'[^"]+'),
    "<": re.compile(r"[^<]+"),
}
"""The names of properties that can be read back, by what is written after the name."""
_NEVER = frozenset(
    {"oneOf", "allOf", "not", "if", "minProperties", "maxProperties", "patternProperties"}
) | {"propertyNames", "dependentRequired", "dependentSchemas"}
_OF_LISTS = {"prefixItems", "minItems", "maxItems", "contains", "uniqueItems"}
_NOT_IN_ROOT = _NEVER | {"anyOf", "$ref"}
_NOT_IN_GEMMA = _NEVER | {"pattern", *_OF_LISTS}
"""Keywords of JSON schemas that can't be enforced where values are not JSON."""


class Room:
    """How long the form of a request's calls may still become."""

    def __init__(self) -> None:
        self._left = _MAX_CHARS

    def take(self, num_chars: int) -> None:
        """Use up this many characters. Raises InvalidRequest if fewer are left."""
        self._left -= num_chars
        if self._left < 0:
            message = "tools: the schemas are too large to be enforced in this model's calls"
            raise InvalidRequest(message, "tools")


class Parameters:
    """Writes the schema of a function's parameters as parts of xgrammar's structural tags. Raises
    InvalidRequest for what would not be enforced."""

    def __init__(self, function: dict[str, Any], room: Room, quote: str = "") -> None:
        """`quote`: Gemma's mark for quotes; without one, values are JSON."""
        self._root = root = _without(_NOT_IN_ROOT, function.get("parameters") or {})
        self._definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._num_chars = len(json.dumps(self._definitions))
        self._room = room
        self._quote = quote

    def xml(self, template: str) -> dict[str, Any]:
        """The parameters in their order, each as in the template. Strings are written as they are,
        and other values as JSON. A string can't contain the beginning of the mark that ends it."""
        found, required = _members(self._root)
        before, _, between, _, after = split(template)
        elements: list[dict[str, Any]] = [text_part("")]
        for key, value in found.items():
            self._check_key(key, between.strip()[0])
            content = self._json(value)
            if is_bare(value):
                content = {"type": "regex", "pattern": "([^<]|<+[^/<])*"}
                if isinstance(value.get("enum"), list):
                    listed = [each for each in value["enum"] if isinstance(each, str)]
                    words = [text_part(_without_mark(each, after.strip())) for each in listed]
                    content = {"type": "or", "elements": words}
            one = sequence_of(
                *(*marked_parts(before), text_part(key), *marked_parts(between)),
                *(content, *marked_parts(after)),
            )
            elements.append(one if key in required else {"type": "optional", "content": one})
        return sequence_of(*elements)

    def pairs(
        self, equals: str, separator: str, schema: dict[str, Any] | None = None, depth: int = 0
    ) -> dict[str, Any]:
        """The properties of an object, by default those of the parameters, in their order, each as
        `key`, `equals` and its value."""
        found, required = _members(self._root if schema is None else schema)

        def pair(key: str, before: str = "") -> dict[str, Any]:
            self._room.take(_LEAST_CHARS)
            value = self._gemma(found[key], depth) if self._quote else self._json(found[key])
            return sequence_of(text_part(f"{before}{key}{equals}"), value)

        def rest(keys: list[str]) -> list[dict[str, Any]]:
            pairs = [(key, pair(key, separator)) for key in keys]
            return [p if k in required else {"type": "optional", "content": p} for k, p in pairs]

        # The first one written may be any of them up to the first that is required.
        firsts: list[dict[str, Any]] = []
        keys = list(found)
        for index, key in enumerate(keys):
            self._check_key(key, equals)
            firsts.append(sequence_of(pair(key), *rest(keys[index + 1 :])))
            if key in required:
                break
        if not required:
            firsts.append(text_part(""))
        return {"type": "or", "elements": firsts}

    def _check_key(self, key: str, end: str) -> None:
        """Raises InvalidRequest for a name that calls of this format can't have."""
        fits = key == key.strip() and key.isprintable() and len(key) <= _MAX_KEY
        quoted = self._quote and key.startswith(self._quote)
        if not fits or quoted or not _KEYS[end].fullmatch(key):
            raise _unenforced(f"a property called {key[:80]!r}")

    def _json(self, schema: Any) -> dict[str, Any]:
        """A value as JSON, with the definitions that it refers to."""
        if isinstance(schema, dict) and '"$ref"' in json.dumps(schema):
            self._room.take(self._num_chars)
            schema = self._definitions | schema
            if '"$ref": "#"' in json.dumps(schema):
                raise _unenforced("'$ref' to '#'")
        return {"type": "json_schema", "json_schema": schema}

    def _gemma(self, schema: Any, depth: int) -> dict[str, Any]:
        """A value as Gemma writes it, with strings between marks. If the schema states neither a
        type nor parts, the value is a string."""
        self._room.take(_LEAST_CHARS)
        schema = _without(_NOT_IN_GEMMA, schema if isinstance(schema, dict) else {})
        if depth > _MAX_DEPTH:
            raise _unenforced(f"nesting deeper than {_MAX_DEPTH} levels")
        kind, branches = schema.get("type"), schema.get("anyOf", [])
        if "$ref" in schema or branches:
            _without(frozenset({"const", "enum", "properties", "type"}), schema)
        if "$ref" in schema:
            branches = [self._target(schema["$ref"])]
        elif isinstance(kind, list):
            branches = [{**schema, "type": each} for each in kind]
        if branches and isinstance(branches, list):
            return {"type": "or", "elements": [self._gemma(each, depth + 1) for each in branches]}
        if kind in ("number", "integer", "boolean", "null"):
            return self._json(schema)
        if kind == "object" or (kind is None and "properties" in schema):
            return sequence_of(
                text_part("{"), self.pairs(":", ",", schema, depth + 1), text_part("}")
            )
        if kind == "array" or (kind is None and "items" in schema):
            item = self._gemma(schema.get("items"), depth + 1)
            more = {"type": "star", "content": sequence_of(text_part(","), item)}
            items = {"type": "optional", "content": sequence_of(item, more)}
            return sequence_of(text_part("["), items, text_part("]"))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if listed is not None:
            return {"type": "or", "elements": self._listed(listed, kind)}
        _without(frozenset({"format"}), schema)
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if type(low) is not int or type(high) not in (int, type(None)):
            raise _unenforced("a length that is no integer")
        # A string can't contain the beginning of the mark that ends it.
        pattern = f"([^<]|<+[^<{re.escape(self._quote[1])}])*"
        if low or high is not None:
            pattern = f"[^<]{{{low},{'' if high is None else high}}}"
        return self._quoted({"type": "regex", "pattern": pattern})

    def _listed(self, values: Any, kind: object) -> list[dict[str, Any]]:
        """The values that an enumeration allows."""
        if not isinstance(values, list) or any(isinstance(each, dict | list) for each in values):
            raise _unenforced("'enum' of other values than text, numbers, booleans and null")
        words = [each for each in values if isinstance(each, str)]
        texts = [self._quoted(text_part(_without_mark(each, self._quote))) for each in words]
        others = [text_part(json.dumps(each)) for each in values if not isinstance(each, str)]
        return texts if kind == "string" else texts + others

    def _quoted(self, text: dict[str, Any]) -> dict[str, Any]:
        return sequence_of(mark_part(self._quote), text, mark_part(self._quote))

    def _target(self, reference: object) -> Any:
        """The schema that a reference leads to."""
        found: Any = self._root
        for name in str(reference).split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        if not str(reference).startswith("#") or found is None:
            raise _unenforced(f"'$ref' to {str(reference)[:80]!r}")
        return found


def properties_of(schema: Any) -> dict[str, Any]:
    """The properties that the schema of an object states."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _members(schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The properties of an object, and which of them are required."""
    found, required = properties_of(schema), schema.get("required") or []
    if not isinstance(required, list):
        raise InvalidRequest("tools: 'required' must be an array of strings", "tools")
    for name in required:
        if not isinstance(name, str) or name not in found:
            message = f"tools: 'required' names {str(name)[:80]!r}, which 'properties' doesn't have"
            raise InvalidRequest(message, "tools")
    return found, required


def _without(keywords: frozenset[str], schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema. Raises InvalidRequest if it has one of these keywords."""
    if wrong := sorted(keywords & schema.keys()):
        raise _unenforced(repr(wrong[0]))
    return schema


def _without_mark(text: str, mark: str) -> str:
    """Returns the text. Raises InvalidRequest if it has the mark that ends a text."""
    if mark in text:
        raise _unenforced(f"a text with {mark!r}")
    return text


def _unenforced(what: str) -> InvalidRequest:
    return InvalidRequest(f"tools: {what} can't be enforced in this model's calls", "tools")
