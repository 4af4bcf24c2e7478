"""Adapters from the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import AdapterError, AdapterNotFound
from weft.core.files import ADAPTER_FILES

_SCHEME = "hf://"
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, or `org/name@revision`: a branch, tag or commit."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_hub_id(path: str) -> HubId | None:
    """The id in `hf://org/name` or `org/name`; None for what can only be a path.

    Raises AdapterNotFound for `hf://` with anything else.
    """
    found = _ID.fullmatch(path.removeprefix(_SCHEME))
    if found is not None and ".." not in path:
        return HubId(found[1], found[2])
    if path.startswith(_SCHEME):
        raise AdapterNotFound(f"{path!r} is not of the form hf://org/name[@revision]", "lora_path")
    return None


def is_hub_uri(path: str) -> bool:
    return path.startswith(_SCHEME)


def fetch_adapter(hub_id: HubId) -> Path:
    """The local folder of an adapter, downloaded unless the hub's cache has it. Slow: on a thread.

    Raises AdapterNotFound when the hub does not have it, AdapterError when it can't be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            hub_id.name, revision=hub_id.revision, allow_patterns=list(ADAPTER_FILES)
        )
    except Exception as error:  # of many kinds, from several libraries
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise AdapterNotFound(
                f"the Hugging Face hub has no {str(hub_id)!r}, or it is not public", "lora_path"
            ) from error
        raise AdapterError(
            f"{str(hub_id)!r} can't be fetched from the Hugging Face hub: {_first_line(error)}",
            "lora_path",
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
