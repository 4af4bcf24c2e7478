"""`POST /v1/responses`: OpenAI's newer API, over the same turn as a chat's. Keeps no state."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from weft.api.bodies import (
    FUNCTION_NAME,
    CalledFunction,
    ClosedBody,
    Function,
    FunctionName,
    Harmless,
    JsonSchema,
    Message,
    NamedTool,
    OpenBody,
    ResponseFormat,
    TextOr,
    ToolCall,
)
from weft.api.bodies import Tool as ChatTool
from weft.api.generation import naming
from weft.api.http import EventStream, answer, body_of, read_body
from weft.api.routes_chat import Reader, Turn
from weft.api.schemas import HARMLESS, AdapterSum, CacheSalt, ChatBody
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.text.chat_parser import Piece, ToolCallDelta

FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""What this API calls fields of the chat request."""

_NOT_SERVED: dict[str, Harmless] = HARMLESS | {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class TextPart(ClosedBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = TextOr[list[TextPart]]


class _Item(ClosedBody):
    """Clients send items of earlier answers back with all the fields that these had."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningPart(ClosedBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[Any] = Field([], max_length=0)
    content: list[ReasoningPart] | None = None


def _type_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_type_of),
]


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
    verbosity: Literal["medium"] | None = None


class ResponsesBody(OpenBody):
    """`POST /v1/responses`."""

    model: str
    adapters: AdapterSum | None = None
    cache_salt: CacheSalt | None = None
    input: TextOr[list[Item]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None

    def to_chat(self) -> ChatBody:
        """The chat request that means the same, checked. Raises InvalidRequest."""
        self.refuse_extra(_NOT_SERVED)
        same = ("model", "cache_salt", "temperature", "top_p", "parallel_tool_calls")
        chat = ChatBody(
            **{name: getattr(self, name) for name in same},
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            response_format=self._format(),
            tools=[tool.to_chat() for tool in self.tools or ()],
            tool_choice=self._tool_choice(),
        )
        chat.check()
        return chat

    def _tool_choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        if isinstance(self.tool_choice, NamedFunction):
            return NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if (form.schema_ is not None) != (form.type == "json_schema"):
            raise InvalidRequest("schema belongs to type 'json_schema'", "text.format.schema")
        schema = None if form.schema_ is None else JsonSchema(schema=form.schema_)
        return ResponseFormat(type=form.type, json_schema=schema)

    def _messages(self) -> list[Message]:
        """The messages of the chat. There, the calls of one turn and the thoughts before them are
        parts of one message."""
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        thoughts: str | None = None
        for n, item in enumerate(self.input):
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
                messages.append(Message(role=item.role, content=content, reasoning_content=own))
                thoughts = None
        if not messages:
            raise InvalidRequest("input must not be empty", "input")
        return messages


def _text(parts: str | list[TextPart]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


Event = dict[str, Any]


def response_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesBody))
    async def create_response(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, service.settings.max_body_bytes)
        with naming(FIELDS):
            chat = body.to_chat()
        pinned = service.pin(body.model, body.adapters)
        response_id = f"resp_{uuid.uuid4().hex}"
        made = _Response(response_id, body, Turn(service, chat, pinned, response_id))
        if body.stream:
            return EventStream(made.events(), pinned.release, typed=True)
        return await answer(request, made.whole(), pinned.release)

    return router


class _Response:
    """One request of the responses API."""

    def __init__(self, response_id: str, body: ResponsesBody, turn: Turn) -> None:
        self._id = response_id
        self._created_at = int(time.time())
        self._body = body
        self._turn = turn

    async def whole(self) -> dict[str, Any]:
        turn = self._turn
        with naming(FIELDS), naming(turn.fields):
            await turn.prepare()
            (output,) = await turn.collect()
        reader, items = turn.reader(), _Items()
        for _ in [*items.add(reader.feed(output)), *items.close(_status(reader))]:
            pass
        return self._ended(output, reader, items)

    async def events(self) -> AsyncGenerator[Event, None]:
        turn = self._turn
        num_sent = 0

        def numbered(event: Event) -> Event:
            nonlocal num_sent
            num_sent += 1
            return {"sequence_number": num_sent - 1, **event}

        with naming(FIELDS), naming(turn.fields):
            await turn.prepare()
            reader, items, output = turn.reader(), _Items(), Output()
            async with aclosing(turn.run()) as deltas:
                async for _, delta in deltas:
                    if not num_sent:
                        begun = self._response("in_progress")
                        yield numbered({"type": "response.created", "response": begun})
                        yield numbered({"type": "response.in_progress", "response": begun})
                    output.add(delta)
                    for event in items.add(reader.feed(delta)):
                        yield numbered(event)
        for event in items.close(_status(reader)):
            yield numbered(event)
        ended = self._ended(output, reader, items)
        yield numbered({"type": f"response.{ended['status']}", "response": ended})

    def _ended(self, output: Output, reader: Reader, items: _Items) -> dict[str, Any]:
        num_input = len(self._turn.requests[0].prompt_ids)
        num_output = len(output.token_ids)
        num_cached, num_thought = output.num_cached_tokens, self._turn.num_reasoning_tokens(output)
        status = _status(reader)
        return self._response(status) | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": None
            if status == "completed"
            else {"reason": "max_output_tokens"},
            "output": items.items,
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": num_thought},
                "total_tokens": num_input + num_output,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        """The response before it has any output: what was asked for, with its defaults."""
        body = self._body
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(reader: Reader) -> str:
    return "incomplete" if reader.finish_reason == "length" else "completed"


class _Items:
    """The items of one output, and the events that tell how they grow. The last one is open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False

    def add(self, piece: Piece) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._text("reasoning", piece.reasoning)
        if piece.content:
            yield from self._text("message", piece.content)
        for call in piece.tool_calls:
            yield from self._call(call)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item. An output without any has an empty message."""
        if not self.items:
            yield from self._text("message", "")
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            yield self._text_event("done", part, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part={**part})
        yield self._item_event("response.output_item.done")

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._begin(_empty_text(kind))
            part = self.items[-1]["content"][0]
            yield self._event("response.content_part.added", content_index=0, part={**part})
        part = self.items[-1]["content"][0]
        part["text"] += text
        if text:
            yield self._text_event("delta", part, delta=text)

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._begin(
                {
                    "type": "function_call",
                    "id": f"fc_{uuid.uuid4().hex}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": "",
                }
            )
        self.items[-1]["arguments"] += call.arguments
        if call.arguments:
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, delta=call.arguments)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        if self._open:
            yield from self.close()
        self._open = True
        self.items.append(item | {"status": "in_progress"})
        added = self._item_event("response.output_item.added")
        if "content" in item:
            added["item"]["content"] = []
        yield added

    def _item_event(self, kind: str) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "output_index": index, "item": {**self.items[-1]}}

    def _text_event(self, what: str, part: dict[str, Any], **fields: Any) -> Event:
        if part["type"] == "output_text":
            fields["logprobs"] = []
        return self._event(f"response.{part['type']}.{what}", content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        index, item_id = len(self.items) - 1, self.items[-1]["id"]
        return {"type": kind, "output_index": index, "item_id": item_id, **fields}


def _empty_text(kind: str) -> dict[str, Any]:
    """A message or reasoning, with one empty part."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        return {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [part]}
