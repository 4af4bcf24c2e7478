"""Decides which node serves a request. Pure: no clock, no I/O. Every node routes by itself, from
reports that all nodes have, without asking another.

A request r goes to the node i of least

    J(r, i) = max(wait_i, load_i(a)) + prefill_i(r) + CROWDING * n_i * work_i(r)
              + order_i(a) + chance_i(r)

    wait      until there is a seat, and what is queued before has been computed
    load      until the adapter a is on the device
    prefill   computing what the node's prefix cache does not have of the prompt
    n * work  what the n other requests there lose: for its prefill, its row in each step, and its
              adapter if none of them has that
    order     a little for each place in the adapter's own order of all nodes (rendezvous hashing:
              Thaler and Ravishankar, 1998), so that routers agree on where an adapter goes first
    chance    what requests that others have sent may cost there, at random
              (`weft.fleet.unseen_requests`)

All of it is in seconds, from coefficients that the engines measure. As others' time counts,
requests stay where their adapter is until that costs more than loading it elsewhere.

A fleet that can't keep up would load adapters all the time if requests went wherever the least is
queued. So when even the best node makes a request wait for long, the order alone decides, within
a bound on each node's load; and when it would wait too long, the request is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.core.errors import ConfigError
from weft.fleet.keys import NUM_CODES, RUNNING, Floats, hash_of
from weft.fleet.latest_reports import ROWS_S, LatestReports
from weft.fleet.view import TRANSIT_S, FleetView, RoutedRequest

SATURATED_S = 1.0
"""Beyond this wait at the best node, requests go by their adapter's order."""
BOUND, ROOM = 1.25, 1.0
"""By order, a node takes requests while it has fewer open ones than BOUND * their mean + ROOM."""
LATER = 1e3
"""Added to the cost of nodes that a policy takes only if there is no other."""
MAX_RETRY_S = 60


class Terms(NamedTuple):
    """The parts of J by node, in seconds."""

    wait: Floats
    """Less than 0 where the queue has been empty, for that long."""
    load: Floats
    prefill: Floats
    others: Floats
    order: Floats
    chance: Floats | None
    """None: other routers send too little to matter."""
    closed: Floats
    """0 at nodes that take requests; much at those that would rather not; infinite at others."""
    total: Floats


@dataclass(frozen=True, slots=True)
class Routed:
    """A request goes to a node."""

    index: int
    node: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Shed:
    """A request is refused, as it would wait too long, or as no node can serve it."""

    retry_after_s: int
    wait_s: float
    """How long it would have waited; infinite if no node can serve it."""


Policy = Callable[[FleetView, RoutedRequest, Terms], Floats]
"""Returns what each node costs by this policy, from the terms of J. The node that costs least is
chosen, unless its cost is infinite."""


def cost(view: FleetView, request: RoutedRequest, terms: Terms) -> Floats:
    """The node that serves the request soonest, counting what the others there lose by it."""
    return terms.total


def least_loaded(view: FleetView, request: RoutedRequest, terms: Terms) -> Floats:
    """The node with the fewest open requests; any of those, if there are several."""
    return view.num_open + view.told.orders.seconds(hash_of(request.request_id)) + terms.closed


def bounded_hrw(view: FleetView, request: RoutedRequest, terms: Terms) -> Floats:
    """The first node in the adapter's order that has no more than its bound of requests."""
    able = terms.closed < np.inf
    mean = (float(view.num_open[able].sum()) + 1) / max(int(able.sum()), 1)
    over = view.num_open >= BOUND * mean + ROOM
    return np.where(over, LATER + view.num_open, terms.order) + terms.closed


def punica(view: FleetView, request: RoutedRequest, terms: Terms) -> Floats:
    """The node with the most requests that has a seat left (Chen et al., "Punica: Multi-Tenant LoRA
    Serving", 2023, arXiv 2310.18547); the one with the fewest, where none has."""
    full = view.num_open >= view.told.table.seats
    return np.where(full, LATER + view.num_open, -view.num_open) + terms.closed


POLICIES: dict[str, Policy] = {
    "cost": cost,
    "least-loaded": least_loaded,
    "bounded-hrw": bounded_hrw,
    "punica": punica,
}
"""The choices of a policy, by name. The first line of a policy's docstring says what it does."""


def find_policy(name: str) -> Policy:
    """Raises ConfigError if there is no policy of this name."""
    if name not in POLICIES:
        message = f"no routing policy named {name!r}; there are: {', '.join(POLICIES)}"
        raise ConfigError(message, "routing_policy")
    return POLICIES[name]


class Router:
    """Decides for the requests of one node. It owns its view of all nodes.

    transit_s, told: see `FleetView`. max_wait_s: a request that would wait longer is refused. For a
    tenant with n times its share of the open requests, the limit is max_wait_s / n if n > 1.
    """

    def __init__(
        self,
        policy: str = "cost",
        transit_s: float = TRANSIT_S,
        max_wait_s: float = math.inf,
        told: LatestReports | None = None,
    ) -> None:
        self.view = FleetView(transit_s, told)
        self._policy = find_policy(policy)
        self._max_wait_s = max_wait_s
        self._weights: dict[str, float] = {}
        self._pair = np.zeros(2)
        """How many tokens of a prompt a node lacks: one without its prefix, and one with it."""

    def place(self, request: RoutedRequest, now: float) -> Routed | Shed:
        """Choose a node, and remember that the request goes there."""
        found = self.choose(request)
        if isinstance(found, Routed):
            self.sent(found, request, now)
        return found

    def sent(self, routed: Routed, request: RoutedRequest, now: float) -> None:
        """Remember that a request goes where `choose` said."""
        self.view.send(routed.index, request, routed.terms.prefill.item(routed.index), now)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Let tenants have these shares from now on; those that are not named have 1."""
        self._weights = dict(weights)

    def choose(self, request: RoutedRequest) -> Routed | Shed:
        """Choose a node for a request, and change nothing."""
        view = self.view
        terms = self.terms(request)
        best = self._best(self._policy, request, terms)
        if best is None:
            return Shed(1, math.inf)
        if terms.wait.item(best) > SATURATED_S:
            best = self._best(bounded_hrw, request, terms)
            assert best is not None, "nodes vanished"
            wait_s, patience_s = float(terms.wait[best]), self.patience_s(request.tenant)
            if wait_s > patience_s:
                retry_s = min(math.ceil(wait_s - patience_s), MAX_RETRY_S)
                return Shed(max(retry_s, 1), wait_s)
        return Routed(best, view.nodes[best].name, terms)

    def _best(self, policy: Policy, request: RoutedRequest, terms: Terms) -> int | None:
        scores = policy(self.view, request, terms)
        if not len(scores):
            return None
        best = int(scores.argmin())
        return best if scores.item(best) < math.inf else None

    def terms(self, request: RoutedRequest) -> Terms:
        """The parts of J at each place of the view's arrays."""
        view, told = self.view, self.view.told
        view.heed()
        if request.adapter:
            load, rows = view.load_and_rows_s(request)
        else:
            load, rows = np.zeros(view.capacity), told.table.by_code[ROWS_S, RUNNING::NUM_CODES]
        prefill = self._prefill(request)
        others = prefill + rows
        others *= view.crowd
        order = told.orders.seconds(request.order_key)
        closed = view.closed_s
        if request.avoid:
            closed = closed + view.barred_s(request)
        wait = view.wait_s
        total = np.maximum(wait, load)
        total += prefill
        total += others
        total += order
        total += closed
        chance = view.chance_s(request, load)
        if chance is not None:
            total += chance
        return Terms(wait, load, prefill, others, order, chance, closed, total)

    def _prefill(self, request: RoutedRequest) -> Floats:
        """Seconds to compute the tokens that each node's cache lacks. A node with a long prefix
        also has the shorter ones that it begins with, so each prefix adds only its further tokens.
        It is enough to look up every other prefix."""
        told, prefixes = self.view.told.prefixes, request.prefixes
        masks, on_way = told.masks, self.view.prefixes.counts
        found: list[tuple[int, int]] = []
        last = 0
        for tokens, key in prefixes[(len(prefixes) + 1) % 2 :: 2]:  # with the longest one
            mask = masks.get(key, 0)
            if key in on_way:
                for index in on_way[key]:
                    mask |= 1 << index
            if mask:
                if mask == last:
                    found[-1] = mask, tokens
                else:
                    found.append((mask, tokens))
                    last = mask
        token_s = self.view.told.table.token_s
        num_tokens = float(request.num_tokens)
        alone: list[tuple[int, int]] = []
        lacking: Floats | None = None
        shorter = 0
        for mask, tokens in found:
            if not mask & (mask - 1):
                alone.append((mask.bit_length() - 1, tokens - shorter))
            elif lacking is None:
                pair = self._pair
                pair[0], pair[1] = num_tokens, num_tokens - (tokens - shorter)
                lacking = pair.take(told.row(mask), None, None, "clip")
            else:
                lacking -= (tokens - shorter) * told.row(mask)
            shorter = tokens
        prefill = token_s * (num_tokens if lacking is None else lacking)
        for index, tokens in alone:
            prefill[index] -= tokens * token_s.item(index)
        return prefill

    def patience_s(self, tenant: str) -> float:
        """A request of the tenant is refused if it would wait for longer than this."""
        open_of = self.view.open_of
        weight = self._weights.get(tenant, 1.0)
        others = sum(self._weights.get(t, 1.0) for t in open_of if t != tenant)
        total = open_of.total()
        if not total or not open_of[tenant]:
            return self._max_wait_s
        excess = (open_of[tenant] / total) / (weight / (weight + others))
        return self._max_wait_s / max(excess, 1.0)

    def explain(self, routed: Routed) -> list[dict[str, Any]]:
        """What each node that could serve the request would have cost it, the cheapest first: the
        name of the `node`, and in seconds the `total` and its parts, as in `Terms`."""
        terms, found = routed.terms, list[dict[str, Any]]()
        for i, node in self.view.nodes.items():
            if i < len(terms.total) and terms.total[i] < np.inf:
                parts = {
                    name: 0.0 if (part := getattr(terms, name)) is None else float(part[i])
                    for name in ("total", "wait", "load", "prefill", "others", "order", "chance")
                }
                found.append({"node": node.name, **parts, "wait": max(parts["wait"], 0.0)})
        return sorted(found, key=lambda each: (each["total"], each["node"]))
