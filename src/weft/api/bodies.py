"""Parts of request bodies that routes share: messages, tools, and the form of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.text.templates import joined_text

S = TypeVar("S")
T = TypeVar("T")

MAX_MESSAGES = 2048
"""The most messages in a conversation, content parts in a message, and calls in a message."""
MAX_TOOLS = 512
MAX_ID_LENGTH = 128


def is_id(given: Any) -> TypeGuard[str]:
    """Whether a client's id for a request or an answer is safe in headers and logs."""
    if not isinstance(given, str):
        return False
    return 0 < len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()


class Take(Enum):
    """How a field is treated that changes no answer, whatever its value."""

    SILENTLY = "it can't change the answer"
    NAMED = "it is a hint that is not followed, and the answer names it as ignored"


Known = tuple[Any, ...] | Take
"""How a known but unsupported field is treated. A tuple lists its harmless values; others are
refused."""

_NAMES = ("adapter", "adapter_id", "adapter_name", "lora", "lora_name", "lora_request")
OTHER_NAMES: dict[str, Known] = dict.fromkeys((*_NAMES, "merged_adapters"), ())
"""What other servers and their clients call the adapter of a request. If it were ignored, the base
would answer."""

_INSTEAD = {
    "function_call": "; use tool_choice",
    "functions": "; use tools",
    "guided_json_object": '; use response_format with the type "json_object"',
    "no_stop_trim": "; use include_stop_str_in_output",
} | dict.fromkeys(OTHER_NAMES, "; give the adapter's name as model, or several as adapters")


def ignored_fields(
    given: Mapping[str, Any] | None,
    known: Mapping[str, Known],
    prefix: str = "",
    strict: bool = False,
) -> list[str]:
    """The names of the given fields that have no effect though the client may expect one: hints
    that are not followed, and unknown fields. Fields that are null are not listed.

    Raises InvalidRequest, naming the field, for a known field with a value that would change the
    answer and, if `strict`, for an unknown field.
    """
    ignored: list[str] = []
    for name, value in (given or {}).items():
        take = known.get(name, Take.NAMED)
        field = prefix + name
        if strict and name not in known:
            raise InvalidRequest(f"unknown field: {field}", field)
        if value is None or take is Take.SILENTLY:
            continue
        if take is Take.NAMED:
            ignored.append(field)
        elif not any(_equal(value, each) for each in take):
            hint = _INSTEAD.get(field, "")
            raise InvalidRequest(f"{field} is not supported by this version{hint}", field)
    return ignored


def _equal(value: object, known: object) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == known and isinstance(value, bool) == isinstance(known, bool)


class OpenBody(BaseModel):
    """Takes any field. `known` says what becomes of those that are not declared here."""

    model_config = ConfigDict(extra="allow", strict=True)
    known: ClassVar[Mapping[str, Known]] = {}

    def ignored(self, strict: bool) -> list[str]:
        """As `ignored_fields`."""
        return ignored_fields(self.model_extra, self.known, strict=strict)


class LenientBody(BaseModel):
    """Takes any field, and forgets those that are not declared here: a part of a conversation, to
    which clients add marks of their own."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ClosedBody(BaseModel):
    """Takes the fields that are declared here, and no other, unless it is null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}


def _form(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[T, Tag("<list>")], Discriminator(_form)
]
"""A text or a list of type T, decided by what is there, so that an error names its place."""


def _string_or_object(value: Any) -> str:
    return "<object>" if isinstance(value, dict | BaseModel) else "<string>"


StringOr = Annotated[
    Annotated[S, Tag("<string>")] | Annotated[T, Tag("<object>")],
    Discriminator(_string_or_object),
]
"""A string of type S or an object of type T, likewise."""

FUNCTION_NAME = "^[a-zA-Z0-9_.-]{1,128}$"
"""More than OpenAI's 64: agents join the names of servers and of their tools."""


def bounded(most: int, least: int = 0) -> Any:
    """The bounds of a list, which is refused at its first fault."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class ContentPart(LenientBody):
    type: str
    text: str | None = None


ContentParts = Annotated[list[ContentPart], bounded(MAX_MESSAGES)]


class CalledFunction(LenientBody):
    name: str = Field(min_length=1)
    arguments: str
    """JSON text."""

    def parsed(self, where: str) -> dict[str, Any]:
        """The arguments. Raises InvalidRequest naming `where` unless they are a JSON object."""
        try:
            arguments = from_json(self.arguments or "{}")
        except ValueError as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}", where) from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where} must be a JSON object", where)
        return arguments


class ToolCall(LenientBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it: the arguments are an object."""
        arguments = self.function.parsed(f"{where}function.arguments")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(OpenBody):
    """What is not declared here and not `known` is forgotten."""

    known = {"audio": (), "function_call": (), "refusal": ("",)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[ContentParts] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """What an assistant thought before it answered; `reasoning` is its other name."""
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], bounded(MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        where = f"messages[{index}]."
        ignored_fields(self.model_extra, self.known, where)
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
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{where}content is required", f"{where}content")
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return joined_text([vars(part) for part in self.content], f"{where}content")


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
    cache_control: Any = None
    """A hint of Anthropic's clients; it changes nothing."""

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

    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    """What the answer is to be drawn from, for chat templates that show documents."""

    def check_continuation(self, messages: list[Message]) -> None:
        """Raises InvalidRequest unless the last message can be continued, if that is asked for."""
        field = "continue_final_message"
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(f"{field} and add_generation_prompt exclude each other", field)
        if self.continue_final_message and messages[-1].role != "assistant":
            raise InvalidRequest(f"{field} needs a last message of role 'assistant'", field)

    def template_options(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.chat`."""
        continues = bool(self.continue_final_message)
        return {
            "add_generation_prompt": not continues and self.add_generation_prompt is not False,
            "continue_final_message": continues,
            "template_kwargs": self.chat_template_kwargs,
            "documents": self.documents,
        }


ToolChoice = StringOr[Literal["none", "auto", "required"], NamedTool]


class JsonSchema(ClosedBody):
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """This is accepted and changes nothing: the schema always binds."""


class ResponseFormat(ClosedBody):
    """OpenAI's `response_format`. LoRAX has a `schema` for `json_object` beside it, and vLLM and
    SGLang have structural tags, whose older form has `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def to_structured(self) -> StructuredOutputs | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise schema_misplaced(self.type, "response_format.json_schema")
        rest = self.model_dump(by_alias=True, exclude={"type", "json_schema"}, exclude_none=True)
        for name in rest:
            kind = "json_object" if name == "schema" else "structural_tag"
            if kind != self.type:
                field = f"response_format.{name}"
                raise InvalidRequest(f"{field} is only allowed with type '{kind}'", field)
        if self.type == "structural_tag":
            return StructuredOutputs(structural_tag=json.dumps({"type": self.type, **rest}))
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        if schema is not None:
            return StructuredOutputs(json=json.dumps(schema))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


def schema_misplaced(kind: str, param: str) -> InvalidRequest:
    """Either the schema is missing, or the form's type is not `json_schema`."""
    wrong = "is required" if kind == "json_schema" else "is not allowed"
    return InvalidRequest(f"{param} {wrong} with type '{kind}'", param)


class StructuredBody(ClosedBody):
    """vLLM's `structured_outputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    """These two are accepted and change nothing: there is no fallback, and JSON is always written
    without white space between its parts."""
    disable_additional_properties: Literal[False] | None = None
    """A schema says for itself which properties an object may have."""

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
