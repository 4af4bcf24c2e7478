"""Rewrites JSON schemas so that xgrammar enforces all that they say.

xgrammar drops what it can't express: `minLength` beside `pattern`, `minimum` beside `$ref`, all of
`allOf`. A form is served exactly or refused: a keyword that can't be enforced is refused by name.
Annotations, and keywords that no standard knows, are left out. Compiled forms may be narrower than
what was asked for, never wider:

- objects with `properties` hold no others unless `additionalProperties` says so, and hold them in
  the schema's order;
- `pattern` matches whole strings, `.` no line break, and no class a character that JSON escapes.

Enforced: type, const, enum, anyOf, oneOf (if its branches exclude each other), allOf (of one),
`$ref` (to `#`, `#/$defs/...`, `#/definitions/...`); pattern, format, minLength, maxLength; minimum,
maximum, exclusiveMinimum, exclusiveMaximum, multipleOf (of integers); items, prefixItems, minItems,
maxItems; properties, required, additionalProperties, patternProperties (one), minProperties,
maxProperties.
"""

from __future__ import annotations

import json
import re
from itertools import combinations, starmap
from typing import Any

from weft.grammar.regex import MAX_COUNT, enforceable_regex, refusal

_BOUNDS = "minimum maximum exclusiveMinimum exclusiveMaximum"


def _names(words: str = "") -> frozenset[str]:
    return frozenset(words.split())


_KEYWORDS = {
    "string": _names("pattern format minLength maxLength"),
    "integer": _names(f"{_BOUNDS} multipleOf"),
    "number": _names(_BOUNDS),
    "array": _names("items prefixItems minItems maxItems"),
    "object": _names(
        "properties required additionalProperties patternProperties minProperties maxProperties"
    ),
    "boolean": _names(),
    "null": _names(),
}
_UNENFORCED = dict.fromkeys(_KEYWORDS, _names()) | {
    "number": _names("multipleOf"),
    "array": _names(
        "uniqueItems contains minContains maxContains additionalItems unevaluatedItems"
    ),
    "object": _names(
        "propertyNames dependentRequired dependentSchemas dependencies unevaluatedProperties"
    ),
}
_CLOSING = {
    "array": ("unevaluatedItems", "items"),
    "object": ("unevaluatedProperties", "additionalProperties"),
}
"""Keywords which, if they are false, allow no more than what the schema lists, and the keyword that
says the same to xgrammar."""
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that xgrammar takes for the whole schema."""

_BINDING = frozenset({"type", *_WHOLE}).union(*_KEYWORDS.values(), *_UNENFORCED.values())

_YEAR, _LEAP_YEAR = "[1-9][0-9]{3}", "[1-9][0-9](0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_MAILBOX, _LABEL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", "[A-Za-z0-9](-*[A-Za-z0-9])*"
_POINTER = "(/([^/~]|~[01])*)*"
_PATTERN_OF_FORMAT = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": f"{_MAILBOX}(\\.{_MAILBOX})*@{_LABEL}(\\.{_LABEL})*",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "time": _TIME,
}
"""Used instead of xgrammar's own, which allow February 31, leading zeros and what is no JSON."""
_FORMATS = _names("duration hostname ipv6 uri uri-reference uri-template uuid")
"""Others that xgrammar enforces."""
_MAX_COUNTED = 64
"""With minProperties or maxProperties: the grammar grows with the cube of the properties."""
_MAX_MULTIPLE = 1024
_MAX_INTEGER = 2**53
"""Listed integers beyond it are rounded when xgrammar writes them."""
_REFERENCE = re.compile(r"#(?:/(?:\$defs|definitions)/[^/]+)?")


def enforceable(schema: object) -> Any:
    """The schema without what isn't a constraint. Raises InvalidRequest for what can't be
    enforced."""
    checker = _Checker(schema)
    checked = checker.check(schema)
    if isinstance(schema, dict):
        for key in ("$defs", "definitions"):
            if key in schema:
                definitions = _object(schema, key)
                checked[key] = {name: checker.check(sub) for name, sub in definitions.items()}
    return checked


class _Checker:
    """Walks one schema; `root` is where its references lead."""

    def __init__(self, root: object) -> None:
        self._root = root

    def check(self, schema: object) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise refusal(f"a schema must be an object or true, got {str(schema)[:40]}")
        for key in _NEVER:
            if key in schema:
                raise refusal(f"{key!r} can't be enforced")
        for key in _WHOLE:
            if key in schema:
                return self._whole(schema, key)
        return self._typed(schema, _types(schema))

    def _typed(self, schema: dict[str, Any], types: list[str]) -> dict[str, Any]:
        checked: dict[str, Any] = {"type": types} if types else {}
        for kind in types:
            if kind not in _KEYWORDS:
                raise refusal(f"{kind!r} is not a type of JSON")
            for key in sorted(_UNENFORCED[kind] & schema.keys()):
                if schema[key] is not False or key in ("contains", "propertyNames"):
                    raise refusal(f"{key!r} can't be enforced for type {kind!r}")
            checked |= {key: schema[key] for key in sorted(_KEYWORDS[kind] & schema.keys())}
            closing, listed = _CLOSING.get(kind, ("", ""))
            if closing in schema:
                checked.setdefault(listed, False)
        _check_values(checked)
        if "string" in types:
            _check_string(checked)
        if "array" in types:
            self._check_array(checked)
        if "object" in types:
            self._check_object(checked)
        return checked

    def _whole(self, schema: dict[str, Any], key: str) -> dict[str, Any]:
        """A schema with one of `_WHOLE`: nothing else in it would be enforced."""
        beside = _BINDING & schema.keys() - {key}
        if key in ("const", "enum"):
            beside -= {"type"}
        if beside:
            raise refusal(f"{min(beside)!r} beside {key!r} can't be enforced")
        value = schema[key]
        if key == "$ref":
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise refusal(f"'$ref' must be '#' or '#/$defs/...', got {str(value)[:80]!r}")
            return {"$ref": value}
        values = [value] if key == "const" else value
        if not isinstance(values, list) or not values:
            raise refusal(f"{key!r} must be an array with elements")
        if key in ("const", "enum"):
            return {"enum": _fitting(values, _types(schema) if "type" in schema else None)}
        if key == "allOf" and len(values) > 1:
            raise refusal("'allOf' of several schemas can't be enforced")
        if key == "oneOf" and not all(starmap(self._exclusive, combinations(values, 2))):
            raise refusal("'oneOf' can't be enforced unless its branches exclude each other")
        return {"anyOf": [self.check(branch) for branch in values]}

    def _check_array(self, checked: dict[str, Any]) -> None:
        if "prefixItems" in checked:
            if not isinstance(checked["prefixItems"], list):
                raise refusal("'prefixItems' must be an array")
            checked["prefixItems"] = [self.check(item) for item in checked["prefixItems"]]
        else:
            checked.setdefault("items", True)
        if checked.get("items", False) is not False:
            checked["items"] = self.check(checked["items"])

    def _check_object(self, checked: dict[str, Any]) -> None:
        named = _object(checked, "properties")
        patterns = _object(checked, "patternProperties")
        if len(patterns) + bool("properties" in checked and patterns) > 1:
            raise refusal("'patternProperties' is enforced alone and with one pattern only")
        required = checked.get("required", [])
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            raise refusal("'required' must be an array of strings")
        for name in required:
            if name not in named:
                raise refusal(f"'required' names {name[:80]!r}, which 'properties' doesn't have")
        if "properties" not in checked and not patterns:
            checked.setdefault("additionalProperties", True)
        open_ended = bool(patterns) or checked.get("additionalProperties", False) is not False
        if open_ended and checked.get("minProperties", 0) > 1:
            raise refusal("'minProperties' above 1 can't be enforced where any names may come")
        counted = {"minProperties", "maxProperties"} & checked.keys()
        if counted and len(named) > _MAX_COUNTED:
            raise refusal(f"{min(counted)!r} is served for up to {_MAX_COUNTED} properties")
        if named:
            checked["properties"] = {name: self.check(sub) for name, sub in named.items()}
        if patterns:
            checked["patternProperties"] = {
                enforceable_regex(pattern, True): self.check(sub)
                for pattern, sub in patterns.items()
            }
            checked.pop("additionalProperties", None)  # names have to match the pattern
        elif open_ended:
            checked["additionalProperties"] = self.check(checked["additionalProperties"])

    def _exclusive(self, a: object, b: object) -> bool:
        """Whether no value fits both: by type, by value, or by a property that both require."""
        a, b = self._resolve(a), self._resolve(b)
        if _apart(a, b):
            return True
        names = [name for name in _required(a) if name in _required(b)]
        ours, theirs = a.get("properties"), b.get("properties")
        if a.get("type") != "object" or b.get("type") != "object":
            return False
        return (
            isinstance(ours, dict)
            and isinstance(theirs, dict)
            and any(
                _apart(self._resolve(ours.get(name)), self._resolve(theirs.get(name)))
                for name in names
            )
        )

    def _resolve(self, schema: object) -> dict[str, Any]:
        """The schema, with one reference followed; an empty one if it is not an object."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            _, *path = schema["$ref"].split("/")
            schema = self._root
            for name in path:
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {}


def _apart(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether types or listed values alone show that no value fits both schemas."""
    values_a, values_b = _listed(a), _listed(b)
    if values_a is not None and values_b is not None:
        return values_a.isdisjoint(values_b)
    types_a, types_b = _basic_types(a), _basic_types(b)
    return bool(types_a and types_b and types_a.isdisjoint(types_b))


def _listed(schema: dict[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(v, sort_keys=True) for v in values} if isinstance(values, list) else None


def _basic_types(schema: dict[str, Any]) -> set[str]:
    """The types of the values that fit, integers taken as numbers; empty if unknown."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types = [_type_of(value) for value in values]
    else:
        types = _types(schema) if "type" in schema else []
    return {"number" if kind == "integer" else kind for kind in types}


def _required(schema: dict[str, Any]) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _types(schema: dict[str, Any]) -> list[str]:
    """The schema's types; where it names none, those that its keywords speak of."""
    given = schema.get("type")
    if given is None:
        kinds = ("string", "number", "array", "object")
        return [k for k in kinds if (_KEYWORDS[k] | _UNENFORCED[k]) & schema.keys()]
    types = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(kind, str) for kind in types):
        raise refusal(f"'type' must name types, got {str(given)[:40]}")
    return types


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def _fitting(values: list[Any], types: list[str] | None) -> list[Any]:
    """The listed values that the schema's own type allows."""
    for value in values:
        if _is_rounded(value):
            raise refusal("'enum' and 'const' hold integers up to 2**53 only")
    if types is None:
        return values
    wide = {*types, "integer"} if "number" in types else set(types)
    fitting = [value for value in values if _type_of(value) in wide]
    if not fitting:
        raise refusal("'enum' and 'type' have no value in common")
    return fitting


def _is_rounded(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_is_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_is_rounded, value))
    return isinstance(value, int) and abs(value) > _MAX_INTEGER


def _check_values(checked: dict[str, Any]) -> None:
    for key, value in checked.items():
        if key.startswith(("min", "max")) and key not in _KEYWORDS["number"]:
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                raise refusal(f"{key!r} must be an integer in [0, {MAX_COUNT}]")
        elif key in _KEYWORDS["integer"] and type(value) not in (int, float):
            raise refusal(f"{key!r} must be a number")
    if "multipleOf" in checked:
        step = checked["multipleOf"]
        if type(step) is not int or not 0 < step <= _MAX_MULTIPLE:
            raise refusal(f"'multipleOf' must be an integer in [1, {_MAX_MULTIPLE}]")
        if beside := sorted(_KEYWORDS["number"] & checked.keys()):
            raise refusal(f"'multipleOf' beside {beside[0]!r} can't be enforced")


def _check_string(checked: dict[str, Any]) -> None:
    bounds = sorted({"minLength", "maxLength"} & checked.keys())
    given = [key for key in ("pattern", "format", *bounds[:1]) if key in checked]
    if len(given) > 1:
        raise refusal(f"{given[1]!r} beside {given[0]!r} can't be enforced")
    if "format" in checked:
        name = str(checked["format"])
        if name in _PATTERN_OF_FORMAT:
            del checked["format"]
            checked["pattern"] = enforceable_regex(_PATTERN_OF_FORMAT[name], in_json=True)
        elif name not in _FORMATS:
            raise refusal(f"the format {name[:40]!r} can't be enforced")
    elif "pattern" in checked:
        if not isinstance(checked["pattern"], str):
            raise refusal("'pattern' must be a string")
        checked["pattern"] = enforceable_regex(checked["pattern"], in_json=True)


def _object(checked: dict[str, Any], key: str) -> dict[str, Any]:
    value = checked.get(key, {})
    if not isinstance(value, dict):
        raise refusal(f"{key!r} must be an object")
    return value
