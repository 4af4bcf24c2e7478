"""The fewest loads that a sequence of uses costs a cache that knows the future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NEVER = float("inf")


def fewest_loads(uses: Sequence[str], size_of: Mapping[str, int], capacity: int) -> int:
    """The number of loads that Belady's MIN needs: it evicts the key whose next use is farthest
    away.

    Each key must be in the cache when it is used, and each alone fits. For keys of one size no
    cache needs fewer loads. For keys of mixed sizes it is a greedy variant, which evicts by size
    times time to the next use; the true optimum is hard to compute, and may be a little lower.
    """
    next_use = _next_uses(uses)
    cached: dict[str, float] = {}
    """The index of the next use of each key in the cache."""
    used = loads = 0
    for index, key in enumerate(uses):
        if key not in cached:
            loads += 1
            used += size_of[key]
            while used > capacity:
                gone = max(cached, key=lambda k: (cached[k] - index) * size_of[k])
                used -= size_of[gone]
                del cached[gone]
        cached[key] = next_use[index]
    return loads


def _next_uses(uses: Sequence[str]) -> list[float]:
    """For each use, the index of the same key's next one."""
    found = [NEVER] * len(uses)
    last: dict[str, int] = {}
    for index in range(len(uses) - 1, -1, -1):
        found[index] = last.get(uses[index], NEVER)
        last[uses[index]] = index
    return found
