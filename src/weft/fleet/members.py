"""Knows the members of a fleet, and keeps a link to each of them.

There is no membership protocol: a file or DNS lists where nodes may be, and is read periodically. A
process that answers there and has the fleet's key is a node.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path

import zmq.asyncio

from weft.core.duty import end_tasks, going_on
from weft.core.errors import ConfigError, EngineDead, WeftError
from weft.core.option_files import read_option_text
from weft.fleet.client import LinkClient
from weft.fleet.curve import FleetKey
from weft.fleet.fleet_client import FleetClient
from weft.fleet.node import RemoteNode
from weft.fleet.patience import Patience
from weft.fleet.reports import REPORT_S, update_between
from weft.fleet.tcp import TcpLink

logger = logging.getLogger(__name__)

READ_S = 1.0
"""How often the list is read again."""
RETRY_S = 0.2
"""The pause before a node that was lost, or does not answer, is tried again."""
MAX_RETRY_S = 2.0
SILENT = (
    "no node of this fleet answers at %s so far: it is not up, can't be reached, or has another"
    " --fleet-key (%s)"
)


def is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536


async def read_addresses(where: str) -> list[str]:
    """The addresses, HOST:PORT each, that a file has in its lines, or to which HOST:PORT resolves.
    Raises ConfigError, and OSError or UnicodeError if DNS has none."""
    if not is_address(where):
        text = await asyncio.to_thread(read_option_text, Path(where), f"--fleet {where}", "fleet")
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        found = [line for line in lines if line]
        for line in found:
            if not is_address(line):
                message = f"--fleet {where}: lines must be HOST:PORT, got {line[:80]!r}"
                raise ConfigError(message, "fleet")
        if not found:  # the file may be half written
            raise ConfigError(f"--fleet {where}: it names no HOST:PORT", "fleet")
        return found
    host, _, port = where.rpartition(":")
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(info[4][0]) for info in infos)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


class Members:
    """Owner of the links to other nodes. Tells a FleetClient of them."""

    def __init__(self, where: str | None, key: FleetKey, name: str, fleet: FleetClient) -> None:
        """`where`: see `read_addresses`; None: no other node is used. `name`: this node's, "" if it
        has no engine."""
        self._key = key
        self._name = name
        alone = f"the server without an engine on {socket.gethostname()}"
        self._who = f"node {name}" if name else alone
        self._fleet = fleet
        self._context = zmq.asyncio.Context()
        self._own: set[str] = set()
        """Addresses at which this process itself answers."""
        self._followed: dict[str, asyncio.Task[None]] = {}
        """Who looks after each address."""
        self._patience: dict[str, Patience] = {}
        """What is known of the nodes' pauses, by address: it outlives links."""
        self._links: set[TcpLink] = set()
        self._named: dict[str, str] = {}
        """By node that is linked: at which address."""
        self._twins: dict[str, str] = {}
        """By address: the name of the node there, if the log has said that it is not unique."""
        self._closing = False
        self._tasks = [asyncio.create_task(self._tick())]
        if where is not None:
            self._tasks.append(asyncio.create_task(self._read(where)))

    async def close(self) -> None:
        self._closing = True
        await end_tasks([*self._tasks, *self._followed.values()])
        await asyncio.to_thread(self._context.term)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if self._fleet.own is not None:
                with going_on("it was not checked whether this node's engine hangs"):
                    self._fleet.own.tick()
            for link in list(self._links):
                with going_on(f"it was not checked whether {link.address} hangs"):
                    link.tick()

    async def _read(self, where: str) -> None:
        said = ""
        while True:
            try:
                self._follow(await read_addresses(where))
                said = ""
            except Exception as error:  # of any kind; who is known stays known
                if str(error) != said:
                    said = str(error)
                    logger.warning("the list of nodes can't be read: %s", error)
            await asyncio.sleep(READ_S)

    def _follow(self, addresses: list[str]) -> None:
        wanted = set(addresses) - self._own
        for address in self._followed.keys() - wanted:
            self._followed.pop(address).cancel()
            self._patience.pop(address, None)
            self._twins.pop(address, None)
        for address in wanted - self._followed.keys():
            self._followed[address] = asyncio.create_task(self._look_after(address))

    async def _look_after(self, address: str) -> None:
        """Keep a link to the node at an address."""
        pause_s, said = RETRY_S, False
        while True:
            begun_s = time.monotonic()
            try:
                if await self._link(address) and time.monotonic() - begun_s > MAX_RETRY_S:
                    pause_s, said = RETRY_S, False
            except EngineDead as error:
                if pause_s == MAX_RETRY_S and not said:
                    said = True
                    logger.warning(SILENT, address, error.message)
            except ConfigError as error:
                logger.error("%s: this address is left out", error.message)
                return
            except Exception:  # of any kind, such as too many open files: that may change
                logger.exception("no link to %s could be made", address)
            if address in self._own:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _link(self, address: str) -> bool:
        """Link to a node until the link is lost. Returns whether it was used. Raises EngineDead if
        it does not answer."""
        client = LinkClient()
        patience = self._patience.setdefault(address, Patience())
        patience.heard()
        link = TcpLink(
            self._context, address, self._key, self._fleet.process, client, patience, self._who
        )
        self._links.add(link)
        try:
            await client.start(link)
            return await self._serve(address, client, link)
        finally:
            self._links.discard(link)
            await client.close()

    async def _serve(self, address: str, client: LinkClient, link: TcpLink) -> bool:
        if link.process == self._fleet.process:
            self._own.add(address)
            if self._fleet.own is not None:
                self._fleet.own.address = address
            return True
        if link.node == self._name or link.node in self._named:
            message = "two nodes are called %s; the one at %s is not used: give each a --node-name"
            if self._twins.get(address) != link.node:
                self._twins[address] = link.node
                logger.error(message, link.node, address)
            return False
        self._twins.pop(address, None)
        self._named[link.node] = address
        node = RemoteNode(client, link)
        logger.info("node %s at %s has joined", node.name, address)
        unlisted = f"node {node.name} is not in the list any more"
        error: WeftError = EngineDead(unlisted, killed=True)
        is_missed = False
        try:
            self._fleet.join(node, update_between(None, link.report) if link.report else None)
            link.on_report = lambda update: self._fleet.reported(node, update)
            error = await client.ended()
            is_missed = link.report is not None and not link.report.draining
        finally:
            del self._named[link.node]
            if not self._closing and is_missed:
                logger.warning("node %s is lost: %s", node.name, error.message)
            elif not self._closing:
                logger.info("node %s has left: %s", node.name, error.message)
            client.died(error)
            self._fleet.lost(node, is_missed)
        return True
