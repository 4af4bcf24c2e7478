"""The simulated fleet: nodes do what the scheduler alone would do, and a seed says everything."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest

from weft.bench import fleet_node
from weft.bench.fleet_node import BLOCK, H200, SimulatedNode, chain_of, request_of
from weft.bench.fleet_simulate import FleetPlan, row_of, setup_of
from weft.bench.fleet_simulator import FleetReplay, FleetSetup, FleetSimulator
from weft.bench.fleet_trace import LEAVES_S, PAUSE_S, FleetAsk, FleetTrace
from weft.core.errors import ConfigError
from weft.core.requests import TokenEvent
from weft.schedule.scheduler import Scheduler


def draw(name: str, rate: float, seconds: float, answer: float = 40.0) -> list[FleetAsk]:
    return FleetTrace.parse(name).draw(30, rate, seconds, answer, seed=1)


def first_and_last(
    asks: list[FleetAsk],
) -> tuple[list[tuple[float, str]], list[tuple[float, TokenEvent]]]:
    """When each request of one node got its first token, and how and when each ended."""
    node = SimulatedNode("node", 30, H200, 64)
    found: list[tuple[float, TokenEvent]] = []
    for number, ask in enumerate(asks):
        found += node.advance(ask.arrival_s)
        node.submit(request_of(number, ask, []), chain_of(ask), ask.arrival_s)
    found += node.advance(60.0)
    node.scheduler.check()
    assert not node.scheduler.busy
    firsts: dict[str, float] = {}
    for when, event in found:
        firsts.setdefault(event.request_id, when)
    ends = [(when, event) for when, event in found if event.finish_reason]
    return sorted((when, request_id) for request_id, when in firsts.items()), ends


def test_coasting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes give the same tokens at the same times if the scheduler plans each step in full."""
    asks = draw("zipf:1.0", 40.0, 2.0)
    coasted = first_and_last(asks)
    monkeypatch.setattr(fleet_node._Scheduler, "decide", Scheduler.plan)
    monkeypatch.setattr(fleet_node._Scheduler, "_plan_decodes", Scheduler._plan_decodes)
    planned = first_and_last(asks)
    assert planned[0] == coasted[0]
    by_time = Counter((when, event.request_id) for when, event in planned[1])
    assert by_time == Counter((when, event.request_id) for when, event in coasted[1])


def test_a_node_that_lost_all_requests_is_idle_after_its_step() -> None:
    node = SimulatedNode("node", 30, H200, 64)
    ask = FleetAsk(0.0, 3, 600, 100, 0)
    node.submit(request_of(0, ask, []), chain_of(ask), 0.0)
    node.advance(0.3)
    assert len(node.take_back("0")) > 10
    for _ in range(3):
        node.advance(math.nextafter(node.next_s, math.inf))
    assert math.isinf(node.next_s)


def replay(setup: FleetSetup, asks: list[FleetAsk], seconds: float) -> FleetReplay:
    simulator = FleetSimulator(setup, asks, seconds)
    found = simulator.run()
    for router in simulator.routers:
        router.view.check()
    for i, node in enumerate(simulator.nodes):
        node.scheduler.check()
        if not simulator.flights and i not in simulator._away:
            assert not node.scheduler.busy
    return found


def test_every_request_ends_once_whatever_happens() -> None:
    """Nodes die and hang, links are cut, nodes are emptied; one seed gives one history."""
    setup = FleetSetup(4, 30, num_routers=2, target=0.1, faults_each_s=0.4, seed=3)
    asks = draw("bursts", 24.0, 3.0)
    found = replay(setup, asks, 20.0)
    assert found.faults > 5
    assert found.moves > 0
    assert all(map(math.isfinite, found.done_s))
    assert all(first < 15.0 for first in found.first_s)
    assert replay(setup, asks, 20.0) == found


def test_the_same_seed_gives_the_same_figures_everywhere() -> None:
    """Whoever makes the simulator faster leaves this as it is; whoever changes what is decided
    writes the new digest down."""
    setup = FleetSetup(4, 30, num_routers=4, target=0.5, seed=1)
    found = replay(setup, draw("zipf:1.0", 60.0, 4.0), 6.0)
    times = [round(1e3 * each, 3) for each in found.first_s + found.done_s]
    figures = times, found.batches, found.loads, found.steps, found.rows, found.moves
    assert hashlib.sha256(repr(figures).encode()).hexdigest()[:16] == "026a5c166fcf4a95"


@pytest.mark.parametrize("policy", ["punica", "omniscient"])
def test_rows(policy: str) -> None:
    trace = FleetTrace.parse("ramp")
    plan = FleetPlan((trace,), (policy,), 2, 30, 64, 12.0, 40.0, 4.0, 2, 0.1, None, None, 0)
    asks = trace.draw(30, 24.0, 4.0, 40.0, 0)
    row = row_of("ramp", policy, asks, replay(setup_of(plan, policy), asks, 4.0), 4.0)
    assert row.tokens_per_s > 100
    assert row.first_p50_ms is not None
    assert 5 < row.first_p50_ms < 200
    assert row.unserved == 0


def test_traces_go_on_with_sessions_and_follow_their_rate() -> None:
    asks = draw("day", 40.0, 60.0)
    longer = [ask for number, ask in enumerate(asks) if ask.session != number]
    assert len(longer) > len(asks) / 4
    last: dict[int, float] = {}
    for ask in asks:
        assert PAUSE_S <= ask.arrival_s - last.get(ask.session, ask.arrival_s - PAUSE_S) <= LEAVES_S
        last[ask.session] = ask.arrival_s
    by_ten_s = Counter(int(ask.arrival_s // 10) for ask in asks)
    assert by_ten_s[2] > 2 * by_ten_s[0]
    assert all(ask.prompt_tokens > 4 * BLOCK for ask in asks)
    with pytest.raises(ConfigError, match="--trace takes a list of zipf:EXPONENT"):
        FleetTrace.parse("zipf:much")
