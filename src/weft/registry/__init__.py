"""Which adapter versions exist and who uses them; which folders they may come from."""

from weft.registry.paths import AdapterRoots
from weft.registry.registry import (
    AdapterRegistry,
    Lease,
    ModelCard,
    Retired,
    check_adapter_name,
)

__all__ = [
    "AdapterRegistry",
    "AdapterRoots",
    "Lease",
    "ModelCard",
    "Retired",
    "check_adapter_name",
]
