"""What a router knows of all nodes: their latest reports (`weft.fleet.latest_reports`), and what
this router has sent there or seen end there since.

A report may lack what was sent shortly before it came, so that is added to it again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.fleet.crowd import Crowd
from weft.fleet.keys import COMING, RESIDENT, RUNNING, Floats, Ints
from weft.fleet.latest_reports import LatestReports
from weft.fleet.reports import ReportUpdate
from weft.fleet.unseen_requests import UnseenRequests

TRANSIT_S = 0.02
"""How long a request and a report may be under way, together."""
RELUCTANT = 1e6
"""Added to the seconds of nodes that get requests only when there is no other node."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What routing needs to know of a request."""

    request_id: str
    num_tokens: int
    """Tokens of the prompt, and of the output that it has already."""
    adapter: int = 0
    """The key of its adapter (`weft.core.load.adapter_key`); 0: it asks for the base."""
    adapter_bytes: int = 0
    prefixes: tuple[tuple[int, int], ...] = ()
    """(Number of tokens, key) of its prefixes, the shortest first."""
    tenant: str = ""
    avoid: frozenset[str] = frozenset()
    """Nodes that may not serve it: those that died with it, or that it has to leave."""

    @property
    def order_key(self) -> int:
        """Requests with the same key prefer the same nodes, other things being equal."""
        return self.adapter or (self.prefixes[0][1] if self.prefixes else 0)


class _Sent(NamedTuple):
    """A request that a node's last report may lack."""

    at_s: float
    request: RoutedRequest
    computed_s: float
    """How long its prompt takes to compute."""
    loads: bool
    """Whether its adapter had to be loaded."""


@dataclass(slots=True)
class NodeState:
    """One node, as one router sees it."""

    name: str
    dead: bool = True
    """Whether it does not answer; true until its first report."""
    draining: bool = False
    idle: bool = False
    enabled: bool = True
    sent: deque[_Sent] = field(default_factory=deque)
    more_open: int = 0
    """How many requests are open there beyond those that it told of."""
    ready_s: float = 0.0
    """When it will have computed its queue with what was sent; only kept if anything was."""


class OnWay:
    """Counts the requests with a key that are on their way to a node, by key and node."""

    def __init__(self) -> None:
        self.counts: dict[int, dict[int, int]] = {}
        """By key and node. Not to be changed by others."""

    def add(self, node: int, key: int) -> None:
        counts = self.counts.get(key)
        if counts is None:
            self.counts[key] = {node: 1}
        else:
            counts[node] = counts.get(node, 0) + 1

    def discard(self, node: int, key: int) -> None:
        counts = self.counts[key]
        if counts[node] > 1:
            counts[node] -= 1
        elif len(counts) > 1:
            del counts[node]
        else:
            del self.counts[key]

    def nodes(self, key: int) -> Collection[int]:
        return self.counts.get(key, ())

    def check(self, held: Counter[tuple[int, int]]) -> None:
        """Raise AssertionError unless it counts these pairs of key and node."""
        assert held == {(k, n): c for k, of_key in self.counts.items() for n, c in of_key.items()}


class FleetView:
    """Owner of what one router knows of all nodes."""

    def __init__(self, transit_s: float = TRANSIT_S, told: LatestReports | None = None) -> None:
        """`transit_s`: a report has seen what was sent this long before it came. `told`: what
        nodes tell, if several routers of one process hear the same."""
        self._transit_s = transit_s
        self.told = told or LatestReports()
        self._heard = self._taken = 0
        """How many of the reports have been heard, and how many are in the arrays."""
        self.nodes: dict[int, NodeState] = {}
        """By their index in all arrays."""
        self._bound = OnWay()
        """Adapters of requests that are on their way to nodes."""
        self.prefixes = OnWay()
        """And their prefixes."""
        self._loading: Counter[int] = Counter()
        """How many loads such requests cause, by node."""
        self.unseen = UnseenRequests()
        self._queues = np.zeros((2, 0))
        """As in `LoadTable`, with what was sent and has ended since the reports."""
        self._crowd = Crowd()
        self._touched: set[int] = set()
        """The nodes whose queues are not just what they reported."""
        self._now = 0.0
        """When the newest report came, or the last request was sent."""
        self.closed_s = np.zeros(0)
        """0; RELUCTANT for a node that gets requests only if no other can; infinite if it can't."""
        self.open_of: Counter[str] = Counter()
        """This router's open requests by tenant."""

    # -- who is there --------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The length of all arrays."""
        return self.told.capacity

    def index(self, name: str) -> int:
        """The index of a node. A new name gets a new one."""
        index = self.told.index(name)
        if index not in self.nodes:
            self._grow()
            self.nodes[index] = NodeState(name)
        return index

    def _grow(self) -> None:
        more = (0, self.capacity - len(self.closed_s))
        if more[1]:
            self._queues = np.pad(self._queues, ((0, 0), more))
            self._crowd.grow(self.capacity)
            self.closed_s = np.pad(self.closed_s, more, constant_values=np.inf)
            self.unseen.set_takes(self.closed_s == 0.0)

    def leave(self, name: str) -> None:
        """Forget a node that is gone for good."""
        index = self.index(name)
        self._see(index, self.nodes[index], np.inf)
        self.told.leave(name)
        del self.nodes[index]
        self._set(index, 0, 0.0)
        self._set_closed(index, np.inf)

    def set_dead(self, name: str) -> None:
        """The node does not answer. Its next report says that it does again."""
        self.heed()
        index = self.index(name)
        self.nodes[index].dead = True
        self._close(index)

    def set_enabled(self, names: frozenset[str] | None) -> None:
        """Let only these nodes get requests, as long as one of them can; None: all."""
        self.heed()
        for index, node in self.nodes.items():
            node.enabled = names is None or node.name in names
            self._close(index)

    def _close(self, index: int) -> None:
        """Work out whether a node may have requests."""
        node = self.nodes[index]
        closed_s = np.inf if node.dead else 0.0
        closed_s += RELUCTANT * (node.draining or node.idle or not node.enabled)
        self._set_closed(index, closed_s)

    def _set_closed(self, index: int, closed_s: float) -> None:
        before_s, self.closed_s[index] = self.closed_s[index], closed_s
        if closed_s:
            self._crowd.end(index)
        elif before_s:
            self._crowd.begin(index, self._now)
        self.unseen.set_takes(self.closed_s == 0.0)

    def barred_s(self, request: RoutedRequest) -> Floats:
        """Infinite at nodes that may not serve this request, and 0 at others."""
        barred = np.zeros(self.capacity)
        for index, node in self.nodes.items():
            if node.name in request.avoid:
                barred[index] = np.inf
        return barred

    # -- what happens there --------------------------------------------------------------------

    def update(self, update: ReportUpdate, now: float) -> None:
        """A node's next report has come. The first one of a node must be whole."""
        self.told.update(update, now)
        self._hear()

    def heed(self) -> None:
        """Bring the arrays up to date with all reports."""
        told = self.told
        if self._taken == told.count:
            return
        self._hear()
        self._taken = told.count
        self._queues[:] = told.table.queues
        self._crowd.set_all(self._queues[0])
        for index in self._touched:
            self._measure(index, self.nodes[index])

    def _hear(self) -> None:
        """Note of each new report which requests it covers, and whether the node serves."""
        told = self.told
        if self._heard == told.count:
            return
        nodes, touched = self.nodes, self._touched
        self._now = max(self._now, told.now)
        for index, report in told.since(self._heard):
            node = nodes.get(index)
            if node is None:
                node = nodes[self.index(report.name)]
            if index in touched:
                self._see(index, node, report.at_s - self._transit_s)
            if node.dead or (node.draining, node.idle) != (report.draining, report.idle):
                node.dead, node.draining, node.idle = False, report.draining, report.idle
                self._close(index)
        self._heard = told.count

    def _see(self, index: int, node: NodeState, until_s: float) -> None:
        """A node's report covers all requests that were sent until `until_s`."""
        sent = node.sent
        while sent and sent[0].at_s <= until_s:
            self._arrived(index, sent.popleft())
        node.more_open = len(sent)
        if sent:
            self._line_up(index, node)
        else:
            self._touched.discard(index)

    def _line_up(self, index: int, node: NodeState) -> None:
        """Work out when a node will have computed what it reported and what was sent since."""
        node.ready_s = self.told.nodes[index].ready_s
        for each in node.sent:
            node.ready_s = max(node.ready_s, each.at_s) + each.computed_s
        self._touched.add(index)
        self._measure(index, node)

    def _measure(self, index: int, node: NodeState) -> None:
        """Set a node's queue from its report and what was sent and has ended since."""
        told = self.told.nodes[index]
        num_open = told.num_open + node.more_open
        self._set(index, num_open, told.begin_of(num_open, node.ready_s))

    def _set(self, index: int, num_open: int, begins_s: float) -> None:
        queues = self._queues
        queues[0, index], queues[1, index] = num_open, begins_s
        self._crowd.set(index, num_open)

    def _arrived(self, index: int, sent: _Sent) -> None:
        """Undo what a request counted for while it was on its way."""
        request = sent.request
        self.unseen.num_on_way -= 1
        if request.adapter:
            self._bound.discard(index, request.adapter)
        for _, key in request.prefixes:
            self.prefixes.discard(index, key)
        if sent.loads:
            self._loading[index] -= 1
            if not self._loading[index]:
                del self._loading[index]

    def send(self, index: int, request: RoutedRequest, computed_s: float, now: float) -> None:
        """A request was sent to a node, where its prompt takes `computed_s` to compute."""
        loads, adapter = False, request.adapter
        if adapter:
            code = int(self.told.adapters.row(adapter)[index])
            loads = not code & (RESIDENT | COMING) and index not in self._bound.nodes(adapter)
            self.told.asked(request.adapter_bytes)
            self._bound.add(index, adapter)
            if loads:
                self._loading[index] += 1
        for _, key in request.prefixes:
            self.prefixes.add(index, key)
        self._now = max(self._now, now)
        node = self.nodes[index]
        if index not in self._touched:
            self._touched.add(index)
            node.ready_s = self.told.nodes[index].ready_s
        node.sent.append(_Sent(now, request, computed_s, loads))
        node.more_open += 1
        node.ready_s = max(node.ready_s, now) + computed_s
        self._measure(index, node)
        self.unseen.send(computed_s)
        self.open_of[request.tenant] += 1

    def end(self, name: str, request: RoutedRequest, num_tokens: int | None) -> None:
        """A request has left a node: it ended with `num_tokens` of output, or (None) it moves or
        its client is gone."""
        self.open_of[request.tenant] -= 1
        if not self.open_of[request.tenant]:
            del self.open_of[request.tenant]
        self.unseen.num_open -= 1
        if num_tokens is not None:
            self.told.answered(num_tokens)
        index = self.told.find(name)
        if index is None or index not in self.nodes:
            return
        if self.told.nodes[index].count > self._heard:
            self._hear()
        node = self.nodes[index]
        node.more_open -= self.told.nodes[index].num_open + node.more_open > 0
        for each in node.sent:
            if each.request.request_id == request.request_id:
                node.sent.remove(each)
                self._arrived(index, each)
                break
        self._line_up(index, node)

    # -- what a router asks --------------------------------------------------------------------

    @property
    def num_open(self) -> Floats:
        """Open requests by node."""
        self.heed()
        num_open: Floats = self._queues[0]
        return num_open

    @property
    def wait_s(self) -> Floats:
        """How long a request that comes now would wait until it is computed, by node; less than 0
        where the queue has been empty, for that long."""
        self.heed()
        wait_s: Floats = self._queues[1] - self._now
        return wait_s

    def codes(self, adapter: int) -> Ints:
        """How each node has an adapter; see `weft.fleet.keys`. Not to be changed."""
        codes = self.told.adapters.row(adapter)
        if bound := self._bound.nodes(adapter):
            codes = codes.copy()
            for index in bound:
                codes[index] |= COMING | RUNNING
        return codes

    @property
    def crowd(self) -> Floats:
        """See `Crowd.weights`."""
        return self._crowd.weights(self.closed_s, self._now)

    def load_and_rows_s(self, request: RoutedRequest) -> tuple[Floats, Floats]:
        """By node, the seconds until a request's adapter is on the device, and what an answer with
        it adds to all its steps together. The latter array is valid until the next call."""
        codes = self.codes(request.adapter)
        fixed_s, byte_s, rows_s = self.told.table.lines(codes)
        load_s: Floats = byte_s * request.adapter_bytes
        load_s += fixed_s
        for index, count in self._loading.items():
            if not codes[index] & (RESIDENT | COMING):
                load_s[index] += count * self.told.nodes[index].loader_s
        return load_s, rows_s

    def chance_s(self, request: RoutedRequest, load: Floats) -> Floats | None:
        """See `UnseenRequests.chance_s`."""
        return self.unseen.chance_s(request.request_id, load, self.told.num_open)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self.told.check()
        self.heed()
        assert self.nodes.keys() <= self.told.nodes.keys()
        assert all(count > 0 for count in self.open_of.values())
        for index in range(self.capacity):
            assert index in self.nodes or self.closed_s[index] == np.inf
        assert (self.num_open >= 0).all()
        sent = [(i, each) for i, node in self.nodes.items() for each in node.sent]
        self._bound.check(Counter((e.request.adapter, i) for i, e in sent if e.request.adapter))
        self.prefixes.check(Counter((key, i) for i, e in sent for _, key in e.request.prefixes))
        assert self._loading == Counter(i for i, each in sent if each.loads)
        assert self.unseen.num_on_way == len(sent)
        assert self.unseen.num_open == self.open_of.total()
        assert (self.unseen.takes == (self.closed_s == 0.0)).all()
        self._crowd.check(self.num_open, self.closed_s)
        for index, node in self.nodes.items():
            told = self.told.nodes[index]
            assert self.num_open[index] == told.num_open + node.more_open
            assert index in self._touched or (not node.sent and not node.more_open)
            assert index in self._touched or self._queues[1, index] == told.begins_s
            assert [each.at_s for each in node.sent] == sorted(each.at_s for each in node.sent)
