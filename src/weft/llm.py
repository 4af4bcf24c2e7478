"""The Python API: an engine in this thread, prompts in, outputs out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar, cast

import torch

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.composition import WeightedAdapter
from weft.core.config import engine_args
from weft.core.errors import InvalidRequest, ModelNotFound, from_wire
from weft.core.messages import Abort, Register, Reply, Report, Submit, Tokens
from weft.core.requests import EngineRequest, FinishReason, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.core.stats import EngineStats
from weft.engine.engine import WAIT_S, Engine
from weft.registry import AdapterRegistry, Lease
from weft.text import AdapterTokenizers, OutputStream, Tokenizer, bad_token_ids, load_tokenizer
from weft.text.own import NO_FORMS

Prompt = str | list[int]
AdapterChoice = str | Sequence[WeightedAdapter] | None
"""A name, adapters whose weighted sum is meant, or None: the base."""
T = TypeVar("T")

_MEMORY = "memory"
"""The root of adapters that come from no folder."""


@dataclass(slots=True)
class RequestOutput:
    """What one prompt gave."""

    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    adapter: AdapterRef | None
    """The version that answered; None for the base."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each token of the prompt, None for its first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


class LLM:
    """A base model and adapters, for offline use.

    llm = LLM("path/or/hub-id", adapters={"sql": "path/to/adapter"})
    llm.generate(["..."], SamplingParams(max_tokens=32), adapter=["sql"])

    `options` are the fields of `weft.core.config` by name (dtype, max_model_len, max_num_seqs,
    max_loras, ...). Not thread-safe. Raises ConfigError, AdapterError.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        skip_tokenizer_init: bool = False,
        **options: object,
    ) -> None:
        args = engine_args(str(model), **options)
        self._tokenizer = (
            None if skip_tokenizer_init else load_tokenizer(args.model.model, args.model.revision)
        )
        self._tokenizers = AdapterTokenizers(self._tokenizer)
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._engine = Engine(args, wake=lambda: self._wakeups.put(None))
        self.info = self._engine.info
        self._registry = AdapterRegistry([args.model.model], args.model.model)
        self._ids = itertools.count()
        try:
            for name, path in (adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's."""
        if self._tokenizer is None:
            raise InvalidRequest("this LLM was made with skip_tokenizer_init", "prompt")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        on_finished: Callable[[RequestOutput], None] = lambda _: None,
        tenant: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); all of them share batches.

        `params`, `adapter` and `tenant` are one for all prompts, or one each; adapter None is the
        base, and a sequence of WeightedAdapter their sum: `[WeightedAdapter("sql", 0.7), ...]`.
        Of prompts that wait, each tenant's are served alike.
        `on_finished` is called with each output as it ends, and must not call this LLM.
        Returns outputs in the order of the prompts. Raises InvalidRequest or ModelNotFound for
        bad arguments before anything runs, AdapterUnavailable if a load fails meanwhile.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        many = cast(list[Prompt], [prompts] if one else list(prompts))
        params = params or SamplingParams()
        same = [params] * len(many) if isinstance(params, SamplingParams) else params
        each_params = _check_length(list(same), len(many), "params")
        each_adapter = _check_length(_choices(adapter, len(many)), len(many), "adapter")
        tenants = [tenant] * len(many) if isinstance(tenant, str) else list(tenant)
        each_tenant = _check_length(tenants, len(many), "tenant")
        with contextlib.ExitStack() as leases:
            held = [leases.enter_context(self._lease(choice)) for choice in each_adapter]
            jobs = [
                self._job(*job) for job in zip(many, each_params, held, each_tenant, strict=True)
            ]
            return self._run(jobs, on_finished)

    def chat(
        self,
        conversations: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, through the chat template: the adapter's
        own, if it has one."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        many = cast(list[Sequence[Mapping[str, str]]], [conversations] if one else conversations)
        names = _check_length(_choices(adapter, len(many)), len(many), "adapter")
        prompts: list[Prompt] = []
        for name, messages in zip(names, many, strict=True):
            own = self._tokenizers.get(name) if isinstance(name, str) else None
            tokenizer = own.tokenizer if own is not None else self.tokenizer
            prompts.append(tokenizer.chat([dict(message) for message in messages]))
        return self.generate(prompts, params, adapter)

    def load_adapter(
        self, name: str, path: str | Path, *, replace: bool = False, pinned: bool = False
    ) -> AdapterRef:
        """Make the adapter in a folder usable under `name`. A tokenizer and a chat template in it
        are then used for its texts.

        With `replace` it takes the place of other content under that name, as a new version. A
        pinned one stays on the device; the newest load of some content says whether it is.
        Raises AdapterError.
        """
        with self._registry.reserve(name, str(path)):
            own = self._tokenizers.load(Path(path))
            info = self._register(str(path), pinned)
            ref = self._publish(name, info, str(path), replace, pinned)
            self._tokenizers.put(name, own)
            return ref

    def publish_adapter(
        self,
        name: str,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        *,
        pinned: bool = False,
    ) -> AdapterRef:
        """Make an adapter that is in memory usable under `name`, in place of what is there.

            config = model.peft_config["default"].to_dict()
            tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
            llm.publish_adapter("policy", config, tensors)

        What both hold is copied, and checked as files are; equal content is the same version,
        wherever it comes from. Its image stays on the host until it is unloaded or replaced.
        Raises AdapterError.
        """
        with self._registry.reserve(name, _MEMORY):
            info = self._engine.publish(config, tensors, pinned)
            ref = self._publish(name, info, _MEMORY, True, pinned)
            self._tokenizers.put(name, None)
            return ref

    def unload_adapter(self, name: str) -> None:
        """Raises AdapterNotFound."""
        self._engine.drop(self._registry.retire(name).ref.digest)
        self._tokenizers.put(name, None)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _lease(self, choice: AdapterChoice) -> Lease:
        if choice is None:
            return Lease(None)
        if not isinstance(choice, str):
            return self._registry.resolve_sum(choice)
        lease = self._registry.resolve(choice)
        if lease.ref is None:
            raise ModelNotFound(f"{choice!r} is the base; say adapter=None for it", "adapter")
        return lease

    def _job(self, prompt: Prompt, params: SamplingParams, lease: Lease, tenant: str) -> _Job:
        name = lease.ref.name if lease.ref and not lease.parts else ""
        info, own = self._registry.info(name), self._tokenizers.get(name)
        tokenizer = own.tokenizer if own is not None else self._tokenizer
        if isinstance(prompt, str):
            ids = (tokenizer or self.tokenizer).encode(prompt)
        else:
            ids = list(prompt)
        vocab_size = (info.vocab_size if info else 0) or self.info.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            message = f"the prompt has a token id outside of [0, {vocab_size})"
            raise InvalidRequest(message, "prompt")
        params.check_vocab(vocab_size)
        if own is not None and not own.extends_base and params.structured_outputs is not None:
            raise InvalidRequest(NO_FORMS, "structured_outputs")
        bad = bad_token_ids(tokenizer, params.bad_words)
        eos_ids = tuple(i for i in own.eos_ids if i < vocab_size) if own is not None else ()
        request_id = str(next(self._ids))
        request = EngineRequest(
            request_id, ids, params, lease.ref, bad, tenant, lease.parts, eos_ids
        )
        output = RequestOutput(prompt if isinstance(prompt, str) else None, ids, lease.ref)
        return _Job(request, output, OutputStream(tokenizer, params, ids))

    def _run(
        self, jobs: list[_Job], on_finished: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        open_jobs = {job.request.request_id: job for job in jobs}
        first: list[Report | None] = [self._engine.apply(Submit(job.request)) for job in jobs]
        reports = itertools.chain((r for r in first if r is not None), self._reports())
        try:
            while open_jobs:
                report = next(reports)
                for event in report.events if isinstance(report, Tokens) else ():
                    self._take(event, open_jobs, on_finished)
        finally:
            for request_id in open_jobs:
                self._engine.apply(Abort(request_id))
        return [job.output for job in jobs]

    def _take(
        self,
        event: TokenEvent,
        open_jobs: dict[str, _Job],
        on_finished: Callable[[RequestOutput], None],
    ) -> None:
        job = open_jobs.get(event.request_id)
        if job is None:
            return
        delta = job.stream.feed(event)
        output = job.output
        output.prompt_logprobs = output.prompt_logprobs or event.prompt_logprobs
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.num_cached_tokens = delta.num_cached_tokens
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs
        if delta.abort:
            self._engine.apply(Abort(event.request_id))
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            del open_jobs[event.request_id]
            on_finished(output)

    def _publish(
        self, name: str, info: AdapterInfo, path: str, replace: bool, pinned: bool
    ) -> AdapterRef:
        """Let `name` point to what was registered; the registration that is then too many goes."""
        before = self._registry.current(name)
        ref = before
        try:
            ref = self._registry.publish(
                name, info, path, replace, lambda old: self._engine.drop(old.digest), pinned
            )
        finally:
            if ref == before:
                self._engine.drop(info.digest)
        return ref

    def _register(self, path: str, pinned: bool) -> AdapterInfo:
        call_id = next(self._ids)
        self._engine.apply(Register(call_id, path, pinned))
        for report in self._reports():
            if isinstance(report, Reply) and report.call_id == call_id:
                if report.error is not None:
                    raise from_wire(report.error)
                assert report.info is not None
                return report.info
        raise AssertionError("unreachable: reports never end")

    def _reports(self) -> Iterator[Report]:
        while True:
            yield from self._engine.step()
            if not self._engine.working:
                with contextlib.suppress(Empty):
                    self._wakeups.get(timeout=WAIT_S)


@dataclass(slots=True)
class _Job:
    request: EngineRequest
    output: RequestOutput
    stream: OutputStream


def _choices(adapter: AdapterChoice | Sequence[AdapterChoice], count: int) -> list[AdapterChoice]:
    """One for each prompt. A sequence of nothing but WeightedAdapter is one choice for all."""
    if _is_choice(adapter):
        return [cast(AdapterChoice, adapter)] * count
    if not isinstance(adapter, Sequence) or not all(map(_is_choice, adapter)):
        raise InvalidRequest(
            "adapter must be a name, None, a sequence of WeightedAdapter, or one of these for each"
            " prompt",
            "adapter",
        )
    return [cast(AdapterChoice, choice) for choice in adapter]


def _is_choice(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, Sequence) and {type(each) for each in value} == {WeightedAdapter}


def _check_length(values: list[T], count: int, name: str) -> list[T]:
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts", name)
    return values
