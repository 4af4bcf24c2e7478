"""What nodes tell of themselves: reports in small updates, sketches of prefixes, measured costs."""

from __future__ import annotations

import random
from array import array
from dataclasses import astuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.load import Costs, EngineLoad, adapter_key
from weft.engine.meter import Meter
from weft.fleet.reports import ReportReceiver, ReportSender, ReportUpdate
from weft.schedule.cache import Cache, Holding
from weft.schedule.sketch import DEPTHS, PrefixSketch, prefix_keys

KEYS = st.frozensets(st.integers(0, 2**64 - 1), max_size=5)
LOADS = st.builds(
    EngineLoad,
    num_running=st.integers(0, 9),
    running_adapters=KEYS,
    loading=st.dictionaries(st.integers(0, 2**64 - 1), st.floats(0, 9), max_size=3),
    resident=KEYS,
    host=KEYS,
    prefixes=KEYS,
)
ENCODE = msgspec.msgpack.Encoder().encode
DECODE = msgspec.msgpack.Decoder(ReportUpdate).decode


@given(loads=st.lists(LOADS, min_size=1, max_size=6), late=st.integers(0, 5))
def test_updates_add_up_to_what_was_reported(loads: list[EngineLoad], late: int) -> None:
    """Also for a reader who comes late, and for one who begins anew."""
    sender = ReportSender("a", 7, {"gpu": "h200"})
    first, second = ReportReceiver(), ReportReceiver()
    for number, load in enumerate(loads):
        wire = ENCODE(sender.update(load, draining=number % 2 == 1))
        assert first.receive(DECODE(wire)) == sender.report
        if number == late:
            whole = sender.whole()
            assert whole is not None and second.receive(DECODE(ENCODE(whole))) == sender.report
        elif number > late:
            assert second.receive(DECODE(wire)) == sender.report
    whole = sender.whole()
    assert whole is not None and first.receive(whole) == sender.report
    assert sender.report is not None and sender.report.load == loads[-1]
    assert sender.report.seq == len(loads) and first.report == sender.report
    assert sender.report.labels == {"gpu": "h200"}
    assert b"h200" not in ENCODE(sender.update(EngineLoad())), "labels are told once"


def test_a_report_of_10_000_adapters_changes_in_few_bytes() -> None:
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(10_000)]
    full = EngineLoad(
        resident=frozenset(keys[:1_024]), host=frozenset(keys[:4_096]), prefixes=frozenset(keys)
    )
    sender = ReportSender("a", 1)
    sender.update(full)
    changed = EngineLoad(
        resident=frozenset(keys[1:1_025]), host=full.host, prefixes=full.prefixes, num_running=3
    )
    assert len(ENCODE(sender.update(changed))) < 500


def test_the_sketch_tells_prefixes_that_the_cache_has() -> None:
    """And none that it has lost, or that another adapter computed."""
    cache, tokens = Cache(num_blocks=12, block_size=4), array("Q", range(41))
    cache.sketch = PrefixSketch()
    holding = Holding()
    assert cache.reserve(holding, len(tokens))
    cache.register(holding, tokens, len(tokens))
    told = [depth for depth in DEPTHS if depth <= 10]

    def told_of(chain: Holding) -> list[tuple[int, int]]:
        return prefix_keys(lambda depth: chain.key(tokens, depth - 1, 4), len(tokens), 4)

    mine = told_of(Holding())
    assert [num_tokens for num_tokens, _ in mine] == [4 * depth for depth in told]
    assert {key for _, key in mine} == cache.sketch.keys
    digest = "ab" * 32
    others = told_of(Holding(digest, 0))
    assert not {key for _, key in others} & cache.sketch.keys
    cache.release(holding)
    other = Holding(digest, 0)
    assert cache.reserve(other, 48)
    assert not cache.sketch.keys


def test_a_sketch_forgets_what_was_used_longest_ago() -> None:
    sketch = PrefixSketch(max_keys=2)
    one, two, three = (bytes([n]) * 16 for n in (1, 2, 3))
    sketch.use(0, one)
    sketch.use(0, two)
    sketch.use(0, one)
    sketch.use(1, three)
    sketch.use(4, two)  # no depth that is told
    assert sketch.keys == {int.from_bytes(key[:8], "little") for key in (one, three)}


def test_costs_are_found_from_steps_and_loads() -> None:
    true = Costs(6e-3, 5e-5, 2e-4, 1e-4, 2e-3, 1e-10, 1e-9)
    rng, meter = random.Random(3), Meter()
    for _ in range(400):
        rows, tokens = rng.randrange(1, 64), rng.choice((0, 0, 256, 1000))
        adapters, size = rng.randrange(rows + 1), rng.randrange(10**6, 10**8)
        work = true.row_s * rows + true.adapter_s * adapters + true.token_s * tokens
        meter.step(rows, adapters, tokens, (true.step_s + work) * rng.uniform(0.9, 1.1))
        host = rng.random() < 0.5
        byte_s = true.host_byte_s if host else true.disk_byte_s
        meter.load(size, host, true.load_s + byte_s * size)
    found = meter.costs
    for name in ("step_s", "adapter_s", "token_s", "host_byte_s", "disk_byte_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.25), name


def test_costs_stay_as_assumed_where_nothing_was_measured() -> None:
    """And none is ever negative, however little the steps tell apart."""
    meter = Meter()
    assert astuple(meter.costs) == pytest.approx(astuple(Costs()))
    for _ in range(1000):
        meter.step(1, 1, 0, 1e-4)
    costs = meter.costs
    assert costs.token_s == pytest.approx(Costs().token_s)
    assert min(costs.step_s, costs.row_s, costs.adapter_s) >= 0
    assert costs.step_s + costs.row_s + costs.adapter_s == pytest.approx(1e-4, rel=0.4)


def test_keys_of_adapters_come_from_their_digests() -> None:
    assert adapter_key("00000000000000ff" + "ab" * 24) == 255
