"""Read PEFT adapter folders, validate them, and pack them into images for the kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.checkpoint.compose import Summand, check_sum, sum_images, summand_of
    from weft.checkpoint.pack import AdapterImage, load_image, pack_image
    from weft.checkpoint.read import AdapterFiles, read_adapter
    from weft.checkpoint.tensors import files_of

__all__ = [
    "AdapterFiles",
    "AdapterImage",
    "Summand",
    "check_sum",
    "files_of",
    "load_image",
    "pack_image",
    "read_adapter",
    "sum_images",
    "summand_of",
]
_MODULES = {
    **dict.fromkeys(("Summand", "check_sum", "sum_images", "summand_of"), "compose"),
    **dict.fromkeys(("AdapterImage", "load_image", "pack_image"), "pack"),
    **dict.fromkeys(("AdapterFiles", "read_adapter"), "read"),
    "files_of": "tensors",
}


def __getattr__(name: str) -> object:
    """Import what needs torch only when it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'weft.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.checkpoint.{_MODULES[name]}"), name)
