"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.chat import Reader, Turn
from weft.api.generation import AnswerHead, naming, usage
from weft.api.http import EventStream, answer, body_of, read_body
from weft.api.logprobs import chat_logprobs, prompt_logprobs
from weft.api.schemas import ChatBody
from weft.api.service import Output, Service
from weft.serving import Pinned
from weft.text import OutputDelta
from weft.text.chat_parser import Piece, ToolCallDelta

_WHOLE = "chat.completion"
_CHUNK = "chat.completion.chunk"


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody, service.settings.max_body_bytes)
        body.check()
        pinned = service.pin(body.model, body.adapters)
        chat = _Chat(service, body, pinned)
        if body.stream:
            return EventStream(chat.chunks(), pinned.release)
        return await answer(request, chat.whole(), pinned.release)

    return router


class _Chat:
    """One chat request."""

    def __init__(self, service: Service, body: ChatBody, pinned: Pinned) -> None:
        self._service = service
        self._body = body
        self._head = AnswerHead.new("chatcmpl", body, pinned)
        self._turn = Turn(service, body, pinned, self._head.id)
        self._wants_ids = bool(body.return_token_ids) or self._turn.tokenizer is None

    async def whole(self) -> dict[str, Any]:
        turn = self._turn
        with naming(turn.fields):
            await turn.prepare()
            outputs = await turn.collect()
        choices = [self._whole_choice(i, output) for i, output in enumerate(outputs)]
        answer = self._head.chunk(_WHOLE, choices)
        answer["usage"] = usage(turn.requests, outputs, turn.num_choices)
        if self._wants_ids:
            answer["prompt_token_ids"] = turn.requests[0].prompt_ids
        if (asked := self._body.prompt_logprobs) is not None and outputs[0].prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(
                turn.tokenizer,
                turn.requests[0].prompt_ids,
                outputs[0].prompt_logprobs,
                asked,
                bool(self._body.return_tokens_as_token_ids),
            )
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        turn = self._turn
        with naming(turn.fields):
            await turn.prepare()
            outputs = [Output() for _ in turn.requests]
            readers = [turn.reader() for _ in turn.requests]
            async with aclosing(turn.run()) as merged:
                async for i, delta in merged:
                    if not outputs[i].texts:
                        yield self._opening(i)
                    outputs[i].add(delta)
                    piece = readers[i].feed(delta)
                    if self._shows(delta, piece):
                        yield self._head.chunk(_CHUNK, [self._choice(i, delta, piece, readers[i])])
        if self._body.include_usage:
            total = usage(turn.requests, outputs, turn.num_choices)
            yield self._head.chunk(_CHUNK, []) | {"usage": total}

    def _whole_choice(self, index: int, output: Output) -> dict[str, Any]:
        reader = self._turn.reader()
        reader.feed(output)
        content = None if reader.calls and not reader.content else reader.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reader.reasoning:
            message |= _reasoning(reader.reasoning)
        if reader.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reader.calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": reader.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._wants_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head.chunk(_CHUNK, [choice])
        if self._wants_ids:
            chunk["prompt_token_ids"] = self._turn.requests[0].prompt_ids
        return chunk

    def _shows(self, delta: OutputDelta, piece: Piece) -> bool:
        said = piece.content or piece.reasoning or piece.tool_calls
        return bool(said or delta.finish_reason or delta.logprobs or self._wants_ids)

    def _choice(
        self, index: int, delta: OutputDelta, piece: Piece, reader: Reader
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.reasoning:
            said |= _reasoning(piece.reasoning)
        if piece.tool_calls:
            said["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        choice: dict[str, Any] = {
            "index": index,
            "delta": said,
            "logprobs": self._logprobs(delta),
            "finish_reason": reader.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._wants_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, part: OutputDelta | Output) -> dict[str, Any] | None:
        body = self._body
        if not body.logprobs or part.logprobs is None:
            return None
        return chat_logprobs(
            self._turn.tokenizer,
            part.token_ids,
            part.logprobs,
            body.top_logprobs or 0,
            bool(body.return_tokens_as_token_ids),
        )


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """A call's id, type and name come once, with its first delta."""
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    named = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": named}
