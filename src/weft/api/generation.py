"""Parts of answers that all generation routes share: head, usage, log-probabilities."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from pydantic_core import from_json

from weft.api.schemas import ChatBody, CompletionBody, GenerationBody
from weft.api.service import Output, Service
from weft.core.errors import InvalidRequest
from weft.core.requests import EngineRequest, TokenLogprob
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.serving import Pinned
from weft.text import OutputDelta, TokenReader

_FIELDS = [f.name for f in fields(SamplingParams) if f.name in GenerationBody.model_fields]
"""The fields that bodies and SamplingParams share; null leaves the default."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields at the beginning of all chunks of an answer."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    """The adapter version that answers, so that clients notice when it changes."""
    include_usage: bool
    """Whether chunks have a field for the usage, which only a last one fills."""
    request_id: str
    """The engine's id of the request. It is unique, whatever ids clients choose."""

    @classmethod
    def new(cls, prefix: str, body: GenerationBody, pinned: Pinned) -> AnswerHead:
        ref = pinned.lease.ref
        fingerprint = f"fp_{ref.digest[:16]}" if ref is not None else None
        if ref is not None and ref.name != ref.bare:
            fingerprint = f"{fingerprint}_v{ref.version}"
        own, created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        given = body.answer_id or own
        return cls(given, created, body.model, fingerprint, body.include_usage, own)

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if self.include_usage:
            chunk["usage"] = None
        return chunk


def usage(
    requests: Sequence[EngineRequest], outputs: Sequence[Output], num_choices: int
) -> dict[str, Any]:
    """The tokens used. Each `num_choices` requests in a row share a prompt, which counts once."""
    num_prompt = sum(len(r.prompt_ids) for r in requests[::num_choices])
    num_cached = sum(o.num_cached_tokens for o in outputs[::num_choices])
    num_completion = sum(len(o.token_ids) for o in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def sampling(
    defaults: Mapping[str, float],
    body: GenerationBody,
    max_tokens: int | None,
    logprobs: int | None,
    form: StructuredOutputs | None,
) -> SamplingParams:
    """The sampling parameters that a body asks for, or `defaults` where it does not say. Raises
    InvalidRequest naming the field."""
    given: dict[str, Any] = {**defaults}
    given |= {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    given |= {
        "max_tokens": max_tokens,
        "logit_bias": {_token_id(key): bias for key, bias in (body.logit_bias or {}).items()},
        "structured_outputs": form,
        "logprobs": logprobs,
    }
    return SamplingParams(**given)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 20):
        raise InvalidRequest(f"logit_bias: {key!r} is no token id", "logit_bias")
    return int(key)


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Inside this context, errors name each field as the client knows it. `fields` maps our names
    to the client's where these differ."""
    try:
        yield
    except InvalidRequest as error:
        own = error.param or ""
        if not (known := fields.get(own)):
            raise
        starts = error.message.startswith(own)
        message = known + error.message[len(own) :] if starts else error.message
        raise type(error)(message, known) from None


def num_choices(service: Service, body: GenerationBody) -> int:
    """How many choices each prompt gets. Raises InvalidRequest, and Overloaded if there is no room
    for them: early, as it would cost much more to build all their requests first."""
    count = 1 if body.n is None else body.n
    limit = service.settings.max_choices
    if not 1 <= count <= limit:
        raise InvalidRequest(f"n must be in [1, {limit}], got {count}", "n")
    if count > 1:  # one choice was checked with the model's name
        service.admission.check_early(service.settings.tenant_of(body.model), count)
    return count


def truncated(
    service: Service, keep: int | None, prompt_ids: list[int], num_answer: int
) -> list[int]:
    """The end of the prompt that `truncate_prompt_tokens` (`keep`) leaves; -1 leaves what fits
    beside `num_answer` tokens of an answer. Raises InvalidRequest."""
    if keep is None:
        return prompt_ids
    limit = service.intake.max_model_len
    if keep == -1:
        keep = max(limit - num_answer, 1)
    if not 1 <= keep <= limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {limit}], got {keep}",
            "truncate_prompt_tokens",
        )
    return prompt_ids[-keep:]


def check_logprobs(
    service: Service,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    num_choices: int,
    asked_in: str = "prompt_logprobs",
) -> None:
    """Raises InvalidRequest if more log-probabilities are asked for than the settings allow in one
    step, or for all prompts together; `asked_in`: the field that asks for those of prompts."""
    settings = service.settings
    if params.logprobs is not None:
        count = len(prompts) * num_choices * (params.logprobs + 1)
        if count > (most := settings.max_step_logprobs):
            raise InvalidRequest(
                f"prompts, n and logprobs make {count} log-probabilities for each step, and there"
                f" may be {most}",
                "logprobs",
            )
    if params.prompt_logprobs is not None:
        num_tokens = num_choices * sum(map(len, prompts))
        count = num_tokens * (params.prompt_logprobs + 1)
        if count > (most := settings.max_prompt_logprobs):
            raise InvalidRequest(
                f"prompts, n and {asked_in} make {count} log-probabilities for prompts, and there"
                f" may be {most}",
                asked_in,
            )


def token_text(tokenizer: TokenReader | None, token_id: int, as_id: bool = False) -> str:
    """How a token is shown: its text; its bytes when they are no text; its id if all else fails
    or the client wants ids."""
    if tokenizer is None or as_id:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(
    body: ChatBody, tokenizer: TokenReader | None, part: OutputDelta | Output
) -> dict[str, Any] | None:
    """The `logprobs` of a chat choice, or of a piece of one."""
    if not body.logprobs or part.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        shown = token_text(tokenizer, token_id, bool(body.return_tokens_as_token_ids))
        return {"token": shown, "logprob": logprob, "bytes": data}

    num_top = body.top_logprobs or 0
    content = [
        entry(token_id, lp.logprob) | {"top_logprobs": [entry(*t) for t in lp.top[:num_top]]}
        for token_id, lp in zip(part.token_ids, part.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    body: GenerationBody, tokenizer: TokenReader | None, request: EngineRequest, output: Output
) -> dict[str, Any]:
    """The field with the log-probabilities of a prompt, if they were asked for, as vLLM shows them:
    at each position the alternatives and the prompt's own token, by id."""
    num_top, logprobs = body.prompt_logprobs, output.prompt_logprobs
    if num_top is None or logprobs is None:
        return {}

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        shown = token_text(tokenizer, token_id, bool(body.return_tokens_as_token_ids))
        return {"logprob": logprob, "rank": rank, "decoded_token": shown}

    def position(token_id: int, lp: TokenLogprob) -> dict[int, dict[str, Any]]:
        best = {t: entry(t, value, n + 1) for n, (t, value) in enumerate(lp.top[:num_top])}
        return {token_id: entry(token_id, lp.logprob, lp.rank)} | best

    pairs = zip(request.prompt_ids, logprobs, strict=True)
    return {"prompt_logprobs": [None if lp is None else position(t, lp) for t, lp in pairs]}


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object. It is empty if they are not one (because the answer was
    cut off inside them), or are nested too deeply."""
    try:
        arguments = from_json(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece: offsets run on between pieces."""

    def __init__(self, body: CompletionBody, tokenizer: TokenReader | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = body.logprobs or 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._special = frozenset[int]() if tokenizer is None else tokenizer.special_ids
        self._hides_special = body.skip_special_tokens is not False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def piece(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        prompt: str = "",
        num_prompt: int = 0,
    ) -> dict[str, Any]:
        """`prompt`: the text of the first `num_prompt` tokens."""
        offsets = self._in_prompt(token_ids[:num_prompt], prompt) if num_prompt else []
        offsets += [self._advance(t) for t in token_ids[num_prompt:]]
        return {
            "tokens": [self._shown(t) for t in token_ids],
            "token_logprobs": [None if lp is None else lp.logprob for lp in logprobs],
            "top_logprobs": [self._top(t, lp) for t, lp in zip(token_ids, logprobs, strict=False)],
            "text_offset": offsets,
        }

    def _in_prompt(self, token_ids: Sequence[int], prompt: str) -> list[int]:
        """Where each token of a prompt begins in its text, which may have special tokens written
        out. Sentencepiece adds a space to what comes first, or after one of these."""
        offsets, num_settled, begin = list[int](), 0, 0

        def settle(end: int) -> None:
            added = max(self._num_chars - end, 0)
            offsets[num_settled:] = [max(each - added, begin) for each in offsets[num_settled:]]
            self._num_chars = end
            self._decoder.reset()

        for token_id in token_ids:
            mark = token_text(self._tokenizer, token_id) if token_id in self._special else ""
            at = prompt.find(mark, begin, self._num_chars + len(mark)) if mark else -1
            if at < 0:
                offsets.append(self._advance(token_id))
                continue
            settle(at)
            offsets.append(at)
            num_settled = len(offsets)
            begin = self._num_chars = at + len(mark)
        settle(len(prompt))
        return offsets

    def _shown(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, self._as_ids)

    def _top(self, token_id: int, lp: TokenLogprob | None) -> dict[str, float] | None:
        """The alternatives by their texts; the chosen token is always among them."""
        if lp is None:
            return None
        best = {self._shown(t): value for t, value in lp.top[: self._num_top]}
        return best | {self._shown(token_id): lp.logprob}

    def _advance(self, token_id: int) -> int:
        """The character at which this token begins. Its own characters are counted for the next."""
        hidden = self._hides_special and token_id in self._special
        if self._tokenizer is None or hidden:
            return self._num_chars
        data = self._tokenizer.token_bytes(token_id)
        if data and data[0] & 0xC0 != 0x80:  # what came before is a whole character, or none
            self._num_chars += len(self._decoder.decode(b"", final=True))
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return start
