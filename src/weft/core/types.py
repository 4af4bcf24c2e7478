"""Records that cross package and process boundaries. Standard library only.

Requests go down (`EngineRequest`), tokens come up (`TokenEvent`). All of them are plain
dataclasses of plain values, so that any codec can carry them between processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from weft.core.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable adapter version. `digest` (sha256, hex) keys slots, KV and images."""

    name: str
    version: int
    digest: str


LOAD_STAGES = ("read", "pack", "copy")
"""Of a load: from its folder or image file, its packing if it was in a folder, to the device."""
LOAD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Buckets of `Spread`s of seconds."""


CheckResult = Literal["passed", "failed", "skipped"]
"""Of the check of what is registered; skipped: it could not be made."""
CHECK_RESULTS: tuple[CheckResult, ...] = get_args(CheckResult)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """What happened to one adapter that has been on the device since the engine's start."""

    num_loads: int
    """Times it was brought to the device."""
    num_evictions: int
    last_load_s: float
    """Seconds from the order of its last load to its residency."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages (LOAD_STAGES) that its last load had."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread: their number by bucket of `LOAD_BOUNDS_S`, and their sum."""

    counts: tuple[int, ...]
    """One more than there are bounds."""
    sum: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """A place of adapters: device, host or disk. Counters since the start."""

    num_bytes: int
    max_bytes: int
    num_adapters: int
    hits: int = 0
    """Requests (device) or loads (host, disk) that found their adapter there."""
    misses: int = 0
    evictions: int = 0
    errors: int = 0
    """Files that could not be read or written, or were not what they should be."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the engine reports of an adapter that it accepted."""

    digest: str
    path: str
    max_rank: int
    num_bytes: int
    targets: tuple[str, ...]
    """Names of the adapted projections without the layer, e.g. ("q_proj", "v_proj")."""
    conversion_error: float = 0.0
    """Of an adapter of another kind than LoRA, in its worst target: how far the LoRA that is served
    for it is off, as a relative Frobenius norm; 0: not at all."""
    conversion_worst: str = ""
    """That target."""
    invocation_token_ids: tuple[int, ...] = ()
    """Of an activated LoRA: from their last occurrence in the prompt on it is active, and nowhere
    without one. Empty: it is active everywhere."""
    vocab_size: int = 0
    """Its vocabulary, if it is another than the base's, 0."""
    checked: bool = False
    """Whether the device was seen to compute it as its files say."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have: exactly one of these is given.

    Raises InvalidRequest unless it is; whether a schema, regex or grammar is valid shows when
    the engine compiles it.
    """

    json: str | None = None
    """A JSON schema, as JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] = ()
    """One of these strings."""
    grammar: str | None = None
    """EBNF; its root rule is `root`."""
    structural_tag: str | None = None
    """xgrammar's structural tag, as JSON text: free text with constrained parts."""
    begin_after_token: int | None = None
    """The form binds from the token after this one on: the end of the reasoning."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", tuple(self.choice))
        values = (self.json, self.json_object, self.regex, self.choice, self.grammar)
        given = sum(value not in (None, False, ()) for value in (*values, self.structural_tag))
        if given != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one constraint, got {given}",
                "structured_outputs",
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request.

    temperature 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch the filter off. `seed`
    makes a request's tokens reproducible whoever shares its batch. `logprobs` is the number of
    alternatives to report beside the chosen token (None: no log-probabilities at all),
    `prompt_logprobs` likewise at each position of the prompt.

    Rules about tokens that leave none to choose are refused where that is plain beforehand. Where
    it comes about later, the strongest hold: `structured_outputs`, then `allowed_token_ids`, bad
    words of one token, `min_tokens`, and other bad words last.

    Raises InvalidRequest, naming the field, for a value out of range.
    """

    max_tokens: int | None = 16
    """None: as many as fit into the model's context."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are left out."""
    repetition_penalty: float = 1.0
    """Above 1: logits of tokens in prompt or output are divided by it (multiplied if negative)."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the output as often as they are there."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits, by token id."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor a stop token can be chosen, and no stop string ends."""
    bad_words: tuple[str, ...] = ()
    """Strings that must not be produced."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these can be chosen; empty: all."""
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value: object = getattr(self, name)
            values = (value,) if isinstance(value, str | int) else tuple(getattr(self, name) or ())
            object.__setattr__(self, name, values)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1, 2**63 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be in (0, 1], got 0", "top_p")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0", "repetition_penalty")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None)
            _check_float("logit_bias", bias, -100.0, 100.0)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _check_int(name, token, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, if a token id is not below `vocab_size`."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            highest = max(getattr(self, name), default=-1)
            if highest >= vocab_size:
                raise InvalidRequest(
                    f"{name} has token id {highest}, outside of [0, {vocab_size})", name
                )


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", name)


def _check_strings(name: str, values: tuple[str, ...], max_strings: int, max_chars: int) -> None:
    if len(values) > max_strings:
        raise InvalidRequest(f"{name} has more than {max_strings} strings", name)
    if any(not isinstance(s, str) or not s for s in values):
        raise InvalidRequest(f"{name} must hold non-empty strings", name)
    if any(len(s) > max_chars for s in values):
        raise InvalidRequest(f"{name} has a string of more than {max_chars} characters", name)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise InvalidRequest(f"{name} must be a number, got {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low:g}, {high:g}], got {value}", name)


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One of several adapters that are summed, and what its part is multiplied by."""

    ref: AdapterRef
    scale: float


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue. `adapter` None means the base model."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    adapter: AdapterRef | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be produced: `params.bad_words`, tokenized."""
    tenant: str = ""
    """Who asks. Tenants whose requests wait are served alike."""
    parts: tuple[AdapterPart, ...] = ()
    """What `adapter` is the weighted sum of; (): it is registered under its own digest."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the adapter's own tokenizer: they end the output as the model's EOS does."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural, before temperature and filters) at one output position."""

    logprob: float
    rank: int
    """Rank of the chosen token, 1 for the most likely."""
    top: list[tuple[int, float]]
    """The most likely tokens, best first: (token id, log-probability)."""


class TokenEvent(NamedTuple):
    """New tokens of a request. Exactly one event of a request has `finish_reason` set: its last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    """"stop": its last token ended it."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the request; None for EOS."""
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    error: tuple[str, str, str | None] | None = None
    """With finish_reason "error": see `weft.core.errors.from_wire`."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first event, if asked for: one for each token of the prompt, None for its first."""
    queue_s: float | None = None
    """With the first event: seconds from the engine's receipt of the request to its first step."""
    adapter_wait_s: float | None = None
    """With `queue_s`: the part of it in which the request was passed over because its adapter was
    not on the device, or not to be had in this batch."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the API needs to know of a started engine."""

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_loras: int
    max_lora_rank: int
    adapter_memory_bytes: int
    num_parameters: int
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages of its start, in their order; see `weft.core.stages`."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, read between two steps. All counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Blocks in use over all blocks, 0 to 1; cached but unused blocks are not in use."""
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    resident_adapters: tuple[str, ...] = ()
    """Digests on the device."""
    host_adapters: tuple[str, ...] = ()
    """Digests in the host cache."""
    pinned_adapters: tuple[str, ...] = ()
    """Digests that are never evicted."""
    adapters: dict[str, AdapterStats] = field(default_factory=dict)
    """By digest: those that have been on the device."""
    adapter_bytes: int = 0
    """Device bytes that adapters take now."""
    tiers: dict[str, TierStats] = field(default_factory=dict)
    """By device, host, disk; no disk if images are not kept there."""
    load_s: dict[str, Spread] = field(default_factory=dict)
    """Seconds of loads and registrations, by stage."""
    adapter_wait_s: Spread | None = None
    """Seconds for which requests were passed over because their adapters were not to be had."""
    self_checks: dict[str, int] = field(default_factory=dict)
    """Checks of registered adapters by result (CHECK_RESULTS); empty if none are made."""
    self_check_s: Spread | None = None
    """Seconds that they took."""
    quarantined_adapters: tuple[str, ...] = ()
    """Digests of those that failed one, and were not loaded again since."""
    adapter_copy_faults: int = 0
    """Adapters that did not come to the device as they were packed: found by their checksum."""
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""
