"""Prepares a prompt for the engine: pin the adapter, encode, check, and build the request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from weft.core.adapters import ClassHead, WeightedAdapter
from weft.core.errors import MAXIMUM, ContextLengthExceeded, InvalidRequest, shown, too_long
from weft.core.requests import EngineRequest, Pooling
from weft.core.sampling import SamplingParams
from weft.core.stats import EngineInfo
from weft.grammar.check import check_form
from weft.registry import Access, AdapterRegistry, Lease
from weft.serving.publisher import Executor
from weft.text import AdapterTokenizers, Tokenizer, TokenReader
from weft.text.adapter_tokenizers import NO_FORMS
from weft.text.sandbox.jobs import Answer, Chat, Decode, Encode, Ids, Text
from weft.text.sandbox.pool import Call, Owner
from weft.text.templates import template_options
from weft.text.tokenizer import bad_token_ids, spellings

T = TypeVar("T")

_MESSAGE_CHARS = 16
"""What `_work` counts, in characters, for each object or list beside its texts."""


_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""A pooled request ends after its prompt, and samples one token that nobody reads."""
_CLIENTS = "its client"
"""Named as the owner of a chat template that came with a request."""


@dataclass(frozen=True, slots=True)
class Language:
    """How a model's text becomes tokens. An adapter has its own language if it brings a tokenizer,
    a chat template or added tokens, else the base model's."""

    tokenizer: TokenReader | None
    vocab_size: int
    """Valid token ids are below this."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end an output, in addition to the base model's."""
    takes_forms: bool = True
    """Whether structured outputs are possible: they are compiled for the base's tokens."""
    author: str = ""
    """Who brought the chat template, and perhaps the tokenizer: the adapter's namespace or, if it
    has none, its name. These run in worker processes. "": they are the base model's."""


@dataclass(frozen=True, slots=True)
class Pinned(AbstractContextManager["Pinned"]):
    """The model of a request: a base, an adapter's version or a sum, kept until `release`."""

    lease: Lease
    language: Language
    head: ClassHead | None = None
    """The classification head, if the adapter was trained with one."""

    @property
    def name(self) -> str | None:
        """The adapter's name without a version, or a sum's names; None for the base model."""
        return self.lease.ref.bare if self.lease.ref is not None else None

    def release(self) -> None:
        """Give the adapter back. A second call does nothing."""
        self.lease.release()

    def __exit__(self, *_: object) -> None:
        self.release()


class Intake:
    """Turns prompts into requests for an engine. It holds no request: each call stands alone."""

    def __init__(
        self,
        info: EngineInfo,
        registry: AdapterRegistry,
        tokenizers: AdapterTokenizers,
        executor: Executor,
        long_text_chars: int | None = None,
    ) -> None:
        """Texts of more than `long_text_chars` are tokenized in worker processes; with None, only
        texts for adapters' own tokenizers and templates are."""
        self._registry = registry
        self._tokenizers = tokenizers
        self._executor = executor
        self._long_text_chars = long_text_chars
        self._base = Language(tokenizers.base, info.vocab_size)
        self.max_model_len = info.max_model_len

    # -- pin -----------------------------------------------------------------------------------

    def pin(self, access: Access, model: str | None) -> Pinned:
        """Look up and pin, in one step, the base model or adapter of this name; None stands for
        the base. The caller releases it. Raises PermissionDenied, ModelNotFound."""
        if model is None:
            access.need("use")
            return Pinned(Lease(None), self._base)
        lease = access.resolve(model)
        return self._pinned(lease, lease.ref.name if lease.ref else None)

    def pin_sum(self, access: Access, adapters: Sequence[WeightedAdapter]) -> Pinned:
        """Pin the weighted sum of several adapters; its language is the base model's. A single
        adapter with the scale 1 is pinned as in `pin`. Raises PermissionDenied, InvalidRequest,
        ModelNotFound."""
        lease = access.resolve_sum(adapters)
        return self._pinned(lease, lease.ref.name if lease.ref and not lease.parts else None)

    def _pinned(self, lease: Lease, adapter: str | None) -> Pinned:
        info = None if adapter is None else self._registry.info(adapter)
        return Pinned(lease, self._language(adapter), info.head if info is not None else None)

    def language_of(self, access: Access, model: str | None) -> Language:
        """The language of a model that is not pinned. Raises PermissionDenied, ModelNotFound."""
        with self.pin(access, model) as pinned:
            return pinned.language

    def _language(self, adapter: str | None) -> Language:
        """The language that the adapter of this name has now; None stands for the base model."""
        if adapter is None:
            return self._base
        info, own = self._registry.info(adapter), self._tokenizers.get(adapter)
        vocab_size = (info.vocab_size if info is not None else 0) or self._base.vocab_size
        if own is None:
            return Language(self._base.tokenizer, vocab_size)
        eos_ids = tuple(i for i in own.eos_ids if i < vocab_size)
        author = adapter.partition("/")[0]
        return Language(own.tokenizer, vocab_size, eos_ids, own.extends_base, author)

    # -- encode --------------------------------------------------------------------------------

    async def encode(
        self,
        texts: Sequence[str],
        field_name: str,
        language: Language,
        *,
        add_special_tokens: bool = True,
        any_length: bool = False,
        tenant: str = "",
        seconds: Sequence[str] = (),
    ) -> list[list[int]]:
        """The token ids of text prompts. Errors name the texts' field, `field_name`. If there are
        `seconds`, prompt i is the pair of `texts[i]` and `seconds[i]`.

        Texts that are plainly too long are refused before they are tokenized, unless `any_length`
        is given. Raises InvalidRequest, ContextLengthExceeded, Overloaded.
        """
        tokenizer = self.tokenizer_of(language, field_name)
        for text in (*texts, *seconds):
            if not text.isascii():
                _check_text(text, field_name)
        for i, text in enumerate(() if any_length else texts):
            self._check_length(tokenizer, len(text), _place(field_name, i, texts))
        size, author = sum(map(len, (*texts, *seconds))), _author(language)
        if isinstance(tokenizer, Tokenizer) and not self._goes_away(tokenizer, size):
            encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
            if seconds:
                pairs = zip(texts, seconds, strict=True)
                return await self._here(size, lambda: [encode(a, second=b) for a, b in pairs])
            return await self._here(size, lambda: [encode(text) for text in texts])
        job = Encode(list(texts), add_special_tokens, list(seconds))
        owner = Owner(author, tenant)
        return _ids(await self._away(Call(job, tokenizer, owner, field_name, size)))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        language: Language,
        *,
        any_length: bool = False,
        tenant: str = "",
        own_template: str | None = None,
        **template: Any,
    ) -> list[int]:
        """The prompt ids of a conversation whose messages are as chat templates expect them.

        `own_template` is the request's own chat template, used instead of the language's;
        `template` is passed to `template_options`. If the chat template does not mention the role
        "developer", it becomes "system". Raises InvalidRequest, ContextLengthExceeded, Overloaded.
        """
        tokenizer = self.tokenizer_of(language, "messages")
        if own_template is not None and not tokenizer.is_portable:
            raise InvalidRequest("chat_template can't be run for this tokenizer", "chat_template")
        written_by = own_template or tokenizer.chat_template
        if not any_length:
            self._check_length(tokenizer, _num_chars(messages), "messages")
        if "developer" not in (written_by or ""):
            messages = [
                {**m, "role": "system"} if m.get("role") == "developer" else m for m in messages
            ]
        size = _work(messages) + _work(list(template.values()))
        if isinstance(tokenizer, Tokenizer) and not (language.author or own_template):
            chat = partial(tokenizer.chat, messages, **template)
            if not self._goes_away(tokenizer, size):
                return await self._here(size, chat)
        options = template_options(written_by, **template)
        job = Chat(
            own_template or tokenizer.template_for(options["tools"]),
            _json([list(messages), options]),
        )
        owner = Owner(_CLIENTS if own_template else language.author, tenant)
        return _ids(await self._away(Call(job, tokenizer, owner, "messages", size)))[0]

    async def decode(self, ids: Sequence[int], language: Language, tenant: str = "") -> str:
        """The text of token ids from the field `tokens`. Raises InvalidRequest, Overloaded."""
        tokenizer = self.tokenizer_of(language, "tokens")
        if not self._goes_away(tokenizer, len(ids)):
            return await self._here(len(ids), lambda: tokenizer.decode(ids))
        owner = Owner(_author(language), tenant)
        answer = await self._away(Call(Decode(list(ids)), tokenizer, owner, "tokens", len(ids)))
        assert isinstance(answer, Text)
        return answer.text

    def _is_long(self, size: int) -> bool:
        return self._long_text_chars is not None and size > self._long_text_chars

    def _goes_away(self, tokenizer: TokenReader, size: int) -> bool:
        """Whether this many characters or tokens are left to a worker process."""
        return tokenizer.is_portable and self._is_long(size)

    async def _away(self, call: Call) -> Answer:
        """Have a worker process do the call, and return its answer."""
        return await self._executor.finished(self._tokenizers.sandbox.submit(call))

    async def _here(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, done in this process: on a thread if `size` is large."""
        return await self._executor.blocking(work) if self._is_long(size) else work()

    def tokenizer_of(self, language: Language, field_name: str) -> TokenReader:
        """The language's tokenizer. Raises InvalidRequest, naming the field, if it has none."""
        if language.tokenizer is None:
            raise InvalidRequest(
                f"{field_name}: text needs a tokenizer, and the model was loaded without one; "
                "give token ids instead",
                field_name,
            )
        return language.tokenizer

    def _check_length(self, tokenizer: TokenReader, num_chars: int, field_name: str) -> None:
        at_least = num_chars // tokenizer.max_chars_per_token
        if at_least > self.max_model_len:
            raise ContextLengthExceeded(
                f"{too_long('prompt', self.max_model_len)} has at least {at_least}",
                field_name,
            )

    # -- check and build -----------------------------------------------------------------------

    def check_ids(self, ids: Sequence[int], field_name: str, language: Language) -> None:
        """Raise InvalidRequest unless there are ids and all of them are in the vocabulary."""
        if not ids:
            raise InvalidRequest(f"{field_name} must not be empty", field_name)
        vocab_size = language.vocab_size
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < vocab_size:
                message = f"token id {shown(bad)} is outside the vocabulary of {vocab_size}"
                raise InvalidRequest(f"{field_name}: {message}", field_name)

    async def requests(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        pinned: Pinned,
        tenant: str,
        num_choices: int = 1,
        *,
        prompt_field: str = "prompt",
        asked_in: str | None = None,
        cache_salt: str = "",
    ) -> list[EngineRequest]:
        """Checked requests to the engine: all choices of the first prompt, then all of the next,
        and so on. Choice i of a prompt has the seed `params.seed + i`, or a random one.

        `asked_in` is the field in which the client set `max_tokens`. If it is None, `max_tokens`
        is lowered to what fits. Raises InvalidRequest, ContextLengthExceeded.
        """
        lease, language = pinned.lease, pinned.language
        if pinned.head is not None:
            message = f"{pinned.name!r} was trained to classify texts: ask for it at /classify"
            raise InvalidRequest(message, "model")
        params.check_vocab(language.vocab_size)
        if params.structured_outputs is not None:
            if not language.takes_forms:
                raise InvalidRequest(NO_FORMS, "structured_outputs")
            check_form(params.structured_outputs)
        bad = await self._bad_token_ids(params.bad_words, language, tenant)
        made: list[EngineRequest] = []
        for i, prompt_ids in enumerate(prompts):
            place = _place(prompt_field, i, prompts)
            self.check_ids(prompt_ids, place, language)
            fitted = self._fit(len(prompt_ids), params, place, asked_in)
            made += [
                EngineRequest(
                    f"{request_id}-{len(made) + choice}",
                    prompt_ids,
                    fitted,
                    lease.ref,
                    bad,
                    tenant,
                    lease.parts,
                    language.eos_ids,
                    seed=_seed(fitted, choice),
                    cache_salt=cache_salt,
                )
                for choice in range(num_choices)
            ]
        return made

    def pooled(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        pooling: Pooling,
        pinned: Pinned,
        tenant: str,
        *,
        prompt_field: str,
        cache_salt: str = "",
    ) -> list[EngineRequest]:
        """Checked requests to the engine, one for the vector of each prompt. A prompt may fill the
        whole context. Raises InvalidRequest, ContextLengthExceeded."""
        for i, prompt_ids in enumerate(prompts):
            place = _place(prompt_field, i, prompts)
            self.check_ids(prompt_ids, place, pinned.language)
            if (count := len(prompt_ids)) > self.max_model_len:
                message = f"{too_long('input', self.max_model_len)} has {count}"
                raise ContextLengthExceeded(message, place)
        lease = pinned.lease
        return [
            EngineRequest(
                f"{request_id}-{n}",
                prompt_ids,
                _ONE_TOKEN,
                lease.ref,
                tenant=tenant,
                parts=lease.parts,
                seed=0,
                cache_salt=cache_salt,
                pooling=pooling,
            )
            for n, prompt_ids in enumerate(prompts)
        ]

    async def _bad_token_ids(
        self, words: Sequence[str], language: Language, tenant: str
    ) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        if language.tokenizer is None:
            raise InvalidRequest("bad_words need a tokenizer, and none is loaded", "bad_words")
        encoded = await self.encode(
            spellings(words),
            "bad_words",
            language,
            add_special_tokens=False,
            any_length=True,
            tenant=tenant,
        )
        return bad_token_ids(words, encoded)

    def _fit(
        self, num_prompt: int, params: SamplingParams, prompt_field: str, asked_in: str | None
    ) -> SamplingParams:
        """The parameters with a `max_tokens` that fits into the context beside the prompt."""
        limit = self.max_model_len
        room = limit - num_prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"{too_long('prompt', limit)} has {num_prompt}; at least one must be left for the"
                " answer",
                prompt_field,
            )
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room and asked_in is not None:
            raise ContextLengthExceeded(
                f"{MAXIMUM} {limit} tokens, and {num_prompt + wanted} are asked for: {num_prompt}"
                f" in the prompt and {wanted} for the answer",
                asked_in,
            )
        if wanted > room or params.max_tokens is None:
            return replace(params, max_tokens=min(wanted, room))
        return params


def _place(field_name: str, index: int, prompts: Sequence[object]) -> str:
    """How errors name one of a field's prompts."""
    return f"{field_name}[{index}]" if len(prompts) > 1 else field_name


def _check_text(text: str, field_name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field_name} is no text: {error}", field_name) from None


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many characters the texts of a conversation have together."""
    return sum(len(message.get("content") or "") for message in messages)


def _work(value: object) -> int:
    """An estimate of the work to render this value by a chat template, in characters."""
    size, todo = 0, [value]  # no recursion: clients choose how deep the value is nested
    while todo:
        each = todo.pop()
        size += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            size += _MESSAGE_CHARS
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            size += _MESSAGE_CHARS
            todo += each
    return size


def _author(language: Language) -> str:
    """Who brought the tokenizer; "" if it is the base's, even if the template is an adapter's."""
    return "" if isinstance(language.tokenizer, Tokenizer) else language.author


def _json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, TypeError, OverflowError):  # for example, integers that are too large
        return json.dumps(value)


def _ids(answer: Answer) -> list[list[int]]:
    assert isinstance(answer, Ids)
    return answer.lists()


def _seed(params: SamplingParams, choice: int) -> int:
    """The client's seed plus the choice's number, or a random seed if the client gave none."""
    if params.seed is None:
        return secrets.randbits(63)
    return (params.seed + choice + 2**63) % 2**64 - 2**63
