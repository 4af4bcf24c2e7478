"""Ctrl-C while something is under way that must not be left half done, or can't be interrupted."""

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
    if not _raises():
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


@contextlib.contextmanager
def interrupts_at_once() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once, even while a library waits for a server
    that does not answer. Does nothing where `interrupts_later` does nothing."""
    if not _raises():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raises() -> bool:
    """Whether Ctrl-C raises a KeyboardInterrupt in this thread."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
