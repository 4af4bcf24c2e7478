"""Configuration of the engine: frozen, validated where built, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from weft.core.errors import ConfigError

MAX_RANK = 256
"""Largest rank that kernels must take."""


def _at_least(name: str, value: int | float | None, low: int | float) -> None:
    if value is not None and value < low:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} must be at least {low}, got {value}", name)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Which base model, and how to hold it."""

    model: str
    """A folder in Hugging Face's layout, or a hub id."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """auto: the checkpoint's own on a GPU, float32 on a CPU."""
    max_model_len: int | None = None
    """None: what the model's configuration says."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights straight on the device, for speed measurements."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 1)


@dataclass(frozen=True, slots=True)
class LoraArgs:
    """Limits of the adapter memory."""

    max_loras: int = 256
    """Distinct adapters in one batch; sizes no buffer."""
    max_cpu_loras: int = 256
    """Adapters held in the host cache; others are read again from their folders. Those that are
    pinned, or have no folder, are held besides."""
    max_lora_rank: int = MAX_RANK
    adapter_memory: int | None = None
    """Bytes of device memory for adapters; None: an eighth of the free memory, 2 GiB on a CPU."""
    eviction_policy: Literal["lru", "fifo"] = "lru"
    """Which adapters leave the device and the host cache first: those used least recently, or
    those that came first."""
    max_adapter_wait_steps: int = 64
    """A request whose adapter finds no room waits at most so many steps before running
    requests of another adapter are put back to make room for it."""
    lora_backend: str = "auto"
    """Name in the registry of `weft.kernels.lora`; auto: the best for the device."""

    def __post_init__(self) -> None:
        _at_least("max_loras", self.max_loras, 1)
        _at_least("max_cpu_loras", self.max_cpu_loras, 1)
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(
                f"--max-lora-rank must be at most {MAX_RANK}, got {self.max_lora_rank}",
                "max_lora_rank",
            )
        _at_least("adapter_memory", self.adapter_memory, 1)
        _at_least("max_adapter_wait_steps", self.max_adapter_wait_steps, 1)


@dataclass(frozen=True, slots=True)
class CacheArgs:
    """The KV cache."""

    block_size: int = 16
    """Tokens a block."""
    num_blocks: int | None = None
    """None: what `gpu_memory_utilization` leaves on a GPU, `kv_cache_memory` on a CPU."""
    kv_cache_memory: int = 1 << 30
    """Bytes, on a CPU."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("num_blocks", self.num_blocks, 1)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}",
                "gpu_memory_utilization",
            )


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """What may be in one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    overlap: bool = True
    """Plan step N+1 while step N runs."""

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """All that starts an engine."""

    model: ModelArgs
    lora: LoraArgs = field(default_factory=LoraArgs)
    cache: CacheArgs = field(default_factory=CacheArgs)
    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    num_threads: int | None = None
    """Of torch on a CPU; None: torch's own default."""


def engine_args(model: str, **options: object) -> EngineArgs:
    """EngineArgs from options by field name; those that are None keep their defaults.

    Raises ConfigError for a name that no part has, or a value that a part refuses.
    """
    given = {name: value for name, value in options.items() if value is not None}
    parts: dict[str, object] = {}
    for part, kind in (
        ("model", ModelArgs),
        ("lora", LoraArgs),
        ("cache", CacheArgs),
        ("scheduler", SchedulerArgs),
    ):
        names = {f.name for f in fields(kind)} - {"model"}
        values = {name: given.pop(name) for name in names & given.keys()}
        parts[part] = kind(model, **values) if kind is ModelArgs else kind(**values)  # type: ignore
    num_threads = given.pop("num_threads", None)
    if given:
        name = min(given)
        raise ConfigError(f"there is no option {name!r}", name)
    return EngineArgs(num_threads=num_threads, **parts)  # type: ignore[arg-type]
