"""Reads the body of `POST /v1/messages`, Anthropic's API, as the chat that means the same."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

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
    Take,
    TextOr,
    Tool,
    ToolCall,
    ToolChoice,
    bounded,
)
from weft.api.schemas import OF_CHATS, ChatBody, Effort, ModelBody
from weft.core.errors import InvalidRequest
from weft.core.sampling import MAX_STOP_STRINGS

FIELDS = {"response_format": "output_config.format", "stop": "stop_sequences"}
"""What this API calls fields of the chat request."""

_KNOWN: dict[str, Known] = {
    "cache_control": Take.SILENTLY,
    "container": (),
    "context_management": Take.NAMED,
    "diagnostics": Take.NAMED,
    "inference_geo": Take.SILENTLY,
    "mcp_servers": ([],),
    "metadata": Take.SILENTLY,
    "service_tier": Take.SILENTLY,
    "speed": Take.NAMED,
    "user_profile_id": Take.SILENTLY,
    "workspace_id": Take.SILENTLY,
}


class TextBlock(LenientBody):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(LenientBody):
    """What a model thought in an earlier turn. Its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(LenientBody):
    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(LenientBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[Annotated[list[TextBlock], bounded(MAX_MESSAGES)]] | None = None
    is_error: bool | None = None
    """What went wrong stands in the content, which is all that chat templates show."""


def _type_of(block: Any) -> str:
    return f"<{block.get('type') if isinstance(block, dict) else None}>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_type_of),
]

_ROLE_OF_BLOCK = {ThinkingBlock: "assistant", ToolUseBlock: "assistant", ToolResultBlock: "user"}
"""The role that a message with such a block must have."""


class MessageParam(LenientBody):
    role: Literal["user", "assistant", "system"]
    content: TextOr[Annotated[list[Block], bounded(MAX_MESSAGES)]]

    def to_chat(self, where: str) -> list[Message]:
        """The messages of a chat that say the same: there, results of tools are messages of their
        own, and the calls, thoughts and texts of an assistant are one."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        if not self.content and self.role != "assistant":
            raise InvalidRequest(f"{where}.content is empty", f"{where}.content")
        for n, block in enumerate(self.content):
            if (role := _ROLE_OF_BLOCK.get(type(block), self.role)) != self.role:
                field = f"{where}.content[{n}].type"
                raise InvalidRequest(f"{field} {block.type!r} needs role {role!r}", field)
        return self._said() if self.role == "assistant" else self._heard()

    def _said(self) -> list[Message]:
        """An assistant's message."""
        texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
        for block in self.content:
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case ToolUseBlock(id=call_id, name=name, input=given):
                    function = CalledFunction(name=name, arguments=json.dumps(given))
                    calls.append(ToolCall(id=call_id, function=function))
        return [
            Message(
                role="assistant",
                content="".join(texts),
                reasoning_content="\n".join(thoughts) or None,
                tool_calls=calls or None,
            )
        ]

    def _heard(self) -> list[Message]:
        """What a user, the system or a tool says, in its order."""
        messages: list[Message] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = _text(block.content or "")
                messages.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
            elif isinstance(block, TextBlock):
                if messages and messages[-1].role == self.role:
                    messages[-1].content = f"{messages[-1].content}\n{block.text}"
                else:
                    messages.append(Message(role=self.role, content=block.text))
        return messages


class CustomTool(LenientBody):
    """A function that the client calls itself. Marks such as `cache_control` change nothing."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]

    def to_chat(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema
        )
        return Tool(type="function", function=function)


class MessagesToolChoice(LenientBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(LenientBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """A hint that is not followed: `max_tokens` counts the thoughts too."""


class OutputFormat(LenientBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClosedBody):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensBody(ModelBody):
    """`POST /v1/messages/count_tokens`: a conversation, and what it becomes a prompt with."""

    known = _KNOWN

    messages: Annotated[list[MessageParam], bounded(MAX_MESSAGES, least=1)]
    system: TextOr[Annotated[list[TextBlock], bounded(MAX_MESSAGES)]] | None = None
    tools: Annotated[list[CustomTool], bounded(MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def ignored(self, strict: bool) -> list[str]:
        names = super().ignored(strict)
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        return names

    def to_chat(self) -> ChatBody:
        """The chat request that means the same, checked. Raises InvalidRequest."""
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        messages = self._messages()
        continues = messages[-1].role == "assistant"
        if continues and messages[-1].tool_calls:
            raise InvalidRequest(
                "messages must not end with tool_use: its tool_result must follow", "messages"
            )
        chat = ChatBody(
            model=self.model,
            cache_salt=self.cache_salt,
            messages=messages,
            continue_final_message=continues or None,
            tools=[tool.to_chat() for tool in self.tools or ()] or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            enable_thinking=_THINKS.get(self.thinking.type) if self.thinking else None,
            reasoning_effort=config.effort,
            response_format=_as_response_format(config.format),
            **self._sampling(),
        )
        chat.check()
        return chat

    def _sampling(self) -> dict[str, Any]:
        return {}

    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        if self.system:
            messages.append(Message(role="system", content=_text(self.system)))
        for n, message in enumerate(self.messages):
            messages += message.to_chat(f"messages[{n}]")
        return messages

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type != "tool":
            return "required" if choice.type == "any" else choice.type
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is required", "tool_choice.name")
        return NamedTool(type="function", function=FunctionName(name=choice.name))


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    known = OF_CHATS | _KNOWN

    max_tokens: int
    """For thoughts and answer together."""
    stop_sequences: Annotated[list[str], bounded(MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


_THINKS = {"enabled": True, "disabled": False}
"""Whether the model is to think; where it may choose, its chat template's default decides."""


def _as_response_format(form: OutputFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))


def _text(blocks: str | list[TextBlock]) -> str:
    return blocks if isinstance(blocks, str) else "\n".join(block.text for block in blocks)
