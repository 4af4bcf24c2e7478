"""A fleet in virtual time: real schedulers and real routing, a modelled device, and faults.

The code that serves makes the decisions: `weft.fleet.route`, `weft.fleet.consolidate` and each
node's scheduler. Only when requests move is simulated (`weft.bench.fleet_moves`). One seed gives
the same figures to the bit. Events happen in this order in time:

    arrive ──place──> a node ──first token, last token──> its router
       ▲                 │ report, each `report_s`
       └─── all routers ◀┘                       control: enabled nodes, moves
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.bench.fleet_moves import GENTLE, SHARE, plan_moves
from weft.bench.fleet_node import BLOCK, H200, SimulatedNode, chain_of, request_of
from weft.bench.fleet_trace import FleetAsk
from weft.bench.workload import rng_of
from weft.core.requests import EngineRequest, TokenEvent
from weft.fleet.consolidate import Consolidator, loads_of
from weft.fleet.latest_reports import LatestReports
from weft.fleet.route import Router, Shed
from weft.fleet.view import TRANSIT_S, RoutedRequest
from weft.schedule.cache import Holding
from weft.schedule.sketch import prefix_keys

CONTROL_S = 0.25
"""The time between two looks at the enabled nodes."""
SAMPLE_S = 1.0
"""The time between two samples of the nodes' batches."""
DEATH_SEEN_S, HANG_SEEN_S = 0.01, 0.2
"""Until routers know that a node died, or does not answer."""
RESTART_S, HANG_S, CUT_S = 10.0, 3.0, 3.0
"""How long a dead node is away, a hanging one hangs, and a cut link is cut."""
SLACK_S = 1e-9
"""How much later a node is looked at than it is due, as that time is subject to rounding."""
AGAIN_S = 0.5
"""A request that no node takes is tried again after this time."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """A fleet to simulate."""

    num_nodes: int
    num_adapters: int
    seats: int = 64
    """Requests that run at a node at a time."""
    policy: str = "cost"
    num_routers: int = 1
    report_s: float = 0.1
    """The time between two reports of a node; 0: routers always know everything."""
    target: float | None = None
    """The part of its seats that a node is to have taken; None: all nodes are always enabled."""
    faults_each_s: float | None = None
    """The mean time between two faults; None: there are none."""
    seed: int = 0


@dataclass(slots=True)
class FleetReplay:
    """What happened. Times in seconds."""

    first_s: list[float] = field(default_factory=list)
    """From arrival to the first token, by request; infinite if there was none."""
    done_s: list[float] = field(default_factory=list)
    """When each request ended; infinite if it did not."""
    gaps_s: list[float] = field(default_factory=list)
    """The longest time between two tokens around each move of a request that had tokens."""
    batches: list[list[int]] = field(default_factory=list)
    """Running requests by sample and node."""
    node_seconds: float = 0.0
    """Seconds of nodes in which they were enabled or had requests."""
    loads: int = 0
    steps: int = 0
    rows: int = 0
    moves: int = 0
    faults: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way through the fleet."""

    number: int
    ask: FleetAsk
    router: int
    node: int = -1
    """Where it is; -1 while it is nowhere."""
    routed: RoutedRequest | None = None
    first_s: float = math.inf
    left_s: float | None = None
    """When it left a node, until it gets its next token elsewhere."""
    chain: Holding = field(init=False)
    """The keys of its blocks, until it is sent."""
    output: list[int] = field(default_factory=list)
    """What it had got when it was sent last."""

    def request(self) -> EngineRequest:
        return request_of(self.number, self.ask, self.output)

    def describe(self, request: EngineRequest, avoid: str = "") -> RoutedRequest:
        """What a router needs to know of it. It takes a new chain, as it holds nothing now."""
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self.chain = chain_of(self.ask)
        return RoutedRequest(
            request.request_id,
            num_tokens,
            self.ask.adapter + 1,
            H200.rank_bytes,
            tuple(prefix_keys(self.chain.cached_key, num_tokens, BLOCK)),
            avoid=frozenset([avoid] if avoid else []),
        )


class FleetSimulator:
    """Replays requests on a fleet until `seconds`."""

    def __init__(self, setup: FleetSetup, asks: Sequence[FleetAsk], seconds: float) -> None:
        self._setup = setup
        self._asks = asks
        self._seconds = seconds
        self.nodes = [self._new_node(i) for i in range(setup.num_nodes)]
        transit_s = TRANSIT_S if setup.report_s else 0.0
        self._told = None if setup.faults_each_s else LatestReports()
        """What all routers hear; None: links may be cut, so that each hears for itself."""
        self.routers = [
            Router(setup.policy, transit_s, told=self._told) for _ in range(setup.num_routers)
        ]
        self._consolidator = Consolidator(setup.target) if setup.target else None
        self.flights: dict[int, _Flight] = {}
        """Open requests by number."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._dirty: set[int] = set()
        """Nodes that have changed since an omniscient router looked."""
        self._away: set[int] = set()
        """Nodes that are dead or hang."""
        self._cut: set[tuple[int, int]] = set()
        """(Router, node) that can't reach each other."""
        self._rng = rng_of(setup.seed, 1)
        self.replay = FleetReplay()

    def _new_node(self, i: int) -> SimulatedNode:
        return SimulatedNode(f"node-{i}", self._setup.num_adapters, H200, self._setup.seats)

    def run(self) -> FleetReplay:
        setup, replay, asks = self._setup, self.replay, self._asks
        replay.first_s = [math.inf] * len(asks)
        replay.done_s = [math.inf] * len(asks)
        of_router = self._rng.integers(setup.num_routers, size=len(asks))
        for i in range(setup.num_nodes):
            self._report(i, 0.0)
            if setup.report_s:
                self._each(setup.report_s, lambda now, i=i: self._report(i, now), i)  # type: ignore[misc]
        self._each(SAMPLE_S, self._sample)
        if self._consolidator is not None:
            self._each(CONTROL_S, self._control)
        if setup.faults_each_s is not None:
            self._at(self._rng.exponential(setup.faults_each_s), self._fault)
        number = 0
        while True:
            arrival_s = asks[number].arrival_s if number < len(asks) else math.inf
            event_s = self._events[0][0] if self._events else math.inf
            now = min(arrival_s, event_s)
            if now >= self._seconds:
                break
            if arrival_s <= event_s:
                flight = _Flight(number, asks[number], int(of_router[number]))
                self.flights[number] = flight
                self._arrive(flight, now)
                number += 1
            else:
                heapq.heappop(self._events)[2](now)
        for node in self.nodes:
            self._add_up(node)
        return replay

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    def _each(self, period_s: float, action: Callable[[float], None], place: int = 0) -> None:
        """Repeat something; places, from 0 on, begin at different times, and so take turns."""

        def again(now: float) -> None:
            action(now)
            self._at(now + period_s, again)

        self._at(period_s * (1 + place / self._setup.num_nodes), again)

    # -- requests ------------------------------------------------------------------------------

    def _arrive(self, flight: _Flight, now: float) -> None:
        router = self.routers[flight.router]
        for i in sorted(self._dirty):
            self._report(i, now)
        request = flight.request()
        flight.routed = flight.describe(request)
        found = router.place(flight.routed, now)
        if isinstance(found, Shed):
            self._at(now + AGAIN_S, lambda now: self._arrive(flight, now))
        else:
            self._send(flight, found.index, now, request)

    def _send(self, flight: _Flight, i: int, now: float, request: EngineRequest) -> None:
        flight.node = i
        if i not in self._away:
            self._work(i, now)
            self.nodes[i].submit(request, flight.chain, now)
            self._touch(i)

    def _work(self, i: int, now: float) -> None:
        """Let a node work until now, and hear what it has to say."""
        for when, event in self.nodes[i].advance(now):
            self._hear(i, when, event)

    def _touch(self, i: int) -> None:
        """A node has changed: it is looked at again when it does next."""
        if not self._setup.report_s:
            self._dirty.add(i)
        node = self.nodes[i]
        due_s = node.next_s + SLACK_S
        if due_s != node.due_s:
            node.due_s = due_s
            if due_s < self._seconds:
                self._at(due_s, lambda now: self._wake(i, now))

    def _wake(self, i: int, now: float) -> None:
        node = self.nodes[i]
        if node.due_s == now:
            node.due_s = math.inf
            if i not in self._away:
                self._work(i, now)
                self._touch(i)

    def _hear(self, i: int, when: float, event: TokenEvent) -> None:
        number = int(event.request_id)
        flight, replay = self.flights[number], self.replay
        if math.isinf(flight.first_s):
            flight.first_s = when
            replay.first_s[number] = when - flight.ask.arrival_s
        if flight.left_s is not None:
            replay.gaps_s.append(when - flight.left_s)
            flight.left_s = None
        if event.finish_reason is not None:
            assert event.finish_reason == "length", event
            assert flight.routed is not None
            replay.done_s[number] = when
            del self.flights[number]
            node = self.nodes[i].name
            self.routers[flight.router].view.end(node, flight.routed, flight.ask.output_tokens)

    # -- what nodes say, and what is decided for all -------------------------------------------

    def _report(self, i: int, now: float) -> None:
        if i in self._away:
            return
        self._work(i, now)
        self._dirty.discard(i)
        update = self.nodes[i].report(now)
        if self._told is not None:
            self._told.update(update, now)
        else:
            for k, router in enumerate(self.routers):
                if (k, i) not in self._cut:
                    router.view.update(update, now)
        self._touch(i)

    def _control(self, now: float) -> None:
        assert self._consolidator is not None
        view = self.routers[0].view
        before = self._consolidator.enabled
        found = self._consolidator.tick(now, loads_of(view))
        if found.names != before:
            for router in self.routers:
                router.view.set_enabled(found.names)
        if found.emptied is not None:
            i = view.index(found.emptied)
            self._work(i, now)
            self._move([f for f in self.flights.values() if f.node == i], now, GENTLE)
            self._touch(i)

    def _move(self, flights: Iterable[_Flight], now: float, share: float = SHARE) -> None:
        """Let requests go on elsewhere. Those whose node is lost run nowhere until then."""
        by_router: dict[int, list[_Flight]] = {}
        for flight in flights:
            by_router.setdefault(flight.router, []).append(flight)
        for k, of_router in by_router.items():
            asked = []
            for flight in sorted(of_router, key=lambda f: f.number):
                source = self.nodes[flight.node]
                if flight.node not in self._away and source.scheduler.has(str(flight.number)):
                    flight.output = source.scheduler.output_of(str(flight.number))
                asked.append(flight.describe(flight.request(), source.name))
            moves = plan_moves(self.routers[k], asked, now, share)
            for move, request in zip(moves, asked, strict=True):
                self._plan_move(self.flights[int(move.request_id)], request, move.node, move.at_s)

    def _plan_move(
        self, flight: _Flight, request: RoutedRequest, target: str | None, at_s: float
    ) -> None:
        if target is None:
            self._at(at_s + AGAIN_S, lambda now: self._try_again(flight, now))
            return
        source = flight.node

        def go(now: float) -> None:
            view = self.routers[flight.router].view
            index = view.index(target)
            if source not in self._away:
                self._work(source, now)
            if flight.number not in self.flights or flight.node != source:
                view.end(target, request, None)  # it has ended, or moved otherwise
                return
            self._leave(flight, now)
            flight.routed = request
            self.replay.moves += 1
            self._send(flight, index, now, flight.request())

        self._at(at_s, go)

    def _try_again(self, flight: _Flight, now: float) -> None:
        if flight.number in self.flights:
            self._move([flight], now)

    def _leave(self, flight: _Flight, now: float) -> None:
        """Take a request from the node where it is."""
        view, node = self.routers[flight.router].view, self.nodes[flight.node]
        assert flight.routed is not None
        if flight.node not in self._away and node.scheduler.has(str(flight.number)):
            flight.output = node.take_back(str(flight.number))
            self._touch(flight.node)
        if math.isfinite(flight.first_s) and flight.left_s is None:
            flight.left_s = now
        view.end(node.name, flight.routed, None)

    def _sample(self, now: float) -> None:
        replay = self.replay
        enabled = self._consolidator and self._consolidator.enabled
        for i, node in enumerate(self.nodes):
            used = not enabled or node.name in enabled or node.scheduler.busy
            replay.node_seconds += SAMPLE_S * (used and i not in self._away)
        replay.batches.append([node.scheduler.num_running for node in self.nodes])

    def _add_up(self, node: SimulatedNode) -> None:
        self.replay.loads += node.slots.num_loads
        self.replay.steps += node.num_steps
        self.replay.rows += node.num_rows

    # -- faults --------------------------------------------------------------------------------

    def _fault(self, now: float) -> None:
        """A node dies or hangs, or a link is cut."""
        assert self._setup.faults_each_s is not None
        self._at(now + self._rng.exponential(self._setup.faults_each_s), self._fault)
        i, kind = int(self._rng.integers(len(self.nodes))), int(self._rng.integers(3))
        k = int(self._rng.integers(len(self.routers)))
        if i in self._away or len(self._away) + 1 >= len(self.nodes):
            return
        self.replay.faults += 1
        self._work(i, now)
        if kind == 2:
            self._cut.add((k, i))
            self._at(now + HANG_SEEN_S, lambda now: self._lose(i, now, [k]))
            self._at(now + CUT_S, lambda now: self._mend(k, i, now))
            return
        here = [f for f in self.flights.values() if f.node == i]
        for flight in here:
            if self.nodes[i].scheduler.has(str(flight.number)):
                flight.output = self.nodes[i].scheduler.output_of(str(flight.number))
                flight.left_s = now if math.isfinite(flight.first_s) else None
        self._away.add(i)
        self._at(now + (DEATH_SEEN_S, HANG_SEEN_S)[kind], lambda now: self._lose(i, now))
        self._at(now + (RESTART_S, HANG_S)[kind], lambda now: self._come_back(i, now))

    def _lose(self, i: int, now: float, routers: Sequence[int] | None = None) -> None:
        """These routers, or all, see that a node does not answer."""
        known = range(len(self.routers)) if routers is None else routers
        for k in known:
            self.routers[k].view.set_dead(self.nodes[i].name)
        here = [f for f in self.flights.values() if f.node == i and f.router in known]
        if i not in self._away:
            self._work(i, now)
            here = [f for f in here if f.number in self.flights]
            for flight in here:
                flight.output = self.nodes[i].take_back(str(flight.number))
            self._touch(i)
        self._move(here, now)

    def _mend(self, k: int, i: int, now: float) -> None:
        self._cut.discard((k, i))
        if i not in self._away:
            self._work(i, now)
            self.routers[k].view.update(self.nodes[i].whole_report(now), now)
            self._touch(i)

    def _come_back(self, i: int, now: float) -> None:
        """A node that was away begins anew, with nothing."""
        self._add_up(self.nodes[i])
        self.nodes[i] = self._new_node(i)
        self._away.discard(i)
        self._report(i, now)
