"""Holds the latest reports of all nodes as arrays, so that a decision is a few operations.

Arrays have an element for each node, and may be longer than there are nodes. What depends on an
adapter is in a table by node and code: an adapter's code says how a node has it, such as on the
device (`weft.fleet.keys`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.load import EngineLoad
from weft.fleet.keys import (
    COMING,
    HOST,
    NUM_CODES,
    RESIDENT,
    RUNNING,
    Floats,
    Ints,
    KeyedCodes,
    KeyedNodes,
    Orders,
)
from weft.fleet.reports import ReportUpdate

ANSWER_TOKENS = 128.0
"""The length of an answer, until some were seen."""
ADAPTER_BYTES = 84e6
"""The size of an adapter, until some were seen: rank 16 of a model with 8 billion weights."""
MEMORY = 0.01
"""How much the newest request changes a mean over requests."""
LOADERS = 2
"""How many loads a node makes at a time."""
LOAD_S, BYTE_S, ROWS_S = 0, 1, 2
"""The seconds until an adapter is on the device, apart from its size; those for each of its bytes;
and what an answer with it adds to all the steps in which it takes part, together."""


def _places() -> Ints:
    """For each row and code, the place of its value among the few in `LoadTable.write`."""
    places = np.zeros((3, 2, 2, 2, 2), np.intp)  # by RUNNING, COMING, HOST, RESIDENT
    places[LOAD_S, :, 0, :, 0], places[LOAD_S, :, 1, :, 0] = 1, 2
    places[BYTE_S, :, 0, 0, 0], places[BYTE_S, :, 0, 1, 0] = 3, 4
    places[BYTE_S, :, 1, :, 0] = 5
    places[ROWS_S, 0], places[ROWS_S, 1] = 6, 7
    return places.reshape(3, NUM_CODES)


_PLACES = _places()


@dataclass(slots=True)
class ReportedNode:
    """What a node told last."""

    name: str
    load: EngineLoad
    draining: bool = False
    idle: bool = False
    at_s: float = 0.0
    """When that report came."""
    count: int = 0
    """That report's number among those of all nodes."""
    num_open: int = 0
    ready_s: float = 0.0
    """When it will have computed what it has queued."""
    spare: int = 0
    """With how many open requests one seat is free."""
    drain_s: float = 0.0
    """How long a request waits for a seat, for each open request beyond `spare`."""
    begins_s: float = 0.0
    """When a request that comes next begins to be computed."""

    def begin_of(self, num_open: int, ready_s: float) -> float:
        """When a request begins to be computed, if `num_open` are open before it and the queue is
        computed at `ready_s`. Without a free seat it waits until others end, after answers of mean
        length."""
        waiting = num_open - self.spare
        return ready_s + waiting * self.drain_s if waiting > 0 else ready_s

    loader_s: float = 0.0
    """By how many seconds one load there delays another."""


class LoadTable:
    """What follows from each node's load, in arrays; those that are in seconds end with `_s`."""

    def __init__(self) -> None:
        self.seats, self.token_s = np.zeros((2, 0))
        """Seats, and what each token of a prompt takes."""
        self.queues = np.zeros((2, 0))
        """The nodes' open requests, and their `ReportedNode.begins_s`."""
        self.by_code = np.zeros((3, 0))
        """`LOAD_S`, `BYTE_S` and `ROWS_S` for each node and code."""
        self._by_node = np.zeros((3, 0, NUM_CODES))
        """The same, by node and code."""
        self._taken = np.zeros((3, 0))
        """The columns of `by_code` for the codes that were asked for last."""
        self._lines: tuple[Floats, ...] = tuple(self._taken)

    def grow(self, capacity: int) -> None:
        more = capacity - len(self.token_s)
        self.seats, self.token_s = np.pad(self.seats, (0, more)), np.pad(self.token_s, (0, more))
        self.queues = np.pad(self.queues, ((0, 0), (0, more)))
        self.by_code = np.pad(self.by_code, ((0, 0), (0, NUM_CODES * more)))
        self._by_node = self.by_code.reshape(3, capacity, NUM_CODES)
        self._taken = np.zeros((3, capacity))
        self._lines = tuple(self._taken)

    def lines(self, codes: Ints) -> tuple[Floats, ...]:
        """`LOAD_S`, `BYTE_S` and `ROWS_S` by node, for one code of each; valid until the next
        call."""
        self.by_code.take(codes, 1, self._taken, "clip")  # faster; all are within bounds
        return self._lines

    def write(self, i: int, load: EngineLoad, answer_tokens: float, adapter_bytes: float) -> float:
        """Work out all elements of a node. The last arguments are means over requests. Returns
        `ReportedNode.loader_s`."""
        costs = load.costs
        self.seats[i], self.token_s[i] = max(load.max_seats, 1), costs.token_s
        loader_s = (costs.load_s + costs.disk_byte_s * adapter_bytes) / LOADERS
        queue_s = loader_s * len(load.loading)
        fixed_s, host_s, disk_s = costs.load_s + queue_s, costs.host_byte_s, costs.disk_byte_s
        if load.free_adapter_bytes < adapter_bytes:  # what it evicts has to be loaded again
            fixed_s, host_s, disk_s = fixed_s + costs.load_s, 2 * host_s, disk_s + host_s
        rest_s, rest_byte_s = (costs.load_s + queue_s) / 2, costs.disk_byte_s / 2
        row_s = costs.row_s * answer_tokens
        first_s = row_s + costs.adapter_s * answer_tokens
        found = 0.0, fixed_s, rest_s, disk_s, host_s, rest_byte_s, first_s, row_s
        self._by_node[:, i] = np.array(found).take(_PLACES)
        return loader_s


class LatestReports:
    """Owns the latest report of each node."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self.nodes: dict[int, ReportedNode] = {}
        """By their index in all arrays."""
        self._recent: dict[int, ReportedNode] = {}
        """The nodes that have reported, the latest one at the end."""
        self.count = 0
        """How many reports have come."""
        self.now = 0.0
        """When the newest came."""
        self.adapters = KeyedCodes()
        self.prefixes = KeyedNodes()
        self.orders = Orders()
        self._adapter_bytes = ADAPTER_BYTES
        self._answer_tokens = ANSWER_TOKENS
        """The mean length of an answer."""
        self.num_open = 0
        """Open requests at all nodes."""
        self.table = LoadTable()

    # -- who is there --------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The length of all arrays, a multiple of 8."""
        return len(self.table.token_s)

    def find(self, name: str) -> int | None:
        return self._index.get(name)

    def index(self, name: str) -> int:
        """The index of a node. A new name gets a new one."""
        index = self._index.get(name)
        if index is None:
            index = next(i for i in range(len(self.nodes) + 1) if i not in self.nodes)
            if index >= self.capacity:
                self._grow(max(8, 2 * index))
            self._index[name] = index
            self.nodes[index] = ReportedNode(name, EngineLoad())
            self._seat()
            self._write(index)
        return index

    def leave(self, name: str) -> int:
        """Forget a node that is gone for good. Returns the index that it had."""
        index = self._index.pop(name)
        self.adapters.forget(index)
        self.prefixes.forget(index)
        self.num_open -= self.nodes.pop(index).num_open
        self.table.queues[:, index] = 0.0
        self._recent.pop(index, None)
        self._seat()
        return index

    def _seat(self) -> None:
        self.orders.set_nodes({i: node.name for i, node in self.nodes.items()}, self.capacity)

    def _grow(self, capacity: int) -> None:
        for each in (self.table, self.adapters, self.prefixes):
            each.grow(capacity)

    # -- reports -------------------------------------------------------------------------------

    def update(self, update: ReportUpdate, now: float) -> None:
        """A node's next report has come. The first one of a node must be whole."""
        report = update.report
        i, load = self.index(report.node), report.load
        node = self.nodes[i]
        if update.whole:
            self.adapters.forget(i)
            self.prefixes.forget(i)
            node.load = EngineLoad()
        adapters, old = self.adapters, node.load
        for bit, change in ((RESIDENT, update.resident), (HOST, update.host)):
            adapters.discard(i, bit, change.removed)
            adapters.add(i, bit, change.added)
        adapters.replace(i, COMING, old.loading.keys(), load.loading.keys())
        adapters.replace(i, RUNNING, old.running_adapters, load.running_adapters)
        self.prefixes.discard(i, update.prefixes.removed)
        self.prefixes.add(i, update.prefixes.added)
        self.count += 1
        self.now = max(self.now, now)
        node.load, node.at_s, node.count = load, now, self.count
        node.draining, node.idle = report.draining, report.idle
        self._recent.pop(i, None)
        self._recent[i] = node
        self._write(i)

    def since(self, count: int) -> Iterator[tuple[int, ReportedNode]]:
        """The nodes that have reported since the first `count` reports, by index."""
        for i, node in reversed(self._recent.items()):
            if node.count <= count:
                break
            yield i, node

    def asked(self, adapter_bytes: int) -> None:
        """Count a request for an adapter of this size in the mean."""
        self._adapter_bytes += MEMORY * (adapter_bytes - self._adapter_bytes)

    def answered(self, num_tokens: int) -> None:
        """Count an answer of this length in the mean."""
        self._answer_tokens += MEMORY * (num_tokens - self._answer_tokens)

    def _write(self, i: int) -> None:
        node, answer_tokens = self.nodes[i], self._answer_tokens
        load, costs, seats = node.load, node.load.costs, max(node.load.max_seats, 1)
        self.num_open += load.num_open - node.num_open
        node.num_open, node.spare = load.num_open, seats - 1
        node.ready_s = node.at_s + costs.token_s * load.queued_tokens
        step_s = costs.step_s + costs.adapter_s * len(load.running_adapters) + costs.row_s * seats
        node.drain_s = step_s * answer_tokens / seats
        node.begins_s = node.begin_of(node.num_open, node.ready_s)
        self.table.queues[:, i] = node.num_open, node.begins_s
        node.loader_s = self.table.write(i, load, answer_tokens, self._adapter_bytes)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self.adapters.check()
        self.prefixes.check()
        assert {node.name: i for i, node in self.nodes.items()} == self._index
        counts = [node.count for node in self._recent.values()]
        assert counts == sorted(counts)
        assert self.num_open == sum(node.load.num_open for node in self.nodes.values())
        assert self._recent == {i: node for i, node in self.nodes.items() if node.count}
