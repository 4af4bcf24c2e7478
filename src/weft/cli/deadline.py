"""Makes a process end in time once it was told to, whatever hangs in it."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading

logger = logging.getLogger(__name__)

BACKSTOP_S = 1.0
"""How long before the limit a thread says what hangs, and ends the process."""


def end_within(limit_s: float) -> None:
    """From now on the process has this long to end by itself. Then it is ended with status 1, and
    stderr tells where its threads were.

    A thread does that or, if none can run because something holds the GIL, a timer of
    `faulthandler`, which does not need it.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)
    timer = threading.Timer(max(limit_s - BACKSTOP_S, 0.0), _end, (limit_s,))
    timer.daemon = True
    timer.start()


def _end(limit_s: float) -> None:
    logger.error("the server has not ended in %g s; it is ended now, though this hangs:", limit_s)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def end_without_threads() -> None:
    """The process may end now, with status 0. Threads that still wait for something, such as a
    bucket that does not answer, have a last second."""
    timer = threading.Timer(BACKSTOP_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
