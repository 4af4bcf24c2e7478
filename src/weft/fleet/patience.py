"""Decides after how many ticks a silent node is taken to hang. Pure.

A node sends something at each tick, and 4 ticks of silence usually mean that it hangs. On an
overloaded machine, healthy nodes sometimes pause for as long. So pauses are remembered for a while,
and a node that has paused may do so again, and for longer:

    limit = 4 ticks, or 2.5 times the longest pause of late, but at most 40 ticks

A node that was taken to hang and comes back has paused too, and gets two and a half times as long.
"""

from __future__ import annotations

import math

LEAST, MOST = 4, 40
FACTOR = 2.5
KEPT = 2.0 ** (-1 / 400)
"""What a tick leaves of the longest pause: half of it after 400 ticks, which are 20 s."""


class Patience:
    """The silence of one node, and what is known of its pauses."""

    def __init__(self) -> None:
        self._silent = 0
        self._longest = 0.0

    @property
    def limit(self) -> int:
        return min(max(LEAST, math.ceil(FACTOR * self._longest)), MOST)

    def heard(self) -> None:
        """The node has said something."""
        self._longest = max(self._longest * KEPT**self._silent, self._silent)
        self._silent = 0

    def tick(self) -> bool:
        """A tick has passed. Returns True once, when the node is first taken to hang."""
        self._silent += 1
        return self._silent == self.limit + 1

    @property
    def over(self) -> bool:
        """Whether it is taken to hang."""
        return self._silent > self.limit
