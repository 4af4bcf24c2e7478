"""Which folders adapters may be read from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from weft.core.errors import AdapterNotFound, AdapterPathRefused
from weft.core.files import ADAPTER_FILES


class AdapterRoots:
    """The folders below which adapters lie; nothing outside them is ever opened."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(Path(root).resolve() for root in roots)

    def resolve(self, path: str) -> Path:
        """The real, absolute folder that `path` names; a relative one is tried below each root.

        Symbolic links are followed, those of the files that are read in it too, and must end
        below a root (any of them). Raises AdapterPathRefused, or AdapterNotFound when there is no
        such folder; whether a path outside the roots exists can't be learned from the answer.
        """
        if not path or not path.isprintable() or ".." in Path(path).parts:
            raise _refused(path, "must be a plain path without '..'")
        places = [self._real(root / path) for root in self._roots]
        folder = next((place for place in places if place and _is_folder(place)), None)
        if folder is None:
            if None in places or not places:
                raise _refused(path, "is outside the folders given with --lora-root")
            raise AdapterNotFound(f"lora_path {path!r}: no such folder", "lora_path")
        for name in ADAPTER_FILES:
            if self._real(folder / name) is None:
                raise _refused(path, f"{name} is a link that leaves the allowed folders")
        return folder

    def hold(self, path: str) -> bool:
        """Whether a root has something under this relative path, be it allowed or not."""
        return any(os.path.lexists(root / path) for root in self._roots)

    def _real(self, path: Path) -> Path | None:
        """The path with links followed, or None if that is not below a root."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        return real if any(real.is_relative_to(root) for root in self._roots) else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _refused(path: str, why: str) -> AdapterPathRefused:
    return AdapterPathRefused(f"lora_path {path!r} {why}", "lora_path")
