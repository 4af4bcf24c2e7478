"""A client's end of a link to another node: ZeroMQ over TCP, encrypted.

    this process                                      the other node (`weft.fleet.listener`)
      Hello ────────────────────────────────────────▶
                                    (its engine is up) ◀─ Welcome, ReportUpdate
      Submit, Abort, Hold, ..., Beat ───────────────▶
                     (one message a step) ◀──────────── Tokens, Reply, ReportUpdate each 50 ms
                                                      ◀─ Gone, or silence, or a closed connection

A link lives no longer than the engine behind it: whoever wants to go on makes a new one. A closed
connection is seen at once. A node that hangs is known by its silence, counted in ticks of this
process rather than by a clock: if this process itself was held up, nobody is blamed for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.core.duty import end_tasks
from weft.core.errors import ConfigError, EngineDead
from weft.core.messages import Command, Started, Submit
from weft.fleet.client import LinkClient
from weft.fleet.curve import FleetKey
from weft.fleet.patience import Patience
from weft.fleet.reports import NodeReport, ReportReceiver, ReportUpdate
from weft.fleet.sent_requests import SentRequests
from weft.fleet.wire import DOWN, UP, Beat, Down, Drain, Gone, Hello, Rest, Up, Welcome

logger = logging.getLogger(__name__)

MAX_CONNECTING = 40
"""How many ticks the first answer may take."""
BEAT_EACH = 5
"""How many ticks are between two signs of life of this process."""
QUEUED = 1_000
"""How many messages wait for a slow other end before the link is given up. A node with many
requests sends one for each step."""
LAST_WORDS_MS = 200
"""How long a link that ends may take to send its last messages."""
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class TcpLink:
    """A link to another node; `connect` makes one with its client."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        key: FleetKey,
        me: str,
        client: LinkClient,
        patience: Patience,
        who: str = "",
    ) -> None:
        """`patience`: what is known of the other node's pauses. `who`: what the other node's log is
        to call this process."""
        self.address = address
        self.node = ""
        """The other node's name and (below) its process, once it has answered."""
        self.process = ""
        self.on_report: Callable[[ReportUpdate], None] = lambda _: None
        self._client = client
        self._receiver = ReportReceiver()
        self._sent = SentRequests()
        self._patience = patience
        self._ticks = 0
        self._socket: Any = context.socket(zmq.DEALER)
        self._socket.set_hwm(QUEUED)
        self._socket.linger = LAST_WORDS_MS
        self._socket.ipv6 = address.startswith("[")
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        key.lock(self._socket, server=False)
        self._monitor: Any = self._socket.get_monitor_socket(_ENDS)
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(f"--fleet: {address!r}: {error}", "fleet") from error
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_connection()),
        ]
        self._put(Hello(me, who))

    @property
    def report(self) -> NodeReport | None:
        return self._receiver.report

    def send(self, command: Command) -> None:
        self._put(self._sent.pack(command.request) if isinstance(command, Submit) else command)

    def drain(self, draining: bool) -> None:
        self._put(Drain(draining))

    def rest(self, idle: bool) -> None:
        self._put(Rest(idle))

    def tick(self) -> None:
        """Called each REPORT_S."""
        self._ticks += 1
        if self._patience.tick() if self.node else self._ticks > MAX_CONNECTING:
            self._end(f"{self._name} has given no sign of life")
        elif self._ticks % BEAT_EACH == 0:
            self._put(Beat())

    async def join(self, timeout_s: float) -> None:
        try:
            await end_tasks(self._tasks)
        finally:  # a socket that stays open would hold up the end of its context for ever
            self._close()

    @property
    def _name(self) -> str:
        return f"node {self.node}" if self.node else f"the node at {self.address}"

    def _put(self, record: Down) -> None:
        sent = self._socket.send(DOWN.encode(record), zmq.DONTWAIT)
        if sent.done() and sent.exception() is not None:
            self._end(f"{self._name} takes no messages")

    def _end(self, why: str) -> None:
        self._client.died(EngineDead(why, killed=True))  # no request is known to be to blame

    async def _receive(self) -> None:
        try:
            while True:
                content = await self._socket.recv()
                try:
                    record = UP.decode(content)
                except (msgspec.MsgspecError, KeyError) as error:
                    why = "sends what is not understood here, as another version of Weft may:"
                    self._end(f"{self._name} {why} {error}")
                    return
                self._take(record)
        except Exception:
            logger.exception("the link to %s ends, as its message could not be taken", self._name)
            self._end(f"a message of {self._name} could not be taken")

    def _take(self, record: Up) -> None:
        self._patience.heard()
        match record:
            case ReportUpdate():
                self._receiver.receive(record)
                self.on_report(record)
            case Welcome(node, process, info):
                self.node, self.process = node, process
                self._client.dispatch(Started(info))
            case Gone(message, killed):
                self._client.died(EngineDead(message, killed=killed))
            case _:
                self._client.dispatch(record)

    async def _watch_connection(self) -> None:
        await self._monitor.recv_multipart()
        self._end(f"the connection to {self._name} was closed")

    def _close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
