"""What goes between an engine and its client: commands down, reports up. Plain records."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.adapters import AdapterInfo
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Register:
    call_id: int
    path: str
    pinned: bool = False
    before: AdapterInfo | None = None
    """What an engine before this one said of it."""


@dataclass(frozen=True, slots=True)
class Drop:
    call_id: int
    digest: str


@dataclass(frozen=True, slots=True)
class GetStats:
    call_id: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Something besides commands needs the engine's attention."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort all requests and end."""


Command = Submit | Abort | Register | Drop | GetStats | Wake | Stop


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
    """Answer to the command with that call id."""

    call_id: int
    info: AdapterInfo | None = None
    stats: EngineStats | None = None
    error: tuple[str, str, str | None] | None = None


Report = Started | StartFailed | Tokens | Reply
