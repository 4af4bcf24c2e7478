"""Merges several streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import TypeVar

from weft.core.duty import end_tasks

T = TypeVar("T")


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
    places: AbstractContextManager[None],
    turn: Callable[[], Awaitable[None]],
) -> AsyncGenerator[T, None]:
    """The items of several streams as they come. Iteration holds the context `places`. Each stream
    awaits its `turn` to begin. The first error ends all streams."""
    queue: asyncio.Queue[T | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            await turn()
            async for item in stream:
                queue.put_nowait(item)

    with places:
        tasks = [asyncio.create_task(pump(stream)) for stream in streams]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    item.result()
                    num_open -= 1
                else:
                    yield item
        finally:
            await end_tasks(tasks)
