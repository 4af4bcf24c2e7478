"""How a command ends that can't go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from weft.core.errors import WeftError


@contextmanager
def ending_in_one_line(status: int = 1, traceback: bool = False) -> Iterator[None]:
    """Errors that Weft raises on purpose end the command with one line on stderr and this exit
    status, or pass through where a `traceback` is wanted. Ctrl-C ends the command quietly."""
    try:
        yield
    except WeftError as error:
        if traceback:
            raise
        sys.stderr.write(f"weft: error: {' '.join(error.message.split())}\n")
        raise typer.Exit(status) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
