"""Text that others wrote, for a terminal."""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text without the characters by which it could move the cursor, change what is shown, or
    set the clipboard of who reads it. Tabs and line breaks stay."""
    return _CONTROLS.sub("", text)


def plain_json(value: Any) -> Any:
    """A value of JSON with all its texts plain."""
    if isinstance(value, dict):
        return {plain(key): plain_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_json(each) for each in value]
    return plain(value) if isinstance(value, str) else value
