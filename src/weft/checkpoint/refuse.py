"""Formats refusals safely: the names that they show come from a stranger's files."""

from __future__ import annotations

import json
from typing import NoReturn

from weft.core.errors import AdapterInvalid

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_SHOWN = 160
"""Characters."""


def refuse(name: str, why: str) -> NoReturn:
    """Raise AdapterInvalid for the field, tensor or file `name`; it becomes `param`."""
    name = shown_name(name)
    raise AdapterInvalid(f"{name}: {why}", name) from None


def refuse_pointer(name: str, content: bytes | memoryview) -> None:
    """Raise AdapterInvalid if the file's content is what Git LFS puts in the place of a file that
    it has not downloaded."""
    if bytes(content[: len(_LFS_POINTER)]) == _LFS_POINTER:
        refuse(name, "is only a pointer of Git LFS; `git lfs pull` downloads the file itself")


def shown_name(name: str) -> str:
    """`name` itself if it is short and printable ASCII, else escaped and shortened."""
    if name and name.isascii() and name.isprintable() and len(name) <= _MAX_SHOWN:
        return name
    return show(name).strip('"') or '""'


def show(value: object) -> str:
    """A JSON value for a message, in ASCII and shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "..."
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
