"""Routing: routers with the same reports agree, worse reports repel, nobody starves, and a fleet
that can't keep up refuses in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import ConfigError
from weft.core.load import Costs, EngineLoad
from weft.fleet.crowd import WARM_S
from weft.fleet.keys import (
    COMING,
    HOST,
    NUM_CODES,
    RESIDENT,
    RUNNING,
    KeyedCodes,
    KeyedNodes,
    Orders,
)
from weft.fleet.latest_reports import LatestReports
from weft.fleet.reports import NodeReport, update_between
from weft.fleet.route import POLICIES, Routed, Router, Shed
from weft.fleet.view import TRANSIT_S, RoutedRequest

MB = 1 << 20
NAMES = tuple(f"node-{k}" for k in range(6))
IDLE = EngineLoad(max_seats=8, free_adapter_bytes=1 << 40)


def router(loads: Sequence[EngineLoad], **options: object) -> Router:
    """A router that has one report of each node."""
    found = Router(**options)  # type: ignore[arg-type]
    for name, load in zip(NAMES, loads, strict=False):
        report(found, name, load)
    return found


def report(
    router: Router, name: str, load: EngineLoad, now: float = 0.0, draining: bool = False
) -> None:
    router.view.update(update_between(None, NodeReport(name, 1, 1, load, draining)), now)


def request(number: int = 0, adapter: int = 7, **fields: object) -> RoutedRequest:
    values: dict[str, object] = {"num_tokens": 100, "adapter_bytes": 80 * MB, **fields}
    return RoutedRequest(str(number), adapter=adapter, **values)  # type: ignore[arg-type]


def node_of(router: Router, asked: RoutedRequest) -> str:
    found = router.choose(asked)
    assert isinstance(found, Routed)
    return found.node


keys = st.frozensets(st.integers(1, 5), max_size=3)
loads = st.builds(
    EngineLoad,
    max_seats=st.integers(1, 8),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 20),
    queued_tokens=st.integers(0, 20_000),
    free_adapter_bytes=st.sampled_from([0, 1 << 40]),
    running_adapters=keys,
    loading=st.dictionaries(st.integers(1, 5), st.just(0.0), max_size=2),
    resident=keys,
    host=keys,
    prefixes=st.frozensets(st.integers(100, 104), max_size=4),
)
fleets = st.lists(loads, min_size=1, max_size=6)
requests = st.builds(
    RoutedRequest,
    st.integers(0, 99).map(str),
    num_tokens=st.integers(1, 4000),
    adapter=st.integers(0, 5),
    adapter_bytes=st.integers(0, 200 * MB),
    prefixes=st.sampled_from([(), ((16, 100),), ((16, 101), (64, 102)), ((32, 103), (96, 104))]),
)
FEW = settings(max_examples=30, deadline=None)


@FEW
@given(fleets, requests, st.permutations(range(6)), st.sampled_from(sorted(POLICIES)))
def test_routers_with_the_same_reports_agree(
    fleet: list[EngineLoad], asked: RoutedRequest, order: list[int], policy: str
) -> None:
    """In whatever order the reports came, and whatever came before them."""
    one = router(fleet, policy=policy)
    other = Router(policy)
    for name in NAMES:
        report(other, name, replace(IDLE, resident=frozenset({1, 2, 3})))
    for i in order:
        if i < len(fleet):
            report(other, NAMES[i], fleet[i])
        else:
            other.view.leave(NAMES[i])
    other.view.check()
    assert node_of(one, asked) == node_of(other, asked)


@FEW
@given(fleets, requests, st.data(), st.sampled_from(["cost", "least-loaded", "bounded-hrw"]))
def test_a_worse_report_never_attracts(
    fleet: list[EngineLoad], asked: RoutedRequest, data: st.DataObject, policy: str
) -> None:
    before = node_of(router(fleet, policy=policy), asked)
    worse = data.draw(st.sampled_from(range(len(fleet))))
    load = fleet[worse]
    slower = {k: 2 * getattr(load.costs, k) for k in Costs.__slots__}
    others = {key + 1000: s for key, s in load.loading.items()}  # its loader is as busy as before
    load = data.draw(
        st.sampled_from(
            [
                replace(load, num_waiting=load.num_waiting + 3),
                replace(load, queued_tokens=load.queued_tokens + 500),
                replace(load, resident=frozenset(), host=frozenset(), loading=others),
                replace(load, prefixes=frozenset()),
                replace(load, running_adapters=frozenset()),
                replace(load, costs=Costs(**slower)),
            ]
        )
    )
    changed = [load if i == worse else each for i, each in enumerate(fleet)]
    after = node_of(router(changed, policy=policy), asked)
    assert after == before or after != NAMES[worse]


@pytest.mark.parametrize("policy", ["cost", "least-loaded", "bounded-hrw"])
def test_no_node_starves(policy: str) -> None:
    """Requests for many adapters reach all nodes, though the router hears of nothing meanwhile."""
    busy = router([IDLE] * 6, policy=policy)
    counts: Counter[str] = Counter()
    for k in range(120):
        found = busy.place(request(k, adapter=k + 1), now=0.0)
        assert isinstance(found, Routed)
        counts[found.node] += 1
    busy.view.check()
    assert set(counts) == set(NAMES)
    assert max(counts.values()) <= 3 * min(counts.values())


def test_punica_fills_the_fullest_node_that_has_a_seat() -> None:
    some = [replace(IDLE, num_running=n) for n in (2, 8, 7, 0)]
    assert node_of(router(some, policy="punica"), request()) == NAMES[2]
    full = [replace(IDLE, num_running=8, num_waiting=n) for n in (2, 1, 3)]
    assert node_of(router(full, policy="punica"), request()) == NAMES[1]


def test_a_request_goes_where_its_adapter_and_prefix_are() -> None:
    for name in NAMES[:4]:
        there = [
            replace(IDLE, resident=frozenset({7}) if each == name else frozenset())
            for each in NAMES
        ]
        assert node_of(router(there), request()) == name
        there = [
            replace(IDLE, prefixes=frozenset({1, 2}) if each == name else frozenset({1}))
            for each in NAMES
        ]
        asked = request(adapter=0, num_tokens=4000, prefixes=((16, 1), (3000, 2)))
        assert node_of(router(there), asked) == name


def test_a_crowd_spreads_over_more_nodes_than_one() -> None:
    """As the requests of one hot adapter become more, further nodes load it too."""
    hot = router([replace(IDLE, max_seats=64, resident=frozenset({7}))] + [IDLE] * 5)
    placed = [hot.place(request(k), now=0.0) for k in range(200)]
    nodes = Counter(each.node for each in placed if isinstance(each, Routed))
    assert len(nodes) > 2
    assert nodes[NAMES[0]] > 40


def test_what_was_sent_counts_until_a_report_has_seen_it() -> None:
    one = router([IDLE])
    one.place(request(1), now=1.0)
    report(one, NAMES[0], IDLE, now=1.0 + TRANSIT_S / 2)  # it may have been made before
    assert one.view.num_open[0] == 1
    assert one.terms(request(2)).load[0] < one.terms(request(2, adapter=8)).load[0]
    report(one, NAMES[0], replace(IDLE, num_running=1), now=1.0 + 2 * TRANSIT_S)
    assert one.view.num_open[0] == 1
    one.view.end(NAMES[0], request(1), 30)
    assert one.view.num_open[0] == 0
    one.view.check()


def test_routers_that_know_the_same_do_not_all_choose_one_node() -> None:
    """Eight routers hear the same reports now and then; between two of them, node 0 looks best."""
    told = LatestReports()
    routers = [Router(told=told) for _ in range(8)]
    there = replace(IDLE, max_seats=64, num_running=10, resident=frozenset({7}))
    fleet = [replace(there, num_running=9), *[there] * 5]
    worst = 0
    for second in range(20):
        for name, load in zip(NAMES, fleet, strict=True):
            report(routers[0], name, load, now=float(second))
        asked = [request(24 * second + k, num_tokens=600) for k in range(24)]
        placed = [routers[k % 8].place(each, second + 0.01 * k) for k, each in enumerate(asked)]
        nodes = [each.node for each in placed if isinstance(each, Routed)]
        worst = max(Counter(nodes).values())
        for k, (node, each) in enumerate(zip(nodes, asked, strict=True)):
            routers[k % 8].view.end(node, each, None if second < 19 else 30)
        for each in routers:
            each.view.check()
    assert worst <= 12, "without chance all eight send their first request to node 0"


def test_a_node_that_begins_to_take_requests_gets_a_few_at_first() -> None:
    """It is empty then, and costs least; but what comes would wait for its adapters there."""
    busy = replace(IDLE, max_seats=64, num_running=30, resident=frozenset(range(1, 40)))
    fleet = router([busy] * 5 + [replace(IDLE, max_seats=64, host=busy.resident)])
    fleet.view.set_enabled(frozenset(NAMES[:5]))
    began_s = 10.0
    report(fleet, NAMES[0], busy, began_s)
    fleet.view.set_enabled(None)
    got = []
    for passed in (0.0, 0.3, 0.6, 0.9, 1.2):
        placed = [
            fleet.place(request(k, 1 + k % 39), began_s + passed * WARM_S + 0.01) for k in range(40)
        ]
        nodes = [each.node for each in placed if isinstance(each, Routed)]
        got.append(nodes.count(NAMES[5]))
        for k, node in enumerate(nodes):
            fleet.view.end(node, request(k, 1 + k % 39), None)
        fleet.view.check()
    assert got == sorted(got) and 0 < got[0] <= got[-1] / 2, got


def test_a_router_that_is_alone_leaves_nothing_to_chance() -> None:
    alone = router([IDLE] * 3)
    for k in range(100):
        found = alone.place(request(k), now=0.1 * k)
        assert isinstance(found, Routed)
        assert found.terms.chance is None


def test_chance_is_as_without_the_nodes_that_take_no_requests() -> None:
    busy = replace(IDLE, max_seats=64, num_running=60)
    holds = replace(busy, resident=frozenset({7}))
    chances = []
    for idle in ([], [IDLE, replace(IDLE, resident=frozenset({7}))]):
        fleet = router([holds, busy, busy, *idle])
        fleet.view.set_enabled(frozenset(NAMES[:3]))
        for k in range(9):
            fleet.view.send(k % 3, request(k, 1 + k), 0.01, 1.0)
        chance = fleet.terms(request(99, 7)).chance
        assert chance is not None
        chances.append(chance[:3].tolist())
    assert chances[0] == chances[1]


def test_drains_and_deaths() -> None:
    fleet = router([replace(IDLE, resident=frozenset({7})), IDLE, IDLE])
    view = fleet.view
    assert node_of(fleet, request()) == NAMES[0]
    assert node_of(fleet, request(avoid=frozenset({NAMES[0]}))) != NAMES[0]
    assert fleet.choose(request(avoid=frozenset(NAMES))) == Shed(1, math.inf)
    view.set_enabled(frozenset({NAMES[1]}))
    assert node_of(fleet, request()) == NAMES[1]
    view.set_dead(NAMES[1])
    assert node_of(fleet, request()) == NAMES[0], "those not enabled are better than none"
    view.set_enabled(None)
    report(fleet, NAMES[0], IDLE, draining=True)
    assert node_of(fleet, request()) == NAMES[2]
    for name in NAMES[:3]:
        view.set_dead(name)
    assert fleet.choose(request()) == Shed(1, math.inf)
    report(fleet, NAMES[1], IDLE)
    assert node_of(fleet, request()) == NAMES[1], "its report says that it is back"


def test_a_fleet_that_cant_keep_up_refuses_in_time() -> None:
    loads = [replace(IDLE, num_running=8, num_waiting=w) for w in (100, 200, 300)]
    assert isinstance(router(loads, max_wait_s=30.0).choose(request()), Routed)
    shed = router(loads, max_wait_s=3.0).choose(request())
    assert isinstance(shed, Shed)
    assert shed.wait_s > 3.0
    assert shed.retry_after_s == math.ceil(shed.wait_s - 3.0)


def test_whoever_has_more_than_its_share_is_refused_first() -> None:
    loads = [replace(IDLE, num_running=8, num_waiting=100)] * 3
    fleet = router(loads, max_wait_s=20.0)
    fleet.set_weights({"gold": 3.0})
    for k in range(12):
        fleet.place(request(k, tenant="many"), now=0.0)
    fleet.place(request(100, tenant="gold"), now=0.0)
    assert isinstance(fleet.choose(request(101, tenant="many")), Shed)
    for tenant in ("gold", "new"):
        assert isinstance(fleet.choose(request(102, tenant=tenant)), Routed)


def test_saturated_fleets_follow_the_order_of_the_adapter() -> None:
    full = replace(IDLE, num_running=8, num_waiting=60)
    fleet = router([full] * 6)
    first = int(fleet.view.told.orders.seconds(7)[:6].argmin())
    for resident in range(6):
        report(fleet, NAMES[resident], replace(full, resident=frozenset({7})))
        assert node_of(fleet, request()) == NAMES[first]


def test_an_explanation_adds_up() -> None:
    fleet = router([replace(IDLE, num_running=k, queued_tokens=900 * k) for k in (3, 1, 2)])
    found = fleet.place(request(), now=0.0)
    assert isinstance(found, Routed)
    rows = fleet.explain(found)
    assert rows[0]["node"] == found.node
    assert {row["node"] for row in rows} == set(NAMES[:3])
    for row in rows:
        added = sum(row[name] for name in ("prefill", "others", "order", "chance"))
        assert row["total"] == pytest.approx(max(row["wait"], row["load"]) + added)


def test_a_policy_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no routing policy named 'random'; there are: cost,"):
        Router("random")


def test_orders_change_little_when_a_node_comes() -> None:
    orders = Orders()
    orders.set_nodes(dict(enumerate(NAMES[:5])), 8)
    before = [int(orders.seconds(key)[:5].argmin()) for key in range(1, 600)]
    orders.set_nodes(dict(enumerate(NAMES)), 8)
    after = [int(orders.seconds(key)[:6].argmin()) for key in range(1, 600)]
    assert all(b == a or a == 5 for b, a in zip(before, after, strict=True))
    assert min(Counter(after).values()) > 50


changes = st.tuples(
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([RESIDENT, HOST, COMING, RUNNING]),
    st.lists(st.integers(1, 4), max_size=3),
)


@FEW
@given(st.lists(changes, max_size=30))
def test_keyed_codes_and_nodes(history: list[tuple[bool, int, int, list[int]]]) -> None:
    """They are a set of bits, or one bit, for each key and node."""
    codes, nodes, model = KeyedCodes(), KeyedNodes(), {}
    codes.grow(2)
    codes.grow(4)
    nodes.grow(8)
    for adds, node, bit, some in history:
        (codes.add if adds else codes.discard)(node, bit, some)
        if bit == RESIDENT:
            (nodes.add if adds else nodes.discard)(node, some)
        for key in some:
            old = model.get((key, node), 0)
            model[key, node] = old | bit if adds else old & ~bit
        codes.check()
        nodes.check()
    for key in range(1, 5):
        held = [model.get((key, node), 0) for node in range(4)]
        assert codes.row(key).tolist() == [NUM_CODES * n + code for n, code in enumerate(held)]
        row = nodes.row(nodes.masks.get(key, 0))
        assert row.tolist() == [code & RESIDENT for code in held] + [0] * 4
