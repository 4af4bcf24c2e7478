"""Reads the body of `POST /v1/responses` as the chat that means the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from weft.api.bodies import (
    FUNCTION_NAME,
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ClosedBody,
    Function,
    FunctionName,
    JsonSchema,
    Known,
    LenientBody,
    Message,
    NamedTool,
    ResponseFormat,
    StringOr,
    Take,
    TextOr,
    ToolCall,
    ToolChoice,
    bounded,
    schema_misplaced,
)
from weft.api.bodies import Tool as ChatTool
from weft.api.schemas import OF_CHATS, ChatBody, Effort, ModelBody
from weft.core.errors import InvalidRequest

FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""What this API calls fields of the chat request."""

_LOGPROBS = "message.output_text.logprobs"

_KNOWN: dict[str, Known] = OF_CHATS | {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    # It bounds the calls of tools that a server runs by itself, and there are none.
    "max_tool_calls": Take.SILENTLY,
    "moderation": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}


class TextPart(LenientBody):
    type: Literal["input_text", "output_text"]
    text: str


Parts = TextOr[Annotated[list[TextPart], bounded(MAX_MESSAGES)]]


class MessageItem(LenientBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(LenientBody):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    arguments: str


class CallOutputItem(LenientBody):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningPart(LenientBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(LenientBody):
    type: Literal["reasoning"]
    summary: list[Any] = Field([], max_length=0)
    content: Annotated[list[ReasoningPart], bounded(MAX_MESSAGES)] | None = None
    encrypted_content: None = None
    """Thoughts of another server can't be read here."""


class ReferenceItem(LenientBody):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _type_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")],
    Discriminator(_type_of),
]
"""Clients send items of earlier answers back with all the fields that these had."""


_ITEM = TypeAdapter[Item](Item)

Stored = Callable[[str, str], dict[str, Any]]
"""Gives the item of a stored response with an id, for a field that names it."""


class FunctionTool(ClosedBody):
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> ChatTool:
        return ChatTool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class NamedFunction(ClosedBody):
    type: Literal["function"]
    name: str


class TextFormat(ClosedBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(ClosedBody):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint that is not followed."""


class Reasoning(LenientBody):
    effort: Effort | None = None
    summary: str | None = None
    """A hint: there are no summaries, as all thoughts are shown."""


class ResponsesBody(ModelBody):
    """`POST /v1/responses`."""

    known = _KNOWN

    input: TextOr[Annotated[list[Item], bounded(MAX_MESSAGES)]]
    instructions: str | None = None
    """What the system says. It holds for this turn, and is not carried on to a next one."""
    previous_response_id: str | None = None
    """The stored response from which the conversation goes on."""
    store: bool | None = None
    """Whether the response is kept for a next turn; it is unless this says no."""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], bounded(MAX_TOOLS)] | None = None
    tool_choice: StringOr[Literal["none", "auto", "required"], NamedFunction] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    """Further parts of the answer; the others that OpenAI knows belong to tools of its own."""
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the oldest turns are left out if the conversation is too long."""

    def ignored(self, strict: bool) -> list[str]:
        names = super().ignored(strict)
        if self.text is not None and self.text.verbosity is not None:
            names.append("text.verbosity")
        return names

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def to_chat(self, before: Sequence[Message], stored: Stored) -> ChatBody:
        """The chat request that means the same, checked, with the conversation that comes before
        the input. Raises InvalidRequest, ResponseNotFound."""
        same = ("model", "cache_salt", "temperature", "top_p", "parallel_tool_calls")
        chat = ChatBody(
            **{name: getattr(self, name) for name in same},
            messages=[*self._instructions(), *before, *self._messages(stored)],
            max_completion_tokens=self.max_output_tokens,
            response_format=self._format(),
            tools=[tool.to_chat() for tool in self.tools or ()],
            tool_choice=self._tool_choice(),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
        )
        chat.check()
        return chat

    def _tool_choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, NamedFunction):
            return NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if (form.schema_ is not None) != (form.type == "json_schema"):
            raise schema_misplaced(form.type, "text.format.schema")
        schema = None if form.schema_ is None else JsonSchema(schema=form.schema_)
        return ResponseFormat(type=form.type, json_schema=schema)

    def _instructions(self) -> list[Message]:
        return [Message(role="system", content=self.instructions)] if self.instructions else []

    def _messages(self, stored: Stored) -> list[Message]:
        """The input as messages of the chat. There, the calls of one turn, the thoughts before
        them and what is said beside them are parts of one message."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        messages: list[Message] = []
        thoughts: str | None = None
        for n, item in enumerate(self.input):
            if isinstance(item, ReferenceItem):
                item = _ITEM.validate_python(stored(item.id, f"input[{n}].id"))
                assert not isinstance(item, ReferenceItem), "no output has references"
            if isinstance(item, ReasoningItem):
                thoughts = "\n".join(part.text for part in item.content or ())
            elif isinstance(item, CallItem):
                if not messages or messages[-1].role != "assistant" or thoughts:
                    messages.append(Message(role="assistant", reasoning_content=thoughts))
                function = CalledFunction(name=item.name, arguments=item.arguments)
                function.parsed(f"input[{n}].arguments")
                call = ToolCall(id=item.call_id, function=function)
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
                thoughts = None
            elif isinstance(item, CallOutputItem):
                output = _text(item.output)
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            else:
                own = thoughts if item.role == "assistant" else None
                content = _text(item.content)
                last = messages[-1] if messages and item.role == "assistant" and not own else None
                if last is not None and last.tool_calls and last.content is None:
                    last.content = content
                else:
                    messages.append(Message(role=item.role, content=content, reasoning_content=own))
                thoughts = None
        if not messages:
            raise InvalidRequest("input must not be empty", "input")
        return messages


def _text(parts: str | list[TextPart]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
