"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.generation import (
    AnswerHead,
    CompletionLogprobs,
    check_logprobs,
    naming,
    num_choices,
    prompt_logprobs,
    sampling,
    truncated,
    usage,
)
from weft.api.http import ERRORS, STREAMED, EventStream, answer, body_of
from weft.api.reading import read_request
from weft.api.schemas import CompletionBody, texts_or_ids
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.core.requests import EngineRequest, FinishReason, TokenLogprob
from weft.core.sampling import StructuredOutputs
from weft.serving import Pinned
from weft.text import OutputDelta

_KIND = "text_completion"


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody), responses=STREAMED)
    async def create_completion(request: Request) -> Response:
        body = await read_request(request, CompletionBody, service.settings)
        body.check()
        pinned = await service.pin(body, request.headers)
        completion = _Completion(service, body, pinned)
        headers = service.headers_of(pinned)
        if body.stream:
            return EventStream(completion.chunks(), pinned.release, headers)
        return await answer(request, completion.whole(), pinned.release, headers)

    return router


class _Completion:
    """One completion request: `n` choices for each prompt."""

    def __init__(self, service: Service, body: CompletionBody, pinned: Pinned) -> None:
        self._service = service
        self._body = body
        self._pinned = pinned
        self._head = AnswerHead.new("cmpl", body, pinned)
        self._language = pinned.language
        self._tokenizer = pinned.language.tokenizer
        self._wants_ids = bool(body.return_token_ids) or self._tokenizer is None
        self._num_choices = 1
        self._texts: list[str] = []
        """The prompts, if they were given as texts."""

    async def whole(self) -> dict[str, Any]:
        form, field = self._body.form()
        with naming({"structured_outputs": field}):
            requests = await self._requests(form)
            outputs = [Output() for _ in requests]
            runs = self._service.run_all(requests, self._language, whole=True)
            async with aclosing(runs) as merged:
                async for i, delta in merged:
                    outputs[i].add(self._wanted(delta))
        choices = [
            self._choice(i, output, CompletionLogprobs(self._body, self._tokenizer), requests[i])
            | prompt_logprobs(self._body, self._tokenizer, requests[i], output)
            for i, output in enumerate(outputs)
        ]
        answer = self._head.chunk(_KIND, choices)
        answer["usage"] = usage(requests, outputs, self._num_choices)
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        form, field = self._body.form()
        with naming({"structured_outputs": field}):
            requests = await self._requests(form)
            outputs = [Output() for _ in requests]
            shapes = [CompletionLogprobs(self._body, self._tokenizer) for _ in requests]
            async with aclosing(self._service.run_all(requests, self._language)) as merged:
                async for i, made in merged:
                    delta, output = self._wanted(made), outputs[i]
                    first = not output.texts
                    output.add(delta)
                    if first or self._shows(delta):
                        request = requests[i] if first else None
                        choice = self._choice(i, delta, shapes[i], request)
                        chunk = self._head.chunk(_KIND, [choice])
                        if self._body.usage_in_all:
                            chunk["usage"] = usage([requests[i]], [output], 1)
                        yield chunk
        if self._body.include_usage:
            total = usage(requests, outputs, self._num_choices)
            yield self._head.chunk(_KIND, []) | {"usage": total}

    def _wanted(self, delta: OutputDelta) -> OutputDelta:
        """The delta; where the prompt alone is wanted, without the one token that the engine has to
        make."""
        return _without_tokens(delta) if self._body.max_tokens == 0 else delta

    async def _requests(self, form: StructuredOutputs | None) -> list[EngineRequest]:
        body = self._body
        self._num_choices = num_choices(self._service, body)
        settings = self._service.settings
        default = settings.default_max_tokens
        max_tokens = default if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens 0 needs echo: true", "max_tokens")
        params = sampling(settings.sampling_defaults, body, max_tokens or 1, body.logprobs, form)
        if body.echo and body.logprobs is not None:
            asked = max(body.logprobs, body.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=asked)
        prompts = await self._prompts()
        self._check_count(len(prompts) * self._num_choices)
        keep, num_answer = body.truncate_prompt_tokens, max(body.max_tokens or 1, 1)
        prompts = [truncated(self._service, keep, ids, num_answer) for ids in prompts]
        asked_in = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_logprobs(self._service, params, prompts, self._num_choices, asked_in)
        tenant = self._service.settings.tenant_of(self._pinned.name)
        return await self._service.intake.requests(
            self._head.request_id,
            prompts,
            params,
            self._pinned,
            tenant,
            self._num_choices,
            asked_in=None if body.max_tokens is None else "max_tokens",
            cache_salt=self._service.salt(tenant, body.cache_salt),
        )

    async def _prompts(self) -> list[list[int]]:
        """The prompts as token ids, whichever of the four forms the field has."""
        body = self._body
        texts, ids = texts_or_ids(body.prompt, "prompt")
        self._check_count(len(texts or ids))
        if not texts:
            return ids
        if body.truncate_prompt_tokens is None:
            self._texts = texts
        return await self._service.encode(
            texts,
            "prompt",
            self._language,
            add_special_tokens=body.add_special_tokens is not False,
            any_length=body.truncate_prompt_tokens is not None,
        )

    def _check_count(self, num_sequences: int) -> None:
        if num_sequences > (limit := self._service.settings.max_prompts):
            raise InvalidRequest(
                f"prompt and n make {num_sequences} sequences, at most {limit}", "prompt"
            )

    def _shows(self, delta: OutputDelta) -> bool:
        return bool(delta.text or delta.finish_reason or delta.logprobs or self._wants_ids)

    def _choice(
        self,
        index: int,
        part: OutputDelta | Output,
        shape: CompletionLogprobs,
        request: EngineRequest | None,
    ) -> dict[str, Any]:
        """A choice, or a piece of one. `request` comes with its first piece."""
        echoed = request if self._body.echo else None
        choice: dict[str, Any] = {
            "index": index,
            "text": part.text if echoed is None else self._prompt_text(index, echoed) + part.text,
            "logprobs": self._logprobs(index, part, shape, echoed),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._wants_ids:
            choice["token_ids"] = part.token_ids
            if request is not None:
                choice["prompt_token_ids"] = request.prompt_ids
        return choice

    def _prompt_text(self, index: int, request: EngineRequest) -> str:
        if self._texts:
            return self._texts[index // self._num_choices]
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(
            request.prompt_ids, self._body.skip_special_tokens is not False
        )

    def _logprobs(
        self,
        index: int,
        part: OutputDelta | Output,
        shape: CompletionLogprobs,
        echoed: EngineRequest | None,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or part.logprobs is None:
            return None
        if echoed is None:
            return shape.piece(part.token_ids, part.logprobs)
        ids = [*echoed.prompt_ids, *part.token_ids]
        logprobs = [*(part.prompt_logprobs or ()), *part.logprobs]
        return shape.piece(ids, logprobs, self._prompt_text(index, echoed), len(echoed.prompt_ids))


def _without_tokens(delta: OutputDelta) -> OutputDelta:
    logprobs = None if delta.logprobs is None else list[TokenLogprob]()
    ended: FinishReason | None = None if delta.finish_reason is None else "length"
    return replace(
        delta, text="", token_ids=[], logprobs=logprobs, finish_reason=ended, stop_reason=None
    )
