"""How long tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""How long a test waits for what comes within a second or a few on an idle machine, such as a
server's start: others may want the processor too."""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
