"""The Python API: `LLM` runs an engine in this thread, for prompts without a server."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from weft.core.adapters import AdapterRef, WeightedAdapter
from weft.core.config import engine_args
from weft.core.errors import ConfigError, InvalidRequest, ModelNotFound, check_switches
from weft.core.requests import EngineRequest, FinishReason, TokenLogprob
from weft.core.sampling import SamplingParams, as_int
from weft.core.stats import EngineStats
from weft.fleet.direct import DirectClient
from weft.models.config import resolve_model
from weft.registry import Access, AdapterRegistry, Caller, Sources
from weft.serving import DirectExecutor, Intake, Language, Pinned, Publisher
from weft.serving.publisher import sources_of
from weft.text import AdapterTokenizers, OutputDelta, OutputStream, Tokenizer, load_tokenizer
from weft.text.templates import joined_text

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
"""Messages as in OpenAI's API; content is a text or a list of text parts."""
AdapterChoice = str | Sequence[WeightedAdapter] | None
"""An adapter's name, a sequence of WeightedAdapter for their sum, or None for the base."""
T = TypeVar("T")

_MEMORY = "memory"
"""Shown as the source of adapters that were loaded from memory."""


@dataclass(slots=True)
class RequestOutput:
    """The output of one prompt."""

    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    adapter: AdapterRef | None
    """The version that answered; None for the base."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    """One for each token of the output, if they were asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each token of the prompt, None for its first."""
    finish_reason: FinishReason | None = None
    """"stop" after an end-of-sequence token, a stop token or a stop string; "length" after
    `max_tokens` or at the end of the context."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for an end-of-sequence token."""
    num_cached_tokens: int = 0
    """How many tokens of the prompt came from the prefix cache."""


class LLM:
    """A base model and adapters, for offline use.

    llm = LLM("path/or/hub-id", adapters={"sql": "path/to/adapter"})
    llm.generate(["..."], SamplingParams(max_tokens=32), adapter=["sql"])

    `options` are the fields of `weft.core.config` by name (dtype, max_model_len, max_num_seqs,
    max_loras, ...). Calls from several threads run one after another.
    Raises ConfigError, AdapterError.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        skip_tokenizer_init: bool = False,
        **options: object,
    ) -> None:
        if not isinstance(cast(object, model), str | Path) or not str(model):
            message = f"model must be a folder or a name on the Hugging Face hub, got {model!r}"
            raise ConfigError(message, "model")
        if not isinstance(cast(object, adapters), Mapping | None):
            message = f"adapters must be paths by name, such as {{'sql': './sql'}}, got {adapters}"
            raise ConfigError(message, "adapters")
        first = sources_of(list((adapters or {}).values()))
        args = replace(engine_args(str(model), **options), first_adapters=first)
        resolve_model(args.model.model, args.model.revision, weights=False)
        self._tokenizer = (
            None if skip_tokenizer_init else load_tokenizer(args.model.model, args.model.revision)
        )
        tokenizers = AdapterTokenizers(self._tokenizer)
        self._client = client = DirectClient(args)
        dropped = weakref.finalize(self, lambda: DirectExecutor().run(client.close()))
        dropped.atexit = False  # then everything goes with the process
        self.info = client.info
        self._registry = AdapterRegistry([args.model.model], args.model.model)
        self._access = Access(self._registry, Caller())
        self._executor = DirectExecutor()
        self._intake = Intake(self.info, self._registry, tokenizers, self._executor)
        self._publisher = Publisher(
            self._client, self._registry, tokenizers, Sources(), self._executor
        )
        self._ids = itertools.count()
        self._tells = False
        """Whether `on_finished` is being called."""
        try:
            for name, path in (adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
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

        `params`, `adapter` and `tenant` are one value for all prompts, or a sequence with one for
        each. The adapter None is the base; `[WeightedAdapter("sql", 0.7), ...]` is a sum.
        While prompts wait, all tenants get the same service.
        `on_finished` is called with each output as it ends, and must not call this LLM: all its
        methods then raise InvalidRequest.
        Returns outputs in the order of the prompts. Raises InvalidRequest or ModelNotFound for
        bad arguments before anything runs, and AdapterUnavailable if a load fails later.
        """
        several = isinstance(cast(object, prompts), Sequence) or hasattr(prompts, "tolist")
        one = not several or isinstance(prompts, str) or bool(_token_ids(prompts))
        many = cast(list[Prompt], [prompts] if one else list(prompts))
        return self._answer(many, self._encode, params, adapter, tenant, on_finished)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; arguments and errors are those of `generate`. The
        adapter's own chat template is used if it has one, else the base's."""
        one = not _is_list(conversations) or (
            bool(conversations) and isinstance(conversations[0], Mapping)
        )
        many = cast(list[Conversation], [conversations] if one else list(conversations))
        return self._answer(many, self._encode_chat, params, adapter)

    def load_adapter(
        self, name: str, path: str | Path, *, replace: bool = False, pinned: bool = False
    ) -> AdapterRef:
        """Load an adapter under `name`, with its tokenizer and chat template if it brings them.
        `path` is a folder, `org/name[@revision]` on the Hugging Face hub, or a URI, such as
        `https://host/adapter.tar.gz` or `s3://bucket/adapter`.

        With `replace`, it becomes a new version of a name that has other content.
        Content stays on the device while any of its names is loaded with `pinned`.
        Raises AdapterError, InvalidRequest.
        """
        check_switches(replace=replace, pinned=pinned)
        return self._free.run(self._publisher.load(name, str(path), replace, pinned))

    def publish_adapter(
        self,
        name: str,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        *,
        pinned: bool = False,
    ) -> AdapterRef:
        """Load an adapter from memory under `name`, replacing any earlier version of it.

            config = model.peft_config["default"].to_dict()
            tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
            llm.publish_adapter("policy", config, tensors)

        Both arguments are copied and checked like files, but B may be zero everywhere, as before
        the first step of a training. Equal arguments are the same version. The adapter stays in
        host memory until it is unloaded or replaced. Raises AdapterError, InvalidRequest.
        """
        check_switches(pinned=pinned)
        executor = self._free
        publishing = self._publisher.publish(
            name,
            _MEMORY,
            lambda: self._client.hold_tensors(config, tensors, name, pinned),
            replace=True,
            pinned=pinned,
        )
        return executor.run(executor.to_the_end(publishing))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, and free its memory. Raises AdapterNotFound."""
        self._free.run(self._publisher.unload(name))

    def stats(self) -> EngineStats:
        """Counts and sizes of what the engine holds and has done."""
        return self._free.run(self._client.stats())

    def close(self) -> None:
        """Stop the engine. A second call does nothing."""
        self._free.run(self._client.close())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _free(self) -> DirectExecutor:
        """The executor, for what callers ask for. Raises InvalidRequest within `on_finished`."""
        with self._executor.turn:  # others wait until the call has ended
            if self._tells:
                raise InvalidRequest("on_finished must not call this LLM", "on_finished")
        return self._executor

    def _answer(
        self,
        inputs: Sequence[T],
        encode: Callable[[T, Language], list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: AdapterChoice | Sequence[AdapterChoice],
        tenant: str | Sequence[str] = "",
        on_finished: Callable[[RequestOutput], None] = lambda _: None,
    ) -> list[RequestOutput]:
        """The outputs of prompts of whatever kind `encode` turns into token ids."""
        count, params = len(inputs), SamplingParams() if params is None else params
        each_params = _each(params, _is_params, count, "params", "SamplingParams")
        each_tenant = _each(tenant, _is_text, count, "tenant", "a name")
        what = "a name, None, a sequence of WeightedAdapter"
        choices = _each(adapter, _is_choice, count, "adapter", what)
        with self._free.turn, contextlib.ExitStack() as held:
            pins = [held.enter_context(self._pin(choice)) for choice in choices]
            jobs: list[_Prompting] = []
            for given, its_params, pinned, who in zip(
                inputs, each_params, pins, each_tenant, strict=True
            ):
                ids, language = encode(given, pinned.language), pinned.language
                request_id = str(next(self._ids))
                making = self._intake.requests(request_id, [ids], its_params, pinned, who)
                made = self._executor.run(making)
                prompt = given if isinstance(given, str) else None
                output = RequestOutput(prompt, ids, pinned.lease.ref)
                stream = OutputStream(language.tokenizer, its_params, ids, text_at_end=True)
                jobs.append(_Prompting(made[0], output, stream))
            return self._run(jobs, on_finished)

    def _pin(self, choice: AdapterChoice) -> Pinned:
        if choice is not None and not isinstance(choice, str):
            return self._intake.pin_sum(self._access, choice)
        pinned = self._intake.pin(self._access, choice)
        if choice is not None and pinned.name is None:
            raise ModelNotFound(f"{choice!r} is the base; say adapter=None for it", "adapter")
        return pinned

    def _encode(self, prompt: Prompt, language: Language) -> list[int]:
        if isinstance(prompt, str):
            return self._executor.run(self._intake.encode([prompt], "prompt", language))[0]
        ids = _token_ids(prompt)
        if ids is None:
            message = f"a prompt must be a text or a list of token ids, got {prompt!r:.100}"
            raise InvalidRequest(message, "prompt")
        return ids

    def _encode_chat(self, conversation: Conversation, language: Language) -> list[int]:
        if not _is_list(conversation):
            message = f"a conversation must be a list of messages, got {conversation!r:.100}"
            raise InvalidRequest(message, "messages")
        messages = [_with_text(message, n) for n, message in enumerate(conversation)]
        return self._executor.run(self._intake.encode_chat(messages, language))

    def _run(
        self, jobs: list[_Prompting], on_finished: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        open_jobs = {job.request.request_id: job for job in jobs}
        with contextlib.closing(self._client.run([job.request for job in jobs])) as events:
            for event in events:
                job = open_jobs.get(event.request_id)
                if job is None:
                    continue
                if job.stream.holds(event):
                    job.output.token_ids += event.token_ids
                    continue
                delta = job.stream.feed(event)
                job.add(delta)
                if delta.abort:
                    self._client.abort(event.request_id)
                if delta.finish_reason is not None:
                    del open_jobs[event.request_id]
                    self._tells = True
                    try:
                        on_finished(job.output)
                    finally:
                        self._tells = False
        return [job.output for job in jobs]


@dataclass(slots=True)
class _Prompting:
    """One prompt on its way to its output."""

    request: EngineRequest
    output: RequestOutput
    stream: OutputStream

    def add(self, delta: OutputDelta) -> None:
        output = self.output
        output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.num_cached_tokens = delta.num_cached_tokens
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs


def _with_text(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The message as chat templates expect it: content is one string."""
    if not isinstance(cast(object, message), Mapping):
        raise InvalidRequest(
            f"messages[{index}] must be a mapping, got {message!r:.100}", "messages"
        )
    if not isinstance(message.get("role"), str):
        field = f"messages[{index}].role"
        raise InvalidRequest(f"{field} must be a text such as 'user'", field)
    content, field = message.get("content"), f"messages[{index}].content"
    if isinstance(content, list):
        content = joined_text(content, field)
    elif content is None and message.get("role") == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise InvalidRequest(f"{field} must be a text or a list of text parts", field)
    return {**message, "content": content}


def _token_ids(prompt: Any) -> list[int] | None:
    """The token ids that a list or an array holds; None if it is or holds anything else."""
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    is_list = isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)
    ids = [as_int(each) for each in given] if is_list else [None]
    return None if None in ids else cast(list[int], ids)


def _is_params(value: object) -> bool:
    return isinstance(value, SamplingParams)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_choice(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, Sequence) and {type(each) for each in value} == {WeightedAdapter}


def _each(
    given: Any, is_one: Callable[[object], bool], count: int, name: str, what: str
) -> list[Any]:
    """A list with one value for each prompt, from one value for all of them or a sequence."""
    values = [given] * count if is_one(given) else given
    if not (isinstance(values, Sequence) and all(map(is_one, values))):
        raise InvalidRequest(f"{name} must be {what}, or one of these for each prompt", name)
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts", name)
    return list(values)
