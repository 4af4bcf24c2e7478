"""Which adapter versions exist and who uses them; where they may come from."""

from weft.registry.holders import Holders
from weft.registry.paths import AdapterRoots
from weft.registry.registry import (
    AdapterCard,
    AdapterRegistry,
    Lease,
    ModelCard,
    Retired,
    check_adapter_name,
)
from weft.registry.sources import AnyFolder, Sources

__all__ = [
    "AdapterCard",
    "AdapterRegistry",
    "AdapterRoots",
    "AnyFolder",
    "Holders",
    "Lease",
    "ModelCard",
    "Retired",
    "Sources",
    "check_adapter_name",
]
