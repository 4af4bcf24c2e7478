"""How long tests wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 240.0
"""How long a test waits for what comes within a second or a few on an idle machine, such as a
server's start: others may want the processor too."""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    """What `wait_until` does, in a task."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def in_time(work: Awaitable[T]) -> T:
    """What the work returns, if it does not take too long."""
    async with asyncio.timeout(PATIENCE_S):
        return await work
