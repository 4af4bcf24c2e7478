"""The connections of clients: how many may be open, how long a client may take to send a request,
and which tenant's request is begun next.

uvicorn parses and answers; it has no limits of its own for clients that connect and say nothing.
`http_config` makes the configuration of all servers of the application. `served_beside` serves
metrics at an address of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.api.http import WRITE, error_response
from weft.api.middleware import PROBES
from weft.core.errors import ConfigError, EngineDead, Overloaded
from weft.core.fair_calls import FairCalls

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""How long a client may take to send the head of a request, after it has connected or has sent the
first byte."""
KEEP_ALIVE_S = 75
"""How long an idle connection stays open. Clients and proxies keep theirs for up to a minute, and
must be the first to close: a request that crosses the server's close is lost."""
MAX_FILES = 1 << 20
"""The most open files that this process asks for; the system may allow more."""
RESERVED_FILES = 256
"""Open files kept free for everything but connections, such as an engine that is restarted."""
SPARE = 32
"""Connections beyond the limit, on which only probes are answered."""
WARN_S = 10.0
"""The shortest time between two log lines about refused connections."""
BEGUN_EACH = 1
"""How many requests of one tenant are begun in one pass of the event loop. Each takes about a
millisecond, for which all streams wait."""
BEGUN_ALONE = 16
"""The same while no other tenant has a request under way."""
_KEY = re.compile(
    rb"\r\n(?:authorization:[ \t]*bearer[ \t]+|x-api-key:[ \t]*)([^\r\n]+)", re.IGNORECASE
)
_KEY_WITHIN = 8192
"""How many bytes of a request's head are searched for the key."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open at a time."""

    in_all: int
    per_address: int
    """From one address, or one IPv6 network of 64 bits; 0: no limit."""


METRICS_LIMITS = ConnectionLimits(64, 16)
"""Connections to the address for metrics. They take from the files that `RESERVED_FILES` leaves."""


def connection_limits(per_address: int | None = None) -> ConnectionLimits:
    """The limits that go with how many files this process may open, which is raised as far as the
    system allows. `per_address` None: half of all. Raises ConfigError if that is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY:
        soft = MAX_FILES
    elif soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems state more than they allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < RESERVED_FILES:
        message = f"the system lets a server open {soft} files, and it needs {RESERVED_FILES}"
        raise ConfigError(f"{message}: raise the limit (ulimit -n)", "ulimit")
    in_all = max(soft - RESERVED_FILES, soft // 2)
    return ConnectionLimits(in_all, in_all // 2 if per_address is None else per_address)


def http_config(
    app: FastAPI, limits: ConnectionLimits | None = None, **options: Any
) -> uvicorn.Config:
    """The configuration that all servers of the application share.

    They parse with h11 even if httptools is installed. httptools takes a fifth less time for a
    chunk, but loses the body of a request that offers HTTP/2, as Java's client does, and lets a
    head grow without bound.
    """
    entrance = Entrance(limits or connection_limits(), app.state.tenant_of_key)
    return uvicorn.Config(
        app,
        http=partial(ClientConnection, entrance),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


class Places:
    """Who has a connection.

        0 ......................... limit ................. limit + SPARE
          all requests are answered   only probes are         closed at once

    Where all places are taken, the connection that has waited longest for a request makes room.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self._open: dict[ClientConnection, str] = {}
        """All connections, with the address that each is counted for."""
        self._waiting: dict[ClientConnection, None] = {}
        """Those without a request under way, the one that has been idle for longest first."""
        self._spare: set[ClientConnection] = set()
        """Those that came when all places were taken."""
        self._warned_s = -WARN_S

    def take(self, connection: ClientConnection) -> bool:
        """Give a new connection a place, unless there is none for it."""
        address = _counted_as(connection.client[0] if connection.client else "")
        limit = self._limits.per_address
        if address and limit and self._by_address[address] >= limit:
            self._warn(f"{address} has {limit} connections; further ones are refused")
            return False
        if self.is_full and self._waiting:
            self._warn(f"there are {len(self._open)} connections; idle ones are closed")
            longest = next(iter(self._waiting))
            self.leave(longest)
            longest.close_idle()
        if len(self._open) >= self._limits.in_all + SPARE:
            return False
        if self.is_full:
            self._spare.add(connection)
        self._open[connection] = address
        self._by_address[address] += 1
        self._waiting[connection] = None
        return True

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self._limits.in_all

    def is_spare(self, connection: ClientConnection) -> bool:
        return connection in self._spare

    def ask(self, connection: ClientConnection) -> None:
        """A request has come on it."""
        self._waiting.pop(connection, None)

    def wait(self, connection: ClientConnection) -> None:
        """Its request has been answered."""
        if connection in self._open:
            self._waiting[connection] = None

    def leave(self, connection: ClientConnection) -> None:
        """It is closed; it may be said again."""
        address = self._open.pop(connection, None)
        self._waiting.pop(connection, None)
        self._spare.discard(connection)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self._waiting.keys() | self._spare <= self._open.keys()
        assert self._by_address == Counter(self._open.values())
        assert len(self._open) <= self._limits.in_all + SPARE

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._warned_s >= WARN_S:
            self._warned_s = time.monotonic()
            logger.warning("%s", message)


@lru_cache(maxsize=1024)
def _counted_as(host: str) -> str:
    """The address, or network, that a client is counted for; "" if it has none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


class Entrance:
    """What all connections of a server share."""

    def __init__(self, limits: ConnectionLimits, tenant_of_key: Callable[[bytes], str]) -> None:
        self.places = Places(limits)
        self._tenant_of_key = tenant_of_key
        self._in_turn = FairCalls(BEGUN_EACH, BEGUN_ALONE)

    def begin(self, head: bytes, call: Callable[[], object]) -> Callable[[], None]:
        """Have `call` called at the turn of the tenant whose key is in `head`, the part of a
        request's head received so far. The key only decides the turn, and grants nothing. The
        returned function must be called when the request has ended."""
        found = _KEY.search(head)
        tenant = self._tenant_of_key(found[1].strip()) if found else ""
        self._in_turn.enter(tenant)
        self._in_turn.call(tenant, call)
        return partial(self._in_turn.leave, tenant)


class ClientConnection(H11Protocol):
    """A connection whose client must send each head in time. Tenants take turns to have their
    requests parsed and begun. A request that states its length in two ways is answered, but is the
    last on its connection (RFC 9112, 6.1)."""

    def __init__(self, entrance: Entrance, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entrance = entrance
        self._places = entrance.places
        self._in_line = False
        """Whether it waits for its turn."""
        self._seen: object = None
        """The newest request that `handle_events` found."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._leave: Callable[[], None] | None = None
        """To be called when the request under way, or waiting for its turn, has ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._places.take(self):
            transport.abort()
            return
        if self._places.is_spare(self):
            self.app = partial(_answer_probes, self.app)
        self.app = partial(self._answer, self.app)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        self._unlimit_head()
        self._end_turn()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._asking and not self.transport.is_closing():
            self._limit_head()

    def handle_events(self) -> None:
        """Handle what has been received: at once for the request under way, in turn for others."""
        if self._asking:
            super().handle_events()
        elif not self._in_line:
            self._in_line = True
            received, _ = self.conn.trailing_data
            self._end_turn()
            self._leave = self._entrance.begin(received[:_KEY_WITHIN], self._take_turn)
            if self._in_line:
                self.flow.pause_reading()

    def _take_turn(self) -> None:
        self._in_line = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        super().handle_events()
        if self._asking and self.cycle is not self._seen:
            self._seen = self.cycle
            self._unlimit_head()
            self._places.ask(self)
            if self.scope["http_version"] == "1.1":
                self.scope["state"][WRITE] = self._write_chunk
            names = {name for name, _ in self.headers}
            if self._places.is_spare(self) or names >= {b"content-length", b"transfer-encoding"}:
                self.headers.append(CLOSE_HEADER)

    def _write_chunk(self, data: bytes) -> bool:
        """Write a piece of a streamed answer that has begun, unless the client is gone or has to
        read first. h11 would write the same bytes: it keeps no count of chunks."""
        if self.flow.write_paused or self.cycle.disconnected or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer a request. One that is cancelled, as the server stops, is
        answered in its place, or cut if its answer has begun: uvicorn would log an error."""
        cycle = self.cycle
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if cycle.response_started:
                cycle.disconnected = True
                self.transport.abort()
            else:
                error = EngineDead("the server has stopped")
                await error_response(error, scope["path"])(scope, receive, send)

    def on_response_complete(self) -> None:
        self._places.wait(self)
        self._end_turn()
        super().on_response_complete()

    def _end_turn(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def close_idle(self) -> None:
        """Close the connection, which has no request under way, to make room for others."""
        self.transport.abort()

    @property
    def _asking(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _unlimit_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def _answer_probes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] in PROBES:
        await app(scope, receive, send)
    else:
        error = Overloaded("the server has too many connections", retry_after_s=1)
        await error_response(error, scope["path"])(scope, receive, send)


class _BesideServer(uvicorn.Server):
    """A server that leaves signals to the one beside which it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served_beside(app: FastAPI, listener: socket.socket | None) -> AsyncIterator[None]:
    """A context in which the application is served on this listener; None: nowhere."""
    if listener is None:
        yield
        return
    server = _BesideServer(http_config(app, METRICS_LIMITS, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait({serving})
