"""Notices when work on threads or in processes makes no progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns the CPU seconds that a thread or process has taken until now."""

LONG_S = 60.0
"""Work that takes longer counts as stuck, even while it computes."""


@dataclass(slots=True)
class _UnderWay:
    clock: Clock
    begun_s: float
    cpu_s: float
    """What `clock` returned last."""
    moved_s: float
    """When `clock` was last seen to have changed."""


class StallWatch:
    """Watches work at a number of places, such as threads. Work is stuck while it computes nothing,
    or if it takes very long; all is stuck while every place has stuck work."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._works: dict[int, _UnderWay] = {}
        self._numbers = itertools.count()

    @contextmanager
    def watching(self, clock: Clock) -> Iterator[None]:
        """A context in which work with this clock takes one place."""
        number, now = next(self._numbers), time.monotonic()
        self._works[number] = _UnderWay(clock, now, 0.0, now)
        try:
            yield
        finally:
            del self._works[number]

    def stuck_s(self) -> float:
        """For how many seconds every place has been stuck; 0 if any makes progress or is free. Call
        it regularly, from one thread: progress is what has changed since the last call."""
        now = time.monotonic()
        stuck_s: list[float] = []
        for work in list(self._works.values()):
            cpu_s = work.clock()
            if cpu_s != work.cpu_s:
                work.cpu_s, work.moved_s = cpu_s, now
            age_s = now - work.begun_s
            stuck_s.append(now - work.moved_s if age_s < LONG_S else age_s)
        return min(stuck_s) if len(stuck_s) >= self._num_places else 0.0


def thread_clock(thread: int) -> Clock:
    """The clock of a thread of this process."""

    def read() -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(thread))
        except (AttributeError, OSError):  # no such clock: it seems to move
            return time.monotonic()

    return read


def process_clock(pid: int) -> Clock:
    """The clock of another process, all its threads together."""

    def read() -> float:
        try:
            return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid in C
        except OSError:
            return time.monotonic()

    return read
