"""Generation without HTTP: pin the adapter, tokenize, check, run, release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from weft.api.admission import Admission
from weft.api.language import Language, Languages
from weft.api.observe import Observer, TraceSink
from weft.api.settings import ApiSettings
from weft.core.composition import WeightedAdapter
from weft.core.errors import ContextLengthExceeded, EngineDead, InvalidRequest
from weft.core.protocols import EngineClient
from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.core.stats import EngineStats
from weft.metrics import Metrics
from weft.registry import AdapterRegistry, Lease
from weft.text import AdapterTokenizers, OutputDelta, OutputStream, Tokenizer

T = TypeVar("T")


@dataclass(slots=True)
class Output:
    """All that one request gave."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Service:
    """What both generation routes share. Holds no request: each call's state is its own."""

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        tokenizers: AdapterTokenizers,
        settings: ApiSettings,
        metrics: Metrics,
        traces: TraceSink | None = None,
    ) -> None:
        self.engine = engine
        self.registry = registry
        self.settings = settings
        self.metrics = metrics
        self._observer = Observer(metrics, settings.served_model_names[0], traces)
        self.admission = Admission(settings.max_open)
        self.languages = Languages(tokenizers, registry, settings, engine.info.vocab_size)

    def pin(self, model: str, adapters: Sequence[WeightedAdapter] | None = None) -> Lease:
        """Look up and pin in one step: what `model` names, or the weighted sum of `adapters` on
        the base that it then must name. The caller releases. Raises ModelNotFound, InvalidRequest,
        EngineDead, QueueFull."""
        if not self.engine.alive:
            raise EngineDead("the engine is not running")
        self.admission.check()
        lease = self.registry.resolve(model)
        if adapters is None:
            return lease
        lease.release()
        if lease.ref is not None:
            raise InvalidRequest(
                f"adapters are summed on the base model; model must name that, not {model!r}",
                "adapters",
            )
        return self.registry.resolve_sum(adapters)

    async def stats(self) -> EngineStats | None:
        """None when the engine does not answer."""
        try:
            return await self.engine.stats()
        except EngineDead:
            return None

    def language_of(self, lease: Lease) -> Language:
        """To be asked for as soon as there is the lease, as a name's may change. That of a sum is
        the base's."""
        return self.languages.of(lease.ref.name if lease.ref and not lease.parts else None)

    def language_named(self, model: str | None) -> Language:
        """Of what `model` names; None: the base. Raises ModelNotFound."""
        if model is None:
            return self.languages.base
        card = self.registry.card(model)
        return self.languages.of(None if card.parent is None else card.id)

    async def encode(
        self,
        texts: Sequence[str],
        field_name: str,
        language: Language,
        *,
        add_special_tokens: bool = True,
        any_length: bool = False,
    ) -> list[list[int]]:
        """Token ids of text prompts. `field_name` is where they came from, for errors. Texts that
        can't fit are refused before they are tokenized, unless `any_length` may come."""
        tokenizer = self.need_tokenizer(language, field_name)
        for text in () if any_length else texts:
            self._check_length(tokenizer, len(text), field_name)
        return await self.maybe_on_thread(
            sum(map(len, texts)), lambda: [tokenizer.encode(t, add_special_tokens) for t in texts]
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        language: Language,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        any_length: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation whose messages are as chat templates expect them.

        To a template that knows no developers, these are the system.
        """
        tokenizer = self.need_tokenizer(language, "messages")
        num_chars = sum(len(m["content"]) for m in messages)
        if not any_length:
            self._check_length(tokenizer, num_chars, "messages")
        if "developer" not in (tokenizer.chat_template or ""):
            messages = [
                {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
            ]

        def work() -> list[int]:
            return tokenizer.chat(
                messages,
                add_generation_prompt,
                template_kwargs,
                tools=tools,
                continue_final_message=continue_final_message,
            )

        if language.is_own:
            return await asyncio.to_thread(work)  # what its template takes, nobody knows
        return await self.maybe_on_thread(num_chars + len(repr(tools or "")), work)

    async def maybe_on_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work`, which must not hold up the event loop if there is much of it."""
        if num_chars > self.settings.long_text_chars:
            return await asyncio.to_thread(work)
        return work()

    def need_tokenizer(self, language: Language, field_name: str) -> Tokenizer:
        if language.tokenizer is None:
            raise InvalidRequest(
                f"{field_name}: text needs a tokenizer, and this server runs without one; "
                "send token ids to /v1/completions",
                field_name,
            )
        return language.tokenizer

    def _check_length(self, tokenizer: Tokenizer, num_chars: int, field_name: str) -> None:
        """Refuse a text that can't fit before tokenizing it."""
        limit = self.engine.info.max_model_len
        at_least = num_chars // tokenizer.max_chars_per_token
        if at_least > limit:
            raise ContextLengthExceeded(
                f"this model's context holds {limit} tokens, and the prompt has at least "
                f"{at_least}",
                field_name,
            )

    def check_ids(self, ids: Sequence[int], field_name: str, language: Language) -> None:
        """Raises InvalidRequest unless there are ids and all are in the vocabulary."""
        if not ids:
            raise InvalidRequest(f"{field_name} must not be empty", field_name)
        vocab_size = language.vocab_size
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < vocab_size:
                raise InvalidRequest(
                    f"{field_name}: token id {bad} is outside the vocabulary of {vocab_size}",
                    field_name,
                )

    def fit(
        self, num_prompt: int, params: SamplingParams, prompt_field: str, asked_in: str | None
    ) -> SamplingParams:
        """The parameters with `max_tokens` that fits beside the prompt. `asked_in` is the field in
        which the client set it; None: nobody did, and it may shrink."""
        limit = self.engine.info.max_model_len
        room = limit - num_prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"this model's context holds {limit} tokens, and the prompt has {num_prompt}; "
                "at least one must be left for the answer",
                prompt_field,
            )
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room and asked_in is not None:
            raise ContextLengthExceeded(
                f"this model's context holds {limit} tokens, and {num_prompt + wanted} are asked "
                f"for: {num_prompt} in the prompt and {wanted} for the answer",
                asked_in,
            )
        return replace(params, max_tokens=min(wanted, room))

    async def _run(
        self, request: EngineRequest, language: Language, shown_ids: Collection[int]
    ) -> AsyncGenerator[OutputDelta, None]:
        """The request's deltas. Closing the generator aborts what still runs in the engine."""
        output = OutputStream(language.tokenizer, request.params, request.prompt_ids, shown_ids)
        events = cast(AsyncGenerator[TokenEvent, None], self.engine.generate(request))
        with self._observer.watch(request) as watch:
            async with aclosing(events):
                async for event in events:
                    watch.event(event)
                    delta = output.feed(event)
                    watch.finish_reason = delta.finish_reason or watch.finish_reason
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise EngineDead("the engine ended a request without an answer")

    async def run_all(
        self,
        requests: Sequence[EngineRequest],
        language: Language,
        shown_ids: Collection[int] = (),
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """The deltas of several requests as they come, each with the index of its request.

        `shown_ids` are special tokens that their texts show in any case. Closing the generator
        aborts what still runs. Raises QueueFull.
        """
        with self.admission.enter(len(requests)):
            if len(requests) == 1:
                async with aclosing(self._run(requests[0], language, shown_ids)) as deltas:
                    async for delta in deltas:
                        yield 0, delta
                return
            runs = [self._run(request, language, shown_ids) for request in requests]
            async with aclosing(_merge(runs)) as merged:
                async for item in merged:
                    yield item

    async def collect(
        self,
        requests: Sequence[EngineRequest],
        language: Language,
        shown_ids: Collection[int] = (),
    ) -> list[Output]:
        """The whole outputs, in the order of the requests."""
        outputs = [Output() for _ in requests]
        async with aclosing(self.run_all(requests, language, shown_ids)) as merged:
            async for index, delta in merged:
                outputs[index].add(delta)
        return outputs


async def _merge(
    streams: Sequence[AsyncGenerator[OutputDelta, None]],
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Items of several streams as they come. The first error ends all of them."""
    queue: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[OutputDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait((index, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
