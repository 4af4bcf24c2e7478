"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.generation import Head, engine_request, sampling, usage
from weft.api.http import EventStream, answer, read_body
from weft.api.logprobs import chat_logprobs
from weft.api.schemas import ChatBody
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.core.types import EngineRequest, SamplingParams
from weft.registry import Lease
from weft.text import OutputDelta

_WHOLE = "chat.completion"
_CHUNK = "chat.completion.chunk"


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody, service.settings.max_body_bytes)
        body.check()
        lease = service.pin(body.model)
        chat = _Chat(service, body, lease)
        if body.stream:
            return EventStream(chat.chunks(), lease.release)
        return await answer(request, chat.whole(), lease.release)

    return router


class _Chat:
    """One chat request."""

    def __init__(self, service: Service, body: ChatBody, lease: Lease) -> None:
        self._service = service
        self._body = body
        self._lease = lease
        self._head = Head.new("chatcmpl", body.model, lease)
        self._wants_ids = bool(body.return_token_ids) or service.tokenizer is None

    async def whole(self) -> dict[str, Any]:
        request = await self._request()
        outputs = await self._service.collect([request])
        output = outputs[0]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        answer = self._head.chunk(_WHOLE, [choice])
        answer["usage"] = usage([request.prompt_ids], outputs)
        if self._wants_ids:
            answer["prompt_token_ids"] = request.prompt_ids
            choice["token_ids"] = output.token_ids
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        request = await self._request()
        output = Output()
        opened = False
        async with aclosing(self._service.run(request)) as deltas:
            async for delta in deltas:
                output.add(delta)
                if not opened:
                    opened = True
                    yield self._opening(request)
                if delta.text or delta.finish_reason or delta.logprobs or self._wants_ids:
                    yield self._chunk([self._choice(delta)])
        if self._body.include_usage:
            yield self._chunk([]) | {"usage": usage([request.prompt_ids], [output])}

    async def _request(self) -> EngineRequest:
        body = self._body
        params = self._params()
        messages = [m.to_template(i) for i, m in enumerate(body.messages)]
        ids = await self._service.encode_chat(
            messages, body.add_generation_prompt, body.chat_template_kwargs
        )
        return engine_request(
            self._service,
            self._head.id,
            ids,
            params,
            self._lease,
            prompt_field="messages",
            asked_in=self._max_tokens_field(),
        )

    def _params(self) -> SamplingParams:
        body = self._body
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        try:
            return sampling(
                body,
                max_tokens,
                (body.top_logprobs or 0) if body.logprobs else None,
                self._service.engine.info.vocab_size,
            )
        except InvalidRequest as error:
            renamed = {"max_tokens": self._max_tokens_field(), "logprobs": "top_logprobs"}
            param = renamed.get(error.param or "", error.param)
            raise InvalidRequest(
                error.message.replace(str(error.param), str(param), 1), param
            ) from None

    def _max_tokens_field(self) -> str | None:
        """The field in which the client set the length of the answer."""
        if self._body.max_completion_tokens is not None:
            return "max_completion_tokens"
        return None if self._body.max_tokens is None else "max_tokens"

    def _opening(self, request: EngineRequest) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice])
        if self._wants_ids:
            chunk["prompt_token_ids"] = request.prompt_ids
        return chunk

    def _choice(self, delta: OutputDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._wants_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: Any) -> dict[str, Any] | None:
        if not self._body.logprobs or logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        return chat_logprobs(tokenizer, token_ids, logprobs, self._body.top_logprobs or 0)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head.chunk(_CHUNK, choices)
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk
