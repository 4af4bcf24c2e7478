"""Which adapter versions exist and who uses them; where they may come from."""

from weft.registry.holders import Holders
from weft.registry.hub import HubId, fetch_adapter, is_hub_uri, parse_hub_id
from weft.registry.paths import AdapterRoots
from weft.registry.registry import (
    AdapterCard,
    AdapterRegistry,
    Lease,
    ModelCard,
    Retired,
    check_adapter_name,
)

__all__ = [
    "AdapterCard",
    "AdapterRegistry",
    "AdapterRoots",
    "Holders",
    "HubId",
    "Lease",
    "ModelCard",
    "Retired",
    "check_adapter_name",
    "fetch_adapter",
    "is_hub_uri",
    "parse_hub_id",
]
