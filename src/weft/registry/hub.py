"""Adapters from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from weft.core.errors import AdapterError, AdapterNotFound
from weft.core.files import ADAPTER_FILES

_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
"""`org/name`, or `org/name@revision`: a branch, a tag or a commit."""


def is_hub_id(text: str) -> bool:
    """Whether this could name a repository of the hub."""
    return ".." not in text and _ID.fullmatch(text) is not None


def fetch_adapter(hub_id: str) -> Path:
    """The local folder of an adapter, which is downloaded unless the hub's cache has it.

    This is slow, and work for a thread. Raises AdapterNotFound if the hub does not have it,
    AdapterError if it can't be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    found = _ID.fullmatch(hub_id)
    assert found is not None, hub_id
    try:
        folder = snapshot_download(found[1], revision=found[2], allow_patterns=list(ADAPTER_FILES))
    except Exception as error:  # of many kinds, from several libraries
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise AdapterNotFound(
                f"the Hugging Face hub has no {hub_id!r}, or it is not public", "lora_path"
            ) from error
        raise AdapterError(
            f"{hub_id!r} can't be fetched from the Hugging Face hub: {_first_line(error)}",
            "lora_path",
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
