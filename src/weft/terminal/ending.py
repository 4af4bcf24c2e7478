"""How a command ends that can't go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from weft.core.errors import WeftError


def fail(message: str, status: int = 1) -> NoReturn:
    """End with one line on stderr."""
    sys.stderr.write(f"weft: error: {' '.join(message.split())}\n")
    raise typer.Exit(status)


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """Errors that Weft raises on purpose end the command with `fail`; Ctrl-C ends it quietly."""
    try:
        yield
    except WeftError as error:
        fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
