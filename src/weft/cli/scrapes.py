"""What a server does, from its metrics: reading them, and what changed between two readings."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from weft.core.errors import Unreachable

TIMEOUT_S = 5.0

Labels = frozenset[tuple[str, str]]
Buckets = dict[float, float]
"""Number of values up to each bound."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All series at one time."""

    time_s: float
    """Unix time."""
    series: Mapping[str, Mapping[Labels, float]]
    """By name and labels."""

    def sum(self, name: str) -> float:
        return sum(self.series.get(name, {}).values())

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums by a label's value."""
        sums: dict[str, float] = {}
        for labels, value in self.series.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str, **only: str) -> Buckets:
        """The buckets of a histogram, all its series with these labels taken together."""
        found: Buckets = {}
        for labels, value in self.series.get(f"{name}_bucket", {}).items():
            values = dict(labels)
            if only.items() <= values.items():
                bound = float(values["le"])
                found[bound] = found.get(bound, 0.0) + value
        return found

    def since(self, before: Scrape) -> Scrape:
        """What counters have gained; one that is smaller than before began anew."""
        gained = {
            name: {
                labels: value - old if value >= (old := then.get(labels, 0.0)) else value
                for labels, value in now.items()
            }
            for name, now in self.series.items()
            for then in (before.series.get(name, {}),)
        }
        return Scrape(self.time_s, gained)


def parse(text: str, time_s: float) -> Scrape:
    """Raises Unreachable when the text is not of a Weft server."""
    series: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                series.setdefault(sample.name, {})[labels] = sample.value
    except ValueError:
        series = {}
    if "weft:engine_up" not in series:
        raise Unreachable("/metrics is not that of a Weft server")
    return Scrape(time_s, series)


def fetch(url: str) -> Scrape:
    """The server's metrics now. Raises Unreachable."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
            return parse(answer.read().decode("utf-8", "replace"), time.time())
    except Unreachable as error:
        raise Unreachable(f"{url}{error.message}") from None
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreachable(f"{url}/metrics answers with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        raise Unreachable(f"can't reach {url}: {why}") from None


def plain_url(given: str) -> str:
    """`localhost:8000/v1/` as http://localhost:8000."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles, in seconds; None: there was no request."""

    p50_s: float | None = None
    p95_s: float | None = None
    recent: bool = True
    """Whether this is about the last seconds, not all since the server's start."""


@dataclass(frozen=True, slots=True)
class AdapterRow:
    name: str
    tokens_per_s: float
    requests_per_s: float
    num_requests: float
    """Since its series began."""
    first_token: Latency
    per_token: Latency
    level: str
    """gpu, cpu, disk; of the base `base`, of the sum of others nothing."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A place of adapters."""

    name: str
    """device, host, disk."""
    num_bytes: float
    max_bytes: float
    hit_share: float | None
    """The share of what was looked for there that was found, 0 to 1; None: nothing was."""
    evictions_per_s: float


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown. Rates are per second."""

    model: str
    engine_up: bool
    uptime_s: float | None
    running: float = 0.0
    waiting: float = 0.0
    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    """HTTP answers with status 500 and above."""
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    cached_share: float | None = None
    """The share of prompt tokens that the prefix cache had, 0 to 1."""
    kv_usage: float = 0.0
    preemptions_per_s: float = 0.0
    first_token: Latency = field(default_factory=Latency)
    per_token: Latency = field(default_factory=Latency)
    levels: Mapping[str, int] = field(default_factory=dict)
    """Adapters by gpu, cpu, disk."""
    room: float = 0.0
    """Adapters that fit on the device, about."""
    loads_per_s: float = 0.0
    evictions_per_s: float = 0.0
    tiers: tuple[TierLoad, ...] = ()
    stages: Mapping[str, Latency] = field(default_factory=dict)
    """How long each stage of a load takes: read, pack, copy."""
    wait: Latency = field(default_factory=Latency)
    """How long requests wait until their adapter is resident."""
    adapters: tuple[AdapterRow, ...] = ()
    """The busiest first."""


def measure(now: Scrape, before: Scrape) -> View:
    """What happened between two scrapes of one server."""
    gained = now.since(before)
    per_s = 1.0 / max(now.time_s - before.time_s, 1e-3)
    started = now.sum("process_start_time_seconds")
    prompt = gained.sum("vllm:prompt_tokens_total")
    by_status = gained.by("status", "weft:http_requests_total")
    return View(
        model=next(iter(now.by("model_name", "vllm:e2e_request_latency_seconds_count")), ""),
        engine_up=bool(now.sum("weft:engine_up")),
        uptime_s=max(now.time_s - started, 0.0) if started else None,
        running=now.sum("vllm:num_requests_running"),
        waiting=now.sum("vllm:num_requests_waiting"),
        requests_per_s=gained.sum("vllm:request_success_total") * per_s,
        errors_per_s=sum(n for status, n in by_status.items() if status.startswith("5")) * per_s,
        output_tokens_per_s=gained.sum("vllm:generation_tokens_total") * per_s,
        prompt_tokens_per_s=prompt * per_s,
        cached_share=gained.sum("vllm:prefix_cache_hits_total") / prompt if prompt else None,
        kv_usage=now.sum("vllm:kv_cache_usage_perc"),
        preemptions_per_s=gained.sum("vllm:num_preemptions_total") * per_s,
        first_token=_latency(now, gained, "vllm:time_to_first_token_seconds"),
        per_token=_latency(now, gained, "vllm:request_time_per_output_token_seconds"),
        levels={level: int(n) for level, n in now.by("level", "weft:adapters").items()},
        room=now.sum("vllm:max_gpu_lora_adapters"),
        loads_per_s=gained.sum("weft:adapter_loads_total") * per_s,
        evictions_per_s=gained.sum("weft:adapter_evictions_total") * per_s,
        tiers=tuple(_tier_rows(now, gained, per_s)),
        stages={
            stage: _latency(now, gained, "weft:adapter_load_seconds", stage=stage)
            for stage in now.by("stage", "weft:adapter_load_seconds_count")
        },
        wait=_latency(now, gained, "weft:adapter_wait_seconds"),
        adapters=tuple(_adapter_rows(now, gained, per_s)),
    )


def _tier_rows(now: Scrape, gained: Scrape, per_s: float) -> Iterator[TierLoad]:
    limits = now.by("tier", "weft:adapter_tier_limit_bytes")
    num_bytes = now.by("tier", "weft:adapter_tier_bytes")
    hits = gained.by("tier", "weft:adapter_tier_hits_total")
    misses = gained.by("tier", "weft:adapter_tier_misses_total")
    evictions = gained.by("tier", "weft:adapter_tier_evictions_total")
    for tier, limit in limits.items():
        asked = hits.get(tier, 0.0) + misses.get(tier, 0.0)
        share = hits.get(tier, 0.0) / asked if asked else None
        evicted = evictions.get(tier, 0.0) * per_s
        yield TierLoad(tier, num_bytes.get(tier, 0.0), limit, share, evicted)


def _adapter_rows(now: Scrape, gained: Scrape, per_s: float) -> list[AdapterRow]:
    models = now.by("model_name", "vllm:e2e_request_latency_seconds_count").keys()
    level_of = _levels(now) | dict.fromkeys(models, "base") | {"other": ""}
    tokens = gained.by("adapter", "weft:adapter_output_tokens_total")
    requests = gained.by("adapter", "weft:adapter_requests_total")
    total = now.by("adapter", "weft:adapter_requests_total")
    times = "weft:adapter_time"
    rows = [
        AdapterRow(
            name=name,
            tokens_per_s=tokens.get(name, 0.0) * per_s,
            requests_per_s=requests.get(name, 0.0) * per_s,
            num_requests=count,
            first_token=_latency(now, gained, f"{times}_to_first_token_seconds", adapter=name),
            per_token=_latency(now, gained, f"{times}_per_output_token_seconds", adapter=name),
            level=level_of.get(name, "disk"),
        )
        for name, count in total.items()
        if count
    ]
    rows.sort(key=lambda row: (-row.tokens_per_s, -row.num_requests, row.name))
    return rows


def _levels(now: Scrape) -> dict[str, str]:
    """The fastest memory that has an adapter, of those that are in one."""
    levels: dict[str, str] = {}
    for labels in now.series.get("vllm:lora_adapter_loaded", {}):
        values = dict(labels)
        name, level = values["adapter_name"], values["level"]
        levels[name] = "gpu" if "gpu" in (level, levels.get(name)) else level
    return levels


def _latency(now: Scrape, gained: Scrape, name: str, **only: str) -> Latency:
    recent = gained.buckets(name, **only)
    any_recent = recent.get(float("inf"), 0.0) > 0
    buckets = recent if any_recent else now.buckets(name, **only)
    return Latency(quantile(buckets, 0.5), quantile(buckets, 0.95), any_recent)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Estimated as Prometheus does: values are spread evenly in their bucket."""
    edges = [(0.0, 0.0), *sorted(buckets.items())]
    rank = share * edges[-1][1]
    if rank <= 0:
        return None
    for (low, below), (high, up_to) in pairwise(edges):
        if up_to >= rank:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / (up_to - below)
    return None
