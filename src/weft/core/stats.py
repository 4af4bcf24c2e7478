"""Records of what an engine is (`EngineInfo`), and of what happens in it (`EngineStats`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

LOAD_STAGES = ("read", "pack", "copy")
"""The stages of a load: read a folder or image file, pack a folder, copy to the device."""
LOAD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""The upper bounds of a `Spread`'s buckets."""

CheckResult = Literal["passed", "failed", "skipped"]
"""How the check of a new adapter ended; skipped means that it could not be made."""
CHECK_RESULTS: tuple[CheckResult, ...] = get_args(CheckResult)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """What happened to one adapter that has been on the device since the engine's start."""

    num_loads: int = 0
    num_evictions: int = 0
    last_load_s: float = 0.0
    """Seconds from the order of its last load to its residency."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages (LOAD_STAGES) that its last load had."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram of seconds: their sum, and their number in each bucket of `LOAD_BOUNDS_S` and in
    one beyond."""

    counts: tuple[int, ...]
    sum: float


class Times:
    """Builds a `Spread` of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LOAD_BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(LOAD_BOUNDS_S, seconds)] += 1
        self._sum += seconds

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self._sum)


class StageTimes:
    """A histogram for each stage of loads and registrations."""

    def __init__(self) -> None:
        self._times = {stage: Times() for stage in LOAD_STAGES}

    def add(self, stage_s: Mapping[str, float]) -> None:
        for stage, seconds in stage_s.items():
            self._times[stage].add(seconds)

    @property
    def spreads(self) -> dict[str, Spread]:
        return {stage: times.spread for stage, times in self._times.items()}


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one place of adapters: device, host or disk. Counters since the start."""

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
    quantization: str | None = None
    """What `--quantization` says."""
    weights: str = ""
    """A hash of a sample of the weights, which tells models of one shape apart; "" for random
    ones."""


@dataclass(slots=True)
class FleetFigures:
    """What a process knows of the fleet that it is a part of."""

    nodes: dict[str, int] = field(default_factory=dict)
    """How many there are, by state."""
    lost_at: dict[str, float] = field(default_factory=dict)
    """When nodes were lost that were not drained before and are not back, by name, in seconds since
    1970."""
    moves: int = 0
    """Requests of this process that left a node that still served them."""
    losses: int = 0
    """Requests of this process that lost their node."""
    wanted_replicas: int | None = None
    """How many nodes there should be; None: another process reports that."""


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
    """Digests on the device; the next two fields: those on the host, and those never evicted."""
    host_adapters: tuple[str, ...] = ()
    pinned_adapters: tuple[str, ...] = ()
    adapters: dict[str, AdapterStats] = field(default_factory=dict)
    """By digest: those that have been on the device."""
    adapter_bytes: int = 0
    tiers: dict[str, TierStats] = field(default_factory=dict)
    """By device, host, disk; no disk if images are not kept there."""
    load_s: dict[str, Spread] = field(default_factory=dict)
    """Seconds of loads and registrations, by stage."""
    device_load_s: Spread | None = None
    """Seconds of loads to the device, from the order to the residency."""
    adapter_wait_s: Spread | None = None
    """Seconds for which requests were passed over because their adapters were not available."""
    self_checks: dict[str, int] = field(default_factory=dict)
    """Checks of registered adapters by result (CHECK_RESULTS); empty if none are made."""
    self_check_s: Spread | None = None
    quarantined_adapters: tuple[str, ...] = ()
    """Digests of adapters that failed their check and were not loaded again since."""
    adapter_copy_faults: int = 0
    """Copies to the device whose checksum was wrong."""
    steps: int = 0
    host_s: float = 0.0
    """Seconds of all steps in which the engine's thread did not wait for the device."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
