"""Accepts links from other nodes, and runs their requests on this node's engine.

Each link is a *session*. The engine's output for it is sent in one message per step, without
waiting: a client that does not read is dropped, and so is one that is silent for long. A session's
requests end with it. The adapters that it held stay for a while, in case the client was only cut
off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from weft.core.adapters import AdapterSource
from weft.core.duty import end_tasks, going_on
from weft.core.errors import ConfigError, EngineDead, RegistryUnavailable, WeftError, to_wire
from weft.core.messages import (
    Abort,
    GetStats,
    Hold,
    Release,
    Reply,
    SetTenants,
    Stop,
    Submit,
    SubmitAgain,
    Tokens,
)
from weft.core.requests import EngineRequest, TokenEvent, error_event
from weft.fleet.curve import DOMAIN, FleetKey
from weft.fleet.lender import ContentLender
from weft.fleet.reports import REPORT_S, ReportUpdate
from weft.fleet.sent_requests import ReceivedRequests
from weft.fleet.supervisor import Supervisor
from weft.fleet.tcp import LAST_WORDS_MS, QUEUED
from weft.fleet.wire import (
    DOWN,
    PIECES,
    UP,
    Beat,
    Drain,
    FilePiece,
    GetPiece,
    Gone,
    Hello,
    Rest,
    Welcome,
)
from weft.registry.contents import Contents

logger = logging.getLogger(__name__)

MAX_SILENT = 40
"""After so many ticks without a message a session ends."""
KEPT_S = 60.0
"""How long the adapters of a session stay held after its end."""
MAX_BYTES = 64 << 20
"""The largest message that is taken."""

Locate = Callable[[AdapterSource], Awaitable[AdapterSource]]
"""Finds where this machine has the content that another node has somewhere."""


@dataclass(slots=True, eq=False)
class Session:
    """The state of one client's link."""

    address: bytes
    """The socket's identity of the link."""
    client: str
    who: str
    """What the log calls the client."""
    received: ReceivedRequests = field(default_factory=ReceivedRequests)
    requests: set[str] = field(default_factory=set)
    events: list[TokenEvent] = field(default_factory=list)
    """What the next message will carry."""
    welcome: bool = False
    """Whether it was told that the engine is up."""
    silent: int = 0
    held: set[tuple[str, str]] = field(default_factory=set)
    """What it has held: pairs of digest and holder."""


class NodeListener:
    """Owner of the sessions of this node. `check()` states the invariants."""

    def __init__(
        self,
        address: str,
        key: FleetKey,
        engine: Supervisor,
        process: str,
        whole: Callable[[], ReportUpdate | None],
        on_order: Callable[[Drain | Rest], None],
        locate: Locate,
        contents: Contents,
    ) -> None:
        """`process` identifies this process. `whole` returns the node's newest report, for new
        sessions. Other nodes may fetch `contents`. Raises ConfigError for a bad address.
        """
        self._engine = engine
        self._process = process
        self._whole = whole
        self._on_order = on_order
        self._locate = locate
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._guard = AsyncioAuthenticator(self._context)
        self._socket = self._bind(address, key)
        self._sessions: dict[bytes, Session] = {}
        self._left: dict[tuple[str, str], float] = {}
        """What ended sessions held, and when they ended."""
        self._unsent: set[Session] = set()
        self._suspects: dict[str, asyncio.Task[None]] = {}
        """By id: requests suspected of killing engines, which wait for their turns or run."""
        self._lender = ContentLender(contents, self._send_piece)
        work = (self._receive(), self._tick(), self._lender.serve())
        self._tasks = {asyncio.create_task(each) for each in work}

    def _bind(self, address: str, key: FleetKey) -> Any:
        self._guard.start()
        self._guard.configure_curve_callback(DOMAIN, key)
        socket: Any = self._context.socket(zmq.ROUTER)
        socket.set_hwm(QUEUED)
        socket.linger = LAST_WORDS_MS
        socket.ipv6 = address.startswith("[")
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        key.lock(socket, server=True)
        try:
            socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            socket.close(0)
            self._guard.stop()
            self._context.term()
            raise ConfigError(f"--fleet-listen {address}: {error}", "fleet_listen") from error
        return socket

    @property
    def clients(self) -> set[str]:
        """The processes that have a session here."""
        return {session.client for session in self._sessions.values()}

    @property
    def port(self) -> int:
        endpoint: str = self._socket.last_endpoint.decode()
        return int(endpoint.rpartition(":")[2])

    # -- what the node tells all ---------------------------------------------------------------

    def report(self, update: ReportUpdate) -> None:
        """Send a report to all sessions; those that wait for the engine learn that it is up."""
        record = UP.encode(update)
        for session in list(self._sessions.values()):
            if session.welcome:
                self._send(session, record)
            else:
                self._welcome(session)

    def gone(self, error: WeftError) -> None:
        """The engine is gone: so are all sessions that knew it, after what it still said."""
        self._flush()
        killed = isinstance(error, EngineDead) and error.killed
        record = UP.encode(Gone(error.message, killed))
        for session in list(self._sessions.values()):
            if session.welcome and self._send(session, record):
                self._drop(session)

    async def close(self) -> None:
        await end_tasks(self._tasks)
        self.gone(EngineDead("the node was stopped", killed=True))
        self._socket.close()
        self._guard.stop()
        await asyncio.to_thread(self._context.term)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert all(session.address == at for at, session in self._sessions.items())
        assert all(session in self._sessions.values() for session in self._unsent)
        assert all(not session.requests or session.welcome for session in self._sessions.values())

    # -- messages ------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            address, *parts = await self._socket.recv_multipart()
            try:
                self._take(address, *parts)
            except KeyError:  # a kind that this version does not know
                logger.exception("a message of another node was not understood")
            except Exception:  # of any kind: records raise WeftError too when they are made
                logger.exception("a message of another node was not understood; its link ends")
                if (session := self._sessions.get(address)) is not None:
                    self._drop(session)  # it would wait for an answer for ever

    def _take(self, address: bytes, message: bytes) -> None:
        record = DOWN.decode(message)
        if isinstance(record, Hello):
            session = Session(address, record.client, record.who or "another node")
            self._sessions[address] = session
            self._welcome(session)
            return
        if isinstance(record, GetPiece):
            self._lender.ask(address, record)
            return
        found = self._sessions.get(address)
        if found is None:  # it was dropped, and learns of it by the silence
            return
        found.silent = 0
        match record:
            case Submit() | SubmitAgain():
                self._submit(found, found.received.unpack(record).request)
            case Abort(request_id):
                found.requests.discard(request_id)
                self._end(request_id, EngineDead("the request was ended"))
            case Hold() | Release() | GetStats():
                self._spawn(self._answer(found, record))
            case SetTenants(tenants):
                self._spawn(self._engine.set_tenants(tenants))
            case Drain() | Rest():
                self._on_order(record)
            case Stop():
                self._drop(found)
            case Beat() | _:
                pass

    def _welcome(self, session: Session) -> None:
        whole = self._whole()
        if whole is not None and self._engine.alive:
            welcome = UP.encode(Welcome(whole.report.node, self._process, self._engine.info))
            session.welcome = self._send(session, welcome) and self._send(session, UP.encode(whole))

    def _submit(self, session: Session, request: EngineRequest) -> None:
        session.requests.add(request.request_id)
        put = partial(self._put, session, request.request_id)
        try:
            if self._engine.is_suspect(request):
                self._suspects[request.request_id] = self._spawn(self._generate(request, put))
            else:
                self._engine.follow(request, put)
        except WeftError as error:
            put(error)

    async def _generate(
        self, request: EngineRequest, put: Callable[[TokenEvent | WeftError], None]
    ) -> None:
        try:
            async for event in self._engine.generate(request):
                put(event)
        except WeftError as error:
            put(error)
        finally:
            self._suspects.pop(request.request_id, None)

    def _end(self, request_id: str, error: WeftError) -> None:
        """End a request early, of which its client hears no more."""
        self._engine.leave(request_id, error)
        if (suspect := self._suspects.pop(request_id, None)) is not None:
            suspect.cancel()  # it may wait for its turn, and no engine knows it then

    def _put(self, session: Session, request_id: str, item: TokenEvent | WeftError) -> None:
        """An event of a request; it goes out with all others that come in this pass."""
        if request_id not in session.requests:
            return
        if isinstance(item, WeftError):
            if isinstance(item, EngineDead):  # `gone` tells of it
                return
            item = error_event(request_id, item)
        if item.finish_reason is not None:
            session.requests.discard(request_id)
        session.events.append(item)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.add(session)

    def _flush(self) -> None:
        sessions, self._unsent = self._unsent, set()
        for session in sessions:
            events, session.events = session.events, []
            self._send(session, UP.encode(Tokens(events)))

    async def _answer(self, session: Session, call: Hold | Release | GetStats) -> None:
        try:
            reply = await self._result(session, call)
        except Exception as error:  # of any kind: the client waits for an answer
            if isinstance(error, RegistryUnavailable):
                logger.warning("%s", error)
            reply = Reply(call.call_id, error=to_wire(error))
        self._send(session, UP.encode(reply))

    async def _result(self, session: Session, call: Hold | Release | GetStats) -> Reply:
        match call:
            case Hold(call_id, source, holder, pinned):
                name = f"{session.client}/{holder}"
                if source.digest is not None:  # it is not to be taken for left behind meanwhile
                    session.held.add((source.digest, name))
                info = await self._engine.hold(await self._locate(source), name, pinned)
                session.held.add((info.digest, name))
                if self._sessions.get(session.address) is not session:  # it has ended meanwhile
                    self._leave(session)
                return Reply(call_id, info=info)
            case Release(call_id, digest, holder):
                name = f"{session.client}/{holder}"
                for each in self._sessions.values():
                    each.held.discard((digest, name))
                await self._engine.release(digest, name)
                return Reply(call_id)
            case GetStats(call_id):
                return Reply(call_id, stats=await self._engine.stats())

    def _send(self, session: Session, message: bytes) -> bool:
        """Send a message, and drop the session if it takes none. Returns whether it was sent."""
        if self._sessions.get(session.address) is not session:
            return False
        sent = self._socket.send_multipart([session.address, message], zmq.DONTWAIT)
        if sent.done() and sent.exception() is not None:
            self._drop(session)
            return False
        return True

    def _send_piece(self, address: bytes, piece: FilePiece) -> None:
        """Who takes none any more has gone, and asks nobody."""
        sent = self._socket.send_multipart([address, PIECES.encode(piece)], zmq.DONTWAIT)
        if sent.done() and (error := sent.exception()) is not None:
            logger.debug("a piece was not sent: %s", error)

    # -- the end of sessions -------------------------------------------------------------------

    def _drop(self, session: Session) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
        self._unsent.discard(session)
        requests, session.requests = session.requests, set()
        for request_id in requests:
            self._end(request_id, EngineDead("its client is gone"))
        self._leave(session)

    def _leave(self, session: Session) -> None:
        """Have what a session held released after a while, unless another session holds it."""
        self._left.update(dict.fromkeys(session.held, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            with going_on("requests of silent nodes were not ended"):
                for session in list(self._sessions.values()):
                    session.silent += 1
                    if session.silent > MAX_SILENT:
                        message = "%s has said nothing for %.0f s; its requests are ended here"
                        logger.warning(message, session.who, MAX_SILENT * REPORT_S)
                        self._drop(session)
                self._release_left_behind()

    def _release_left_behind(self) -> None:
        now = time.monotonic()
        for pair, left_s in list(self._left.items()):
            if now - left_s > KEPT_S:
                del self._left[pair]
                if not any(pair in session.held for session in self._sessions.values()):
                    self._spawn(self._engine.release(*pair))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
