"""Decides how much the time of a node's other requests counts in its cost.

A second of another request counts `CROWDING` times a second of the request itself. But a node that
has just begun to take requests is empty, and all routers see that at once: each would send it all
new requests until its next report, and most would wait for adapters to be loaded. So a new node
counts as crowded as the others are on average, and less and less so for `WARM_S`:

    requests    30 ┤─ ─ ─ ╲─ ─ ─ ─ ─ ─ ─ ─  the mean of the others
                   │        ╲      ╱          what the node counts as: the line that falls,
                   │          ╲  ╱            and what it has, as soon as that is more
                 0 ┼──────────╱╲─────────▶    seconds since it began to take requests

Pure: no clock, no I/O.
"""

from __future__ import annotations

import numpy as np

from weft.fleet.keys import Floats

CROWDING = 0.5
"""How much a second of another request on the node counts, relative to the request's own: running
requests are half done on average."""
WARM_S = 3.0


class Crowd:
    """Owner of the weight of each node's open requests."""

    def __init__(self) -> None:
        self._weights: Floats = np.zeros(0)
        """CROWDING times the open requests, by node."""
        self._fresh: dict[int, float] = {}
        """When nodes began to take requests, if that was lately; the first ones first."""

    def grow(self, capacity: int) -> None:
        self._weights = np.pad(self._weights, (0, capacity - len(self._weights)))

    def set_all(self, num_open: Floats) -> None:
        """All nodes have so many open requests."""
        np.multiply(num_open, CROWDING, self._weights)

    def set(self, node: int, num_open: int) -> None:
        """The node has so many open requests."""
        self._weights[node] = CROWDING * num_open

    def begin(self, node: int, now: float) -> None:
        """The node takes requests from now on."""
        self._fresh.pop(node, None)
        self._fresh[node] = now

    def end(self, node: int) -> None:
        """The node takes none any more."""
        self._fresh.pop(node, None)

    def weights(self, closed_s: Floats, now: float) -> Floats:
        """What a second of the others' time counts, by node. Not to be changed. `closed_s`: 0 at
        nodes that take requests."""
        while self._fresh:
            first = next(iter(self._fresh))
            if now - self._fresh[first] < WARM_S:
                return self._with_fresh(closed_s, now)
            del self._fresh[first]
        return self._weights

    def _with_fresh(self, closed_s: Floats, now: float) -> Floats:
        others = closed_s == 0.0
        others[list(self._fresh)] = False
        if not others.any():
            return self._weights
        weights, mean = self._weights.copy(), float(self._weights[others].mean())
        for node, since_s in self._fresh.items():
            weights[node] = max(weights[node], mean * (1.0 - (now - since_s) / WARM_S))
        return weights

    def check(self, num_open: Floats, closed_s: Floats) -> None:
        """Raise AssertionError unless these are the open requests, and the nodes that take any."""
        assert (self._weights == CROWDING * num_open).all()
        assert not closed_s[list(self._fresh)].any()
        assert list(self._fresh.values()) == sorted(self._fresh.values())
