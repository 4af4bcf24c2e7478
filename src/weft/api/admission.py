"""How many requests may be open at a time: those that the engine runs, and a queue's worth."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.errors import InvalidRequest, Overloaded

_RECENT_S = 30.0
_UNKNOWN_RETRY_S, _MAX_RETRY_S = 5, 30


class Admission:
    """Counts open engine requests; beyond the limit a request is refused instead of queued, so
    that those who wait, wait for a bounded time."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._num_open = 0
        self._ended_s: deque[float] = deque(maxlen=64)
        """The times at which the last requests ended, which tell the throughput."""

    @property
    def num_open(self) -> int:
        return self._num_open

    def check(self) -> None:
        """Refuse early, before work is put into a request. Raises Overloaded."""
        if self._num_open >= self._max_open:
            raise self._full(1)

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Hold `count` places, all or none. Raises Overloaded, or InvalidRequest when there never
        are so many."""
        if count > self._max_open:
            raise InvalidRequest(
                f"this request asks for {count} sequences, and the server takes "
                f"{self._max_open} at a time"
            )
        if self._num_open + count > self._max_open:
            raise self._full(count)
        self._num_open += count
        try:
            yield
        finally:
            self._num_open -= count
            self._ended_s.extend([time.monotonic()] * count)

    def _full(self, count: int) -> Overloaded:
        needed = self._num_open + count - self._max_open
        message = f"{self._num_open} requests are open, and the server takes {self._max_open}"
        return Overloaded(f"{message}; try again later", retry_after_s=self._retry_after_s(needed))

    def _retry_after_s(self, needed: int) -> int:
        """In how many seconds so many places should be free, if requests end as fast as of late."""
        now_s = time.monotonic()
        recent = [ended_s for ended_s in self._ended_s if ended_s > now_s - _RECENT_S]
        if not recent:
            return _UNKNOWN_RETRY_S
        seconds_each = (now_s - recent[0]) / len(recent)
        return min(max(math.ceil(needed * seconds_each), 1), _MAX_RETRY_S)
