"""Judges from an engine's signs of life what is wrong with it, if anything."""

from __future__ import annotations

import time

from weft.core.messages import Pulse

HANG_S = 8.0
"""What makes no progress for this long counts as hanging."""
PARTS = {
    "step": "the engine has been at one step for {:.0f} s",
    "loaders": "the threads that load adapters have not got on for {:.0f} s",
    "readers": "the threads that read new adapters have not got on for {:.0f} s",
    "compilers": "the processes that compile forms have not got on for {:.0f} s",
    "ranks": "another rank of the model has given no sign of life for {:.0f} s",
    "registrars": "the threads that check new adapters have not got on for {:.0f} s",
}


class Vitals:
    """The newest sign of life of an engine, which may give none."""

    def __init__(self) -> None:
        self._pulse: Pulse | None = None
        self._heard_s = 0.0

    def hear(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._heard_s = time.monotonic()

    def troubles(self) -> list[str]:
        """What hangs; empty if nothing does."""
        if self._pulse is None:
            return []
        silent_s = time.monotonic() - self._heard_s
        if silent_s > HANG_S:
            return [f"the engine has given no sign of life for {silent_s:.0f} s"]
        return [
            PARTS[part].format(busy_s + silent_s)
            for part, busy_s in self._pulse.busy_s.items()
            if busy_s > 0 and busy_s + silent_s > HANG_S
        ]
