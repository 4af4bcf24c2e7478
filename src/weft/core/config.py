"""Configuration of the engine: frozen dataclasses that validate themselves when they are built.

`weft serve --help` says what each field does; docstrings here add what the help leaves out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from weft.core.adapters import AdapterSource
from weft.core.errors import ConfigError, shown
from weft.core.numbers import MAX_NUMBER
from weft.core.sizes import parse_bytes, parse_memory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_RANK = 256
"""Largest rank that kernels must take."""
MAX_THREADS = 1024
"""Largest number of threads to compute with: with many more, a process can't start them."""
MAX_ADDED_TOKENS = 256
"""Default of `LoraArgs.max_added_tokens`."""
LORA_BACKENDS = "weft.lora_backends"
"""The group of entry points by which other packages bring LoRA backends."""

BYTES = frozenset(
    {
        "adapter_memory",
        "kv_cache_memory",
        "snapshot_memory",
        "adapter_host_memory",
        "adapter_cache_bytes",
    }
)
"""Fields that are sizes of memory."""


def check_texts(args: DataclassInstance) -> None:
    """Raises ConfigError if a field holds a text or a path that is not UTF-8, as command lines may:
    neither other processes nor clients could be told it."""
    for name in (each.name for each in fields(args)):
        value = getattr(args, name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str | Path) and re.search("[\ud800-\udfff]", str(text)):
                flag = "the base" if name == "model" else "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be UTF-8", name)


def _check(holds: bool, name: str, must_be: str, value: float | None) -> None:
    if not holds:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} must be {must_be}, got {shown(value)}", name)


def _at_least(args: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        _check(value is None or value >= low, name, f"at least {low}", value)
        _check(value is None or value <= MAX_NUMBER, name, f"at most {MAX_NUMBER}", value)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Which base model, and how to hold it."""

    model: str
    """A folder in Hugging Face's layout, or a hub id."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: str | None = None
    """A format of `weft.kernels.quant`, made while loading."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    revision: str | None = None
    tensor_parallel_size: int = 1
    """Devices that the model is spread over, each with a process of its own."""
    deterministic: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_model_len", "tensor_parallel_size")
        for has, flag in (
            (self.quantization is not None, "--quantization"),
            (self.tensor_parallel_size > 1, "--tensor-parallel-size"),
        ):
            if self.deterministic and has:
                raise ConfigError(f"--deterministic can't be given with {flag}", "deterministic")


@dataclass(frozen=True, slots=True)
class LoraArgs:
    """Limits of the adapter memory."""

    max_loras: int = 256
    """The most distinct adapters in one batch; no buffer's size depends on it."""
    adapter_host_memory: int | None = None
    """Bytes. Pinned adapters, and those that have no folder, come on top."""
    adapter_cache_dir: str | None = None
    adapter_cache_bytes: int = 32 << 30
    max_lora_rank: int = MAX_RANK
    conversion_tolerance: float = 1e-3
    max_added_tokens: int = MAX_ADDED_TOKENS
    adapter_memory: int | float | None = None
    """Bytes, or a fraction (below 1) of the device's whole memory, or of the machine's on a CPU."""
    eviction_policy: str = "cost"
    """A name in the table of `weft.schedule.policy`."""
    max_adapter_wait: float = 2.0
    """Seconds. After half of them, the adapters that have to make way take no new requests."""
    self_check: bool = True
    fully_sharded_loras: bool = False
    lora_backend: str = "auto"
    """Name in the registry of `weft.kernels.lora`; auto: the best for the device."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_loras", "adapter_host_memory", "adapter_cache_bytes")
        _at_least(self, 1, "max_lora_rank")
        rank = self.max_lora_rank
        _check(rank <= MAX_RANK, "max_lora_rank", f"at most {MAX_RANK}", rank)
        _at_least(self, 0, "max_added_tokens")
        _at_least(self, 0.0, "conversion_tolerance")
        memory = self.adapter_memory
        stated = memory is None or (isinstance(memory, int) and memory >= 1) or 0.0 < memory < 1.0
        kinds = "a number of bytes, or a fraction between 0 and 1"
        _check(stated, "adapter_memory", kinds, memory)
        wait = self.max_adapter_wait
        _check(0 < wait < math.inf, "max_adapter_wait", "more than 0 seconds", wait)
        check_backend(self.lora_backend)


_BUILT_IN = ("reference", "torch", "triton")


def backend_names() -> list[str]:
    """The names of LoRA backends, built-in ones first."""
    from importlib.metadata import entry_points  # it takes its time to import

    return [*_BUILT_IN, *(e.name for e in entry_points(group=LORA_BACKENDS))]


def check_backend(name: str) -> None:
    """Raises ConfigError for a LoRA backend that is not there. Looking for those of third parties
    takes long, so it is done only for a name that is not built in."""
    if name not in ("auto", *_BUILT_IN) and name not in (known := backend_names()):
        message = f"there is none of this name, only auto, {', '.join(known)}"
        raise ConfigError(f"--lora-backend {name}: {message}", "lora_backend")


@dataclass(frozen=True, slots=True)
class CacheArgs:
    """The KV cache."""

    block_size: int = 16
    num_blocks: int | None = None
    """None: as many as `kv_cache_memory` has room for."""
    kv_cache_memory: int | None = None
    """None: what `gpu_memory_utilization` leaves on a GPU, 1 GiB on a CPU."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    snapshot_memory: int | None = None
    """None: an eighth of what the KV cache would have."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "block_size", "num_blocks", "kv_cache_memory")
        _at_least(self, 0, "snapshot_memory")
        share = self.gpu_memory_utilization
        _check(0.0 < share <= 1.0, "gpu_memory_utilization", "in (0, 1]", share)


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """What may be in one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_chunk_delay: float | None = None
    """Milliseconds; None: there is no cap."""
    overlap: bool = True
    speculative: Literal["off", "ngram", "mtp"] = "off"
    tenant_weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        delay = self.max_chunk_delay
        _check(delay is None or 0 < delay < math.inf, "max_chunk_delay", "more than 0 ms", delay)
        tokens, least = self.max_num_batched_tokens, f"at least --max-num-seqs {self.max_num_seqs}"
        _check(tokens >= self.max_num_seqs, "max_num_batched_tokens", least, tokens)
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ConfigError(
                    f"--tenant-weights: the weight of {tenant!r} must be more than 0, got {weight}",
                    "tenant_weights",
                )


@dataclass(frozen=True, slots=True)
class KvEventsArgs:
    """Where an engine publishes which prefixes it has cached; see `weft.fleet.kv_events`."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    """Where missed messages can be asked for."""
    buffer_steps: int = 10_000
    """How many messages are kept for `replay_endpoint`."""
    hwm: int = 100_000
    """How many messages may wait for a subscriber."""
    topic: str = ""

    def __post_init__(self) -> None:
        _at_least(self, 1, "buffer_steps", "hwm")


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """All arguments of an engine."""

    model: ModelArgs
    lora: LoraArgs = field(default_factory=LoraArgs)
    cache: CacheArgs = field(default_factory=CacheArgs)
    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    num_threads: int | None = None
    kv_events: KvEventsArgs | None = None
    first_adapters: tuple[AdapterSource, ...] = ()
    """Adapters that the engine will be asked to hold as soon as it is ready. With one device, it
    reads them side by side before, on a GPU while steps are captured."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_threads")
        holds = self.num_threads is None or self.num_threads <= MAX_THREADS
        _check(holds, "num_threads", f"at most {MAX_THREADS}", self.num_threads)
        check_texts(self.model)
        check_texts(self.lora)


def engine_args(model: str, **options: object) -> EngineArgs:
    """EngineArgs from options by field name; those that are None keep their defaults. A size of
    memory may be a text such as "8G".

    Raises ConfigError for a name that no part has, or a value that a part refuses.
    """
    given = {name: value for name, value in options.items() if value is not None}
    parts: dict[str, object] = {}
    known = ["num_threads"]
    kinds = {"model": ModelArgs, "lora": LoraArgs, "cache": CacheArgs, "scheduler": SchedulerArgs}
    for part, kind in kinds.items():
        names = {f.name for f in fields(kind)} - {"model"}
        known.extend(names)
        values = {name: _typed(kind, name, given.pop(name)) for name in names & given.keys()}
        parts[part] = kind(model, **values) if kind is ModelArgs else kind(**values)
    num_threads = _typed(EngineArgs, "num_threads", given.pop("num_threads", None))
    if given:
        name = min(given)
        like = get_close_matches(name, known, 1, 0.75)
        hint = f"did you mean {like[0]!r}?" if like else "options are the flags of `weft serve`"
        raise ConfigError(f"there is no option {name!r}; {hint}", name)
    return EngineArgs(num_threads=num_threads, **parts)  # type: ignore[arg-type]


def _typed(kind: type, name: str, value: object) -> Any:
    """The value of a field, which must have the field's type. A path may stand for a string, and a
    text for a size of memory."""
    given: object = str(value) if isinstance(value, Path) else value
    hint = get_type_hints(kind)[name]
    if name in BYTES and isinstance(given, str):
        try:
            given = parse_memory(given) if float in get_args(hint) else parse_bytes(given)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", name) from None
    if not _is_of(given, hint):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        known = ", ".join(map(str, choices))
        wanted = f"one of {known}" if choices else f"of the type {kind.__annotations__[name]}"
        raise ConfigError(f"{name} must be {wanted}, got {shown(value)}", name)
    return given


def _is_of(value: object, hint: Any) -> bool:
    """Whether a value has this type: a plain one, a Literal, a union, or a mapping of such."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is not None:
        items = value.items() if isinstance(value, origin) else [(None, None)]
        return all(_is_of(key, args[0]) and _is_of(one, args[1]) for key, one in items)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if hint is float else hint)
