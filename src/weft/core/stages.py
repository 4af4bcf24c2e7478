"""Measures how long the stages of an engine's start take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class Stages:
    """The seconds that each of several consecutive stages takes, by the stage's name."""

    def __init__(self, on_end: Callable[[str], None] = lambda _: None) -> None:
        """`on_end` is called with the name of each stage when it has ended."""
        self.on_end = on_end
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """End the stage `name`, which began with the end of the one before, or with this object."""
        now = time.perf_counter()
        self.seconds[name] = now - self._since
        self._since = now
        logger.info("start: %s took %.1f s", name, self.seconds[name])
        self.on_end(name)


def in_words(seconds: Mapping[str, float]) -> str:
    """The sum and each stage's seconds, such as "3.4 s: model 1.2, compile 2.2"."""
    parts = ", ".join(f"{name} {of:.1f}" for name, of in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {parts}"
