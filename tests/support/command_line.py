"""The command line as tests call it in their own process.

A runner makes all commands anew for each call, which takes longer than most of the calls do. This
one makes them once.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import typer.testing
from typer.testing import Result

typer.testing._get_command = cache(typer.testing._get_command)


class CliRunner(typer.testing.CliRunner):
    """After a command, this process logs as it did before: the command's stderr is closed. No
    engine starts before the command has been checked: if it is refused, another test would get it.
    """

    def invoke(self, *args: Any, **kwargs: Any) -> Result:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("weft.fleet.process.spawn_engine_ahead", lambda _: None)
                return super().invoke(*args, **kwargs)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
