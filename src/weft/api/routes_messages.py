"""`POST /v1/messages` and `count_tokens`, Anthropic's API, on the same turn as chats."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.generation import call_arguments, naming
from weft.api.http import ERRORS, STREAMED, EventStream, answer, body_of, json_response
from weft.api.messages_body import FIELDS, CountTokensBody, MessagesBody
from weft.api.reading import read_request
from weft.api.routes_chat import Reader, Turn
from weft.api.service import Output, Service
from weft.text.pieces import Piece, TextDelta, ToolCallDelta

Event = dict[str, Any]


def message_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/messages", openapi_extra=body_of(MessagesBody), responses=STREAMED)
    async def create_message(request: Request) -> Response:
        body = await read_request(request, MessagesBody, service.settings)
        with naming(FIELDS):
            chat = body.to_chat()
        pinned = await service.pin(body, request.headers)
        message_id = f"msg_{uuid.uuid4().hex}"
        made = _Message(message_id, body, Turn(service, chat, pinned, message_id, fills=True))
        headers = service.headers_of(pinned)
        if body.stream:
            return EventStream(made.events(), pinned.release, headers, typed=True)
        return await answer(request, made.whole(), pinned.release, headers)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of this conversation has."""
        body = await read_request(request, CountTokensBody, service.settings)
        with naming(FIELDS):
            chat = body.to_chat()
        pinned = await service.pin(body, request.headers)
        try:
            count = await Turn(service, chat, pinned, "").count()
        finally:
            pinned.release()
        return json_response({"input_tokens": count})

    return router


class _Message:
    """One request for a message."""

    def __init__(self, message_id: str, body: MessagesBody, turn: Turn) -> None:
        self._id = message_id
        self._body = body
        self._turn = turn

    async def whole(self) -> dict[str, Any]:
        turn = self._turn
        with naming(FIELDS), naming(turn.fields):
            await turn.prepare()
            (output,) = await turn.collect()
        reader, blocks = turn.reader(), _Blocks()
        for _ in [*blocks.add(reader.feed(output)), *blocks.close()]:
            pass
        reader.check_whole()
        shown = self._shown(output, reader)
        return shown | {"content": blocks.blocks, **self._ending(reader, output)}

    async def events(self) -> AsyncGenerator[Event, None]:
        turn, begun = self._turn, False
        with naming(FIELDS), naming(turn.fields):
            await turn.prepare()
            reader, blocks, output = turn.reader(), _Blocks(), Output()
            async with aclosing(turn.run()) as deltas:
                async for _, delta in deltas:
                    output.add(delta)
                    if not begun:
                        begun = True
                        yield {"type": "message_start", "message": self._shown(output, reader)}
                        yield {"type": "ping"}
                    for event in blocks.add(reader.feed(delta)):
                        yield event
        reader.check_whole()
        for event in blocks.close():
            yield event
        ending = self._ending(reader, output)
        yield {"type": "message_delta", "delta": ending, "usage": self._usage(output, reader)}
        yield {"type": "message_stop"}

    def _shown(self, output: Output, reader: Reader) -> dict[str, Any]:
        """The message, of which there is no content yet."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output, reader),
        }

    def _ending(self, reader: Reader, output: Output) -> dict[str, Any]:
        """Why the message ends."""
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        if reader.finish_reason == "tool_calls":
            reason = "tool_use"
        elif reader.finish_reason == "length":
            whole = len(output.token_ids) >= self._body.max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: Output, reader: Reader) -> dict[str, Any]:
        """The tokens used. Those of a cached prefix are not among the input's."""
        num_cached = output.num_cached_tokens
        num_thought = self._turn.num_reasoning_tokens(output, reader)
        return {
            "input_tokens": len(self._turn.requests[0].prompt_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": len(output.token_ids),
            "output_tokens_details": {"thinking_tokens": num_thought},
        }


class _Blocks:
    """The content blocks of one message, and the events that tell how they grow. The last one is
    open."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False
        self._input = ""
        """The JSON so far of the open call's arguments."""

    def add(self, piece: Piece) -> Iterator[Event]:
        for part in piece.parts:
            if isinstance(part, TextDelta):
                kind = "text" if part.kind == "content" else "thinking"
                yield from self._text(kind, part.text)
            else:
                yield from self._call(part)

    def close(self) -> Iterator[Event]:
        """End the open block."""
        if not self._open:
            return
        self._open = False
        block = self.blocks[-1]
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        elif block["type"] == "tool_use":
            block["input"] = call_arguments(self._input)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signed})
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._begin(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
            self._input = ""
        self._input += call.arguments
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open = True
        self.blocks.append(block)
        index = len(self.blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
