"""The nodes of a fleet, as its client sees them: this process's own, and others over links."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import WeftError
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant
from weft.fleet.client import LinkClient
from weft.fleet.curve import FleetKey
from weft.fleet.listener import Locate, NodeListener
from weft.fleet.patience import Patience
from weft.fleet.reports import NodeReport, ReportSender, ReportUpdate
from weft.fleet.supervisor import Supervisor
from weft.fleet.tcp import TcpLink
from weft.fleet.wire import Drain, Rest
from weft.registry.contents import Contents

logger = logging.getLogger(__name__)


class Node(Protocol):
    """A node whose engine is up, or was."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def report(self) -> NodeReport | None:
        """Its newest report; None while it takes no requests: it is down, hangs, or is cut off."""

    held: set[str]
    """Digests of the adapters that this process makes the node hold."""

    @property
    def address(self) -> str:
        """HOST:PORT at which other nodes reach it; "" while that is not known."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]: ...

    def leave(self, request_id: str, error: WeftError) -> None:
        """See `LinkClient.leave`."""

    async def hold(self, source: AdapterSource, holder: str, pinned: bool) -> AdapterInfo: ...

    async def release(self, digest: str, holder: str) -> None: ...

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None: ...

    def drain(self, draining: bool) -> None:
        """See `weft.fleet.wire.Drain`."""

    def rest(self, idle: bool) -> None:
        """See `weft.fleet.wire.Rest`."""


class OwnNode:
    """This process's own node: its engine, the reports about it, and the sessions that use it.

    on_report: called with each report; with None when there are none for now.
    """

    def __init__(
        self,
        name: str | None,
        engine: Supervisor,
        listen: str,
        key: FleetKey,
        locate: Locate,
        contents: Contents,
        has_api: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`listen`: HOST:PORT for others. `contents`: what they may fetch here. `name` None: that
        of the host and the port. `has_api`: whether this process routes requests. `labels`: what
        adapters may be kept by. Raises ConfigError if the address can't be had."""
        self.process = uuid.uuid4().hex
        """Identifies this process; see `weft.fleet.wire.Hello`."""
        self.held: set[str] = set()
        self.address = ""
        """Where this node has reached itself, as others do."""
        self.on_report: Callable[[Node, ReportUpdate | None], None] = lambda *_: None
        self._engine = engine
        self._has_api = has_api
        self._draining = self._idle = False
        self._restarts = 0
        self._patience = Patience()
        self.listener = NodeListener(
            listen,
            key,
            engine,
            self.process,
            lambda: self._sender.whole(),
            self._ordered,
            locate,
            contents,
        )
        self.name = name or f"{socket.gethostname()}:{self.listener.port}"
        self._labels = labels
        self._sender = ReportSender(self.name, time.time_ns(), labels)
        engine.on_pulse = self._pulsed

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def report(self) -> NodeReport | None:
        up = self._engine.alive and not self._patience.over
        return self._sender.report if up else None

    @property
    def troubles(self) -> list[str]:
        return self._engine.troubles

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        return self._engine.generate(request)

    def leave(self, request_id: str, error: WeftError) -> None:
        self._engine.leave(request_id, error)

    async def hold(self, source: AdapterSource, holder: str, pinned: bool) -> AdapterInfo:
        return await self._engine.hold(source, holder, pinned)

    async def release(self, digest: str, holder: str) -> None:
        await self._engine.release(digest, holder)

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        await self._engine.set_tenants(tenants)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    def drain(self, draining: bool) -> None:
        if draining != self._draining:
            self._draining = draining
            logger.info("this node %s requests", "takes no more" if draining else "takes")
            self._tell()

    def rest(self, idle: bool) -> None:
        if idle != self._idle:
            self._idle = idle
            self._tell()

    def tick(self) -> None:
        """See whether the engine still reports. Called each REPORT_S."""
        if self._patience.tick():
            self.on_report(self, None)

    async def close(self) -> None:
        await self.listener.close()
        await self._engine.close()

    def _ordered(self, order: Drain | Rest) -> None:
        """Another node has asked for this."""
        match order:
            case Drain(draining):
                self.drain(draining)
            case Rest(idle):
                self.rest(idle)

    def _pulsed(self) -> None:
        self._patience.heard()
        if self._engine.alive:
            self._tell()
        elif (death := self._engine.death) is not None:
            self.listener.gone(death)
            self.on_report(self, None)

    def _tell(self) -> None:
        """Report what is known now to everybody."""
        if (load := self._engine.load) is None:
            return
        if self._restarts != self._engine.restarts:
            self._restarts = self._engine.restarts
            self._sender = ReportSender(self.name, time.time_ns(), self._labels)
        controller = self.process if self._has_api else min(self.listener.clients, default="")
        update = self._sender.update(load, self._draining, self._idle, controller)
        self.listener.report(update)
        self.on_report(self, update)


class RemoteNode:
    """Another node, over a link to it."""

    def __init__(self, client: LinkClient, link: TcpLink) -> None:
        self.held: set[str] = set()
        self._client = client
        self._link = link
        self.generate = client.generate
        self.leave = client.leave
        self.hold = client.hold
        self.release = client.release
        self.set_tenants = client.set_tenants
        self.drain = link.drain
        self.rest = link.rest

    @property
    def name(self) -> str:
        return self._link.node

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def report(self) -> NodeReport | None:
        return self._link.report if self._client.alive else None
