"""Which nodes serve, what moves when one is emptied, and which nodes hold an adapter."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from test_route import IDLE, MB, NAMES, router

from weft.bench.fleet_moves import plan_moves
from weft.core.load import EngineLoad
from weft.fleet.consolidate import (
    COPIES,
    JUMP,
    LATE_S,
    PATIENCE_S,
    SPARE,
    WINDOW_S,
    Consolidator,
    Enabled,
    NodeLoad,
    Placement,
)
from weft.fleet.view import RoutedRequest

FEW = settings(max_examples=30, deadline=None)
SEATS = 10


class Clock:
    """A consolidator, and the load that its fleet has over time, spread over enabled nodes."""

    def __init__(self, num_nodes: int) -> None:
        self.names = [f"n{k}" for k in range(num_nodes)]
        self.decides = Consolidator(target=0.8)
        self.now = 0.0

    def run(self, num_open: int, seconds: float, wait_s: float = 0.0) -> list[Enabled]:
        found = []
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            enabled = self.decides.enabled or frozenset(self.names)
            each = num_open // max(len(enabled), 1)
            loads = [
                NodeLoad(n, each * (n in enabled), SEATS, wait_s, 0.1 * k)
                for k, n in enumerate(self.names)
            ]
            found.append(self.decides.tick(self.now, loads))
            self.decides.check()
        return found


def test_few_requests_end_up_on_few_nodes() -> None:
    fleet = Clock(6)
    seen = fleet.run(12, 60.0)
    assert len(seen[-1].names) == 2
    emptied = [each.emptied for each in seen if each.emptied]
    assert len(emptied) == 4
    assert emptied[0] == "n0", "the one that takes least to empty goes first"
    assert not fleet.run(12, 30.0)[-1].emptied, "and it stays like that"


def test_nodes_are_enabled_at_once_and_disabled_late() -> None:
    fleet = Clock(6)
    fleet.run(8, 60.0)
    assert len(fleet.run(40, 0.5)[-1].names) >= 5
    quiet = fleet.run(8, PATIENCE_S / 2)
    assert all(each.emptied is None for each in quiet)


def test_load_that_wavers_empties_nobody() -> None:
    fleet = Clock(6)
    fleet.run(30, 60.0)
    for _ in range(20):
        for num_open in (27, 33):
            assert all(each.emptied is None for each in fleet.run(num_open, 1.0))


def test_waits_enable_another_node() -> None:
    fleet = Clock(6)
    before = len(fleet.run(8, 60.0)[-1].names)
    assert len(fleet.run(8, 0.25, wait_s=2 * LATE_S)[-1].names) == before + 1


def test_growth_is_seen_ahead() -> None:
    fleet = Clock(6)
    fleet.run(6, 38.0)
    for num_open in range(6, 32):
        last = fleet.run(num_open, 0.5)[-1]
    assert len(last.names) > (31 + 1) / (0.8 * SEATS)


def test_autoscalers_hear_of_the_most_that_was_needed() -> None:
    fleet = Clock(6)
    fleet.run(36, 10.0)
    assert fleet.run(6, WINDOW_S / 2)[-1].wanted_replicas >= 5 + SPARE
    assert fleet.run(6, WINDOW_S)[-1].wanted_replicas <= 2 + SPARE


@FEW
@given(st.lists(st.tuples(st.integers(0, 80), st.sets(st.integers(0, 5), min_size=1)), max_size=25))
def test_there_is_always_a_node(history: list[tuple[int, set[int]]]) -> None:
    """Nodes come and die at any time; those enabled are alive. They are not fewer than the load
    takes, where there are as many, but for what the load may differ by chance."""
    decides = Consolidator(target=0.8)
    for tick, (num_open, alive) in enumerate(history):
        loads = [NodeLoad(f"n{k}", num_open // len(alive), SEATS) for k in sorted(alive)]
        found = decides.tick(tick * 1.0, loads)
        decides.check()
        assert found.names
        assert found.names <= {load.name for load in loads}
        total = sum(load.num_open for load in loads)
        least = total - JUMP * math.sqrt(total)
        assert len(found.names) >= min(len(alive), least / (0.8 * SEATS))
        assert found.emptied not in found.names


@FEW
@given(st.integers(0, 40), st.sampled_from([EngineLoad(max_seats=8), IDLE]), st.integers(1, 5))
def test_moves_conserve_requests(count: int, load: EngineLoad, num_others: int) -> None:
    """Each request goes to one other node; a node gets one after the other."""
    fleet = router([load] * (num_others + 1))
    moving = [
        RoutedRequest(str(k), 500 + k, 1 + k % 4, 80 * MB, avoid=frozenset({NAMES[0]}))
        for k in range(count)
    ]
    moves = plan_moves(fleet, moving, now=5.0)
    assert [move.request_id for move in moves] == [str(k) for k in range(count)]
    assert all(move.node in NAMES[1 : num_others + 1] for move in moves)
    sent = Counter(move.node for move in moves)
    for index, node in fleet.view.nodes.items():
        assert fleet.view.num_open[index] == load.num_open + sent[NAMES[index]]
        times = [move.at_s for move in moves if move.node == node.name]
        assert all(late - early > 0.01 for early, late in pairwise(times))
    assert all(move.at_s >= 5.0 for move in moves)


def test_a_storm_is_spread() -> None:
    moving = [RoutedRequest(str(k), 2000, k + 1, 80 * MB) for k in range(60)]
    moves = plan_moves(router([IDLE] * 6), moving, now=0.0)
    assert max(Counter(move.node for move in moves).values()) <= 15


def test_who_can_go_nowhere_stays() -> None:
    moving = [RoutedRequest("a", 500, avoid=frozenset({NAMES[0]}))]
    (move,) = plan_moves(router([IDLE]), moving, now=0.0)
    assert move.node is None


def test_hot_adapters_are_kept_on_several_nodes() -> None:
    fleet, popular = router([IDLE] * 6), Placement()
    for k in range(600):
        popular.saw(1 + (k % 3 if k % 2 else 10 + k % 50), now=0.01 * k)
    for adapter in (1, 2, 3):
        assert popular.copies(adapter, 6) == 2, COPIES
    assert popular.copies(15, 6) == 1
    found = popular.prefetches(fleet.view)
    wanted = Counter(each.adapter for each in found)
    assert wanted == {1: 2, 2: 2, 3: 2}
    assert len({(each.node, each.adapter) for each in found}) == 6
    for later in range(100):
        popular.saw(90, now=2000.0 + later)
    assert popular.copies(1, 6) == 1
    assert popular.copies(90, 6) == 6


def test_what_was_asked_for_long_ago_counts_for_nothing() -> None:
    """A clock shows any time at the start, and there may be no request for days."""
    popular = Placement()
    popular.saw(7, 1e5)
    popular.saw(8, 1e9)
    assert popular.copies(8, 6) == 6 and popular.copies(7, 6) == 1
