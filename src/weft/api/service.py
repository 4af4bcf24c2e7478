"""Generation without HTTP: pin the adapter, tokenize, check, run, release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from weft.api.admission import Admission
from weft.api.dialect import Dialect
from weft.api.observe import Observer, TraceSink
from weft.api.settings import ApiSettings
from weft.core.composition import WeightedAdapter
from weft.core.errors import EngineDead, InvalidRequest
from weft.core.protocols import EngineClient
from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.core.stats import EngineStats
from weft.metrics import Metrics
from weft.registry import AdapterRegistry
from weft.serving import Intake, Language, Pinned
from weft.serving.intake import num_chars
from weft.text import AdapterTokenizers, OutputDelta, OutputStream

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
        self.intake = Intake(engine.info, registry, tokenizers)
        self._dialect = Dialect.of(tokenizers.base, settings)

    def pin(self, model: str, adapters: Sequence[WeightedAdapter] | None = None) -> Pinned:
        """Pin what `model` names, or the weighted sum of `adapters` on the base that it then must
        name. The caller releases it. Raises ModelNotFound, InvalidRequest, EngineDead, Overloaded.
        """
        if not self.engine.alive:
            raise EngineDead("the engine is not running")
        self.admission.check()
        pinned = self.intake.pin(model)
        if adapters is None:
            return pinned
        pinned.release()
        if pinned.lease.ref is not None:
            raise InvalidRequest(
                f"adapters are summed on the base model; model must name that, not {model!r}",
                "adapters",
            )
        return self.intake.pin_sum(adapters)

    async def stats(self) -> EngineStats | None:
        """None when the engine does not answer."""
        try:
            return await self.engine.stats()
        except EngineDead:
            return None

    def dialect_of(self, language: Language) -> Dialect:
        """How models of this language mark calls of tools and reasoning."""
        return Dialect.of(language.tokenizer, self.settings) if language.is_own else self._dialect

    async def encode(
        self, texts: Sequence[str], field_name: str, language: Language, **options: bool
    ) -> list[list[int]]:
        """As `Intake.encode`, which must not hold up the event loop."""
        return await self.maybe_on_thread(
            sum(map(len, texts)),
            lambda: self.intake.encode(texts, field_name, language, **options),
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], language: Language, **options: Any
    ) -> list[int]:
        """As `Intake.encode_chat`, which must not hold up the event loop. How long an adapter's
        own template takes, nobody knows."""
        size = num_chars(messages) + len(repr(options.get("tools") or ""))
        return await self.maybe_on_thread(
            size, lambda: self.intake.encode_chat(messages, language, **options), language.is_own
        )

    async def maybe_on_thread(self, size: int, work: Callable[[], T], always: bool = False) -> T:
        """The result of `work`, done on a thread if there is much of it: `size` characters."""
        if always or size > self.settings.long_text_chars:
            return await asyncio.to_thread(work)
        return work()

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
        aborts what still runs. Raises Overloaded.
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
