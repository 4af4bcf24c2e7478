"""LoRA kernels: they add an adapter's part to the output of a base layer.

Backends register by name and are imported when first asked for. Third parties add theirs with an
entry point in the group `weft.lora_backends` whose value is a callable `(pool) -> LoraBackend`.
The names of all of them are in `weft.core.config`.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec

from weft.core.config import LORA_BACKENDS, check_backend
from weft.core.errors import ConfigError
from weft.kernels.lora.base import AdapterPool, LoraBackend, LoraBatch, LoraStep, Segment

__all__ = ["AdapterPool", "LoraBackend", "LoraBatch", "LoraStep", "Segment", "make_backend"]

_BUILT_IN = {
    "reference": "weft.kernels.lora.reference:ReferenceBackend",
    "torch": "weft.kernels.lora.grouped:GroupedBackend",
    "triton": "weft.kernels.lora.triton:TritonBackend",
}


def make_backend(name: str, pool: AdapterPool) -> LoraBackend:
    """Make the backend of that name over `pool`; "auto" is triton on a GPU where Triton is
    installed, else torch. Raises ConfigError when unknown."""
    check_backend(name)
    if name == "auto":
        name = "triton" if pool.arena.is_cuda and find_spec("triton") else "torch"
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        made: LoraBackend = getattr(import_module(module), attribute)(pool)
        return made
    if any(group.sums_ranks for group in pool.table.groups):
        message = f"the LoRA backend {name!r} does not serve --fully-sharded-loras"
        raise ConfigError(message, "fully_sharded_loras")
    entry = next(
        entry for entry in metadata.entry_points(group=LORA_BACKENDS) if entry.name == name
    )
    plugin: LoraBackend = entry.load()(pool)
    return plugin
