"""`/v1/responses`, OpenAI's newer API, on the same turn as chats."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.bodies import CalledFunction, Message, ToolCall, ignored_fields
from weft.api.generation import call_arguments, chat_logprobs, naming
from weft.api.http import ERRORS, STREAMED, EventStream, answer, body_of, json_response
from weft.api.reading import note_ignored, read_request
from weft.api.responses_body import FIELDS, ResponsesBody
from weft.api.routes_chat import Reader, Turn
from weft.api.schemas import ChatBody
from weft.api.service import Output, Service
from weft.api.stored import StoredResponse, StoredResponses, id_of_item
from weft.text import OutputDelta
from weft.text.pieces import Piece, TextDelta, ToolCallDelta

Event = dict[str, Any]


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    kept = StoredResponses(service.settings.response_store_bytes)

    def tenant() -> str:
        access = service.access
        access.need("use")
        return access.caller.tenant

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesBody), responses=STREAMED)
    async def create_response(request: Request) -> Response:
        body = await read_request(request, ResponsesBody, service.settings)
        previous, before = body.previous_response_id, tuple[Message, ...]()
        if previous is not None:
            before = kept.get(tenant(), previous, "previous_response_id").messages
        with naming(FIELDS):
            chat = body.to_chat(before, kept.finder(tenant()))
        pinned = await service.pin(body, request.headers)
        response_id = f"resp_{uuid.uuid4().hex}"
        turn = Turn(service, chat, pinned, response_id, drops_oldest=body.truncation == "auto")
        store = kept.max_bytes and body.store is not False
        keep = partial(kept.put, tenant(), response_id) if store else None
        made = _Response(response_id, body, chat, turn, keep)
        headers = service.headers_of(pinned)
        if body.stream:
            return EventStream(made.events(), pinned.release, headers, typed=True)
        return await answer(request, made.whole(), pinned.release, headers)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A response that the same tenant has stored. It is not streamed."""
        known = {"stream": ("false",)}
        strict = service.settings.strict_fields
        note_ignored(request, ignored_fields(request.query_params, known, strict=strict))
        shown = kept.get(tenant(), response_id).shown
        return Response(shown, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Forget a stored response."""
        kept.delete(tenant(), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


class _Response:
    """One request of the responses API."""

    def __init__(
        self,
        response_id: str,
        body: ResponsesBody,
        chat: ChatBody,
        turn: Turn,
        keep: Callable[[StoredResponse], None] | None,
    ) -> None:
        """`keep` stores the response when it has ended."""
        self._keep = keep
        self._id = response_id
        self._created_at = int(time.time())
        self._body = body
        self._chat = chat
        self._turn = turn

    async def whole(self) -> dict[str, Any]:
        """The response that has ended, which the last event has."""
        ended: dict[str, Any] = {}
        async for event in self.events(whole=True):
            ended = event.get("response", ended)
        return ended

    async def events(self, whole: bool = False) -> AsyncGenerator[Event, None]:
        """How the response grows; `whole`: it may come in one piece, if that is faster."""
        turn = self._turn
        num_sent = 0

        def numbered(event: Event) -> Event:
            nonlocal num_sent
            num_sent += 1
            return {"sequence_number": num_sent - 1, **event}

        with naming(FIELDS), naming(turn.fields):
            await turn.prepare()
            reader, items, output = turn.reader(), _Items(self._id), Output()
            async with aclosing(self._deltas(whole)) as deltas:
                async for _, delta in deltas:
                    if not num_sent:
                        begun = self._response("in_progress")
                        yield numbered({"type": "response.created", "response": begun})
                        yield numbered({"type": "response.in_progress", "response": begun})
                    output.add(delta)
                    for event in self._add(delta, reader, items):
                        yield numbered(event)
        reader.check_whole()
        for event in items.close(_status(reader)):
            yield numbered(event)
        ended = self._ended(output, reader, items)
        yield numbered({"type": f"response.{ended['status']}", "response": ended})

    def _deltas(self, whole: bool) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Which token's log-probabilities are of the answer shows only token by token."""
        by_token = self._body.wants_logprobs
        return self._turn.run(whole and not by_token, by_token)

    def _add(self, part: OutputDelta, reader: Reader, items: _Items) -> Iterator[Event]:
        """What a part of the output adds to the items. Only tokens of the answer itself have
        log-probabilities: those of reasoning and calls are left out."""
        piece, begin = reader.feed(part), self._turn.begin_of_text(reader)
        told = chat_logprobs(self._chat, self._turn.tokenizer, part)
        logprobs: list[dict[str, Any]] = told["content"] if told else []
        if told and begin in part.token_ids:
            items.forget_logprobs()
            logprobs = logprobs[part.token_ids.index(begin) + 1 :]
        elif piece.reasoning or piece.tool_calls:
            items.forget_logprobs()
            logprobs = []
        return items.add(piece, logprobs)

    def _ended(self, output: Output, reader: Reader, items: _Items) -> dict[str, Any]:
        num_input = len(self._turn.requests[0].prompt_ids)
        num_output = len(output.token_ids)
        num_cached = output.num_cached_tokens
        num_thought = self._turn.num_reasoning_tokens(output, reader)
        status = _status(reader)
        shown = self._response(status) | {
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
        if self._keep is not None:
            own = self._chat.messages[1 if self._body.instructions else 0 :]
            self._keep(StoredResponse.of(shown, (*own, _message(reader))))
        return shown

    def _response(self, status: str) -> dict[str, Any]:
        """The response before it has any output: what was asked for, with its defaults."""
        body, params = self._body, self._turn.requests[0].params
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
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": self._chat.reasoning_effort, "summary": None},
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }


def _message(reader: Reader) -> Message:
    """The answer as a message of the conversation."""
    calls = [
        ToolCall(
            id=call.id or "",
            function=CalledFunction(
                name=call.name or "", arguments=json.dumps(call_arguments(call.arguments))
            ),
        )
        for call in reader.calls
    ]
    return Message(
        role="assistant",
        content=reader.content,
        reasoning_content=reader.reasoning or None,
        tool_calls=calls or None,
    )


def _status(reader: Reader) -> str:
    return "incomplete" if reader.finish_reason == "length" else "completed"


class _Items:
    """The items of one output, and the events that tell how they grow. The last one is open."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []
        """Those of tokens whose text has not come yet."""

    def forget_logprobs(self) -> None:
        """The tokens that wait for their text were none of the answer."""
        self._logprobs = []

    def add(self, piece: Piece, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._logprobs += logprobs
        for part in piece.parts:
            if isinstance(part, TextDelta):
                kind = "message" if part.kind == "content" else part.kind
                yield from self._text(kind, part.text)
            else:
                yield from self._call(part)

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
            self._take_logprobs(part)
            yield self._text_event("done", part, part.get("logprobs"), text=part["text"])
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
            yield self._text_event("delta", part, self._take_logprobs(part), delta=text)

    def _take_logprobs(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Those that waited for this part's text, which are its own from now on."""
        if part["type"] != "output_text":
            return []
        taken, self._logprobs = self._logprobs, []
        part["logprobs"] += taken
        return taken

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._begin(
                {
                    "type": "function_call",
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
        own = id_of_item(_KINDS[item["type"]], self._response_id, len(self.items))
        self.items.append({"id": own, **item, "status": "in_progress"})
        added = self._item_event("response.output_item.added")
        if "content" in item:
            added["item"]["content"] = []
        yield added

    def _item_event(self, kind: str) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "output_index": index, "item": {**self.items[-1]}}

    def _text_event(
        self, what: str, part: dict[str, Any], logprobs: list[dict[str, Any]] | None, **fields: Any
    ) -> Event:
        if part["type"] == "output_text":
            fields["logprobs"] = logprobs
        return self._event(f"response.{part['type']}.{what}", content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        index, item_id = len(self.items) - 1, self.items[-1]["id"]
        return {"type": kind, "output_index": index, "item_id": item_id, **fields}


_KINDS = {"function_call": "fc", "message": "msg", "reasoning": "rs"}
"""What the ids of items begin with, by their types."""


def _empty_text(kind: str) -> dict[str, Any]:
    """A message or reasoning, with one empty part."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        return {"type": kind, "summary": [], "content": [part]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": kind, "role": "assistant", "content": [part]}
