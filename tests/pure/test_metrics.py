"""What a scrape says; series by adapter are bounded, never decrease, and add up."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import observed
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.sampling import SamplingParams
from weft.core.stats import AdapterStats, EngineStats, FleetFigures, Spread, TierStats
from weft.metrics import Metrics, RequestRecord, tallies
from weft.metrics.exposition import Bounds, Histogram
from weft.metrics.tallies import OTHER, PERIOD_S, Tallies

ROOT = Path(__file__).parents[2]
INFO = replace(observed.INFO, model="/models/tiny")
CACHE = {"model_name": "base", "engine": "0", "block_size": "16", "num_gpu_blocks": "10"}
Sample = tuple[str, frozenset[tuple[str, str]]]


def adapters(**num_bytes: int) -> dict[AdapterRef, AdapterInfo]:
    """Live versions by name, whose digests are d-NAME."""
    return {
        AdapterRef(name, 1, f"d-{name}"): AdapterInfo(f"d-{name}", "/x", 4, size, ())
        for name, size in num_bytes.items()
    }


def scrape(
    metrics: Metrics,
    stats: EngineStats | None = None,
    live: Mapping[AdapterRef, AdapterInfo] | None = None,
) -> dict[Sample, float]:
    text = metrics.render(INFO, stats or EngineStats(), live or {}).decode()
    found = {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(found) == len(lines), "a series is there twice"
    return found


def value(found: Mapping[Sample, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def series(found: Mapping[Sample, float], name: str) -> list[tuple[dict[str, str], float]]:
    return [(dict(labels), number) for (n, labels), number in found.items() if n == name]


# -- what a scrape says ----------------------------------------------------------------------------


def test_figures_of_the_engine_under_the_names_that_tools_know() -> None:
    stats = EngineStats(
        num_running=2,
        num_waiting=3,
        kv_usage=0.5,
        prompt_tokens=100,
        cached_tokens=60,
        generated_tokens=70,
        preemptions=1,
    )
    found = scrape(Metrics("base"), stats)
    for name, expected in {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 70,
        "vllm:num_preemptions_total": 1,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 60,
        "vllm:gpu_cache_usage_perc": 0.5,
        "vllm:gpu_prefix_cache_queries_total": 100,
        "vllm:gpu_prefix_cache_hits_total": 60,
    }.items():
        assert value(found, name, model_name="base") == expected
    assert value(found, "vllm:cache_config_info", **CACHE) == 1
    assert value(found, "weft:engine_up") == 1


def test_an_engine_that_does_not_answer() -> None:
    metrics = Metrics("base")
    metrics.arrived("a", 3)
    text = metrics.render(INFO, None, {}).decode()
    assert "weft:engine_up 0.0" in text
    assert 'weft:adapter_prompt_tokens_total{adapter="a"} 3.0' in text
    assert "vllm:num_requests_running" not in text and "lora_requests_info" not in text


def test_a_fleet_and_what_autoscalers_read_of_it() -> None:
    lost_at = {"n2": 1.8e9}
    figures = FleetFigures({"up": 2, "idle": 1}, lost_at, moves=3, losses=1, wanted_replicas=4)
    text = Metrics("base").render(INFO, None, {}, fleet=figures).decode()
    assert 'weft:fleet_nodes{state="idle"} 1.0' in text and "weft:fleet_moves_total 3.0" in text
    assert "\nweft:wanted_replicas 4.0\n" in text
    assert 'weft:fleet_node_lost_timestamp_seconds{node="n2"} 1800000000.0' in text
    silent = Metrics("base").render(INFO, None, {}, fleet=FleetFigures()).decode()
    assert "weft:wanted_replicas" not in silent
    scaled = (ROOT / "deploy/kubernetes/weft-keda.yaml").read_text()
    assert "weft:wanted_replicas" in scaled


def test_one_request() -> None:
    metrics = Metrics("base")
    metrics.arrived("a", 5)
    metrics.queued("a", 0.02)
    metrics.first_tokens("a", 1, 0.2)
    metrics.more_tokens("a", 3, 0.12)
    metrics.finished("a", "length", 0.32, 0.04)
    metrics.arrived(None, 7)
    metrics.finished(None, "abort", 1.0, None)
    record = RequestRecord("r", "a", None, SamplingParams(), 0.0, 5)
    metrics.requests.ended(record)  # without a token, so without times
    record.queue_s, record.first_token_s, record.last_token_s = 0.02, 0.2, 0.32
    record.num_output_tokens = 4
    metrics.requests.ended(record)
    found = scrape(metrics)
    for name, count, total in (
        ("vllm:request_queue_time_seconds", 1, 0.02),
        ("vllm:time_to_first_token_seconds", 1, 0.2),
        ("vllm:inter_token_latency_seconds", 3, 0.12),
        ("vllm:request_time_per_output_token_seconds", 1, 0.04),
        ("vllm:e2e_request_latency_seconds", 2, 1.32),
        ("vllm:request_prefill_time_seconds", 1, 0.18),
        ("vllm:request_decode_time_seconds", 1, 0.12),
        ("vllm:request_inference_time_seconds", 1, 0.3),
        ("vllm:request_prompt_tokens", 2, 10),
        ("vllm:request_generation_tokens", 2, 4),
    ):
        assert value(found, f"{name}_count", model_name="base") == count
        assert value(found, f"{name}_sum", model_name="base") == pytest.approx(total)
    ttft = "vllm:time_to_first_token_seconds_bucket"
    assert value(found, ttft, model_name="base", le="0.1") == 0
    assert value(found, ttft, model_name="base", le="0.25") == 1
    assert value(found, ttft, model_name="base", le="+Inf") == 1
    success = "vllm:request_success_total"
    assert value(found, success, model_name="base", finished_reason="length") == 1
    assert value(found, success, model_name="base", finished_reason="abort") == 1
    assert value(found, "weft:adapter_prompt_tokens_total", adapter="a") == 5
    assert value(found, "weft:adapter_output_tokens_total", adapter="a") == 4
    assert value(found, "weft:adapter_requests_total", adapter="a", finished_reason="length") == 1
    assert value(found, "weft:adapter_time_to_first_token_seconds_count", adapter="a") == 1
    assert value(found, "weft:adapter_time_per_output_token_seconds_count", adapter="a") == 1
    assert value(found, "weft:adapter_queue_time_seconds_count", adapter="a") == 1
    assert value(found, "weft:adapter_prompt_tokens_total", adapter="base") == 7


def test_where_adapters_are() -> None:
    live = adapters(a=100, b=100, c=300, d=300)
    stats = EngineStats(
        resident_adapters=("d-a", "d-gone"),
        host_adapters=("d-a", "d-b"),
        waiting_adapters=("d-c",),
        running_adapters=("d-a",),
        pinned_adapters=("d-b",),
        adapters={d: AdapterStats(2, 1, 0.25) for d in ("d-a", "d-c", "d-gone")},
    )
    found = scrape(Metrics("base"), stats, live)
    [(info, _)] = series(found, "vllm:lora_requests_info")
    assert info == {
        "max_lora": "4",
        "running_lora_adapters": "a",
        "waiting_lora_adapters": "c",
    }
    loaded = {
        (d["adapter_name"], d["level"], d["pinned"])
        for d, _ in series(found, "vllm:lora_adapter_loaded")
    }
    assert loaded == {("a", "gpu", "false"), ("a", "cpu", "false"), ("b", "cpu", "true")}
    assert series(found, "weft:adapter_last_load_seconds") == [({"adapter": "a"}, 0.25)]
    assert value(found, "vllm:num_gpu_loaded_lora_adapters") == 2
    assert value(found, "vllm:num_cpu_loaded_lora_adapters") == 2
    assert value(found, "vllm:max_gpu_lora_adapters") == 5, "1000 bytes, 200 each"
    levels = {d["level"]: n for d, n in series(found, "weft:adapters")}
    assert levels == {"gpu": 1, "cpu": 1, "disk": 2}


def test_tiers_and_loads() -> None:
    spread = Spread((0, 2, *[0] * 12), 0.004)
    stats = EngineStats(
        tiers={"device": TierStats(30, 90, 3, 5, 6, 7), "disk": TierStats(40, 80, 4, 1, 2, 3, 9)},
        load_s={"read": spread, "copy": spread},
        device_load_s=spread,
        adapter_wait_s=spread,
    )
    found = scrape(Metrics("base"), stats)
    for name, device, disk in (
        ("bytes", 30, 40),
        ("limit_bytes", 90, 80),
        ("adapters", 3, 4),
        ("hits_total", 5, 1),
        ("misses_total", 6, 2),
        ("evictions_total", 7, 3),
        ("errors_total", 0, 9),
    ):
        assert value(found, f"weft:adapter_tier_{name}", tier="device") == device
        assert value(found, f"weft:adapter_tier_{name}", tier="disk") == disk
    for name, labels in (
        ("weft:adapter_load_seconds", {"stage": "copy"}),
        ("weft:adapter_wait_seconds", {}),
        ("vllm:lora_adapter_load_seconds", {}),
    ):
        assert value(found, f"{name}_sum", **labels) == 0.004
        assert value(found, f"{name}_bucket", **labels, le="0.001") == 0
        assert value(found, f"{name}_bucket", **labels, le="0.0025") == 2


def test_room_without_any_adapter_is_what_a_batch_may_hold() -> None:
    assert value(scrape(Metrics("base")), "vllm:max_gpu_lora_adapters") == INFO.max_loras


def test_evictions_are_counted_by_name_also_over_a_restart_of_the_engine() -> None:
    metrics, live = Metrics("base"), adapters(a=1, b=1)
    for num_a, num_gone, total_a, total_other in ((2, 1, 2, 1), (3, 1, 3, 1), (1, 4, 4, 4)):
        stats = EngineStats(
            adapters={"d-a": AdapterStats(9, num_a, 0.1), "d-gone": AdapterStats(9, num_gone, 0.1)}
        )
        found = scrape(metrics, stats, live)
        assert value(found, "weft:adapter_evictions_by_name_total", adapter="a") == total_a
        assert value(found, "weft:adapter_evictions_by_name_total", adapter=OTHER) == total_other


def test_names_are_escaped() -> None:
    metrics, name = Metrics("base"), 'a"b\\nc d'
    metrics.arrived(name, 1)
    assert value(scrape(metrics), "weft:adapter_prompt_tokens_total", adapter=name) == 1


@given(st.lists(st.floats(0, 20)), st.lists(st.floats(0.001, 10), min_size=1, unique=True))
def test_a_histogram_counts_up_to_its_bounds(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(Bounds(*sorted(bounds)))
    for number in values:
        histogram.observe(number)
    *buckets, (last, total) = histogram.buckets()
    assert (last, total) == ("+Inf", len(values))
    assert [n for _, n in buckets] == [sum(v <= b for v in values) for b in sorted(bounds)]
    assert histogram.sum == pytest.approx(sum(values))


# -- series by adapter -----------------------------------------------------------------------------


class Reader:
    """Prometheus: keeps the last value of every series, and adds up increases."""

    def __init__(self) -> None:
        self.last: dict[Any, float] = {}
        self.increase = 0.0

    def read(self, shown: list[tuple[str, tallies.Tally]], max_own: int) -> set[str]:
        labels = {label for label, _ in shown}
        assert len(labels) == len(shown) <= max_own + 2
        for label, tally in shown:
            before = self.last.get(label, 0.0)
            now = tally.output_tokens
            assert now >= before or now == 0, f"{label} decreased from {before} to {now}"
            self.increase += now - before if now >= before else now
            self.last[label] = now
        return labels


def _traffic(rng: random.Random, num_names: int) -> str | None:
    """Some adapters are busy for a while, most hardly ever, and the base now and then."""
    if rng.random() < 0.1:
        return None
    if rng.random() < 0.5:
        return f"n{rng.randrange(num_names)}"
    return f"n{int(rng.paretovariate(0.7)) % num_names}"


@given(
    seed=st.integers(0, 2**32),
    num_names=st.sampled_from([3, 30, 10_000]),
    max_own=st.sampled_from([1, 7, 100]),
    small=st.booleans(),
)
def test_random_traffic(seed: int, num_names: int, max_own: int, small: bool) -> None:
    rng, now_s = random.Random(seed), 0.0
    tally_of, reader, true_total = Tallies("base", max_own), Reader(), 0
    late = Reader()
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(tallies, "MAX_FORMER", 5)
            patch.setattr(tallies, "MAX_SCORED", 20)
        for _ in range(30):
            for _ in range(rng.randrange(60)):
                name = _traffic(rng, num_names)
                tally_of.arrived(name)
                tally_of.of(name).output_tokens += (count := rng.randrange(1, 9))
                true_total += count
            now_s += rng.choice([1.0, PERIOD_S / 2, PERIOD_S, 20 * PERIOD_S])
            labels = reader.read(tally_of.shown(now_s), max_own)
            assert {"base", OTHER} <= labels
            assert reader.increase == true_total
            late.read(tally_of.shown(now_s + PERIOD_S / 3), max_own)
            assert late.increase == true_total, "another reader, some time later, misses some"
            tally_of.check()
    if not small:
        assert sum(reader.last.values()) == true_total


def test_the_busiest_have_their_own_series() -> None:
    counted, now_s = Tallies("base", max_own=10), 0.0
    for n in range(10):
        counted.of(f"early{n}").output_tokens += 1
        counted.arrived(f"early{n}")
    for _ in range(25):
        for n in range(10):
            for _ in range(5):
                counted.arrived(f"busy{n}")
                counted.of(f"busy{n}").output_tokens += 1
        now_s += PERIOD_S
        labels = {label for label, _ in counted.shown(now_s)}
    assert labels == {"base", OTHER, *(f"busy{n}" for n in range(10))}


def test_who_is_about_as_busy_as_others_keeps_its_series() -> None:
    counted = Tallies("base", max_own=1)
    for name, times in (("a", 2), ("b", 3)):
        counted.of(name)
        for _ in range(times):
            counted.arrived(name)
    for n in range(5):
        assert "a" in {label for label, _ in counted.shown(n * PERIOD_S)}


def test_even_traffic_does_not_turn_over_all_series() -> None:
    rng, counted, turned_over, before = random.Random(1), Tallies("base"), 0, set[str]()
    for minute in range(20):
        for _ in range(500):
            name = f"n{rng.randrange(10_000)}"
            counted.arrived(name)
            counted.of(name)
        labels = {label for label, _ in counted.shown(minute * PERIOD_S)}
        turned_over = max(turned_over, len(before - labels))
        before = labels
    assert 0 < turned_over <= 10


def test_a_forgotten_series_does_not_begin_between_scrapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first value would be more than 0: readers could not tell that it began anew."""
    monkeypatch.setattr(tallies, "MAX_FORMER", 1)
    counted = Tallies("base", max_own=20)
    for name in [f"n{n:02}" for n in range(20)] + 5 * ["late1", "late2"]:
        counted.arrived(name)
        counted.of(name).output_tokens += 1
    before = {label for now_s in (0.0, PERIOD_S) for label, _ in counted.shown(now_s)}
    after = {label for label, _ in counted.shown(1000 * PERIOD_S)}
    assert before - after == {"n00", "n01"}, "and the places are free"
    counted.of("n00").output_tokens += 5
    shown = dict(counted.shown(1000 * PERIOD_S + 1))
    assert "n00" not in shown and shown[OTHER].output_tokens == 10 + 5


def test_an_adapter_named_as_the_rest_counts_there() -> None:
    counted = Tallies("base")
    counted.arrived(OTHER)
    counted.of(OTHER).output_tokens += 1
    assert [label for label, _ in counted.shown(0.0)] == ["base", OTHER]


def test_a_scrape_of_ten_thousand_adapters_is_bounded() -> None:
    metrics, live = Metrics("base"), adapters(**{f"n{n}": 10 for n in range(10_000)})
    for ref in live:
        metrics.arrived(ref.name, 1)
        metrics.first_tokens(ref.name, 1, 0.1)
        metrics.finished(ref.name, "stop", 0.1, None)
    digests = tuple(ref.digest for ref in live)
    stats = EngineStats(resident_adapters=digests[:50], host_adapters=digests[:80])
    found = scrape(metrics, stats, live)
    by_metric = Counter(name for name, _ in found)
    assert by_metric["weft:adapter_output_tokens_total"] == 102
    assert by_metric["vllm:lora_adapter_loaded"] == 130
    assert len(found) < 3500
    total = sum(n for _, n in series(found, "weft:adapter_output_tokens_total"))
    assert total == 10_000


# -- the dashboard ---------------------------------------------------------------------------------

NAME = re.compile(r"(?:vllm|weft):[a-z0-9_]+")
SELECTOR = re.compile(r"((?:vllm|weft):[a-z0-9_]+)\{([^{}]*)\}")
FROM_PROMETHEUS = {"job", "instance", "le"}


def everything() -> dict[Sample, float]:
    """A scrape in which every metric has a series."""
    metrics = Metrics("base")
    metrics.http_requests.labels("/v1/completions", "200").inc()
    metrics.arrived("a", 1)
    metrics.queued("a", 0.1)
    metrics.first_tokens("a", 1, 0.1)
    metrics.finished("a", "stop", 0.1, 0.1)
    stats = EngineStats(
        resident_adapters=("d-a",),
        adapters={"d-a": AdapterStats(1, 0, 0.1)},
        tiers={"disk": TierStats(0, 0, 0)},
        load_s={"read": Spread((1, *[0] * 13), 0.0)},
        adapter_wait_s=Spread((1, *[0] * 13), 0.0),
        finished={"stop": 1},
    )
    return scrape(metrics, stats, adapters(a=1))


def test_the_dashboard_shows_what_is_there() -> None:
    dashboard = json.loads((ROOT / "dashboards" / "weft.json").read_text())
    labels_of: dict[str, set[str]] = {}
    for name, labels in everything():
        labels_of.setdefault(name, set()).update(dict(labels))
    variables = dashboard["templating"]["list"]
    queries = [v["definition"] for v in variables if v["type"] == "query"]
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", [])]
    assert len(targets) > 30
    expressions = [target["expr"] for target in targets]
    for expression in expressions + queries:
        assert expression.count("(") == expression.count(")"), expression
        names = NAME.findall(expression)
        assert names and set(names) <= labels_of.keys(), expression
        for name, selector in SELECTOR.findall(expression):
            used = set(re.findall(r"(\w+)=", selector))
            assert used <= labels_of[name] | FROM_PROMETHEUS, expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            known = set[str]().union(*(labels_of[name] for name in names))
            assert set(grouped.split(", ")) <= known, expression
    for target in targets:
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        names = NAME.findall(target["expr"])
        assert used <= labels_of[names[0]] | FROM_PROMETHEUS, target
    given = {v["name"] for v in variables}
    assert set(re.findall(r"\$(\w+)", " ".join(expressions))) <= given | {
        "__rate_interval",
        "__range",
    }
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and "adapter" in given and "datasource" in given


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "dashboards" / "weft.json").read_text())
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in dashboard["panels"]):
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        taken |= cells
