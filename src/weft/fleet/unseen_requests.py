"""Estimates what other routers have sent since the nodes' last reports.

Routers that know the same and all choose the cheapest node choose the same one, until its next
report says that it is full. So each router adds a random part of its own to a node's cost. It is as
large as what requests that other routers send between two reports may cost there:

    reports     node 1 has the least             node 1 has 25 more than the others
    routers     1  1  1  1  1  1  1  ...         3  2  4  2  3  4  2  ...
    with it     1  4  1  2  3  1  2  ...         2  1  3  4  2  1  3  ...

The noise is Gumbel's, so that a node is chosen by a chance of exp(-J / scale), whatever the others
are; it comes from the request's id alone. A router that is alone, or sees each report at once, adds
nothing. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

from weft.fleet.keys import MASK, ORDER_S, Floats, mixed

CROWD = 2.0
"""How many times the time of its prompt an unseen request costs. One of them is for the prompt
itself, and the other because it makes all steps of the node longer."""
MEMORY = 0.05
"""How much the newest request changes the means over requests."""
NUM_NOISE = 1 << 13


def _noise() -> Floats:
    hashes = mixed(np.arange(1, NUM_NOISE + 1, dtype=np.uint64))
    chances = (hashes + 0.5).astype(np.float64) / (MASK + 1.0)
    return np.log(-np.log(chances), dtype=np.float64)


class UnseenRequests:
    """Owner of how many requests of one router are on their way, by which it knows how many of
    the others are."""

    def __init__(self) -> None:
        self.num_open = 0
        """This router's open requests."""
        self.num_on_way = 0
        """Those of them that were sent after the last report of their node, so that it can't tell
        of them."""
        self._mean_on_way = 0.0
        """The average of `num_on_way`, taken whenever a request comes."""
        self._prefill_s = 0.0
        """The mean time that a prompt takes."""
        self.takes: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Which nodes take requests; see `set_takes`."""
        self._num_taking = 0
        self._noise = _noise()

    def set_takes(self, takes: NDArray[np.bool_]) -> None:
        """These nodes take requests, by their index."""
        self.takes, self._num_taking = takes, int(np.count_nonzero(takes))

    def send(self, prefill_s: float) -> None:
        """A request was sent, whose prompt takes so long."""
        self._mean_on_way += MEMORY * (self.num_on_way - self._mean_on_way)
        self._prefill_s += MEMORY * (prefill_s - self._prefill_s)
        self.num_on_way += 1
        self.num_open += 1

    def scale_s(self, num_open: int) -> float:
        """What the unseen requests of all other routers cost a node that takes requests, in seconds
        on average.

        `num_open` counts the open requests of all routers. For each request of its own, this router
        takes the others to have as many on their way as they have open.
        """
        others = num_open - self.num_open
        if others <= 0 or not self._num_taking:
            return 0.0
        per_own = others / (self.num_open or 1)
        return CROWD * self._prefill_s * self._mean_on_way * per_own / self._num_taking

    def chance_s(self, request_id: str, load: Floats, num_open: int) -> Floats | None:
        """The random part of a request's costs at each node, in seconds; None if it would be too
        small to count. `load`: until its adapter is on the device; 0 if it is.

        Many nodes that need to load the adapter must not draw the request from the few that have
        it, because the least of many random numbers is small. So either kind counts as a whole.
        """
        scale_s = self.scale_s(num_open)
        if scale_s < ORDER_S:
            return None
        start = zlib.crc32(request_id.encode()) % (NUM_NOISE - len(load))
        chance = self._noise[start : start + len(load)] * scale_s
        lacks = np.logical_and(load, self.takes)
        lacking, num_nodes = int(np.count_nonzero(lacks)), self._num_taking
        if 0 < lacking < num_nodes:
            chance += lacks * (scale_s * math.log(lacking / (num_nodes - lacking)))
        return chance
