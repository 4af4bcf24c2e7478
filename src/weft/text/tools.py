"""The formats in which models call tools."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.text.xml_call import is_bare


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    begin: str
    """The mark before a call, or before a list of calls."""
    end: str = ""
    """The mark after a call."""
    separator: str = ""
    """What stands between calls that share the mark before them."""
    bare: bool = False
    """Whether an output may begin with a call that has no mark."""
    arguments: str = "arguments"
    """The arguments' key in the family's own templates; "arguments" and "parameters" are read."""
    lists: bool = False
    """Whether calls may also be a JSON list, or a name before its arguments."""
    inner: tuple[str, ...] = ()
    """Marks inside of calls."""
    name: str = "name"
    """The key of a call's name in the family's own templates; others are read, too."""
    syntax: Literal["json", "xml", "gemma", "python", "named"] = "json"
    """json: an object. xml: `<function=name>` with `<parameter=key>`. gemma: `call:name{key:value}`
    with marks for quotes. python: `name(key=value)`. named: a tool's name, a line break and a JSON
    object, at the beginning of an output or behind a mark."""
    quote: str = ""
    """The mark that stands for quotes."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where they are special tokens, the text must not leave them out."""
        return tuple(mark for mark in (self.begin, self.end, self.quote, *self.inner) if mark)


TOOL_FORMATS = {
    "hermes": ToolFormat(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": ToolFormat(
        begin="<|python_tag|>", separator=";", bare=True, arguments="parameters"
    ),
    "mistral": ToolFormat(begin="[TOOL_CALLS]", lists=True, inner=("[CALL_ID]", "[ARGS]")),
    "qwen3_coder": ToolFormat(begin="<tool_call>", end="</tool_call>", syntax="xml"),
    "seed_oss": ToolFormat(begin="<seed:tool_call>", end="</seed:tool_call>", syntax="xml"),
    "granite": ToolFormat(begin="<|tool_call|>", lists=True),
    "cohere": ToolFormat(
        begin="<|START_ACTION|>", lists=True, name="tool_name", arguments="parameters"
    ),
    "phi4_mini_json": ToolFormat(begin="<|tool_call|>", end="<|/tool_call|>", lists=True),
    "gemma4": ToolFormat(begin="<|tool_call>", end="<tool_call|>", syntax="gemma", quote='<|"|>'),
    "functiongemma": ToolFormat(
        begin="<start_function_call>", end="<end_function_call>", syntax="gemma", quote="<escape>"
    ),
    "olmo3": ToolFormat(begin="<function_calls>", end="</function_calls>", syntax="python"),
    "glm4": ToolFormat(begin="<|assistant|>", syntax="named"),
    "harmony": ToolFormat(
        begin="<|channel|>",
        inner=("<|start|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
}
"""Formats by name:

- hermes (Hermes, Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
- llama3_json (Llama 3.1 to 3.3): `{"name": ..., "parameters": {...}}` at the beginning of the
  output or after `<|python_tag|>`, several with `;` between them
- mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and for each call
  `[TOOL_CALLS]name[ARGS]{...}`
- qwen3_coder (Qwen3-Coder, Qwen 3.5): `<tool_call><function=name><parameter=key>...</parameter>
  </function></tool_call>`, whose values are JSON where the tool's schema asks for more than text
- seed_oss: the same between `<seed:tool_call>` and `</seed:tool_call>`
- granite (Granite 3): `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`
- cohere (Command R7B and A): `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]`
- phi4_mini_json (Phi-4-mini): `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`
- gemma4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`
- functiongemma: the same as `<start_function_call>call:name{key:<escape>text<escape>}
  <end_function_call>`
- olmo3: `<function_calls>name(key="text", n=3)</function_calls>`, several on lines of their own
- glm4 (GLM-4-0414): a tool's name at the beginning of the output, and its arguments as JSON on the
  next line; further calls behind `<|assistant|>`
- harmony (gpt-oss): messages with headers, which `weft.text.harmony` reads
"""


_SHOWN_BY: tuple[tuple[str, str | None], ...] = (
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<function_calls>", "olmo3"),
    ("<|/tool|>", "phi4_mini_json"),
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<seed:tool_call>", "seed_oss"),
    ("<function=", "qwen3_coder"),
    ("<|START_ACTION|>", "cohere"),
    ("<arg_key>", None),  # GLM 4.5 to 4.7
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("<|observation|>", "glm4"),
)
"""What a chat template holds, and the format that it means, or None; the first found counts."""


def detect_tool_format(chat_template: str) -> str | None:
    """The format that a model's own chat template writes, or None if it writes none of ours."""
    for mark, name in _SHOWN_BY:
        if mark in chat_template:
            in_messages = name == "glm4" and "item['tools']" in chat_template
            return None if in_messages else name  # the first GLM-4 is not served with tools
    if "<|python_tag|>" in chat_template or '"parameters": dictionary' in chat_template:
        return "llama3_json"
    return None


def tools_schema(
    tools: list[dict[str, Any]], format: str, name: str | None, one_call: bool = False
) -> StructuredOutputs:
    """The form that makes the model call some of `tools` (OpenAI's form), or once the one named
    `name`; with `one_call` one of them once.

    The arguments satisfy the function's own schema, and the format's parser reads the whole call.
    Raises InvalidRequest for a name that no tool has, for a tool without a function, and for
    a schema that calls of this format can't be held to.
    """
    return StructuredOutputs(structural_tag=as_tag(calls_part(tools, format, name, one_call)))


def calls_part(
    tools: list[dict[str, Any]], format: str, name: str | None, one_call: bool
) -> dict[str, Any]:
    """The calls of `tools_schema` as a part of a structural tag of xgrammar's."""
    functions = [_function(tool) for tool in tools]
    chosen = [f for f in functions if name is None or f["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", "tools")
    style, room = TOOL_FORMATS[format], _Room()
    if format == "harmony":
        return {"type": "or", "elements": [_harmony_call(f) for f in chosen]}
    if style.syntax in ("gemma", "named"):
        write = _gemma_call if style.syntax == "gemma" else _named_call
        return {"type": "or", "elements": [write(style, f, room) for f in chosen]}
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_call(style, function, room) for function in chosen],
        "separator": f"{style.separator} " if style.separator else "\n",
        "at_least_one": True,
        "stop_after_first": one_call or name is not None,
    }
    if style.lists:
        calls = {**calls, "separator": ", "}
        elements = [
            token_part(style.begin),
            text_part("[" if style.end else " ["),
            calls,
            text_part("]"),
        ]
        calls = sequence_of(*elements, *([token_part(style.end)] if style.end else []))
    elif style.syntax == "python":
        calls = sequence_of(text_part(style.begin), calls, text_part(style.end))
    return calls


def as_tag(part: dict[str, Any]) -> str:
    """A structural tag with this part alone, as JSON text."""
    return json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False)


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each parameter by name, by tool."""
    return {function["name"]: _properties(function) for function in map(_function, tools)}


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("each tool needs a function with a name", "tools")
    return function


def _call(style: ToolFormat, function: dict[str, Any], room: _Room) -> dict[str, Any]:
    """One call, with its own marks, as a tag of xgrammar's."""
    name = json.dumps(function["name"], ensure_ascii=False)
    apart = bool(style.end) and not style.lists
    begin, end = (f"{style.begin}\n", f"\n{style.end}") if apart else ("", "")
    content = _arguments(function)
    if style.syntax == "python":
        content = _Parameters(function, room).pairs("=", ", ")
        return {"type": "tag", "begin": f"{function['name']}(", "content": content, "end": ")"}
    begin += f'{{"{style.name}": {name}, "{style.arguments}": '
    if style.syntax == "xml":
        begin, end = f"{style.begin}\n<function={function['name']}>\n", f"</function>{end}"
        content = _Parameters(function, room).xml()
        return {"type": "tag", "begin": begin, "content": content, "end": end}
    return {"type": "tag", "begin": begin, "content": content, "end": "}" + end}


def _harmony_call(function: dict[str, Any]) -> dict[str, Any]:
    """One message to a function, as a sequence of xgrammar's."""
    channel, constrain, message = map(token_part, ("<|channel|>", "<|constrain|>", "<|message|>"))
    header = text_part(f"commentary to=functions.{function['name']} ")
    return sequence_of(channel, header, constrain, text_part("json"), message, _arguments(function))


def _named_call(style: ToolFormat, function: dict[str, Any], room: _Room) -> dict[str, Any]:
    return sequence_of(text_part(f"{function['name']}\n"), _arguments(function))


def _gemma_call(style: ToolFormat, function: dict[str, Any], room: _Room) -> dict[str, Any]:
    arguments = _Parameters(function, room, style.quote).pairs(":", ",")
    name, begin, end = (
        text_part(f"call:{function['name']}{{"),
        token_part(style.begin),
        token_part(style.end),
    )
    return sequence_of(begin, name, arguments, text_part("}"), end)


_MAX_CHARS = 1 << 17
"""Twice what a form may have when it is compiled. Without this limit, a form that is too long would
be written to its end before it is refused. That may take very long, as a value is written once more
for each optional property before it, at every level of nesting."""
_LEAST_CHARS = 48
"""What a value or a property takes at least."""
_MAX_DEPTH = 32
_MAX_KEY = 256
_KEYS = {
    ":": re.compile(r"[^:,}\]]+"),
    "=": re.compile(r"[^=)][^=]*"),
    ">": re.compile(r"[^>]+"),
}
"""Names of properties by what follows them: others are not read back as they are written."""
_NEVER = frozenset(
    {"oneOf", "allOf", "not", "if", "minProperties", "maxProperties", "patternProperties"}
) | {"propertyNames", "dependentRequired", "dependentSchemas"}
_OF_LISTS = {"prefixItems", "minItems", "maxItems", "contains", "uniqueItems"}
_NOT_IN_ROOT = _NEVER | {"anyOf", "$ref"}
_NOT_IN_GEMMA = _NEVER | {"pattern", *_OF_LISTS}
"""What can't be said where values are not JSON."""


class _Room:
    """How long the form of a request's calls may still become."""

    def __init__(self) -> None:
        self._left = _MAX_CHARS

    def take(self, num_chars: int) -> None:
        """Raises InvalidRequest if there is no such room."""
        self._left -= num_chars
        if self._left < 0:
            raise InvalidRequest("tools: the form of their calls would be too large", "tools")


class _Parameters:
    """Writes the schema of a function's parameters as parts of xgrammar's structural tags. Raises
    InvalidRequest for what would not be enforced."""

    def __init__(self, function: dict[str, Any], room: _Room, quote: str = "") -> None:
        """`quote`: Gemma's mark for quotes; without one, values are JSON."""
        self._root = root = _without(_NOT_IN_ROOT, function.get("parameters") or {})
        self._definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._num_chars = len(json.dumps(self._definitions))
        self._room = room
        self._quote = quote

    def xml(self) -> dict[str, Any]:
        """Values of the parameters in their order, text as it is and others as JSON. Text can't
        hold what begins the mark at its end."""
        found, required = _members(self._root)
        elements: list[dict[str, Any]] = [text_part("")]
        for key, value in found.items():
            self._check_key(key, ">")
            content = self._json(value)
            if is_bare(value):
                content = {"type": "regex", "pattern": "([^<]|<+[^/<])*"}
                if isinstance(value.get("enum"), list):
                    listed = [each for each in value["enum"] if isinstance(each, str)]
                    words = [text_part(_without_mark(each, "</parameter>")) for each in listed]
                    content = {"type": "or", "elements": words}
            one = sequence_of(
                text_part(f"<parameter={key}>\n"), content, text_part("\n</parameter>\n")
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

        # What may come first: any that may be left out, up to the first that may not.
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
        """A value whose text is between marks. What has no type, nor parts, is text."""
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
        # Text can't hold what begins the mark at its end.
        pattern = f"([^<]|<+[^<{re.escape(self._quote[1])}])*"
        if low or high is not None:
            pattern = f"[^<]{{{low},{'' if high is None else high}}}"
        return self._quoted({"type": "regex", "pattern": pattern})

    def _listed(self, values: Any, kind: object) -> list[dict[str, Any]]:
        """What an enumeration allows."""
        if not isinstance(values, list) or any(isinstance(each, dict | list) for each in values):
            raise _unenforced("'enum' of other values than text, numbers, booleans and null")
        words = [each for each in values if isinstance(each, str)]
        texts = [self._quoted(text_part(_without_mark(each, self._quote))) for each in words]
        others = [text_part(json.dumps(each)) for each in values if not isinstance(each, str)]
        return texts if kind == "string" else texts + others

    def _quoted(self, text: dict[str, Any]) -> dict[str, Any]:
        return sequence_of(token_part(self._quote), text, token_part(self._quote))

    def _target(self, reference: object) -> Any:
        """The schema that a reference leads to."""
        found: Any = self._root
        for name in str(reference).split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        if not str(reference).startswith("#") or found is None:
            raise _unenforced(f"'$ref' to {str(reference)[:80]!r}")
        return found


def _members(schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The properties of an object, and which of them are required."""
    found, required = _properties({"parameters": schema}), schema.get("required") or []
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


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "json_schema", "json_schema": schema}


def sequence_of(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def token_part(mark: str) -> dict[str, Any]:
    return {"type": "token", "token": mark}


def text_part(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
