"""The records that an engine and its client exchange: commands go down, reports come up."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Read an adapter, and keep its content for `holder` until a Release of the two."""

    call_id: int
    source: AdapterSource
    holder: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    call_id: int
    digest: str
    holder: str


@dataclass(frozen=True, slots=True)
class GetStats:
    call_id: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Tell the engine that something besides commands needs its attention."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort all requests and end."""


Command = Submit | Abort | Hold | Release | GetStats | Wake | Stop


@dataclass(frozen=True, slots=True)
class Started:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    error: tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class Tokens:
    events: list[TokenEvent]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the command with that call id: what it asked for, or an error."""

    call_id: int
    info: AdapterInfo | None = None
    stats: EngineStats | None = None
    error: tuple[str, str, str | None] | None = None


Report = Started | StartFailed | Tokens | Reply
