"""Calls of tools: how models write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs


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
    """The key that the family's own templates use; both this and the other are read."""
    lists: bool = False
    """Whether calls may also be a JSON list, or a name before its arguments."""
    inner: tuple[str, ...] = ()
    """Marks inside of calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where they are special tokens, the text must not leave them out."""
        return tuple(mark for mark in (self.begin, self.end, *self.inner) if mark)


TOOL_FORMATS = {
    "hermes": ToolFormat(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": ToolFormat(
        begin="<|python_tag|>", separator=";", bare=True, arguments="parameters"
    ),
    "mistral": ToolFormat(begin="[TOOL_CALLS]", lists=True, inner=("[CALL_ID]", "[ARGS]")),
}
"""Formats by name:

- hermes (Hermes, Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
- llama3_json (Llama 3.1 to 3.3): `{"name": ..., "parameters": {...}}` at the beginning of the
  output or after `<|python_tag|>`, several with `;` between them
- mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and for each call
  `[TOOL_CALLS]name[ARGS]{...}`
"""


def detect_tool_format(chat_template: str) -> str | None:
    """The format that a model's own chat template writes, or None if it writes none of ours."""
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or '"parameters": dictionary' in chat_template:
        return "llama3_json"
    return None


def tools_schema(tools: list[dict[str, Any]], format: str, name: str | None) -> StructuredOutputs:
    """What makes the model call: one of `tools` (OpenAI's form), or the one called `name`.

    Its arguments satisfy the function's own schema, and the whole is what the format's parser
    reads. Raises InvalidRequest for a name that no tool has, and for a tool without a function.
    """
    functions = [_function(tool) for tool in tools]
    chosen = [f for f in functions if name is None or f["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", "tools")
    style = TOOL_FORMATS[format]
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(style, function) for function in chosen],
        "separator": f"{style.separator} " if style.separator else "\n",
        "at_least_one": True,
        "stop_after_first": name is not None,
    }
    if style.lists:
        calls = {**calls, "separator": ", "}
        begin = {"type": "token", "token": style.begin}
        elements = [begin, _text(" ["), calls, _text("]")]
        calls = {"type": "sequence", "elements": elements}
    tag = {"type": "structural_tag", "format": calls}
    return StructuredOutputs(structural_tag=json.dumps(tag, ensure_ascii=False))


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("each tool needs a function with a name", "tools")
    return function


def _call(style: ToolFormat, function: dict[str, Any]) -> dict[str, Any]:
    """One call, with its own marks, as a tag of xgrammar's."""
    name = json.dumps(function["name"], ensure_ascii=False)
    begin, end = (f"{style.begin}\n", f"\n{style.end}") if style.end else ("", "")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "tag",
        "begin": f'{begin}{{"name": {name}, "{style.arguments}": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}" + end,
    }


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
