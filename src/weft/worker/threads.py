"""Threads whose progress can be observed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from weft.core.stalls import StallWatch, thread_clock

T = TypeVar("T")
logger = logging.getLogger(__name__)


def wait_for(what: str, work: Callable[[], object], timeout_s: float) -> None:
    """Run `work`, which may hang, on a thread of its own, and wait for it up to `timeout_s`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("%s has not ended within %.0f s, and is left behind", what, timeout_s)


class WatchedThreads(ThreadPoolExecutor):
    """A pool of threads that knows for how long all of them have been stuck."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self._stalls = StallWatch(num_threads)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(self._watched, fn, *args, **kwargs)

    def stuck_s(self) -> float:
        """As `StallWatch.stuck_s`."""
        return self._stalls.stuck_s()

    def _watched(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with self._stalls.watching(thread_clock(threading.get_ident())):
            return fn(*args, **kwargs)
