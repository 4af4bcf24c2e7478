"""Reads the files that options and arguments of commands name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from weft.core.errors import ConfigError

MAX_FILE_BYTES = 16 << 20


def read_option_file(path: Path, named: str, param: str) -> bytes:
    """The content of a regular file of at most MAX_FILE_BYTES. Anything else, such as a pipe, is
    refused without waiting for somebody to write to it. Raises ConfigError, whose message begins
    with `named`, the option and its value, and whose parameter is `param`."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{named}: {error.strerror}", param) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{named}: larger than {MAX_FILE_BYTES} bytes", param)
    return content


def read_option_text(path: Path, named: str, param: str) -> str:
    """The text of a regular file in UTF-8, read as `read_option_file` reads it. Raises
    ConfigError."""
    try:
        return read_option_file(path, named, param).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named}: it is not UTF-8", param) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
