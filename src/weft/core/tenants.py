"""Records of tenants: what each may take, and how large its share is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The most that one tenant may have at a time. None: only the server's general limits hold.
    Raises ConfigError for a cap below 1."""

    max_open_requests: int | None = None
    """Requests that run or wait; each prompt and each of its `n` choices counts."""
    max_seats: int | None = None
    """Sequences in the running batch."""
    max_tokens_in_flight: int | None = None
    """Tokens of open requests: their prompts, and what they may still generate."""
    max_adapters: int | None = None
    """Adapters in its namespace."""
    max_adapter_bytes: int | None = None
    """Bytes of those adapters in memory, together."""
    max_loads: int | None = None
    """Adapters that are being loaded."""
    max_forms: int | None = None
    """Structured outputs that are being compiled."""
    max_stored_bytes: int | None = None
    """Bytes of all versions that its names keep in a shared registry."""
    max_publishes_per_hour: int | None = None
    """Versions that it may add to a shared registry. All may come at once; the allowance is full
    again an hour later."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            cap = getattr(self, name)
            if cap is not None and cap < 1:
                raise ConfigError(f"{name} must be at least 1, got {cap}", name)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer or team that shares the server. Raises ConfigError unless 0 < weight < inf."""

    name: str
    """Also the namespace of its adapters: `name/adapter`."""
    weight: float = 1.0
    """Its share of the device beside others that want it too: twice the weight, twice the share."""
    caps: Caps = Caps()
    shares_prefixes: bool = False
    """Whether its prompts share cached prefixes with those of other such tenants. If not, nobody
    can infer its prompts from how fast answers come."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"weight must be more than 0, got {self.weight}", "weight")


NOBODY = Tenant("")


def tenant_in(tenants: Mapping[str, Tenant], name: str) -> Tenant:
    """The tenant of this name. Unconfigured names all belong to one tenant, named ""."""
    return tenants.get(name) or tenants.get("") or NOBODY
