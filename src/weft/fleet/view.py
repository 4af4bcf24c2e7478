"""What a router knows of all nodes, laid out so that a decision is a few operations on arrays.

A node is what it reported last, and what this router has sent there or seen end there since. A
report need not have seen what was sent shortly before it came, so that is added to it again.

Arrays have an element for each node. What depends on an adapter is in tables by node and code
(`weft.fleet.keys`), in which an adapter's row of codes says where to look.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.load import EngineLoad
from weft.fleet.keys import COMING, HOST, NUM_CODES, RESIDENT, RUNNING, KeyedCodes, Orders
from weft.fleet.reports import KeyChange, ReportUpdate

Floats = NDArray[np.float64]

TRANSIT_S = 0.02
"""What requests and reports may take on their way, together."""
ANSWER_TOKENS = 128.0
"""The length of an answer, until some were seen."""
ADAPTER_BYTES = 84e6
"""The size of an adapter, until some were seen: rank 16 of a model with 8 billion weights."""
MEMORY = 0.01
"""How much the newest request changes these two means."""
LOADERS = 2
"""How many loads a node makes at a time."""
LOAD_S, BYTE_S, ROWS_S = 0, 1, 2
"""Until an adapter is on the device, but for its size; the same for each byte of it; and what an
answer with it adds to all the steps in which it takes part, together."""
RELUCTANT = 1e6
"""Added to the seconds of nodes that get requests only when there is no other node."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What matters of a request for where it goes."""

    request_id: str
    num_tokens: int
    """Tokens of the prompt, and of the output that it has already."""
    adapter: int = 0
    """The key of its adapter (`weft.core.load.adapter_key`); 0: it asks for the base."""
    adapter_bytes: int = 0
    prefixes: tuple[tuple[int, int], ...] = ()
    """(Number of tokens, key) of its prefixes, the shortest first."""
    tenant: str = ""
    labels: frozenset[str] = frozenset()
    """Only nodes that have all of these labels may serve it."""
    avoid: frozenset[str] = frozenset()
    """Nodes that may not serve it: those that died with it, or that it has to leave."""

    @property
    def order_key(self) -> int:
        """Requests with the same key prefer the same nodes, other things being equal."""
        return self.adapter or (self.prefixes[0][1] if self.prefixes else 0)


class NodeState:
    """One node: its last report, and what happened there since."""

    __slots__ = (
        "coming",
        "dead",
        "draining",
        "enabled",
        "labels",
        "load",
        "name",
        "num_open",
        "prefixes",
        "queued_tokens",
        "running",
        "sent",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.labels: frozenset[str] = frozenset()
        self.load = EngineLoad()
        self.dead = True
        """Whether it can serve nobody; so until its first report."""
        self.draining = False
        self.enabled = True
        self.num_open = 0
        self.queued_tokens = 0
        self.coming: set[int] = set()
        self.running: set[int] = set()
        """Adapters that are being loaded and that are in the batch, with those of requests that
        were sent since the last report."""
        self.prefixes: set[int] = set()
        """Those of such requests."""
        self.sent: deque[tuple[float, RoutedRequest, int]] = deque()
        """What the last report need not have seen: when it was sent, what, and how many tokens
        had to be computed for it."""


class CostTable:
    """What depends on a node alone, or on a node and where it has an adapter; in seconds.

    Arrays may be longer than there are nodes; the places beyond them are closed for ever.
    """

    def __init__(self) -> None:
        self.wait_s = np.zeros(0)
        """Until a request that comes now would begin to be computed."""
        self.num_open = np.zeros(0)
        self.seats = np.zeros(0)
        self.token_s = np.zeros(0)
        """For each token of a prompt."""
        self.closed_s = np.zeros(0)
        """0; RELUCTANT for a node that gets requests only if no other can; infinite if it can't."""
        self.by_code = np.zeros((0, 3))
        """Three figures for each node and code (`LOAD_S`, `BYTE_S`, `ROWS_S`)."""

    def grow(self, capacity: int) -> None:
        more = (0, capacity - len(self.wait_s))
        self.wait_s, self.num_open, self.seats, self.token_s = (
            np.pad(each, more) for each in (self.wait_s, self.num_open, self.seats, self.token_s)
        )
        self.closed_s = np.pad(self.closed_s, more, constant_values=np.inf)
        self.by_code = np.pad(self.by_code, ((0, NUM_CODES * more[1]), (0, 0)))

    def write_load(self, i: int, node: NodeState, answer_tokens: float) -> None:
        """Work out what depends on how many requests a node has, and on what is queued there.
        `answer_tokens`: the mean length of an answer."""
        load, costs, num_open = node.load, node.load.costs, node.num_open
        seats = max(load.max_seats, 1)
        step_s = costs.step_s + costs.row_s * min(num_open, seats)
        step_s += costs.adapter_s * len(node.running)
        drain_s = max(num_open + 1 - seats, 0) * step_s * answer_tokens / seats
        self.wait_s[i] = costs.token_s * node.queued_tokens + drain_s
        self.num_open[i] = num_open

    def write(self, i: int, node: NodeState, answer_tokens: float, adapter_bytes: float) -> None:
        """Work out all elements of a node. The last arguments are means over requests."""
        self.write_load(i, node, answer_tokens)
        load, costs = node.load, node.load.costs
        self.seats[i], self.token_s[i] = max(load.max_seats, 1), costs.token_s
        near = costs.row_s * answer_tokens
        far = near + costs.adapter_s * answer_tokens
        by_code = self.by_code[NUM_CODES * i : NUM_CODES * (i + 1)]
        by_code[:, ROWS_S] = [far] * RUNNING + [near] * RUNNING
        self.closed_s[i] = np.inf if node.dead else 0.0
        if node.draining or not node.enabled:
            self.closed_s[i] += RELUCTANT
        from_disk_s = costs.load_s + costs.disk_byte_s * adapter_bytes
        queue_s = from_disk_s * len(node.coming) / LOADERS
        fixed_s, host_s, disk_s = costs.load_s + queue_s, costs.host_byte_s, costs.disk_byte_s
        if load.free_adapter_bytes < adapter_bytes:  # what it evicts has to be loaded again
            fixed_s, host_s, disk_s = fixed_s + costs.load_s, 2 * host_s, disk_s + host_s
        rest_s, rest_byte_s = (costs.load_s + queue_s) / 2, costs.disk_byte_s / 2
        # Absent, on the device, on the host, both; and the same while it is being loaded.
        by_code[:, LOAD_S] = [fixed_s, 0.0, fixed_s, 0.0, rest_s, 0.0, rest_s, 0.0] * 2
        by_code[:, BYTE_S] = [disk_s, 0.0, host_s, 0.0, rest_byte_s, 0.0, rest_byte_s, 0.0] * 2


class FleetView:
    """Owner of what is known of all nodes."""

    def __init__(self, transit_s: float = TRANSIT_S) -> None:
        """`transit_s`: a report has seen what was sent this long before it came."""
        self._transit_s = transit_s
        self.nodes: dict[int, NodeState] = {}
        """By their index in all arrays."""
        self._index: dict[str, int] = {}
        self.table = CostTable()
        self.adapters = KeyedCodes(NUM_CODES, np.dtype(np.intp))
        self.prefixes = KeyedCodes(0, np.dtype(np.float64))
        self.orders = Orders()
        self.open_of: Counter[str] = Counter()
        """This router's open requests by tenant."""
        self._answer_tokens = ANSWER_TOKENS
        self._adapter_bytes = ADAPTER_BYTES

    # -- who is there --------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The length of all arrays."""
        return len(self.table.wait_s)

    def index(self, name: str) -> int:
        """The index of a node, which is a new one if the name is."""
        index = self._index.get(name)
        if index is None:
            index = next(i for i in range(len(self.nodes) + 1) if i not in self.nodes)
            if index >= self.capacity:
                capacity = max(8, 2 * index)
                for each in (self.table, self.adapters, self.prefixes):
                    each.grow(capacity)
            self._index[name] = index
            self.nodes[index] = NodeState(name)
            self._seat()
            self._write(index)
        return index

    def leave(self, name: str) -> None:
        """The node is gone for good, and nothing is remembered of it."""
        index = self._index.pop(name)
        self.adapters.forget(index)
        self.prefixes.forget(index)
        del self.nodes[index]
        self.table.closed_s[index] = np.inf
        self._seat()

    def _seat(self) -> None:
        self.orders.set_nodes({i: node.name for i, node in self.nodes.items()}, self.capacity)

    def set_dead(self, name: str) -> None:
        """The node does not answer. Its next report says that it does again."""
        index = self.index(name)
        self.nodes[index].dead = True
        self._write(index)

    def set_labels(self, name: str, labels: frozenset[str]) -> None:
        self.nodes[self.index(name)].labels = labels

    def set_enabled(self, names: frozenset[str] | None) -> None:
        """Let only these nodes get requests, as long as one of them can; None: all."""
        for index, node in self.nodes.items():
            node.enabled = names is None or node.name in names
            self._write(index)

    def barred_s(self, request: RoutedRequest) -> Floats:
        """Infinite at nodes that may not serve this request, and 0 at others."""
        barred = np.zeros(self.capacity)
        for index, node in self.nodes.items():
            if node.name in request.avoid or not request.labels <= node.labels:
                barred[index] = np.inf
        return barred

    # -- what happens there --------------------------------------------------------------------

    def update(self, update: ReportUpdate, now: float) -> None:
        """A node's next report has come. The first one of a node must be whole."""
        report = update.report
        index, load = self.index(report.node), report.load
        node = self.nodes[index]
        if update.whole:
            self.adapters.forget(index)
            self.prefixes.forget(index)
            node.coming, node.running, node.prefixes = set(), set(), set()
        for codes, bit, change in (
            (self.adapters, RESIDENT, update.resident),
            (self.adapters, HOST, update.host),
            (self.prefixes, RESIDENT, update.prefixes),
        ):
            _apply(codes, index, bit, change)
        sent = node.sent
        while sent and sent[0][0] <= now - self._transit_s:
            sent.popleft()
        node.load, node.dead, node.draining = load, False, report.draining
        node.num_open = load.num_open + len(sent)
        node.queued_tokens = load.queued_tokens + sum(tokens for _, _, tokens in sent)
        self._hold(index, node)
        self._write(index)

    def send(self, index: int, request: RoutedRequest, num_computed: int, now: float) -> None:
        """A request was sent to a node, which has to compute so many tokens of it."""
        node = self.nodes[index]
        node.sent.append((now, request, num_computed))
        node.num_open += 1
        node.queued_tokens += num_computed
        self.open_of[request.tenant] += 1
        new = {key for _, key in request.prefixes} - node.prefixes
        node.prefixes |= new
        self.prefixes.add(index, COMING, new)
        adapter = request.adapter
        if adapter:
            self._adapter_bytes += MEMORY * (request.adapter_bytes - self._adapter_bytes)
        if adapter and not (adapter in node.coming and adapter in node.running):
            node.coming.add(adapter)
            node.running.add(adapter)
            self.adapters.add(index, COMING, (adapter,))
            self.adapters.add(index, RUNNING, (adapter,))
            self._write(index)
        else:
            self.table.write_load(index, node, self._answer_tokens)

    def end(self, name: str, request: RoutedRequest, num_tokens: int | None) -> None:
        """A request left a node: it has ended with so many tokens of output, or, None, before its
        end, as it moves or its client is gone."""
        self.open_of[request.tenant] -= 1
        if not self.open_of[request.tenant]:
            del self.open_of[request.tenant]
        if num_tokens is not None:
            self._answer_tokens += MEMORY * (num_tokens - self._answer_tokens)
        index = self._index.get(name)
        if index is not None:
            node = self.nodes[index]
            node.num_open = max(node.num_open - 1, 0)
            for each in node.sent:
                if each[1].request_id == request.request_id:
                    node.sent.remove(each)
                    node.queued_tokens -= each[2]
                    break
            self.table.write_load(index, node, self._answer_tokens)

    def _hold(self, index: int, node: NodeState) -> None:
        """Write down what a node that has just reported has besides its memory's content."""
        load, requests = node.load, [request for _, request, _ in node.sent]
        wanted = {request.adapter for request in requests if request.adapter}
        coming, running = wanted.union(load.loading), wanted.union(load.running_adapters)
        prefixes = {key for request in requests for _, key in request.prefixes}
        self.adapters.replace(index, COMING, node.coming, coming)
        self.adapters.replace(index, RUNNING, node.running, running)
        self.prefixes.replace(index, COMING, node.prefixes, prefixes)
        node.coming, node.running, node.prefixes = coming, running, prefixes

    def _write(self, index: int) -> None:
        node = self.nodes[index]
        self.table.write(index, node, self._answer_tokens, self._adapter_bytes)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self.adapters.check()
        self.prefixes.check()
        assert {node.name: index for index, node in self.nodes.items()} == self._index
        assert all(count > 0 for count in self.open_of.values())
        for index in range(self.capacity):
            assert index in self.nodes or self.table.closed_s[index] == np.inf
        for node in self.nodes.values():
            assert node.num_open >= 0 and node.queued_tokens >= 0
            assert [each[0] for each in node.sent] == sorted(each[0] for each in node.sent)


def _apply(codes: KeyedCodes, index: int, bit: int, change: KeyChange) -> None:
    codes.discard(index, bit, change.removed)
    codes.add(index, bit, change.added)
