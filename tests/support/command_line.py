"""The command line as tests call it in their own process.

A runner makes all commands anew for each call, which takes longer than most of the calls do. This
one makes them once.
"""

from __future__ import annotations

import logging
import signal
from functools import cache
from typing import Any

import pytest
import typer.testing
from typer.testing import Result

from weft.cli.main import app

typer.testing._get_command = cache(typer.testing._get_command)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that a server handles."""


class CliRunner(typer.testing.CliRunner):
    """After a command, this process logs as it did before, as the command's stderr is closed, and
    Ctrl-C ends it. No engine starts before the command has been checked: if the command is refused,
    another test would get that engine.
    """

    def invoke(self, *args: Any, **kwargs: Any) -> Result:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        on_signals = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("weft.fleet.process.spawn_engine_ahead", lambda _: None)
                return super().invoke(*args, **kwargs)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            for number, handler in on_signals.items():
                signal.signal(number, handler)


def weft(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))
