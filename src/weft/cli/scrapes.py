"""Reads a server's metrics, and works out what changed between two readings."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from weft.cli.asking import request_to, unreachable
from weft.core.errors import Unreachable
from weft.terminal.plain import plain

TIMEOUT_S = 5.0
_HINTS = {
    401: "; does it need a key (--api-key)?",
    403: "; metrics need an admin's key (--api-key)",
    404: "; its metrics may be on another port (--metrics-port)",
}
_MODEL_SERIES = "vllm:e2e_request_latency_seconds_count"
"""A metric whose series name the base model."""

_BEGIN_S = time.time() - time.monotonic()
Labels = frozenset[tuple[str, str]]
Buckets = dict[float, float]
"""Number of values up to each bound."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All series at one time."""

    time_s: float
    """Unix time; see `steady_time`."""
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

    def of_node(self, name: str) -> Scrape:
        """The series with the label `node` of this value."""
        label = ("node", name)
        kept = {
            series: {labels: value for labels, value in values.items() if label in labels}
            for series, values in self.series.items()
        }
        return Scrape(self.time_s, kept)

    def since(self, before: Scrape) -> Scrape:
        """The increases of counters; one that is smaller than before was restarted at 0."""
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
                labels = frozenset((key, plain(each)) for key, each in sample.labels.items())
                series.setdefault(sample.name, {})[labels] = sample.value
    except ValueError:
        series = {}
    if "weft:engine_up" not in series:
        raise Unreachable("/metrics is not from a Weft server")
    return Scrape(time_s, series)


def steady_time() -> float:
    """Unix time by a clock that does not jump when the machine's clock is set."""
    return _BEGIN_S + time.monotonic()


def fetch(url: str, key: str) -> Scrape:
    """The server's metrics now; `key` is the bearer token, if it is not "". Raises Unreachable."""
    try:
        request = request_to(f"{url}/metrics", key)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return parse(answer.read().decode("utf-8", "replace"), steady_time())
    except Unreachable as error:
        raise Unreachable(f"{url}{error.message}") from None
    except urllib.error.HTTPError as error:
        error.close()
        said = f"{url}/metrics answers with status {error.code}{_HINTS.get(error.code, '')}"
        raise Unreachable(said) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise unreachable(url, error) from None


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
    """Requests since the adapter got metrics of its own."""
    first_token: Latency
    per_token: Latency
    level: str
    """gpu, cpu, disk; of the base `base`; nothing of `other` and of a weighted sum of adapters."""


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
    """What happened between two scrapes of one server."""

    now: Scrape
    gained: Scrape
    """What counters have gained."""
    seconds: float

    def sum(self, name: str) -> float:
        return self.now.sum(name)

    def rate(self, name: str) -> float:
        """What a counter gained, per second."""
        return self.gained.sum(name) / self.seconds

    def of_node(self, name: str) -> View:
        """The part of one server, where several are shown as one."""
        return View(self.now.of_node(name), self.gained.of_node(name), self.seconds)

    def latency(self, name: str, **only: str) -> Latency:
        recent = self.gained.buckets(name, **only)
        any_recent = recent.get(float("inf"), 0.0) > 0
        buckets = recent if any_recent else self.now.buckets(name, **only)
        return Latency(quantile(buckets, 0.5), quantile(buckets, 0.95), any_recent)

    @property
    def model(self) -> str:
        return ", ".join(self.now.by("model_name", _MODEL_SERIES))

    @property
    def uptime_s(self) -> float | None:
        started = self.sum("process_start_time_seconds")
        return max(self.now.time_s - started, 0.0) if started else None

    @property
    def errors_per_s(self) -> float:
        """HTTP answers with status 500 and above."""
        by_status = self.gained.by("status", "weft:http_requests_total")
        return sum(n for status, n in by_status.items() if status.startswith("5")) / self.seconds

    @property
    def cached_share(self) -> float | None:
        """The share of prompt tokens that the prefix cache had, 0 to 1."""
        prompt = self.gained.sum("vllm:prompt_tokens_total")
        return self.gained.sum("vllm:prefix_cache_hits_total") / prompt if prompt else None

    def stages(self) -> dict[str, Latency]:
        """How long each stage of a load takes: read, pack, copy."""
        name = "weft:adapter_load_seconds"
        found = self.now.by("stage", f"{name}_count")
        return {stage: self.latency(name, stage=stage) for stage in found}

    def tiers(self) -> Iterator[TierLoad]:
        num_bytes = self.now.by("tier", "weft:adapter_tier_bytes")
        hits, misses, evictions = (
            self.gained.by("tier", f"weft:adapter_tier_{what}_total")
            for what in ("hits", "misses", "evictions")
        )
        for tier, limit in self.now.by("tier", "weft:adapter_tier_limit_bytes").items():
            asked = hits.get(tier, 0.0) + misses.get(tier, 0.0)
            share = hits.get(tier, 0.0) / asked if asked else None
            evicted = evictions.get(tier, 0.0) / self.seconds
            yield TierLoad(tier, num_bytes.get(tier, 0.0), limit, share, evicted)

    def adapters(self) -> list[AdapterRow]:
        """The busiest first."""
        bases = self.now.by("model_name", _MODEL_SERIES)
        level_of = _levels(self.now) | dict.fromkeys(bases, "base") | {"other": ""}
        tokens = self.gained.by("adapter", "weft:adapter_output_tokens_total")
        requests = self.gained.by("adapter", "weft:adapter_requests_total")
        times = "weft:adapter_time"
        rows = [
            AdapterRow(
                name=name,
                tokens_per_s=tokens.get(name, 0.0) / self.seconds,
                requests_per_s=requests.get(name, 0.0) / self.seconds,
                num_requests=count,
                first_token=self.latency(f"{times}_to_first_token_seconds", adapter=name),
                per_token=self.latency(f"{times}_per_output_token_seconds", adapter=name),
                level=level_of.get(name, "" if "," in name else "disk"),
            )
            for name, count in self.now.by("adapter", "weft:adapter_requests_total").items()
            if count
        ]
        rows.sort(key=lambda row: (-row.tokens_per_s, -row.num_requests, row.name))
        return rows


def measure(now: Scrape, before: Scrape) -> View:
    return View(now, now.since(before), max(now.time_s - before.time_s, 1e-3))


def _levels(now: Scrape) -> dict[str, str]:
    """The fastest memory that has an adapter, of those that are in one."""
    levels: dict[str, str] = {}
    for labels in now.series.get("vllm:lora_adapter_loaded", {}):
        values = dict(labels)
        name, level = values["adapter_name"], values["level"]
        levels[name] = "gpu" if "gpu" in (level, levels.get(name)) else level
    return levels


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
