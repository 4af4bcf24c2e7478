"""Generation without HTTP: pin the adapter, tokenize, check, run, release."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

from starlette.datastructures import Headers

from weft.api.admission import Admission
from weft.api.callers import Tenants, caller_var, fairness_of, fairness_var
from weft.api.merging import merged
from weft.api.middleware import TraceSink, watched
from weft.api.schemas import ModelBody
from weft.api.settings import ApiSettings
from weft.api.shadows import Shadows
from weft.core.adapters import WeightedAdapter
from weft.core.errors import EngineDead, InvalidRequest, ModelNotFound, Unauthorized, from_wire
from weft.core.fair_calls import FairCalls
from weft.core.messages import EngineClient
from weft.core.requests import EngineRequest, TokenLogprob, each_token
from weft.core.stats import EngineStats, FleetFigures
from weft.core.tenants import tenant_in
from weft.metrics import Metrics, RegistryView
from weft.registry import Access, AdapterRegistry, Caller, ModelCard
from weft.serving import Intake, Language, Pinned
from weft.serving.follower import Follower
from weft.serving.publisher import Executor
from weft.text import AdapterTokenizers, OutputDelta, OutputStream, TokenReader
from weft.text.reasoning import REASONING, detect_reasoning
from weft.text.tools import detect_tool_format

STICKY = "x-weft-sticky"
"""The header whose requests all get the same version of a name."""
STARTED_EACH, STARTED_ALONE = 8, 16
"""How many choices of a tenant start in one pass of the event loop: with other tenants' requests,
and without. Each start delays all others by a tenth of a millisecond."""
VERSION, DIGEST = "x-weft-adapter", "x-weft-digest"
"""The headers of answers that name the version that made them."""


def sticky_of(body: ModelBody, headers: Headers) -> str:
    """What decides which of several versions answers: the header, the client's user, or else the
    request itself."""
    given = body.model_extra or {}
    for said in (headers.get(STICKY), given.get("safety_identifier"), given.get("user")):
        if isinstance(said, str) and said:
            return said
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's marks for tool calls and reasoning."""

    tool_format: str | None = None
    """A key of TOOL_FORMATS, or None for a model that calls no tools."""
    reasoning: str | None = None
    """A key of REASONING, or None for a model that does not mark its reasoning."""
    begin_of_reasoning: int | None = None
    """The token that reasoning begins with; None if its mark has no single token to begin with."""
    end_of_reasoning: int | None = None
    """The token after which the answer begins; None if the mark is no single token."""
    begin_of_text: int | None = None
    """The token before all text of an answer; gpt-oss has headers between this and reasoning."""

    @classmethod
    def of(cls, tokenizer: TokenReader | None, settings: ApiSettings) -> Dialect:
        """The dialect in the operator's settings, or else the one detected from the chat
        template."""
        if tokenizer is None:
            return cls()
        template = tokenizer.chat_template or ""
        tool_format, reasoning = settings.tool_call_parser, settings.reasoning_parser
        if tool_format == "auto":
            tool_format = detect_tool_format(
                template, lambda mark: tokenizer.mark_id(mark) is not None
            )
        if reasoning == "auto":
            reasoning = detect_reasoning(template)
        first = end = begin = None
        if reasoning is not None:
            style = REASONING[reasoning]
            first = tokenizer.mark_id(style.marks[0])
            end = begin = tokenizer.mark_id(style.end)
        elif tool_format == "harmony":
            end, begin = map(tokenizer.mark_id, ("<|end|>", "<|message|>"))
        return cls(tool_format, reasoning, first, end, begin)


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


class Fleet(Protocol):
    """The nodes that serve this API's requests."""

    def describe(self) -> Sequence[dict[str, object]]: ...

    def pins(self) -> Sequence[dict[str, object]]: ...

    def explain(self, request_id: str) -> Sequence[dict[str, Any]]: ...

    def drain(self, name: str, draining: bool = True) -> None: ...

    def measure(self) -> FleetFigures: ...


class Service:
    """What all routes to a model share. Holds no request: each call's state is its own."""

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        tokenizers: AdapterTokenizers,
        settings: ApiSettings,
        metrics: Metrics,
        executor: Executor,
        *,
        traces: TraceSink | None,
        tenants: Tenants | None,
        follower: Follower | None,
        fleet: Fleet | None,
    ) -> None:
        """`follower` follows a shared registry, if there is one. `fleet`: what `engine` is, if it
        has several nodes."""
        self.engine, self.fleet = engine, fleet
        self._registry, self._tenants = registry, tenants
        self.follower = follower
        self.settings = settings
        self.metrics = metrics
        self._model_name, self._traces = settings.served_model_names[0], traces
        self.admission = Admission(settings.max_open, settings.tenants)
        self._starts = FairCalls(STARTED_EACH, STARTED_ALONE)
        self.intake = Intake(engine.info, registry, tokenizers, executor, settings.long_text_chars)
        self._dialect = Dialect.of(tokenizers.base, settings)
        self.shadows: Shadows | None = None
        if follower is not None:
            counters, few = metrics.shadow_counters(), max(settings.max_open // 10, 1)
            self.shadows = Shadows(
                engine, registry, follower, self.intake, self.admission, counters, few
            )

    @property
    def access(self) -> Access:
        """The models and adapters as whoever sent the request under way may use them. Raises
        Unauthorized."""
        caller = caller_var.get()
        if caller is None and self._tenants is not None and self._tenants.keychain is not None:
            raise Unauthorized("this needs an API key")
        names = self.follower.names if self.follower is not None else None
        return Access(self._registry, caller or Caller(), names)

    def need_engine(self) -> None:
        """Raises EngineDead unless requests can be served now."""
        if not self.engine.alive:
            raise EngineDead("; ".join(self.engine.troubles) or "the engine is not running")

    async def pin(self, body: ModelBody, headers: Headers) -> Pinned:
        """Pin what `model` names; or, on the base that it then must name, the adapter `lora_path`
        or the weighted sum of `adapters`. The caller releases it.

        A version of a shared registry is loaded first. Raises PermissionDenied, ModelNotFound,
        InvalidRequest, EngineDead, Overloaded; AdapterUnavailable or RegistryUnavailable.
        """
        self.need_engine()
        access, model, lora_path = self.access, body.model, body.lora_path
        fairness_var.set(fairness_of(headers))
        self.admission.check_early(self.settings.tenant_of(model))
        adapters = [WeightedAdapter(a.name, a.scale) for a in body.adapters or ()]
        if self.follower is not None:
            named = [(model, "model"), *((each.name, "adapters") for each in adapters)]
            named += [(lora_path, "lora_path")] if lora_path else []
            model, *names = await self._all_ready(access, named, sticky_of(body, headers))
            lora_path = names.pop() if lora_path else None
            adapters = [WeightedAdapter(n, a.scale) for n, a in zip(names, adapters, strict=True)]
        pinned = self.intake.pin(access, model)
        if lora_path:
            return self._pin_beside(access, pinned, lora_path, body.adapters is not None)
        if body.adapters is None:
            return pinned
        pinned.release()
        if pinned.lease.ref is not None:
            raise InvalidRequest(
                f"adapters are summed on the base model; model must name that, not {model!r}",
                "adapters",
            )
        return self.intake.pin_sum(access, adapters)

    async def _all_ready(
        self, access: Access, named: Sequence[tuple[str, str]], sticky: str
    ) -> list[str]:
        """As `_ready`, for all models of a request, each with its field, together."""
        before: list[str] = []
        while True:
            found = [await self._ready(access, model, sticky, field) for model, field in named]
            if len(named) == 1 or found == before:
                return found
            before = found  # a model may be dropped while another one is loaded

    async def _ready(self, access: Access, model: str, sticky: str, field: str) -> str:
        """As `Follower.ready`, for a server with a shared registry."""
        assert self.follower is not None
        try:
            return await self.follower.ready(access, model, sticky)
        except ModelNotFound as error:
            raise ModelNotFound(error.message, field) from None

    def headers_of(self, pinned: Pinned) -> dict[str, str]:
        """The headers of an answer that say which version of a shared registry made it."""
        ref = pinned.lease.ref
        if self.follower is None or ref is None:
            return {}
        return {VERSION: quote(ref.name, safe="/@:,"), DIGEST: f"sha256:{ref.digest}"}

    async def language_of(self, model: str | None) -> Language:
        """The language of a model that is not pinned. Raises PermissionDenied, ModelNotFound;
        AdapterUnavailable or RegistryUnavailable."""
        access = self.access
        if self.follower is not None and model is not None:
            model = await self._ready(access, model, "", "model")
        return self.intake.language_of(access, model)

    async def card(self, model: str) -> ModelCard:
        """Describe a model. Raises ModelNotFound, RegistryUnavailable."""
        try:
            return self.access.card(model)
        except ModelNotFound:
            if self.follower is None:
                raise
        await self.follower.look_again()
        return self.access.card(model)

    async def close(self) -> None:
        """End shadows, and follow the registry no more."""
        if self.shadows is not None:
            await self.shadows.close()
        if self.follower is not None:
            await self.follower.close()

    async def exposition(self) -> bytes:
        """The metrics of everybody, in Prometheus' text format."""
        stats, follower = await self.stats(), self.follower
        view = None
        if follower is not None:
            view = RegistryView(
                follower.names.state.seq, follower.shared.stale_s(), follower.blobs.fetched
            )
        fleet = self.fleet.measure() if self.fleet is not None else None
        return self.metrics.render(self.engine.info, stats, self._registry.adapters(), view, fleet)

    def salt(self, tenant: str, asked: str | None) -> str:
        """The salt of a request, which shares cached prefixes only with requests of the same salt.
        A tenant has its own, unless it `shares_prefixes`; the client's `asked` adds to it."""
        if not self.settings.tenants or tenant_in(self.settings.tenants, tenant).shares_prefixes:
            return f":{asked}" if asked else ""
        return f"{len(tenant)}:{tenant}:{asked or ''}"

    def _pin_beside(self, access: Access, named: Pinned, lora_path: str, sums_too: bool) -> Pinned:
        """Pin the adapter in `lora_path`, SGLang's field beside `model`, and release `named`."""
        field = "lora_path"
        with named:
            if sums_too:
                raise InvalidRequest("lora_path and adapters are both given", field)
            try:
                pinned = self.intake.pin(access, lora_path)
            except ModelNotFound as error:
                raise ModelNotFound(error.message, field) from None
            if named.lease.ref not in (None, pinned.lease.ref):
                pinned.release()
                raise InvalidRequest(
                    f"model names the adapter {named.name!r}, and lora_path another one", field
                )
            return pinned

    async def stats(self) -> EngineStats | None:
        """None when the engine does not answer."""
        try:
            return await self.engine.stats()
        except EngineDead:
            return None

    def dialect_of(self, language: Language) -> Dialect:
        """How models of this language mark calls of tools and reasoning."""
        return Dialect.of(language.tokenizer, self.settings) if language.author else self._dialect

    async def encode(
        self, texts: Sequence[str], field_name: str, language: Language, **options: Any
    ) -> list[list[int]]:
        """As `Intake.encode`, for the tenant of this request."""
        tenant = self.settings.tenant_of(None)
        return await self.intake.encode(texts, field_name, language, tenant=tenant, **options)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], language: Language, **options: Any
    ) -> list[int]:
        """As `Intake.encode_chat`, for the tenant of this request."""
        tenant = self.settings.tenant_of(None)
        return await self.intake.encode_chat(messages, language, tenant=tenant, **options)

    async def _run(
        self,
        index: int,
        request: EngineRequest,
        language: Language,
        shown_ids: Collection[int],
        place: AbstractContextManager[None],
        by_token: bool,
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """The deltas of one of `run_all`'s requests, which holds `place` meanwhile."""
        output = OutputStream(language.tokenizer, request.params, request.prompt_ids, shown_ids)
        shadows, token_ids = self.shadows, list[int]()
        shadow = shadows.number_of(request.adapter) if shadows is not None else None
        start_s = time.monotonic()
        events = self.engine.generate(request)
        with place, watched(request, self._model_name, self.metrics, self._traces) as watch:
            async with aclosing(events):
                async for event in events:
                    watch.event(event)
                    if shadow is not None:
                        token_ids += event.token_ids
                    for part in each_token(event) if by_token else (event,):
                        delta = output.feed(part)
                        if delta.finish_reason is not None:
                            watch.record.finish_reason = delta.finish_reason
                            if shadows is not None and shadow is not None:
                                took_s = time.monotonic() - start_s
                                shadows.begin(shadow, request, language, token_ids, took_s)
                        yield index, delta
                        if delta.finish_reason is not None:
                            return
            raise EngineDead("the engine ended a request without an answer")

    def run_all(
        self,
        requests: Sequence[EngineRequest],
        language: Language,
        shown_ids: Collection[int] = (),
        whole: bool = False,
        by_token: bool = False,
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """The deltas of several requests as they come, each with the index of its request.

        `shown_ids` are special tokens that their texts show in any case. `whole`: the answers are
        sent when they are whole, so deltas may come later, of many tokens each; but a stop string
        ends its request as soon as it is there. `by_token`: each token with a log-probability has
        a delta of its own. Closing the generator aborts what still runs. Raises Overloaded.
        """
        if whole:
            requests = [replace(each, in_groups=not each.params.stop) for each in requests]
        places = self._places(requests)
        if len(requests) == 1:
            return self._run(0, requests[0], language, shown_ids, places, by_token)
        held = nullcontext()
        runs = [
            self._run(i, request, language, shown_ids, held, by_token)
            for i, request in enumerate(requests)
        ]
        return merged(runs, places, partial(self._starts.turn, requests[0].tenant))

    @contextmanager
    def _places(self, requests: Sequence[EngineRequest]) -> Iterator[None]:
        """A context in which the requests are open. Raises Overloaded."""
        num_tokens = sum(len(r.prompt_ids) + (r.params.max_tokens or 0) for r in requests)
        tenant = requests[0].tenant
        with self.admission.enter(len(requests), tenant, num_tokens):
            if self.shadows is not None:
                self.shadows.make_room()
            self._starts.enter(tenant)
            try:
                yield
            finally:
                self._starts.leave(tenant)

    async def collect(
        self, requests: Sequence[EngineRequest], language: Language, shown_ids: Collection[int] = ()
    ) -> list[Output]:
        """The whole outputs, in the order of the requests."""
        outputs = [Output() for _ in requests]
        async with aclosing(self.run_all(requests, language, shown_ids, whole=True)) as merged:
            async for index, delta in merged:
                outputs[index].add(delta)
        return outputs

    async def pool(self, requests: Sequence[EngineRequest]) -> list[bytes]:
        """The vectors of pooled requests, in their order; see `TokenEvent.vector`. Raises
        Overloaded, and the first error of a request, which ends all others."""
        vectors = [b""] * len(requests)
        runs = [self._vector(index, request) for index, request in enumerate(requests)]
        turn = partial(self._starts.turn, requests[0].tenant)
        async with aclosing(merged(runs, self._places(requests), turn)) as found:
            async for index, vector in found:
                vectors[index] = vector
        return vectors

    async def _vector(
        self, index: int, request: EngineRequest
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """The index and the vector of one request. Closing the generator aborts what still runs."""
        with watched(request, self._model_name, self.metrics, self._traces) as watch:
            async with aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    watch.event(event)
                    if event.error is not None:
                        raise from_wire(event.error)
                    if event.vector is not None:
                        watch.record.finish_reason = "stop"
                        yield index, event.vector
                        return
            raise EngineDead("the engine ended a request without an answer")
