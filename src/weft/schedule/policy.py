"""Eviction policies: which idle adapter goes first, on the device and on the host.

A policy is a pure function that returns an adapter's worth; the adapter with the lowest worth is
evicted first. The owner of a tier keeps the facts. Pinned adapters are never candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weft.core.errors import ConfigError

LOAD_S = 1e-3
"""What any load costs besides its measured seconds: to plan it, start it and notice its end."""


class Candidate(NamedTuple):
    """An adapter that may be evicted from a tier. Times and sizes are in the tier's own units."""

    size: int
    came: float
    """When the adapter came to the tier."""
    used: float
    """When the adapter was used last."""
    uses: int = 0
    """How often it was used since it became known, whether or not it was evicted in between."""
    reload_s: float = 0.0
    """Seconds that it would take to load it again; 0: not known."""
    demand: int = 0
    """Requests in the engine that want it."""
    floor: float = 0.0
    """The highest `Worth.value` evicted until this adapter was used last."""


class Worth(NamedTuple):
    """How much an adapter is worth keeping; the fields are compared in this order."""

    wanted: bool
    value: float


Policy = Callable[[Candidate], Worth]


def cost(candidate: Candidate) -> Worth:
    """The adapters that save the fewest seconds of loading for their size go first.

    This is GDSF (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy", HPL-98-69, 1998): value = L + frequency * cost / size. L, the floor, is the
    value of what was evicted; it rises, so what was popular once sinks relative to newcomers
    unless it is used. That is how recency counts, without a time scale to choose. A scan's
    adapters, used once, go before those that are used again and again.

    Two changes: counts of uses survive an eviction, which gave more hits in every trace that was
    tried, changing popularity included. And adapters that no request in the engine wants go before
    all others.
    """
    per_use = (candidate.reload_s + LOAD_S) / candidate.size
    uses = candidate.uses + candidate.demand
    return Worth(candidate.demand > 0, candidate.floor + uses * per_use)


def lru(candidate: Candidate) -> Worth:
    """The adapters that were used least recently go first."""
    return Worth(False, candidate.used)


def fifo(candidate: Candidate) -> Worth:
    """The adapters that came first go first."""
    return Worth(False, candidate.came)


POLICIES: dict[str, Policy] = {"cost": cost, "lru": lru, "fifo": fifo}
"""The choices of `LoraArgs.eviction_policy`, by name. The first line of a policy's docstring is
what the flag's help says of it."""


def find_policy(name: str) -> Policy:
    """Raises ConfigError if there is no policy of this name."""
    if name not in POLICIES:
        message = f"no eviction policy named {name!r}; there are: {', '.join(POLICIES)}"
        raise ConfigError(message, "eviction_policy")
    return POLICIES[name]
