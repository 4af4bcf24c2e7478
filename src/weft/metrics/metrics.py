"""Defines the metrics that routers, dashboards and alerts read.

Names under `vllm:` are those that existing tools know, with the meaning that they expect; names
that only Weft has are under `weft:`. Figures of the engine are read once per scrape from
its `EngineStats`; figures of requests are counted here as they happen. Series by adapter are
bounded: see `weft.metrics.tallies`.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.stats import (
    LOAD_BOUNDS_S,
    LOAD_STAGES,
    EngineInfo,
    EngineStats,
    FleetFigures,
    Spread,
)
from weft.metrics.exposition import Bounds, Exposition, Histogram, Labels, labels
from weft.metrics.requests import RequestHistograms
from weft.metrics.shadows import ShadowCounters
from weft.metrics.tallies import OTHER, Tallies, Tally

__all__ = ["CONTENT_TYPE", "Metrics", "RegistryView"]

Adapters = Mapping[AdapterRef, AdapterInfo]

_FIRST_TOKEN_S = Bounds(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN_S = Bounds(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
_QUEUE_S = Bounds(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LOAD_S = Bounds(*LOAD_BOUNDS_S)
_REQUEST_S = Bounds(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# Name, help, and the field of EngineStats. Those under `vllm:` have the label `model_name`.
_GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait to be run.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", "kv_usage"),
    ("vllm:gpu_cache_usage_perc", "The same, by the name that it had before.", "kv_usage"),
    ("weft:adapter_device_bytes", "Device bytes that adapters take.", "adapter_bytes"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", "guessed_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", "right_guesses"),
    ("vllm:num_preemptions", "Requests put back into the queue.", "preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", "cached_tokens"),
    ("vllm:gpu_prefix_cache_queries", "The queries by their former name.", "prompt_tokens"),
    ("vllm:gpu_prefix_cache_hits", "The hits by their former name.", "cached_tokens"),
    ("weft:engine_steps", "Forward passes.", "steps"),
    ("weft:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("weft:cached_tokens", "Prompt tokens taken from the prefix cache.", "cached_tokens"),
    ("weft:generated_tokens", "Tokens generated.", "generated_tokens"),
    ("weft:preemptions", "Requests put back into the queue.", "preemptions"),
    ("weft:adapter_loads", "Adapters brought to the device.", "adapter_loads"),
    ("weft:adapter_evictions", "Adapters taken off the device.", "adapter_evictions"),
    ("weft:adapter_copy_faults", "Adapters damaged on their way there.", "adapter_copy_faults"),
)
_TIER_GAUGES = (
    ("weft:adapter_tier_bytes", "Bytes of adapters, by tier: device, host, disk.", "num_bytes"),
    ("weft:adapter_tier_limit_bytes", "Bytes that adapters may take, by tier.", "max_bytes"),
    ("weft:adapter_tier_adapters", "Adapters, by tier.", "num_adapters"),
)
_TIER_COUNTERS = (
    ("weft:adapter_tier_hits", "Requests (device) or loads that found their adapter.", "hits"),
    ("weft:adapter_tier_misses", "Those that did not, by tier.", "misses"),
    ("weft:adapter_tier_evictions", "Adapters that made way for others, by tier.", "evictions"),
    ("weft:adapter_tier_errors", "Image files that were not as they should be, by tier.", "errors"),
)
_TALLY_COUNTERS = (
    ("weft:adapter_prompt_tokens", "Prompt tokens of requests, by adapter.", "prompt_tokens"),
    ("weft:adapter_output_tokens", "Tokens generated, by adapter.", "output_tokens"),
    ("weft:adapter_evictions_by_name", "Times taken off the device, by adapter.", "evictions"),
)
# The name of the whole server's histogram, of that by adapter, the help, and the field of Tally.
_HISTOGRAMS = (
    (
        "vllm:time_to_first_token_seconds",
        "weft:adapter_time_to_first_token_seconds",
        "From a request's start to its first token.",
        "first_token_s",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "weft:adapter_time_per_output_token_seconds",
        "A request's mean time between two tokens after the first.",
        "per_token_s",
    ),
    (
        "vllm:request_queue_time_seconds",
        "weft:adapter_queue_time_seconds",
        "From the engine's receipt of a request to its first step.",
        "queue_s",
    ),
)


class RegistryView(NamedTuple):
    """How far a server has followed a shared registry."""

    seq: int
    stale_s: float
    fetched: Mapping[str, int]
    """Bytes of adapters that were downloaded, by where they came from."""


class Metrics:
    """All metrics of one server; several can coexist. For one event loop."""

    def __init__(self, model_name: str) -> None:
        """`model_name` is what requests call the base model. It labels the `vllm:` metrics, and
        stands for the base where adapters have series of their own."""
        self._model_name = model_name
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.http_requests = Counter(
            "weft:http_requests",
            "HTTP requests by route and status; 499: the client left.",
            ["route", "status"],
            registry=self._registry,
        )
        self.ignoring_requests = Counter(
            "weft:ignoring_requests",
            "Requests with fields that were accepted and ignored, by route.",
            ["route"],
            registry=self._registry,
        )
        self._all = Tally(
            first_token_s=Histogram(_FIRST_TOKEN_S),
            per_token_s=Histogram(_PER_TOKEN_S),
            queue_s=Histogram(_QUEUE_S),
        )
        """What all requests had together."""
        self._inter_token_s = Histogram(_PER_TOKEN_S)
        self._request_s = Histogram(_REQUEST_S)
        self.requests = RequestHistograms()
        self._tallies = Tallies(model_name)
        self._tenants = Tallies("")
        self._evictions: dict[str, int] = {}
        """Evictions of each digest as of the last scrape."""

    def shadow_counters(self) -> ShadowCounters:
        """New counters for the shadows of versions; to be called once."""
        return ShadowCounters(self._registry)

    # -- events of requests; `adapter`: its name, None for the base -----------------------------

    def arrived(self, adapter: str | None, num_prompt_tokens: int) -> None:
        self._tallies.arrived(adapter)
        self._tallies.of(adapter).prompt_tokens += num_prompt_tokens

    def queued(self, adapter: str | None, queue_s: float) -> None:
        """A request took its first step `queue_s` after it was received."""
        self._all.queue_s.observe(queue_s)
        self._tallies.of(adapter).queue_s.observe(queue_s)

    def first_tokens(self, adapter: str | None, count: int, first_token_s: float) -> None:
        """A request got its first tokens `first_token_s` after it came."""
        tally = self._tallies.of(adapter)
        tally.output_tokens += count
        tally.first_token_s.observe(first_token_s)
        self._all.first_token_s.observe(first_token_s)

    def more_tokens(self, adapter: str | None, count: int, gap_s: float) -> None:
        """A request got more tokens `gap_s` after the ones before."""
        self._tallies.of(adapter).output_tokens += count
        self._inter_token_s.observe(gap_s / count, count)

    def finished(
        self, adapter: str | None, reason: str, request_s: float, per_token_s: float | None
    ) -> None:
        """A request has ended. `per_token_s` is its mean time between tokens, if it had several."""
        tally = self._tallies.of(adapter)
        tally.finished[reason] += 1
        self._all.finished[reason] += 1
        self._request_s.observe(request_s)
        if per_token_s is not None:
            tally.per_token_s.observe(per_token_s)
            self._all.per_token_s.observe(per_token_s)

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count what a tenant got from a request that has ended. Prompt tokens from the prefix
        cache don't count."""
        self._tenants.arrived(tenant or None)
        tally = self._tenants.of(tenant or None)
        tally.prompt_tokens += num_prompt_tokens
        tally.output_tokens += num_output_tokens

    # -- scrapes --------------------------------------------------------------------------------

    def render(
        self,
        info: EngineInfo,
        stats: EngineStats | None,
        adapters: Adapters,
        view: RegistryView | None = None,
        fleet: FleetFigures | None = None,
    ) -> bytes:
        """The text of one scrape.

        `stats` is None when the engine does not answer, and `adapters` are the live versions.
        `view` is of the shared registry, if there is one, and so is `fleet` of the fleet.
        """
        out = Exposition()
        out.gauge("weft:engine_up", "1 while the engine answers.", [("", stats is not None)])
        if view is not None:
            text = "Changes of the shared registry that this server knows."
            out.gauge("weft:registry_seq", text, [("", view.seq)])
            text = "Seconds since the shared registry last answered."
            out.gauge("weft:registry_stale_seconds", text, [("", view.stale_s)])
            text = "Bytes of adapters that were downloaded: from other nodes, or from the store."
            fetched = [(labels(source=name), count) for name, count in view.fetched.items()]
            out.counter("weft:registry_fetched_bytes", text, fetched)
        if fleet is not None:
            _add_fleet(out, fleet)
        cache = labels(
            model_name=self._model_name,
            engine="0",
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
        )
        out.gauge("vllm:cache_config_info", "The KV cache.", [(cache, 1)])
        if stats is not None:
            names_of = _names_of(adapters)
            self._count_evictions(stats, names_of)
            self._add_figures(out, stats)
            _add_residency(out, info, stats, adapters, names_of)
            _add_tiers(out, stats)
        self._add_requests(out)
        now_s = time.monotonic()
        _add_tallies(out, self._tallies.shown(now_s))
        _add_tenants(out, self._tenants.shown(now_s))
        return generate_latest(self._registry) + out.encode()

    def _count_evictions(self, stats: EngineStats, names_of: Mapping[str, list[str]]) -> None:
        """Count the evictions since the last scrape. A restarted engine counts from 0 again."""
        before, self._evictions = self._evictions, {}
        for digest, adapter in stats.adapters.items():
            total = self._evictions[digest] = adapter.num_evictions
            new = total - before.get(digest, 0)
            if new:
                name = names_of.get(digest, [OTHER])[0]
                self._tallies.of(name).evictions += new if new > 0 else total

    def _add_figures(self, out: Exposition, stats: EngineStats) -> None:
        model = labels(model_name=self._model_name)
        for add, figures in ((out.gauge, _GAUGES), (out.counter, _COUNTERS)):
            for name, text, field in figures:
                given = model if name.startswith("vllm:") else ""
                add(name, text, [(given, getattr(stats, field))])
        out.counter(
            "weft:requests_finished",
            "Requests by finish reason, as the engine saw them.",
            [(labels(finish_reason=why), count) for why, count in sorted(stats.finished.items())],
        )

    def _add_requests(self, out: Exposition) -> None:
        model = labels(model_name=self._model_name)
        for name, _, text, field in _HISTOGRAMS:
            out.histogram(name, text, [(model, getattr(self._all, field))])
        name = "vllm:inter_token_latency_seconds"
        out.histogram(name, "Between two tokens.", [(model, self._inter_token_s)])
        name = "vllm:e2e_request_latency_seconds"
        out.histogram(name, "From start to end.", [(model, self._request_s)])
        self.requests.add(out, model)
        out.counter(
            "vllm:request_success",
            "Requests by finish reason, as their clients saw them.",
            _by_reason(model, self._all),
        )


def _add_fleet(out: Exposition, fleet: FleetFigures) -> None:
    nodes = [(labels(state=state), count) for state, count in sorted(fleet.nodes.items())]
    out.gauge("weft:fleet_nodes", "Nodes of the fleet as this one knows them, by state.", nodes)
    lost = [(labels(node=node), at) for node, at in sorted(fleet.lost_at.items())]
    text = "When nodes were lost that are not back, in seconds since 1970."
    out.gauge("weft:fleet_node_lost_timestamp_seconds", text, lost)
    text = "Requests of this server that left a node which still served them."
    out.counter("weft:fleet_moves", text, [("", fleet.moves)])
    text = "Requests of this server that lost their node and went on elsewhere."
    out.counter("weft:fleet_losses", text, [("", fleet.losses)])
    if fleet.wanted_replicas is not None:
        text = "How many nodes there should be. One node of a fleet says it for all."
        out.gauge("weft:wanted_replicas", text, [("", fleet.wanted_replicas)])


def _add_tallies(out: Exposition, shown: Iterable[tuple[str, Tally]]) -> None:
    tallies = [(labels(adapter=name), tally) for name, tally in shown]
    for name, text, field in _TALLY_COUNTERS:
        out.counter(name, text, [(given, getattr(tally, field)) for given, tally in tallies])
    out.counter(
        "weft:adapter_requests",
        "Requests by adapter and finish reason.",
        [sample for given, tally in tallies for sample in _by_reason(given, tally)],
    )
    for _, name, text, field in _HISTOGRAMS:
        out.histogram(name, text, [(given, getattr(tally, field)) for given, tally in tallies])


def _by_reason(given: Labels, tally: Tally) -> list[tuple[Labels, float]]:
    finished = sorted(tally.finished.items())
    return [(f'{given},finished_reason="{reason}"', count) for reason, count in finished]


def _add_tenants(out: Exposition, shown: Iterable[tuple[str, Tally]]) -> None:
    tokens = [
        (labels(tenant=name, kind=kind), count)
        for name, tally in shown
        for kind, count in (("prompt", tally.prompt_tokens), ("output", tally.output_tokens))
    ]
    out.counter(
        "weft:tenant_tokens",
        "Tokens computed for requests that have ended, by tenant; one without a name is no one's.",
        tokens,
    )


# -- where adapters are; series by name only for those in memory ---------------------------------


def _names_of(adapters: Adapters) -> dict[str, list[str]]:
    """The live names of each digest; versions of one name have the same."""
    names: dict[str, list[str]] = {}
    for ref in adapters:
        names.setdefault(ref.digest, []).append(ref.bare)
    return names


def _add_residency(
    out: Exposition,
    info: EngineInfo,
    stats: EngineStats,
    adapters: Adapters,
    names_of: Mapping[str, list[str]],
) -> None:
    gpu, cpu = set(stats.resident_adapters), set(stats.host_adapters)
    # One series, whose value is the time: readers take the series with the largest value.
    requests = labels(
        max_lora=str(max(info.max_loras, len(gpu))),
        running_lora_adapters=_joined(stats.resident_adapters, names_of),
        waiting_lora_adapters=_joined(stats.waiting_adapters, names_of),
    )
    out.gauge(
        "vllm:lora_requests_info",
        "Adapters resident on the device, and adapters that requests wait for.",
        [(requests, time.time())],
    )
    out.gauge(
        "vllm:lora_adapter_loaded",
        "Adapters in device memory and in the host cache.",
        dict(_loaded(stats, names_of)).items(),
    )
    loads = [] if stats.device_load_s is None else [("", _histogram(stats.device_load_s))]
    text = "Loads to the device, from the order to the residency."
    out.histogram("vllm:lora_adapter_load_seconds", text, loads)
    out.gauge(
        "weft:adapter_last_load_seconds",
        "What the last load to the device took, of adapters in memory.",
        {
            labels(adapter=name): stats.adapters[digest].last_load_s
            for digest in gpu | cpu
            if digest in stats.adapters
            for name in names_of.get(digest, ())
        }.items(),
    )
    fastest = Counts(
        "gpu" if ref.digest in gpu else "cpu" if ref.digest in cpu else "disk" for ref in adapters
    )
    out.gauge(
        "weft:adapters",
        "Adapters that requests can name, by the fastest memory that has their weights.",
        [(labels(level=level), fastest[level]) for level in ("gpu", "cpu", "disk")],
    )
    out.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in device memory.", [("", len(gpu))])
    out.gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory.", [("", len(cpu))])
    out.gauge(
        "vllm:max_gpu_lora_adapters",
        "Adapters, of the mean size of those loaded, that fit into device memory.",
        [("", _room(info, adapters, len(gpu)))],
    )


def _add_tiers(out: Exposition, stats: EngineStats) -> None:
    tiers = [(labels(tier=name), tier) for name, tier in stats.tiers.items()]
    for add, figures in ((out.gauge, _TIER_GAUGES), (out.counter, _TIER_COUNTERS)):
        for name, text, field in figures:
            add(name, text, [(given, getattr(tier, field)) for given, tier in tiers])
    stages = [(stage, stats.load_s[stage]) for stage in LOAD_STAGES if stage in stats.load_s]
    out.histogram(
        "weft:adapter_load_seconds",
        "Loads and registrations, by stage: read, pack, copy to the device.",
        [(labels(stage=stage), _histogram(spread)) for stage, spread in stages],
    )
    waits = "From a request's receipt to its adapter's residency, where it was not resident."
    for name, text, spread in (
        ("weft:adapter_wait_seconds", waits, stats.adapter_wait_s),
        ("weft:adapter_self_check_seconds", "Checks of registered adapters.", stats.self_check_s),
    ):
        out.histogram(name, text, [] if spread is None else [("", _histogram(spread))])
    out.counter(
        "weft:adapter_self_checks",
        "Checks of registered adapters, by result: passed, failed, skipped.",
        [(labels(result=result), count) for result, count in stats.self_checks.items()],
    )
    out.gauge(
        "weft:adapters_quarantined",
        "Adapters that failed a check when they were loaded again, and are not served.",
        [("", len(stats.quarantined_adapters))],
    )


def _histogram(spread: Spread) -> Histogram:
    return Histogram(_LOAD_S, spread.counts, spread.sum)


def _loaded(
    stats: EngineStats, names_of: Mapping[str, list[str]]
) -> Iterator[tuple[Labels, float]]:
    pinned = set(stats.pinned_adapters)
    for level, digests in (("gpu", stats.resident_adapters), ("cpu", stats.host_adapters)):
        for digest in digests:
            is_pinned = "true" if digest in pinned else "false"
            for name in names_of.get(digest, ()):
                yield labels(adapter_name=name, level=level, pinned=is_pinned), 1


def _room(info: EngineInfo, adapters: Adapters, num_resident: int) -> int:
    """An estimate of how many adapters fit on the device, whose memory is bounded in bytes. Without
    any adapter to go by, it is what one batch may hold."""
    num_bytes = sum(adapter.num_bytes for adapter in adapters.values())
    if not num_bytes:
        return max(num_resident, info.max_loras)
    return max(num_resident, info.adapter_memory_bytes * len(adapters) // num_bytes)


def _joined(digests: Iterable[str], names_of: Mapping[str, list[str]]) -> str:
    """The live names, joined by commas. A version that only drains has none."""
    return ",".join(sorted({name for d in digests for name in names_of.get(d, ())}))
