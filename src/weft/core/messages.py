"""The protocol of an engine's client: commands go down, reports come up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.load import EngineLoad
from weft.core.requests import EngineRequest, FollowingTokens, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest
    form_place: int | None = None
    """Where both ends of a link between processes keep the request's form; see
    `weft.fleet.sent_requests`."""


@dataclass(frozen=True, slots=True)
class SubmitAgain:
    """The last Submit with these fields changed, on a link between processes: for another choice
    or prompt of the same request of a client."""

    request_id: str
    seed: int
    prompt_ids: list[int] | None
    """None: the same prompt."""


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Read an adapter, and keep its content for `holder` until its Release by this holder."""

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
class SetTenants:
    """From now on these tenants share the device, by their weights and within their caps."""

    tenants: tuple[Tenant, ...]


@dataclass(frozen=True, slots=True)
class GetStats:
    call_id: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Tell the engine that something besides commands needs its attention."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort all requests and end."""


Command = Submit | SubmitAgain | Abort | Hold | Release | SetTenants | GetStats | Wake | Stop


@dataclass(frozen=True, slots=True)
class Started:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    error: tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Events of requests; iterating yields them all. No request is both in `events` and in
    `following`."""

    events: list[TokenEvent]
    following: FollowingTokens | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        yield from self.events
        if self.following is not None:
            yield from self.following.events

    def __bool__(self) -> bool:
        return bool(self.events) or self.following is not None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the command with that call id: what it asked for, or an error."""

    call_id: int
    info: AdapterInfo | None = None
    stats: EngineStats | None = None
    error: tuple[str, str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life, sent every second, or every `report_s` by an engine that reports its load."""

    busy_s: dict[str, float]
    """For how many seconds each part of the engine has made no progress: `step`, and threads."""
    load: EngineLoad | None = None
    """Its load, if that was asked for and has changed since the last Pulse."""


Report = Started | StartFailed | Tokens | Reply | Pulse


class EngineClient(Protocol):
    """One engine, wherever it runs. All methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it started."""

    @property
    def alive(self) -> bool:
        """Whether requests can be served now."""

    @property
    def troubles(self) -> Sequence[str]:
        """Why requests can't be served now, or some of them can't; empty if all is well."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """Run a request and yield its events; only the last one has `finish_reason` set.

        Closing the iterator early aborts the request. Engine-side failures of the request come
        as an event with finish_reason "error"; EngineDead is raised when the engine is gone.
        """

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        """Read, validate, pack and check an adapter; the engine serves it by its digest as long
        as anybody holds it. `holder` is any name, such as the one that requests use.

        Repeating a hold changes nothing but its pin. Content that any of its holders pins is
        brought to the device as soon as there is room, and stays there. A failure changes
        nothing. Raises AdapterInvalid (`param` names the field or tensor), AdapterConflict (too
        much would be pinned), AdapterNotFound, AdapterUnavailable (the source's content is not the
        one that `source.digest` states), AdapterQuarantined, EngineDead.
        """

    async def release(self, digest: str, holder: str) -> None:
        """This holder does not need that content any more; nothing happens if it never held it.

        Once its last holder has released it, the adapter takes no new requests, and its memory is
        freed when its running ones have ended.
        """

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Let these tenants, and no longer those of an earlier call, share the device by their
        weights, each within its `max_seats`. If there are none, the tenants named in requests only
        determine the order of service. Raises EngineDead."""

    async def stats(self) -> EngineStats:
        """Ask for the engine's figures. Raises EngineDead."""

    async def close(self) -> None:
        """Stop the engine. Open requests end with finish_reason "abort"."""
