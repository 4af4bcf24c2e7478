"""`weft bench simulate`, `churn`, `cold` and `plot`: the simulator by hand-made cases and by what
must hold of every replay, the benchmarks on a small model, plots from a history."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command_line import weft
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import churn, cold, peers
from weft.bench.optimum import fewest_loads
from weft.bench.simulator import (
    DeviceModel,
    Memory,
    Replay,
    digest_of,
    gap,
    jain,
    replay,
    sizes_of,
)
from weft.bench.traces import BURST, NUM_TENANTS, Ask, Trace, TraceKind
from weft.bench.workload import Choice, Lengths
from weft.core.errors import ConfigError
from weft.schedule.policy import POLICIES

TINY = ("--model", "tiny", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory", "16M")
SHORT = ("--input-len", "4", "--output-len", "uniform:2,6", "--seed", "1")
PNG = b"\x89PNG\r\n\x1a\n"
MODEL = DeviceModel()
ADAPTER_BYTES = 16 * MODEL.rank_bytes
TRACES = ("zipf:0.8", "zipf:1.5", "uniform", "bursts", "flood")


def report(*args: str) -> dict[str, Any]:
    done = weft("bench", *args)
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- the optimum -----------------------------------------------------------------------------------


@cache
def least_by_search(uses: str, cached: frozenset[str], sizes: tuple[int, ...], room: int) -> int:
    """Trying every choice of what to evict."""
    if not uses:
        return 0
    key, rest = uses[0], uses[1:]
    if key in cached:
        return least_by_search(rest, cached, sizes, room)
    kept = [
        frozenset(k for k in cached if mask >> ord(k) - ord("a") & 1) | {key}
        for mask in range(1 << len(sizes))
    ]
    fitting = {k for k in kept if sum(sizes[ord(c) - ord("a")] for c in k) <= room}
    return 1 + min(least_by_search(rest, k, sizes, room) for k in fitting)


@given(st.text("abcde", max_size=14), st.integers(1, 4))
def test_no_cache_needs_fewer_loads_than_the_optimum(uses: str, room: int) -> None:
    sizes = dict.fromkeys("abcde", 1)
    least = least_by_search(uses, frozenset(), (1,) * 5, room)
    assert fewest_loads(uses, sizes, room) == least


@given(st.text("abcd", max_size=10), st.tuples(*[st.integers(1, 4)] * 4), st.integers(4, 9))
def test_of_mixed_sizes_it_is_a_possible_choice(
    uses: str, sizes: tuple[int, ...], room: int
) -> None:
    found = fewest_loads(uses, dict(zip("abcd", sizes, strict=True)), room)
    assert least_by_search(uses, frozenset(), sizes, room) <= found <= len(uses)


# -- traces ----------------------------------------------------------------------------------------


def draw(name: str, adapters: int = 100, count: int = 200, **other: Any) -> Trace:
    return TraceKind.parse(name).draw(
        **{
            "num_adapters": adapters,
            "ranks": (16,),
            "count": count,
            "rate": 80.0,
            "seed": 3,
            **other,
        }
    )


@pytest.mark.parametrize("name", TRACES)
def test_traces(name: str) -> None:
    trace = draw(name, ranks=(8, 32))
    assert trace == draw(name, ranks=(8, 32)) != draw(name, ranks=(8, 32), seed=4)
    assert len(trace.asks) == 200 and len(trace.ranks) == 100 and set(trace.ranks) == {8, 32}
    times = [ask.arrival_s for ask in trace.asks]
    assert times == sorted(times) and times[-1] == pytest.approx(200 / 80, rel=0.4)
    assert all(ask.tenant == ask.adapter % NUM_TENANTS < NUM_TENANTS for ask in trace.asks)


def test_a_burst_asks_for_one_adapter_half_of_the_time() -> None:
    asks = draw("bursts", 5000, 13 * BURST).asks
    at_once = Counter(ask.arrival_s for ask in asks)
    assert set(at_once.values()) == {BURST}
    for time in at_once:
        of_burst = Counter(ask.adapter for ask in asks if ask.arrival_s == time)
        assert of_burst.most_common(1)[0][1] >= BURST // 2


def test_a_flood_comes_from_one_tenant_at_one_time() -> None:
    for adapters in (100, 3):
        asks = draw("flood", adapters).asks
        [(time, count)] = Counter(ask.arrival_s for ask in asks).most_common(1)
        assert count == 100
        assert {ask.tenant for ask in asks if ask.arrival_s == time} == {0}
        assert all(ask.adapter < adapters for ask in asks)


@pytest.mark.parametrize("bad", ["", "zipf", "zipf:x", "zipf:-1", "zipf:nan", "uniform:1", "all"])
def test_unknown_traces_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--trace takes"):
        TraceKind.parse(bad)


# -- the simulator ---------------------------------------------------------------------------------


def memory(adapters: int, host: int = 1000) -> Memory:
    return Memory(adapters * ADAPTER_BYTES, host * ADAPTER_BYTES)


def of(*asks: Ask) -> Trace:
    return Trace("by hand", (16,) * (1 + max(ask.adapter for ask in asks)), asks)


def lru(trace: Trace, room: Memory, model: DeviceModel = MODEL, shares: bool = False) -> Replay:
    return replay(trace, "lru", room, model, shares)


def test_a_lone_request_waits_for_the_disk_and_the_link() -> None:
    found = lru(of(Ask(1.0, 0, 0, 100, 3)), memory(2))
    load_s = ADAPTER_BYTES / MODEL.disk_bytes_per_s + ADAPTER_BYTES / MODEL.link_bytes_per_s
    assert found.wait_s == found.residency_s == pytest.approx([load_s])
    steps_s = MODEL.seconds_of_step(100, 1) + 2 * MODEL.seconds_of_step(1, 1)
    assert found.seconds == pytest.approx(1.0 + load_s + steps_s)
    assert (found.num_loads, found.output_tokens, found.hit_rate) == (1, 3, 0.0)


def test_what_is_there_is_not_waited_for() -> None:
    found = lru(of(Ask(0.0, 0, 0, 8, 2), Ask(1.0, 0, 0, 8, 2)), memory(2))
    assert found.wait_s[1] == found.residency_s[1] == 0.0
    assert found.hit_rate == 0.5


@pytest.mark.parametrize(("host", "on_host"), [(1000, True), (1, False)])
def test_evicted_adapters_come_from_the_host_if_they_are_there(host: int, on_host: bool) -> None:
    asks = [Ask(float(i), k, 0, 8, 2) for i, k in enumerate((0, 1, 0))]
    found = lru(of(*asks), memory(1, host))
    assert found.num_loads == 3 and found.num_evictions == 2
    assert found.wait_s[2] == pytest.approx(MODEL.seconds_of_load(ADAPTER_BYTES, on_host))


def test_no_more_loads_run_at_once_than_there_are_loaders() -> None:
    found = lru(of(*(Ask(0.0, k, 0, 8, 2) for k in range(4))), memory(4))
    load_s = MODEL.seconds_of_load(ADAPTER_BYTES, on_host=False)
    assert found.residency_s == pytest.approx([load_s, load_s, 2 * load_s, 2 * load_s])


def test_a_crowd_has_a_hundred_tenants() -> None:
    assert {ask.tenant for ask in draw("crowd", 100, 1500).asks} == set(range(100))


def test_two_tenants_are_served_alike_whatever_they_send() -> None:
    """Within a tenth over any ten seconds: one sends long prompts, the other wants long answers."""
    shapes = ((800, 20), (30, 200))
    asks = [Ask(0.0, i % 2, i % 2, *shapes[i % 2]) for i in range(800)]
    gaps = lru(of(*asks), memory(2), DeviceModel(step_s=0.06), shares=True).gaps
    assert gaps and max(gaps) < 0.1


def test_shares() -> None:
    assert gap([4, 6, 5]) == pytest.approx(0.4) and gap([0, 0]) == 0.0
    assert jain([5, 5, 5]) == 1.0
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 1.0


def short(name: str, **other: Any) -> Trace:
    return draw(name, count=70, **other)


@cache
def replayed(name: str, policy: str) -> Replay:
    return replay(short(name), policy, memory(20), MODEL)


def optimum(name: str, found: Replay) -> float:
    sizes = sizes_of(short(name), MODEL)
    return 1 - fewest_loads(found.uses, sizes, memory(20).device_bytes) / len(found.uses)


@pytest.mark.parametrize("name", TRACES)
def test_policies_against_each_other_and_the_optimum(name: str) -> None:
    for policy in POLICIES:
        found = replayed(name, policy)
        assert 0 <= found.hit_rate <= optimum(name, found)
    assert replayed(name, "cost").hit_rate >= replayed(name, "lru").hit_rate - 0.02


@pytest.mark.parametrize("name", TRACES)
def test_every_request_is_answered_once(name: str) -> None:
    trace, found = short(name), replayed(name, "cost")
    assert found.output_tokens == sum(ask.output_tokens for ask in trace.asks)
    assert len(found.uses) == len(trace.asks) + found.num_preemptions
    asked = Counter(digest_of(ask.adapter) for ask in trace.asks)
    assert asked <= Counter(found.uses)
    assert all(0 <= r <= w for r, w in zip(found.residency_s, found.wait_s, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_the_same_each_time(policy: str) -> None:
    trace = short("bursts", ranks=(8, 64))
    assert replay(trace, policy, memory(15), MODEL) == replay(trace, policy, memory(15), MODEL)


def test_more_memory_gives_more_hits() -> None:
    calm = draw("zipf:0.8", rate=8.0)
    few, many = (replay(calm, "cost", memory(n), MODEL).hit_rate for n in (5, 100))
    assert many > few + 0.05


def test_simulate(tmp_path: Path) -> None:
    plot, record = tmp_path / "simulate.png", tmp_path / "history.jsonl"
    args = ("simulate", "--trace", "zipf:1.0,flood", "--adapters", "8,40", "--num-requests", "20")
    args += ("--adapter-memory", "1G", "--ranks", "8,32", "--record", str(record))
    first = report(*args, "--plot", str(plot))
    second = report(*args, "--no-plot")
    assert first["results"] == second["results"] and first["device"] is None
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines == [first, second] and first["date"].endswith("+00:00")
    rows = first["results"]
    assert [(r["trace"], r["adapters"], r["policy"]) for r in rows] == [
        (trace, count, policy)
        for trace in ("zipf:1.0", "flood")
        for count in (8, 40)
        for policy in POLICIES
    ]
    assert all(row["hit_rate"] <= row["optimum"] for row in rows)
    assert plot.read_bytes().startswith(PNG)


def test_simulate_a_fleet(tmp_path: Path) -> None:
    plot = tmp_path / "fleet.png"
    args = ("simulate", "--fleet", "2", "--seconds", "2", "--adapters", "10", "--rate", "10")
    args += ("--policy", "cost,omniscient", "--plot", str(plot))
    found = report(*args)
    assert [row["policy"] for row in found["results"]] == ["cost", "omniscient"]
    assert all(row["unserved"] == 0 for row in found["results"])
    assert plot.read_bytes().startswith(PNG)


def test_first_tokens_that_never_came_are_null() -> None:
    """JSON has no infinity."""
    args = ("simulate", "--fleet", "2", "--seconds", "1", "--adapters", "3", "--no-plot")
    [row] = report(*args, "--answer", "1e6", "--faults", "0.1", "--policy", "omniscient")["results"]
    assert row["unserved"] > 0 and row["first_p99_ms"] is None


# -- the fewest steps ------------------------------------------------------------------------------


def fewest_by_search(left: tuple[int, ...], sizes: tuple[int, ...], room: int) -> int:
    """Steps that answers of so many tokens need, over every choice of who is in memory."""
    if not any(left):
        return 0
    fitting = [
        chosen
        for count in range(1, len(left) + 1)
        for chosen in combinations([k for k, tokens in enumerate(left) if tokens], count)
        if sum(sizes[k] for k in chosen) <= room
    ]
    return 1 + min(
        fewest_by_search(tuple(n - (k in chosen) for k, n in enumerate(left)), sizes, room)
        for chosen in fitting
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(3, 6),
)
def test_no_order_takes_fewer_steps(answers: list[tuple[int, int]], room: int) -> None:
    sizes, tokens = zip(*answers, strict=True)
    fewest = fewest_by_search(tokens, sizes, room)
    least = churn.least_steps(answers, room)
    assert max(tokens) <= least <= fewest
    if set(sizes) == {1}:
        assert least == fewest, "adapters of one size can be packed without a gap"


# -- churn -----------------------------------------------------------------------------------------


def test_churn_and_that_it_changes_no_token(tmp_path: Path) -> None:
    plot = tmp_path / "churn.png"
    found = report(
        *("churn", *TINY, *SHORT, "--populations", "3,12", "--resident", "3", "--verify"),
        *("--ranks", "2,4", "--num-requests", "24", "--plot", str(plot)),
    )
    few, many = found["results"]
    assert (few["population"], few["loads"], few["hit_rate"], few["share"]) == (3, 0, 1.0, 1.0)
    assert many["loads"] >= 6 and many["evictions"] >= 6 and many["hit_rate"] < 1
    assert few["output_tokens"] == many["output_tokens"]
    assert all(row["least_steps"] <= row["steps"] for row in (few, many))
    assert few["least_steps"] < many["least_steps"] and few["fit"] > 2.5
    assert few["wrong"] == many["wrong"] == 0
    assert 0.5 < many["memory_used"] <= 1 and many["resident_adapters"] >= 2
    assert found["config"]["resident"] == 3 and found["config"]["targets"] == "all linear"
    assert plot.read_bytes().startswith(PNG)


def test_churn_of_adapters_on_disk() -> None:
    found = report(
        *("churn", *TINY, *SHORT, "--populations", "6", "--resident", "2", "--on-disk"),
        *("--ranks", "2,4", "--num-requests", "8", "--adapter-host-memory", "1K", "--no-plot"),
    )
    [row] = found["results"]
    assert row["loads"] >= 3 and found["config"]["on_disk"]


def test_wrong_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = churn._ChurnRuns.tokens

    def tokens(bench: churn._ChurnRuns, population: int) -> list[list[int]]:
        first, *others = right(bench, population)
        return [[first[0] ^ 1, *first[1:]], *others]

    monkeypatch.setattr(churn._ChurnRuns, "tokens", tokens)
    args = ("--populations", "2", "--resident", "2", "--num-requests", "3", "--verify")
    done = weft("bench", "churn", *TINY, *SHORT, *args, "--no-plot")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 1 and not found["ok"] and found["results"][0]["wrong"] == 1


def test_churn_under_a_given_load(tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    done = weft(
        "bench",
        *("churn", *TINY, *SHORT, "--populations", "12", "--load", "0.5", "--choice", "zipf:1.0"),
        *("--num-requests", "16", "--resident", "3", "--plot", str(plot)),
    )
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout.splitlines()[-1])
    capacity, calm, churned = found["results"]
    assert [row["run"] for row in found["results"]] == ["capacity", "calm", "churn"]
    assert capacity["rate"] is None
    assert calm["rate"] == pytest.approx(0.5 * 16 / capacity["seconds"], rel=1e-2)
    assert churned["rate"] == calm["rate"] and calm["share"] == 1.0
    assert calm["loads"] == 0 < churned["loads"] and calm["population"] == 3
    assert churned["resident_tpot_p99_ms"] > 0 and calm["resident_tpot_p99_share"] == 1.0
    told = " ".join(done.stdout.split())
    words = re.search(r"without churn: (\S+) of the throughput, (\S+) times the p99 ms/token", told)
    assert words is not None, told
    shares = [churned["share"], churned["resident_tpot_p99_share"]]
    assert [float(n) for n in words.groups()] == pytest.approx(shares, abs=6e-4)
    assert plot.read_bytes().startswith(PNG)


def test_other_servers_figures_stand_beside_the_same_work_alone() -> None:
    plan = churn.ChurnPlan(
        populations=(16, 32),
        resident=16,
        ranks=(16,),
        targets=None,
        choice=Choice.parse("uniform"),
        num_requests=512,
        input_len=Lengths(1, 1),
        output_len=Lengths(1, 1),
        load=None,
        on_disk=False,
        verify=False,
        seed=0,
    )
    assert churn.peers_of("llama-3-8b", plan, "NVIDIA H200") == peers.CHURN_TOKENS_PER_S
    for other in (
        replace(plan, ranks=(8,)),
        replace(plan, load=0.7),
        replace(plan, choice=Choice.parse("zipf:1.0")),
        replace(plan, resident=32),
    ):
        assert churn.peers_of("llama-3-8b", other, "NVIDIA H200") == {}
    assert churn.peers_of("llama-3-8b", plan, "NVIDIA A100") == {}
    assert churn.peers_of("qwen3-8b", plan, "NVIDIA H200") == {}


# -- cold ------------------------------------------------------------------------------------------


def test_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BATCH": 2,
        "BATCH_TOKENS": 24,
        "NUM_PROBES": 4,
        "PROBE_EVERY_S": 0.01,
        "REGISTER_EVERY_S": 0.02,
    }.items():
        monkeypatch.setattr(cold, name, value)
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    plot = tmp_path / "cold.png"
    found = report("cold", *TINY, "--rank", "2", "--repeats", "2", "--plot", str(plot))
    tiers = found["results"]["first_token"]
    assert [row["adapter"] for row in tiers] == list(cold.TIERS)
    assert tiers[0]["more_ms"] == 0 and all(len(row["repeats_ms"]) == 2 for row in tiers)
    alone, resident, loading, registering = found["results"]["delays"]
    assert resident["loads"] == registering["loads"] == 0 < loading["loads"]
    assert all(row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in (alone, loading))
    assert plot.read_bytes().startswith(PNG)
    assert thawed and sys.getswitchinterval() > 1e-3, "as it was before"


def test_cold_says_that_images_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cold, "SUFFIX", ".other")
    done = weft("bench", "cold", *TINY, "--rank", "2", "--repeats", "1", "--no-plot")
    assert done.exit_code == 1 and "images of adapters can't be written to" in done.stderr


# -- alora -----------------------------------------------------------------------------------------


def test_alora(tmp_path: Path) -> None:
    plot = tmp_path / "alora.png"
    shape = ("--rank", "2", "--conversation", "90", "--adapters", "2", "--repeats", "1")
    found = report("alora", *TINY, *shape, "--plot", str(plot))
    activated, plain = found["results"]
    assert activated["kind"] == "activated" and plain["kind"] == "plain"
    assert activated["prompt_tokens"] == plain["prompt_tokens"] == 98
    assert activated["cached_tokens"] == 80, "what the base has read, in whole blocks"
    assert plain["cached_tokens"] == 0
    assert plot.read_bytes().startswith(PNG)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts(tmp_path: Path) -> None:
    plot = tmp_path / "prompts.png"
    sizes = ("--tokens", "40", "--together", "2", "--prefix", "70", "--repeats", "1")
    sizes += ("--beside", "3", "--chunk", "20")
    together, alone, again, beside = report("prompts", *TINY, *sizes, "--plot", str(plot))[
        "results"
    ]
    assert (together["prompts"], together["tokens"], together["cached"]) == (2, 40, 0)
    assert (alone["tokens"], alone["cached"]) == (70, 0), "each repeat has a prompt of its own"
    assert (again["tokens"], again["cached"]) == (70, 64), "whole blocks come from the cache"
    for row, computed in ((together, 80), (alone, 70), (again, 6), (beside, 23)):
        assert row["us_per_token"] == pytest.approx(1000 * row["ms"] / computed, rel=0.01)
    assert plot.read_bytes().startswith(PNG)


# -- history ---------------------------------------------------------------------------------------

CONFIG = {"model": "llama-3-8b", "rank": 16, "targets": "all linear"}
DECODE = {
    "ok": True,
    "benchmark": "decode",
    "device": "NVIDIA H200",
    "config": CONFIG,
    "results": [
        {"batch": 64, "pattern": pattern, "num_adapters": count, "ms_per_step": ms}
        for pattern, count, ms in (
            ("none", 0, 5.4),
            ("identical", 1, 6.7),
            ("uniform", 8, 6.9),
            ("skewed", 30, 7.0),
            ("distinct", 64, 8.8),
        )
    ],
}
CHURN = {
    **DECODE,
    "benchmark": "churn",
    "config": {
        **CONFIG,
        "load": None,
        "ranks": [16],
        "resident": 16,
        "num_requests": 512,
        "choice": {"kind": "uniform", "exponent": 0.0},
    },
    "results": [
        {"population": count, "output_tokens_per_s": speed}
        for count, speed in ((16, 8000), (32, 7900), (64, 7500), (128, 7000), (256, 6500))
    ],
}


def history(tmp_path: Path, *lines: object) -> tuple[str, ...]:
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return ("plot", "--history", str(path), "--to", str(tmp_path))


def test_plots_of_a_history(tmp_path: Path) -> None:
    done = weft("bench", *history(tmp_path, DECODE, CHURN))
    assert done.exit_code == 0, done.output
    drawn = [Path(line) for line in done.stdout.splitlines()]
    assert drawn == [tmp_path / "step-time.png", tmp_path / "churn.png"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


def test_the_newest_run_that_fits_is_drawn(tmp_path: Path) -> None:
    def png(*lines: object) -> bytes:
        assert weft("bench", *history(tmp_path, *lines)).exit_code == 0
        return (tmp_path / "churn.png").read_bytes()

    faster = {**CHURN, "results": [{**r, "output_tokens_per_s": 9000} for r in CHURN["results"]]}
    others = [
        {**faster, "device": "NVIDIA A100"},
        {**faster, "ok": False},
        {**faster, "config": {**CHURN["config"], "load": 0.7}},
        {**faster, "config": {**CHURN["config"], "ranks": [8, 16]}},
        {**faster, "config": {**CHURN["config"], "options": {"quantization": "int4"}}},
        {**faster, "config": CONFIG},
        {"benchmark": "churn"},
    ]
    assert png(faster, CHURN, *others) == png(CHURN) != png(CHURN, faster)
    assert "can't be read" in weft("bench", *history(tmp_path, CHURN, [1])).stderr


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("plot", "--history", "nowhere.jsonl"), "--history nowhere.jsonl: No such file"),
        (("simulate", "--trace", "zipf:1.0,nonsense"), "--trace takes a list of"),
        (("simulate", "--policy", "random"), "--policy takes a list of cost, lru, fifo"),
        (("simulate", "--fleet", "2", "--adapters", "8,9"), "--adapters takes one number"),
        (("simulate", "--adapter-memory", "1M", "--no-plot"), "more than --adapter-memory has"),
        (("simulate", "--adapters", "9" * 14, "--no-plot"), "--adapters takes numbers from 1 to"),
        (("simulate", "--fleet", "2", "--adapters", "9" * 14), "numbers from 1 to 10,000,000"),
        (("simulate", "--num-requests", "9" * 14, "--no-plot"), "not enough memory. Unable to"),
        (("simulate", "--fleet", "9" * 11, "--no-plot"), "not enough memory. Unable to"),
        (("simulate", "--record", "nowhere/at/all.jsonl"), "--record nowhere"),
        (("churn", *TINY, "--populations", "0"), "--populations takes numbers"),
        (("churn", *TINY, "--input-len", "9999", "--no-plot"), "choose a shorter --input-len"),
        (("churn", *TINY, "--targets", "nose", "--no-plot"), "'nose' is none of q_proj"),
        (("cold", *TINY, "--plot", "cold.pdf"), "takes the name of a .png file"),
        (("alora", *TINY, "--no-plot"), "more than the context of 2048"),
        (("prompts", *TINY, "--no-plot"), "--tokens 2048 leaves no room for an answer"),
    ],
)
def test_refusals(
    args: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = weft("bench", *args)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("weft: error: ") and why in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_history_without_a_run_to_draw_is_refused(tmp_path: Path) -> None:
    done = weft("bench", *history(tmp_path, {**DECODE, "device": "CPU"}))
    assert done.exit_code == 1 and "has no run of decode or churn" in done.stderr
