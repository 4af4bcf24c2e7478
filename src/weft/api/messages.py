"""Messages and tools of a conversation."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from weft.api.bodies import ClosedBody, OpenBody, TextOr, refuse_extra
from weft.core.errors import InvalidRequest

FUNCTION_NAME = "^[a-zA-Z0-9_.-]{1,64}$"

_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


class ContentPart(OpenBody):
    type: str
    text: str | None = None


class CalledFunction(ClosedBody):
    name: str = Field(min_length=1)
    arguments: str
    """JSON text."""

    def parsed(self, where: str) -> dict[str, Any]:
        """The arguments. Raises InvalidRequest naming `where` unless they are a JSON object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}", where) from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where} must be a JSON object", where)
        return arguments


class ToolCall(ClosedBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Clients leave this over from a stream; it is ignored."""

    def to_template(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it: the arguments are an object."""
        arguments = self.function.parsed(f"{where}function.arguments")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(OpenBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[list[ContentPart]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """What an assistant thought before it answered; `reasoning` is its other name."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        where = f"messages[{index}]."
        refuse_extra(self.model_extra, _NOT_SERVED, where)
        for name, role in _ROLE_OF_FIELD.items():
            if getattr(self, name) and self.role != role:
                raise InvalidRequest(f"{where}{name} needs role {role!r}", where + name)
        message: dict[str, Any] = {"role": self.role, "content": self._text(where)}
        if self.name is not None:
            message["name"] = self.name
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                call.to_template(f"{where}tool_calls[{n}].")
                for n, call in enumerate(self.tool_calls)
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts: list[str] = []
        for n, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"content of type {part.type!r} is not supported, only text",
                    f"{where}content[{n}].type",
                )
            refuse_extra(part.model_extra, {}, f"{where}content[{n}].")
            texts.append(part.text)
        return "\n".join(texts)


_ROLE_OF_FIELD = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}


class Function(ClosedBody):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema, or None for a function without parameters."""
    strict: bool | None = None


class Tool(ClosedBody):
    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it: parameters are always there."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class FunctionName(ClosedBody):
    name: str


class NamedTool(ClosedBody):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
