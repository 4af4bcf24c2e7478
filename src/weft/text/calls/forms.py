"""The forms that make a model call tools, as parts of xgrammar's structural tags."""

from __future__ import annotations

import json
from typing import Any

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.text.calls.parameters import Parameters, Room, properties_of
from weft.text.calls.template import mark_part, marked_parts, sequence_of, split, text_part
from weft.text.tools import TOOL_FORMATS, ToolFormat


def tools_schema(
    tools: list[dict[str, Any]], format: str, name: str | None, one_call: bool = False
) -> StructuredOutputs:
    """The form that makes the model call `tools`, which are as in OpenAI's API, once or more.

    `format`: a name in TOOL_FORMATS. `name`: there is exactly one call, of the tool of this name.
    `one_call`: there is exactly one call, of any tool. The arguments satisfy the function's own
    schema, and the format's parser reads the whole call. Raises InvalidRequest for a name that no
    tool has, for a tool without a function, and for a schema that calls of this format can't be
    held to.
    """
    return StructuredOutputs(structural_tag=as_tag(calls_part(tools, format, name, one_call)))


def calls_part(
    tools: list[dict[str, Any]], format: str, name: str | None, one_call: bool
) -> dict[str, Any]:
    """The form of `tools_schema`, as a part of one of xgrammar's structural tags."""
    functions = [_function(tool) for tool in tools]
    chosen = [f for f in functions if name is None or f["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", "tools")
    style, room = TOOL_FORMATS[format], Room()
    if style.syntax == "harmony":
        return {"type": "or", "elements": [_harmony_call(f) for f in chosen]}
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_tag(_call(style, function, room)) for function in chosen],
        "separator": style.between,
        "at_least_one": True,
        "stop_after_first": one_call or name is not None or style.is_single,
    }
    return _between_marks(style, calls) if style.layout != "each" else calls


def as_tag(part: dict[str, Any]) -> str:
    """A structural tag with this part alone, as JSON text."""
    return json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False)


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The JSON schemas of parameters, by tool and then by parameter."""
    functions = map(_function, tools)
    return {function["name"]: properties_of(function.get("parameters")) for function in functions}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("each tool needs a function with a name", "tools")
    return function


def _tag(call: dict[str, Any]) -> dict[str, Any]:
    """A call as a tag, whose begin and end are the call's first and last text or mark. xgrammar
    needs them to know where contents of any length end."""
    first, *parts = call["elements"]
    begin, end = (part if "mark" in part else part.get("value", "") for part in (first, parts[-1]))
    content = sequence_of(*([] if begin else [first]), *(parts[:-1] if end else parts))
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _between_marks(style: ToolFormat, content: dict[str, Any]) -> dict[str, Any]:
    """A call, or all calls, with the marks of the format around it."""
    begin = [] if style.bare else [mark_part(style.begin)]
    end = [mark_part(style.end)] if style.end and not style.bare else []
    return sequence_of(*begin, text_part(style.opening), content, text_part(style.closing), *end)


def _call(style: ToolFormat, function: dict[str, Any], room: Room) -> dict[str, Any]:
    """One call, with its own marks."""
    name = function["name"]
    said = {
        "{name}": text_part(json.dumps(name, ensure_ascii=False)),
        "{n}": {"type": "regex", "pattern": "[0-9]{1,3}"},
    }
    if style.syntax != "json":
        said["{name}"] = text_part(name)
    if style.syntax in ("json", "named"):
        said["{arguments}"] = _arguments(function)
    else:
        said["{parameters}"] = _parameters(style, Parameters(function, room, style.quote))
    parts = ([said[part]] if part in said else marked_parts(part) for part in split(style.call))
    call = sequence_of(*(part for each in parts for part in each))
    return _between_marks(style, call) if style.layout == "each" else call


def _parameters(style: ToolFormat, parameters: Parameters) -> dict[str, Any]:
    if style.syntax == "xml":
        return parameters.xml(style.parameter)
    return parameters.pairs("=", ", ") if style.syntax == "python" else parameters.pairs(":", ",")


def _harmony_call(function: dict[str, Any]) -> dict[str, Any]:
    """One message to a function."""
    channel, constrain, message = map(mark_part, ("<|channel|>", "<|constrain|>", "<|message|>"))
    header = text_part(f"commentary to=functions.{function['name']} ")
    return sequence_of(channel, header, constrain, text_part("json"), message, _arguments(function))


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "json_schema", "json_schema": schema}
