"""Work that a process does again and again: going on after errors, and ending it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def going_on(trouble: str) -> Iterator[None]:
    """A context that swallows any Exception: the program continues behind it. The error is logged
    with `trouble`, which says what is not done because of it."""
    try:
        yield
    except Exception:
        logger.exception("%s", trouble)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended, however they do."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
