"""What routers, dashboards and alerts read.

The names under `vllm:` are those that routers of this field already know, with the meaning they
expect; what only Weft has is under `weft:`. Figures of the engine are read once per scrape from
its `EngineStats`; figures of the HTTP side are counted here as they happen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.core.types import EngineInfo, EngineStats

__all__ = ["CONTENT_TYPE", "Metrics"]

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait to be run.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", "kv_usage"),
    ("weft:adapter_device_bytes", "Device bytes that adapters take.", "adapter_bytes"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("weft:engine_steps", "Forward passes.", "steps"),
    ("weft:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("weft:cached_tokens", "Prompt tokens taken from the prefix cache.", "cached_tokens"),
    ("weft:generated_tokens", "Tokens generated.", "generated_tokens"),
    ("weft:preemptions", "Requests put back to make room.", "preemptions"),
    ("weft:adapter_loads", "Adapters brought to the device.", "adapter_loads"),
    ("weft:adapter_evictions", "Adapters taken off the device.", "adapter_evictions"),
)


class Metrics:
    """All metrics of one server. Has its own registry, so that several servers can coexist."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "weft:http_requests",
            "HTTP requests by route and status; 499: the client left.",
            ["route", "status"],
            registry=self._registry,
        )
        self.time_to_first_token_s = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self.time_per_output_token_s = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between two tokens after the first.",
            buckets=_PER_TOKEN_S,
            registry=self._registry,
        )

    def render(
        self,
        info: EngineInfo,
        stats: EngineStats | None,
        names_of: Mapping[str, Sequence[str]],
    ) -> bytes:
        """The text of one scrape. `stats` is None when the engine does not answer; `names_of`
        gives the live names of each adapter digest."""
        scrape = CollectorRegistry()
        scrape.register(_EngineCollector(info, stats, names_of))
        return generate_latest(self._registry) + generate_latest(scrape)


@dataclass(frozen=True, eq=False)
class _EngineCollector(Collector):
    info: EngineInfo
    stats: EngineStats | None
    names_of: Mapping[str, Sequence[str]]

    def collect(self) -> Iterator[Metric]:
        up = "1 while the engine answers."
        yield GaugeMetricFamily("weft:engine_up", up, value=float(self.stats is not None))
        yield self._cache_config()
        if self.stats is not None:
            yield from self._figures(self.stats)
            yield self._lora_requests(self.stats)
            yield self._lora_loaded(self.stats)

    def _figures(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        finished = CounterMetricFamily(
            "weft:requests_finished", "Requests by finish reason.", labels=["finish_reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished

    def _cache_config(self) -> Metric:
        labels = ["block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=labels)
        family.add_metric([str(self.info.block_size), str(self.info.num_blocks)], 1)
        return family

    def _lora_requests(self, stats: EngineStats) -> Metric:
        """One series, whose value is the time: readers take the series with the largest value."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters resident on the device, and adapters that requests wait for.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        resident = ",".join(self._names(stats.resident_adapters))
        waiting = ",".join(self._names(stats.waiting_adapters))
        family.add_metric([str(self.info.max_loras), resident, waiting], time.time())
        return family

    def _lora_loaded(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Adapters in device memory and in the host cache.",
            labels=["adapter_name", "level"],
        )
        for level, digests in (("gpu", stats.resident_adapters), ("cpu", stats.host_adapters)):
            for name in self._names(digests):
                family.add_metric([name, level], 1)
        return family

    def _names(self, digests: Iterable[str]) -> list[str]:
        """Live names; a version that only drains has none."""
        return sorted({name for d in digests for name in self.names_of.get(d, ())})
