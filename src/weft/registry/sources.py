"""Where adapters come from: each scheme of a URI has one way to a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from weft.core.errors import AdapterError, AdapterNotFound, AdapterPathRefused
from weft.registry.hub import fetch_adapter, is_hub_id


class Folders(Protocol):
    """The local folders that adapters may lie in: `AdapterRoots` or `AnyFolder`."""

    def resolve(self, path: str) -> Path:
        """The absolute folder that `path` names. Raises AdapterNotFound, AdapterPathRefused."""
        ...

    def hold(self, path: str) -> bool:
        """Whether there is anything under this relative path."""
        ...


class AnyFolder:
    """All folders of this machine, for those who run it."""

    def resolve(self, path: str) -> Path:
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise AdapterNotFound(f"there is no folder {path}", "lora_path")
        return folder

    def hold(self, path: str) -> bool:
        return Path(path).expanduser().exists()


class Sources:
    """Finds adapters by what people call them.

    file   /folder, relative/folder, file:///folder
    hf     hf://org/name[@revision], and org/name[@revision] unless that is a folder
    """

    def __init__(self, folders: Folders | None = None, allow_hub: bool = True) -> None:
        """Without `folders`, any folder may be read."""
        self._folders = folders or AnyFolder()
        self._ways: dict[str, Callable[[str], Path]] = {
            "file": self._folders.resolve,
            "hf": fetch_adapter if allow_hub else _refuse_hub,
        }

    def plain(self, name: str) -> str:
        """The same name as Weft shows it: a path without a scheme, or a URI of another scheme.

        Raises AdapterPathRefused for a scheme that is not served, AdapterNotFound for what can't
        be on the hub.
        """
        scheme, separator, place = name.partition("://")
        if not separator:
            return name
        if scheme == "file" and (path := place.removeprefix("localhost")).startswith("/"):
            return unquote(path)
        if scheme == "file" or scheme not in self._ways:
            raise AdapterPathRefused(
                f"{scheme}:// is not served like this, only file:///folder and hf://org/name",
                "lora_path",
            )
        if scheme == "hf" and not is_hub_id(place):
            message = f"{name!r} is not of the form hf://org/name[@revision]"
            raise AdapterNotFound(message, "lora_path")
        return name

    def resolve(self, name: str) -> Path:
        """The local folder of an adapter, which is downloaded first if it is elsewhere.

        This may be slow, and is work for a thread. Raises AdapterNotFound, AdapterPathRefused,
        AdapterError.
        """
        plain = self.plain(name)
        scheme, separator, place = plain.partition("://")
        if separator:
            return self._ways[scheme](place)
        if not self._on_hub(plain):
            return self._ways["file"](plain)
        try:
            return self._ways["hf"](plain)
        except AdapterError as error:
            kind = AdapterNotFound if isinstance(error, AdapterPathRefused) else type(error)
            message = f"there is no folder {plain}, and {error.message}"
            raise kind(message, error.param) from error

    def absolute(self, name: str) -> str:
        """A name that means the same wherever this process runs: an absolute path, or a URI."""
        plain = self.plain(name)
        if "://" in plain:
            return plain
        if self._on_hub(plain):
            return f"hf://{plain}"
        return str(Path(plain).expanduser().absolute())

    def _on_hub(self, path: str) -> bool:
        return is_hub_id(path) and not self._folders.hold(path)


def _refuse_hub(hub_id: str) -> Path:
    raise AdapterPathRefused(
        f"{hub_id!r}: adapters are fetched from the Hugging Face hub only with"
        " --allow-hub-adapters",
        "lora_path",
    )
