"""Lets work that a process repeats continue after an unexpected error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def going_on(trouble: str) -> Iterator[None]:
    """A context that swallows any Exception: the program continues behind it. The error is logged
    with `trouble`, which says what is not done because of it."""
    try:
        yield
    except Exception:
        logger.exception("%s", trouble)
