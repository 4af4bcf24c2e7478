"""The command line as tests call it in their own process.

A runner makes all commands anew for each call, which takes longer than most of the calls do. This
one makes them once.
"""

from __future__ import annotations

from functools import cache

import typer.testing
from typer.testing import CliRunner

__all__ = ["CliRunner"]

typer.testing._get_command = cache(typer.testing._get_command)
