"""How work is carried out that takes long or must not be left half done: under an event loop that
serves others meanwhile, or in the caller's thread, which has nothing else to do."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from weft.core.errors import WeftError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Executor(Protocol):
    """What a coroutine needs of its surroundings."""

    async def blocking(self, work: Callable[[], T]) -> T:
        """The result of a function that blocks its thread."""
        ...

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that ends also when the caller is cancelled."""
        ...

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a coroutine that nobody waits for."""
        ...


class LoopExecutor:
    """Work under the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._start(work)

    async def close(self) -> None:
        """Cancel what has not ended yet."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, WeftError) else logging.ERROR
            logger.log(level, "adapter task failed: %s", error)


class DirectExecutor:
    """Runs coroutines in the caller's thread, where nothing ever waits for an event loop. So it
    also serves where a loop is running already, as in a notebook."""

    def __init__(self) -> None:
        self._busy = False
        self._pending: deque[Coroutine[Any, Any, None]] = deque()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, after which what it left for later runs."""
        self._busy = True
        try:
            return _result(work)
        finally:
            self._busy = False
            self._run_pending()

    async def blocking(self, work: Callable[[], T]) -> T:
        return work()

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._pending.append(work)
        if not self._busy:
            self._run_pending()

    def _run_pending(self) -> None:
        while self._pending:
            _result(self._pending.popleft())


def _result(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("this must not be called while the same object is at work")
