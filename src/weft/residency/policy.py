"""Which of the adapters that may go goes first. A policy is a key: the lowest is evicted first.

Times are whatever the tier counts in: steps on the device, uses in the host cache.
"""

from __future__ import annotations

from collections.abc import Callable

Policy = Callable[[int, int], int]
"""(when it came, when it was used last) -> key."""


def lru(came: int, used: int) -> int:
    """Least recently used first."""
    return used


def fifo(came: int, used: int) -> int:
    """First come, first to go."""
    return came


POLICIES: dict[str, Policy] = {"lru": lru, "fifo": fifo}
"""By the name in `LoraArgs.eviction_policy`."""
