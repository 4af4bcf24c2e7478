"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.generation import Head, engine_request, sampling, usage
from weft.api.http import EventStream, answer, read_body
from weft.api.logprobs import CompletionLogprobs
from weft.api.schemas import CompletionBody
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.core.types import EngineRequest, TokenLogprob
from weft.registry import Lease
from weft.text import OutputDelta

_KIND = "text_completion"


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionBody, service.settings.max_body_bytes)
        body.check()
        lease = service.pin(body.model)
        completion = _Completion(service, body, lease)
        if body.stream:
            return EventStream(completion.chunks(), lease.release)
        return await answer(request, completion.whole(), lease.release)

    return router


class _Completion:
    """One completion request: a choice for each prompt."""

    def __init__(self, service: Service, body: CompletionBody, lease: Lease) -> None:
        self._service = service
        self._body = body
        self._lease = lease
        self._head = Head.new("cmpl", body.model, lease)
        self._wants_ids = bool(body.return_token_ids) or service.tokenizer is None

    async def whole(self) -> dict[str, Any]:
        requests = await self._requests()
        outputs = await self._service.collect(requests)
        choices = [
            self._with_prompt(self._choice(i, output, self._shape()), requests[i])
            for i, output in enumerate(outputs)
        ]
        answer = self._head.chunk(_KIND, choices)
        answer["usage"] = usage((r.prompt_ids for r in requests), outputs)
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        requests = await self._requests()
        outputs = [Output() for _ in requests]
        shapes = [self._shape() for _ in requests]
        async with aclosing(self._service.run_all(requests)) as merged:
            async for index, delta in merged:
                first = not outputs[index].texts
                outputs[index].add(delta)
                if first or delta.text or delta.finish_reason or delta.logprobs or self._wants_ids:
                    choice = self._choice(index, delta, shapes[index])
                    if first:
                        choice = self._with_prompt(choice, requests[index])
                    yield self._chunk([choice])
        if self._body.include_usage:
            yield self._chunk([]) | {"usage": usage((r.prompt_ids for r in requests), outputs)}

    async def _requests(self) -> list[EngineRequest]:
        body = self._body
        params = sampling(
            body,
            self._service.settings.default_max_tokens
            if body.max_tokens is None
            else body.max_tokens,
            body.logprobs,
            self._service.engine.info.vocab_size,
        )
        asked_in = None if body.max_tokens is None else "max_tokens"
        return [
            engine_request(
                self._service,
                f"{self._head.id}-{index}",
                prompt_ids,
                params,
                self._lease,
                prompt_field="prompt",
                asked_in=asked_in,
            )
            for index, prompt_ids in enumerate(await self._prompts())
        ]

    async def _prompts(self) -> list[list[int]]:
        """The prompts as token ids, whichever of the four forms the field has."""
        prompt = [self._body.prompt] if isinstance(self._body.prompt, str) else self._body.prompt
        if not prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > (limit := self._service.settings.max_prompts):
            raise InvalidRequest(f"prompt holds {len(prompt)} prompts, at most {limit}", "prompt")
        if isinstance(prompt[0], str):
            return await self._service.encode(prompt, "prompt")
        return prompt

    def _shape(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._service.tokenizer, self._body.logprobs or 0, self._body.skip_special_tokens
        )

    def _choice(
        self, index: int, part: OutputDelta | Output, shape: CompletionLogprobs
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs(shape, part.token_ids, part.logprobs),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._wants_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _with_prompt(self, choice: dict[str, Any], request: EngineRequest) -> dict[str, Any]:
        return choice | {"prompt_token_ids": request.prompt_ids} if self._wants_ids else choice

    def _logprobs(
        self,
        shape: CompletionLogprobs,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or logprobs is None:
            return None
        return shape.piece(token_ids, logprobs)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head.chunk(_KIND, choices)
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk
