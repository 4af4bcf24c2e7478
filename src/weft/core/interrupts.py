"""Ctrl-C while something is under way that must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """A context that Ctrl-C ends with a KeyboardInterrupt only when it is over. A second Ctrl-C
    raises it at once. Does nothing outside the main thread, and where a program has a handler of
    its own."""
    usual = signal.default_int_handler
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            raise KeyboardInterrupt
