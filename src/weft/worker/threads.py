"""Threads of which one can tell whether they get on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LONG_S = 60.0
"""Work that takes longer counts as stuck, though it computes."""


@dataclass(slots=True)
class _Task:
    begun_s: float
    cpu_s: float
    """What the thread had computed when somebody looked last."""
    moved_s: float
    """When somebody saw last that it computed."""


class WatchedThreads(ThreadPoolExecutor):
    """A pool of threads. A thread is stuck while it computes nothing, or is at the same work for
    very long; the pool is stuck while all threads are."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._working: dict[int, _Task] = {}
        """By thread that has something to do."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(self._watched, fn, *args, **kwargs)

    def look(self) -> float:
        """For how many seconds all threads have been stuck, so that nothing else begins; 0 if any
        gets on. To be asked again and again, by one thread."""
        now = time.monotonic()
        stuck_s: list[float] = []
        for thread, work in list(self._working.items()):
            cpu_s = _cpu_s(thread)
            if cpu_s != work.cpu_s:
                work.cpu_s, work.moved_s = cpu_s, now
            age_s = now - work.begun_s
            stuck_s.append(now - work.moved_s if age_s < LONG_S else age_s)
        return min(stuck_s) if len(stuck_s) == self._num_threads else 0.0

    def _watched(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        thread, now = threading.get_ident(), time.monotonic()
        self._working[thread] = _Task(now, 0.0, now)
        try:
            return fn(*args, **kwargs)
        finally:
            del self._working[thread]


def _cpu_s(thread: int) -> float:
    """The time that a thread which runs now has computed; changes at every call where the system
    does not tell."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):
        return time.monotonic()
