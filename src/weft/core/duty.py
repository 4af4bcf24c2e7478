"""Lets what a process does again and again go on after an error that nobody expected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def going_on(trouble: str) -> Iterator[None]:
    """A context that any error ends early, and that the program goes on behind. The error is logged
    with `trouble`, which says what is not done because of it."""
    try:
        yield
    except Exception:
        logger.exception("%s", trouble)
