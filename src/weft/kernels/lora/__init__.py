"""LoRA kernels: they add an adapter's part to the output of a base layer.

Backends register by name and are imported when first asked for. Third parties add theirs with an
entry point in the group `weft.lora_backends` whose value is a callable `(pool) -> LoraBackend`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from weft.core.errors import ConfigError
from weft.kernels.lora.base import AdapterPool, LoraBackend, LoraBatch, LoraStep, Segment

__all__ = [
    "AdapterPool",
    "LoraBackend",
    "LoraBatch",
    "LoraStep",
    "Segment",
    "backend_names",
    "make_backend",
]

ENTRY_POINT_GROUP = "weft.lora_backends"

_BUILT_IN = {
    "reference": "weft.kernels.lora.reference:ReferenceBackend",
    "torch": "weft.kernels.lora.grouped:GroupedBackend",
    "triton": "weft.kernels.lora.triton:TritonBackend",
}


def backend_names() -> list[str]:
    """The names that `make_backend` takes, built-in ones first."""
    return [*_BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))]


def make_backend(name: str, pool: AdapterPool) -> LoraBackend:
    """Make the backend of that name over `pool`; "auto" is triton on a GPU where Triton is
    installed, else torch. Raises ConfigError when unknown."""
    if name == "auto":
        name = "triton" if pool.arena.is_cuda and find_spec("triton") else "torch"
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        made: LoraBackend = getattr(import_module(module), attribute)(pool)
        return made
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            if any(group.sums_ranks for group in pool.table.groups):
                message = f"the LoRA backend {name!r} does not serve --fully-sharded-loras"
                raise ConfigError(message, "fully_sharded_loras")
            plugin: LoraBackend = entry.load()(pool)
            return plugin
    known = ", ".join(backend_names())
    raise ConfigError(
        f"--lora-backend {name}: there is none of this name, only {known}", "lora_backend"
    )
