"""Lets what a process does again and again go on after an error that nobody expected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def going_on(trouble: str) -> Iterator[None]:
    """Log an error of any kind that ends this context early, behind what it means for others."""
    try:
        yield
    except Exception:
        logger.exception("%s", trouble)
