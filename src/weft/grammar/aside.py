"""Runs slow calls into xgrammar on a thread of their own, which can be abandoned."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK_S = 0.02
"""How often the time that a call has taken is checked."""
_LOWEST_PRIORITY = 19


def run_aside(call: Callable[[], object], limit_s: float) -> float | None:
    """Run a call on another thread. Returns its CPU time in seconds.

    If it takes more than `limit_s`, None is returned, and its thread goes on at the lowest
    priority. The call must not hold the GIL, and nobody may use what it works on.
    """
    aside = _Aside(call)
    aside.start()
    while not aside.ended.wait(LOOK_S):
        if aside.spent_s() > limit_s:
            aside.yield_to_others()
            return None
    return aside.taken_s


class _Aside(threading.Thread):
    """The thread of one call."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(name="weft-mask", daemon=True)
        self._call: Callable[[], object] | None = call
        self._clock: int | None = None
        self.ended = threading.Event()
        self.taken_s = 0.0

    def run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        finally:
            self.taken_s = time.thread_time()
            self.ended.set()

    def spent_s(self) -> float:
        """The thread's CPU time until now, in seconds."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has just ended
            return 0.0

    def yield_to_others(self) -> None:
        if self.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _LOWEST_PRIORITY)
