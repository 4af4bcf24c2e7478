"""An EngineClient that talks to its engine over a link.

The link carries commands to the engine and its reports back. With `weft.fleet.process`, the engine
is in a process of its own. All of `LinkClient` runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import EngineDead, InvalidRequest, WeftError, from_wire
from weft.core.fair_calls import FairCalls
from weft.core.load import EngineLoad
from weft.core.messages import (
    Abort,
    Command,
    GetStats,
    Hold,
    Pulse,
    Release,
    Reply,
    Report,
    SetTenants,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tokens,
)
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant
from weft.fleet.vitals import Vitals

CLOSE_S = 10.0
"""How long `close` waits for the engine to end by itself."""
WOKEN_EACH = 8
"""How many streams of one tenant are woken in one pass of the event loop. Each delays all others by
about a fifth of a millisecond."""
WOKEN_ALONE = 64
"""The same while no other tenant has a stream."""
GROUP = 16
"""How many events at a time a reader gets that takes tokens in groups."""


class Link(Protocol):
    """Carries commands to an engine, and its reports back."""

    def send(self, command: Command) -> None:
        """Send a command, without waiting for anything."""

    async def join(self, timeout_s: float) -> None:
        """Wait for the engine's end; end it by force after the time-out where that is possible."""


class LinkClient:
    """An EngineClient for one engine: owns the streams and calls that wait for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._info: EngineInfo | None = None
        self._dead: WeftError | None = None
        self._ended = asyncio.Event()
        self._streams: dict[str, _Reader] = {}
        """The readers of requests that may get more events. A reader is removed with its last event
        or its error, so that nothing can follow that, however late it is read."""
        self._in_turn = FairCalls(WOKEN_EACH, WOKEN_ALONE)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count()
        self._vitals = Vitals()
        self.lost: list[EngineRequest] = []
        """The requests that were open when the engine died."""
        self.load: EngineLoad | None = None
        """The engine's newest report of its load, if it was asked for reports."""
        self.on_pulse: Callable[[], None] | None = None
        """Called at each sign of life from the engine."""

    async def start(self, link: Link) -> LinkClient:
        """Wait until the engine is ready, and return this client. Raises the error of a failed
        start; a start that fails or is cancelled leaves nothing behind."""
        self._link = link
        try:
            self._info = await self._started
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "not started"
        return self._info

    @property
    def alive(self) -> bool:
        return self._info is not None and self._dead is None

    @property
    def troubles(self) -> list[str]:
        return self._vitals.troubles() if self.alive else ["the engine is not running"]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        stream = _Stream(self._loop, self._in_turn, request)
        self._open(stream)
        self._in_turn.enter(request.tenant)
        try:
            while True:
                for item in await stream.take():
                    if isinstance(item, WeftError):
                        raise item
                    yield item
                    if item.finish_reason is not None:
                        return
        finally:
            self._in_turn.leave(request.tenant)
            if self._streams.get(request.request_id) is stream:
                self._end(request.request_id)

    def follow(self, request: EngineRequest, put: Put) -> None:
        """As `generate`, with a callback: `put` is called with each event, and with the error if
        the engine dies. `leave` ends the request early. Raises EngineDead, InvalidRequest."""
        self._open(_Follower(request, put))

    def leave(self, request_id: str, error: WeftError) -> None:
        """End a request early, if it is open: its reader gets this error."""
        if request_id in self._streams:
            self._end(request_id).put(error)

    def _end(self, request_id: str) -> _Reader:
        """Let the engine end a request, and return its reader, which gets no more events."""
        reader = self._streams.pop(request_id)
        if self.alive:
            self._send(Abort(request_id))
        return reader

    def _open(self, reader: _Reader) -> None:
        request = reader.request
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        self._streams[request.request_id] = reader  # first, as sending may find the link broken
        try:
            self._send(Submit(request))
        except BaseException:
            self._streams.pop(request.request_id, None)
            raise

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        reply = await self._call(lambda call_id: Hold(call_id, source, holder, pinned))
        assert reply.info is not None
        return reply.info

    async def release(self, digest: str, holder: str) -> None:
        await self._call(lambda call_id: Release(call_id, digest, holder))

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        self._send(SetTenants(tuple(tenants)))

    async def stats(self) -> EngineStats:
        reply = await self._call(GetStats)
        assert reply.stats is not None
        return reply.stats

    async def ended(self) -> WeftError:
        """Wait until the engine is gone, and say why it is."""
        await self._ended.wait()
        assert self._dead is not None
        return self._dead

    async def close(self) -> None:
        if self._link is None:
            return
        if self._dead is None:
            with contextlib.suppress(WeftError):
                self._send(Stop())
        await self._link.join(CLOSE_S if self._dead is None else 0)
        self.died(EngineDead("the engine was stopped"))

    # -- from the link, on the event loop ------------------------------------------------------

    def dispatch(self, report: Report) -> None:
        match report:
            case Tokens():
                # First tokens first: these come in the middle of no answer.
                for event in sorted(report, key=_is_later):
                    reader = self._streams.get(event.request_id)
                    if reader is not None:
                        reader.put(event)
                        if event.finish_reason is not None:
                            del self._streams[event.request_id]
            case Reply(call_id):
                future = self._calls.pop(call_id, None)
                if future is not None and not future.done():
                    _resolve(future, report)
            case Pulse():
                self._vitals.hear(report)
                self.load = report.load or self.load
                if self.on_pulse is not None:
                    self.on_pulse()
            case Started(info) if not self._started.done():
                self._started.set_result(info)
            case StartFailed(error) if not self._started.done():
                self._started.set_exception(from_wire(error))
            case _:  # the start was cancelled
                pass

    def died(self, error: WeftError) -> None:
        """The engine is gone, or was given up: end all that waits for it with this error."""
        if self._dead is not None:
            return
        self._dead = error
        self._ended.set()
        self.lost = [reader.request for reader in self._streams.values()]
        if not self._started.done():
            self._started.set_exception(error)
        readers, self._streams = self._streams, {}
        for reader in readers.values():
            reader.put(error)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)

    async def _call(self, make: Callable[[int], Command]) -> Reply:
        call_id = next(self._call_ids)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[call_id] = future
        try:
            self._send(make(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _send(self, command: Command) -> None:
        if self._dead is not None or self._link is None:
            raise self._dead or EngineDead("the engine was not started")
        self._link.send(command)


def _is_later(event: TokenEvent) -> bool:
    """Whether this is not the first event of its request."""
    return event.queue_s is None


Put = Callable[[TokenEvent | WeftError], None]


class _Reader(Protocol):
    """Gets the events of one request."""

    @property
    def request(self) -> EngineRequest: ...

    def put(self, item: TokenEvent | WeftError) -> None: ...


@dataclass(slots=True)
class _Follower:
    """A reader that passes events on at once."""

    request: EngineRequest
    put: Put


class _Stream:
    """The events of one request that its reader has not taken yet."""

    __slots__ = ("_due", "_in_turn", "_is_ready", "_items", "_loop", "_waiter", "request")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, in_turn: FairCalls, request: EngineRequest
    ) -> None:
        self._loop = loop
        self._in_turn = in_turn
        self.request = request
        self._items: list[TokenEvent | WeftError] = []
        self._due = 1
        """The reader is woken for this many events, or for the last one."""
        self._is_ready = False
        """Whether there are enough events to wake the reader."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: TokenEvent | WeftError) -> None:
        self._items.append(item)
        if self._is_ready or (len(self._items) < self._due and not _is_last(item)):
            return
        self._is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._in_turn.call(self.request.tenant, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[TokenEvent | WeftError]:
        """Wait until there are enough events and it is the tenant's turn; take all that are there.
        The first event is always enough, since it says how long the request has waited."""
        if not self._is_ready:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_ready = False
        if self.request.in_groups:
            self._due = GROUP
        items, self._items = self._items, []
        return items if len(items) == 1 else _joined(items)


def _is_last(item: TokenEvent | WeftError) -> bool:
    """Whether nothing comes after this."""
    return isinstance(item, WeftError) or item.finish_reason is not None


def _joined(items: list[TokenEvent | WeftError]) -> list[TokenEvent | WeftError]:
    """Join all token events into one, so that a reader who is behind the engine catches up. Only
    the last item can be an error, as nothing comes after one."""
    events = [item for item in items if isinstance(item, TokenEvent) and item.error is None]
    if len(events) < 2:
        return items
    last = events[-1]
    joined = events[0]._replace(
        token_ids=[token for event in events for token in event.token_ids],
        logprobs=[each for event in events for each in event.logprobs or ()] or None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=max(event.num_cached_tokens for event in events),
        num_tokens=last.num_tokens,
    )
    return [joined, *items[len(events) :]]


def _resolve(future: asyncio.Future[Reply], reply: Reply) -> None:
    if reply.error is not None:
        future.set_exception(from_wire(reply.error))
    else:
        future.set_result(reply)
