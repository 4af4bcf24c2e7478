"""Which adapter versions exist and who uses them; where they may come from."""

from weft.registry.registry import AdapterCard, AdapterRegistry, Holders, Lease, ModelCard
from weft.registry.sources import AdapterRoots, AnyFolder, Sources

__all__ = [
    "AdapterCard",
    "AdapterRegistry",
    "AdapterRoots",
    "AnyFolder",
    "Holders",
    "Lease",
    "ModelCard",
    "Sources",
]
