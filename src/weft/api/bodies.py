"""What bodies of requests are made of: messages, tools, and the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs

T = TypeVar("T")
Harmless = tuple[Any, ...] | None
"""Values of a field that change nothing; None stands for all values."""

_HINTS = {"functions": "; use tools", "function_call": "; use tool_choice"}


class OpenBody(BaseModel):
    """Takes any field; `refuse_extra` says which are meant."""

    model_config = ConfigDict(extra="allow", strict=True)

    def refuse_extra(self, known: Mapping[str, Harmless], prefix: str = "") -> None:
        """Raise InvalidRequest, naming the field, for an extra field that is unknown or not served.

        `known` has the values of known fields that ask for nothing, as null always does.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in known:
                raise InvalidRequest(f"unknown field: {prefix}{name}", prefix + name)
            harmless = known[name]
            if harmless is not None and value is not None and value not in harmless:
                field = prefix + name
                hint = _HINTS.get(field, "")
                raise InvalidRequest(f"{field} is not supported by this version{hint}", field)


class ClosedBody(BaseModel):
    """Takes the fields that are declared here, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _form(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[T, Tag("<list>")], Discriminator(_form)
]
"""A text or a list of type T, decided by what is there, so that an error names its place."""


FUNCTION_NAME = "^[a-zA-Z0-9_.-]{1,64}$"

_NOT_SERVED: dict[str, Harmless] = {
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
        self.refuse_extra(_NOT_SERVED, where)
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
            part.refuse_extra({}, f"{where}content[{n}].")
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


class Conversation(BaseModel):
    """The fields that say how messages become a prompt."""

    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_continuation(self, messages: list[Message]) -> None:
        """Raises InvalidRequest unless the last message can be continued, if that is asked for."""
        field = "continue_final_message"
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(f"{field} and add_generation_prompt are at odds", field)
        if self.continue_final_message and messages[-1].role != "assistant":
            raise InvalidRequest(f"{field} needs a last message of role 'assistant'", field)

    def template_options(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.chat`."""
        continues = bool(self.continue_final_message)
        return {
            "add_generation_prompt": not continues and self.add_generation_prompt is not False,
            "continue_final_message": continues,
            "template_kwargs": self.chat_template_kwargs,
        }


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class JsonSchema(ClosedBody):
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """This is accepted and changes nothing: the schema always binds."""


class ResponseFormat(ClosedBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_structured(self) -> StructuredOutputs | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema belongs to type 'json_schema'",
                "response_format.json_schema",
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=json.dumps(self.json_schema.schema_))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredBody(ClosedBody):
    """vLLM's `structured_outputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    def to_structured(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=_as_text(self.json_),
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
            structural_tag=_as_text(self.structural_tag),
        )


def _as_text(schema: dict[str, Any] | str | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema
