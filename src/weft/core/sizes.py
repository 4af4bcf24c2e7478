"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """A number of bytes: `1048576`, `512M`, `1.5GiB`; suffixes are powers of 1024. Raises
    ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 2G")
    power = " KMGT".index((found[2] or " ").upper())
    try:
        return int(float(found[1]) * 1024**power)
    except OverflowError:
        raise ValueError(f"{text!r:.200} is more bytes than there can be") from None


def parse_memory(text: str) -> int | float:
    """A number of bytes as in `parse_bytes`, or a fraction: `0.1`. Raises ValueError."""
    if re.fullmatch(r"\d*\.\d+", text.strip()):
        if not 0.0 < float(text) < 1.0:
            raise ValueError(f"{text} is not a fraction between 0 and 1")
        return float(text)
    return parse_bytes(text)


def show_bytes(size: int) -> str:
    """The shortest whole number with a suffix: 1073741824 as 1G."""
    power = 0
    while power < 4 and size and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{size}{' KMGT'[power]}".rstrip()
