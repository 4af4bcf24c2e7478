"""Weft serves many LoRA adapters from one copy of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.adapters import WeightedAdapter
from weft.core.sampling import SamplingParams
from weft.core.version import __version__

if TYPE_CHECKING:
    from weft.llm import LLM, RequestOutput
    from weft.publishing import publish

__all__ = ["LLM", "RequestOutput", "SamplingParams", "WeightedAdapter", "__version__", "publish"]


def __getattr__(name: str) -> object:
    """Import what takes long only when it is asked for."""
    if name in ("LLM", "RequestOutput"):
        from weft import llm

        return getattr(llm, name)
    if name == "publish":
        from weft.publishing import publish

        return publish
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
