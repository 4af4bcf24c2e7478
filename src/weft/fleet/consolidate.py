"""Decides how many nodes serve, which node is emptied, and which nodes hold an adapter. Pure: no
clock, no I/O.

Requests are kept on as few nodes as serve them well. Each enabled node should have the fraction
`target` of its seats taken, so that a step reads the weights for many requests at once. The other
nodes are idle and ready; they may be switched off.

    load grows     the nodes that it needs a little later are enabled at once
    load shrinks   when it would have fitted on fewer nodes for a while, one is disabled, the one
                   that is emptied with the least work; its requests move. The next one follows
                   when it is empty
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.fleet.keys import COMING, RESIDENT
from weft.fleet.view import FleetView

TARGET = 0.8
"""The fraction of its seats that should be taken on an enabled node."""
SLACK = 0.95
"""A node is only disabled if the others then have no more than this fraction of their targets."""
LEAD_S = 2.0
"""How far ahead the load is predicted."""
SMOOTH_S, TREND_S = 2.0, 5.0
"""The time constants by which the load and its growth are smoothed, as requests come at random."""
JUMP = 3.0
"""A load that differs from the expected one by this many standard deviations is not smoothed."""
PATIENCE_S = 5.0
"""A node is disabled when the load has fitted on fewer nodes for this long."""
LATE_S, LATE = 0.1, 0.25
"""If requests wait this long on more than this part of the enabled nodes, another one is enabled
whatever the load is."""
WINDOW_S = 300.0
"""Autoscalers are told the most nodes that were needed within this time ..."""
SPARE = 1
"""... and this many more, as a new node takes long to start."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a living node reports that matters for whether it is needed."""

    name: str
    num_open: int
    seats: int
    wait_s: float = 0.0
    """How many seconds a new request would wait there."""
    empty_s: float = 0.0
    """How many seconds its requests would take to be computed again elsewhere."""
    idle: bool = False
    """Whether it was told to be idle, by this or an earlier deciding process."""


def loads_of(view: FleetView) -> list[NodeLoad]:
    """All nodes that could serve."""
    view.heed()
    wait_s = view.wait_s
    return [
        NodeLoad(
            node.name,
            int(view.num_open[i]),
            view.told.nodes[i].load.max_seats,
            max(float(wait_s[i]), 0.0),
            float(view.num_open[i] * view.told.table.token_s[i]),
            node.idle,
        )
        for i, node in view.nodes.items()
        if not node.dead and not node.draining
    ]


@dataclass(frozen=True, slots=True)
class Enabled:
    """Which nodes serve from now on."""

    names: frozenset[str]
    emptied: str | None
    """The node that was just disabled, if any; its requests must move."""
    wanted_replicas: int
    """How many nodes there should be, for autoscalers."""


class _Most:
    """The maximum of a number over a sliding window of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        """(When, number): each number is more than all later ones."""

    def add(self, now: float, number: int) -> int:
        """Add the number's current value. Returns the maximum."""
        seen = self._seen
        while seen and seen[-1][1] <= number:
            seen.pop()
        seen.append((now, number))
        while seen[0][0] < now - self._window_s:
            seen.popleft()
        return seen[0][1]


class _Load:
    """How many requests are open, smoothed together with its growth (Holt's double exponential
    smoothing)."""

    def __init__(self) -> None:
        self._at_s = -math.inf
        """When it was looked at last."""
        self._level = self._growth = 0.0
        """Smoothed open requests at that time, and their growth per second."""

    def expect(self, now: float, num_open: int) -> float:
        """Record the number of open requests. Returns how many to expect `LEAD_S` later; a
        shrinking load counts as constant."""
        passed_s, before = now - self._at_s, self._level
        self._at_s = now
        if passed_s == math.inf:
            self._level = num_open
        elif passed_s > 0:
            expected = before + passed_s * self._growth
            off = num_open - expected
            chance = JUMP * math.sqrt(max(expected, 1.0))
            part = 1.0 if abs(off) > chance else -math.expm1(-passed_s / SMOOTH_S)
            self._level = expected + part * off
            rate = (self._level - before) / passed_s
            self._growth -= (rate - self._growth) * math.expm1(-passed_s / TREND_S)
        return self._level + LEAD_S * max(self._growth, 0.0)


class Consolidator:
    """Owner of the set of enabled nodes."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._order: list[str] = []
        """All nodes: first the enabled ones, then those that were disabled last."""
        self._num_enabled = 0
        self._load = _Load()
        self._emptying = ""
        """The node that was disabled last."""
        self._began_s: float | None = None
        """When the load was first observed."""
        self._fits = _Most(PATIENCE_S)
        """The most nodes that the load needed of late, with something to spare."""
        self._needs = _Most(WINDOW_S)
        """The most nodes that were needed of late, for autoscalers."""

    @property
    def enabled(self) -> frozenset[str]:
        return frozenset(self._order[: self._num_enabled])

    def tick(self, now: float, nodes: Sequence[NodeLoad]) -> Enabled:
        """Look at all living nodes; call this several times a second. At first all are enabled."""
        by_name = {node.name: node for node in nodes}
        if self._began_s is None:
            self._began_s = now
        self._follow(by_name)
        expected = self._load.expect(now, sum(node.num_open for node in nodes))
        per_node = self._target * sum(node.seats for node in nodes) / max(len(nodes), 1)
        need = math.ceil(expected / max(per_node, 1.0))
        enabled = [by_name[name] for name in self._order[: self._num_enabled]]
        fits = math.ceil(expected / max(SLACK * per_node, 1.0))
        if sum(node.wait_s > LATE_S for node in enabled) > LATE * len(enabled):
            need = max(need, self._num_enabled + 1)
            fits = max(fits, need)
        need = min(max(need, 1), len(nodes))
        fits = self._fits.add(now, fits)
        last = by_name.get(self._emptying)
        emptied = None
        if need > self._num_enabled:
            self._num_enabled = need
        elif (
            max(need, fits) < self._num_enabled
            and now - self._began_s >= PATIENCE_S
            and not (last and last.num_open and last not in enabled)
        ):
            victim = min(enabled, key=lambda node: (node.empty_s, node.num_open, node.name))
            emptied = self._emptying = self._disable(victim.name)
        return Enabled(self.enabled, emptied, self._needs.add(now, need) + SPARE)

    def _follow(self, by_name: dict[str, NodeLoad]) -> None:
        """Remove nodes that died, and add new ones. A new node is enabled, unless it reports that
        it was told to be idle."""
        enabled = [name for name in self._order[: self._num_enabled] if name in by_name]
        idle = [name for name in self._order[self._num_enabled :] if name in by_name]
        for name in sorted(by_name.keys() - set(self._order)):
            (idle if by_name[name].idle else enabled).append(name)
        self._order, self._num_enabled = enabled + idle, len(enabled)

    def _disable(self, name: str) -> str:
        self._order.remove(name)
        self._num_enabled -= 1
        self._order.insert(self._num_enabled, name)
        return name

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert len(set(self._order)) == len(self._order)
        assert 0 <= self._num_enabled <= len(self._order)
        assert self._num_enabled > 0 or not self._order


# -- placement -------------------------------------------------------------------------------------

HALF_LIFE_S = 60.0
"""The half-life of a request's weight in the popularity of its adapter."""
FORGOTTEN = 60
"""After this many half-lives without a request, earlier requests are forgotten."""
HOT = 0.25
"""An adapter with this fraction of one node's load is kept on two nodes."""
COPIES = 1.5
"""How many nodes hold an adapter for each node that its load would fill."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """An adapter is to be loaded at a node that has no request for it yet."""

    node: str
    adapter: int


class Placement:
    """Owner of the popularity of adapters, which decides how many nodes hold each."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        """Requests by adapter, in units of a request that comes at `_since`."""
        self._total = 0.0
        self._since = 0.0

    def saw(self, adapter: int, now: float) -> None:
        """A request for this adapter has come."""
        if now - self._since > FORGOTTEN * HALF_LIFE_S:
            self._begin_again(now, math.inf)
        weight = 2.0 ** ((now - self._since) / HALF_LIFE_S)
        self._counts[adapter] = self._counts.get(adapter, 0.0) + weight
        self._total += weight
        if weight > 1024.0:
            self._begin_again(now, weight)

    def _begin_again(self, now: float, weight: float) -> None:
        kept = {a: count / weight for a, count in self._counts.items() if count > weight / 64}
        self._counts, self._since, self._total = kept, now, sum(kept.values())

    def copies(self, adapter: int, num_nodes: int) -> int:
        """How many of the nodes are to hold an adapter, by its part of all requests."""
        if not self._total:
            return 1
        nodes = self._counts.get(adapter, 0.0) / self._total * num_nodes
        least = 2 if nodes >= HOT else 1
        return min(max(math.ceil(COPIES * nodes), least), num_nodes)

    def prefetches(self, view: FleetView) -> list[Prefetch]:
        """What to load where: hot adapters, at the first nodes of their order without them."""
        able = {i: node.name for i, node in view.nodes.items() if not view.closed_s[i]}
        threshold = HOT * self._total / max(len(able), 1)
        found: list[Prefetch] = []
        for adapter, count in self._counts.items():
            if adapter and count >= threshold:
                codes = view.codes(adapter)
                held = {i for i in able if codes[i] & (RESIDENT | COMING)}
                order_s = view.told.orders.seconds(adapter)
                others = sorted(able.keys() - held, key=lambda i: (order_s[i], i))
                missing = self.copies(adapter, len(able)) - len(held)
                found += [Prefetch(able[i], adapter) for i in others[: max(missing, 0)]]
        return found
