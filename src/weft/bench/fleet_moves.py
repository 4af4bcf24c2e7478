"""Decides when simulated requests move to other nodes, and where to.

A server lets only a few moved requests begin at a time, each until its first token. A simulation
knows how long a prompt takes, and leaves that much time between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.fleet.route import Routed, Router
from weft.fleet.view import RoutedRequest

SHARE, GENTLE = 0.5, 0.1
"""The part of its time that a node may spend on prompts of requests that move to it. SHARE: their
node is lost. GENTLE: their node is to be idle, and serves them until they move."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A decision to move a request to another node."""

    request_id: str
    node: str | None
    """The node; None if no node takes it now: it stays where it is, or is tried again later."""
    at_s: float
    """When to send it there. If the node that it leaves is alive, it goes on there until then."""


def plan_moves(
    router: Router, requests: Iterable[RoutedRequest], now: float, share: float = SHARE
) -> list[PlannedMove]:
    """Where each of these requests goes, and when; those that came first go first.

    Each goes where it costs least, which counts those that go there before it. So that nobody's
    tokens are held up by a storm of prompts, a node gets the next one when it could have computed
    the one before in `share` of its time. The router takes all of them for sent.
    """
    free_s: dict[int, float] = {}
    moves: list[PlannedMove] = []
    for request in requests:
        found = router.place(request, now)
        if not isinstance(found, Routed):
            moves.append(PlannedMove(request.request_id, None, now))
            continue
        at_s = free_s.get(found.index, now)
        free_s[found.index] = at_s + float(found.terms.prefill[found.index]) / share
        moves.append(PlannedMove(request.request_id, found.node, at_s))
    return moves
