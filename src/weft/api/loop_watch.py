"""Notices when the event loop that answers all requests is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)

BEAT_S = 1.0
BLOCKED_S = 5.0
"""A loop that does nothing for this long is blocked."""
REMEMBER_S = 10.0
"""How long a block is reported afterwards, as nothing can be answered while it lasts."""


class LoopWatch:
    """Gives the loop a heartbeat. A thread watches it and logs the loop's stack when it stops."""

    def __init__(self) -> None:
        self._beat_s = time.monotonic()
        self._blocked_s = 0.0
        """How long the loop was last blocked."""
        self._free_since_s = -REMEMBER_S

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop within this context."""
        over = threading.Event()
        self._beat_s = time.monotonic()
        beating = asyncio.create_task(self._beat())
        look = (threading.get_ident(), over)
        threading.Thread(target=self._look, args=look, name="weft-watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            beating.cancel()

    def troubles(self) -> list[str]:
        """What was wrong until recently; empty if nothing was."""
        free_s = time.monotonic() - self._free_since_s
        if free_s > REMEMBER_S:
            return []
        return [f"the server was blocked for {self._blocked_s:.0f} s, until {free_s:.0f} s ago"]

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._beat_s > BLOCKED_S:
                self._blocked_s, self._free_since_s = now - self._beat_s, now
            self._beat_s = now
            await asyncio.sleep(BEAT_S)

    def _look(self, thread: int, over: threading.Event) -> None:
        told_s = 0.0
        while not over.wait(BEAT_S):
            beat_s = self._beat_s
            if time.monotonic() - beat_s > BLOCKED_S and told_s != beat_s:
                told_s = beat_s
                frame = sys._current_frames().get(thread)
                place = "".join(traceback.format_stack(frame, 8)) if frame else ""
                logger.error("the server has been blocked for %g s, at:\n%s", BLOCKED_S, place)
