"""What answers of both generation routes are made of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.api.schemas import GenerationBody
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.core.types import EngineRequest, SamplingParams
from weft.registry import Lease


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of an answer begin with."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    """Names the adapter version that answers, so that a client can tell it changed."""

    @classmethod
    def new(cls, prefix: str, model: str, lease: Lease) -> Head:
        fingerprint = f"fp_{lease.ref.digest[:16]}" if lease.ref is not None else None
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage(prompts: Iterable[Sequence[int]], outputs: Iterable[Output]) -> dict[str, Any]:
    num_prompt = sum(len(ids) for ids in prompts)
    num_completion = num_cached = 0
    for output in outputs:
        num_completion += len(output.token_ids)
        num_cached += output.num_cached_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def sampling(
    body: GenerationBody, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Sampling parameters of a request's fields. Raises InvalidRequest naming the field."""
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids")
        if (value := getattr(body, name)) is not None
    }
    for token in given.get("stop_token_ids", ()):
        if token >= vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}",
                "stop_token_ids",
            )
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        **given,
    )


def engine_request(
    service: Service,
    request_id: str,
    prompt_ids: list[int],
    params: SamplingParams,
    lease: Lease,
    *,
    prompt_field: str,
    asked_in: str | None,
) -> EngineRequest:
    """A checked request to the engine. Raises InvalidRequest, ContextLengthExceeded."""
    service.check_ids(prompt_ids, prompt_field)
    fitted = service.fit(len(prompt_ids), params, prompt_field, asked_in)
    return EngineRequest(request_id, prompt_ids, fitted, lease.ref)
