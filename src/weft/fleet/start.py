"""Makes this process a part of a fleet: its engine a node, its API a client of all nodes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.core.adapters import AdapterSource
from weft.core.config import EngineArgs
from weft.core.errors import ConfigError, InvalidRequest
from weft.core.ports import check_free
from weft.fleet.controller import Controller
from weft.fleet.curve import FleetKey
from weft.fleet.fleet_client import FleetClient
from weft.fleet.live_requests import holders_of
from weft.fleet.members import Members, is_address
from weft.fleet.node import OwnNode
from weft.fleet.peers import PeerContents
from weft.fleet.process import start_process
from weft.fleet.reports import REPORT_S
from weft.fleet.supervisor import start_supervised
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.labels import node_labels

PORT = 7070
FETCHES = 16
"""How many adapters that other nodes name are fetched at a time, on threads of their own."""
MIN_TARGET = 0.05


def located(source: AdapterSource, blobs: Blobs) -> AdapterSource:
    """The source as a folder of this machine, from `blobs` if its path is not here. This is slow:
    call it on a thread. Raises what `Blobs.open` does."""
    if source.digest is None or Path(source.path).is_dir():
        return source
    folder = blobs.open(source.digest, source.peers, source.listing)
    return AdapterSource(folder.path, source.digest, source.checked, folder.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetArgs:
    """How a process takes part in a fleet. Raises ConfigError for values that can't be used."""

    where: str
    """A file with a node's HOST:PORT in each line, or HOST:PORT with several addresses in DNS."""
    key: FleetKey
    listen: str = f"0.0.0.0:{PORT}"
    name: str | None = None
    """The node's name; None: the host's name and the port at which it listens."""
    labels: tuple[str, ...] = ()
    """KEY=VALUE of the node, by which adapters may be kept on it."""
    target: float | None = None
    """The fraction of nodes' seats to be taken, so that others can be idle; None: all serve."""
    webhook: str | None = None
    """A URL that is told how many nodes there should be."""
    has_engine: bool = True
    has_api: bool = True

    def __post_init__(self) -> None:
        if not (self.has_engine or self.has_api):
            raise ConfigError("--no-api and --no-engine leave nothing to serve", "no_api")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            message = f"--fleet-listen takes HOST:PORT, got {self.listen!r}"
            raise ConfigError(message, "fleet_listen")
        if not is_address(self.where) and not Path(self.where).is_file():
            raise ConfigError(f"--fleet {self.where}: no regular file, and not HOST:PORT", "fleet")
        if self.target is not None and not MIN_TARGET <= self.target <= 1:
            message = f"--consolidate takes {MIN_TARGET} to 1, got {self.target}"
            raise ConfigError(message, "consolidate")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            message = f"--scale-webhook takes an http(s) URL, got {self.webhook!r}"
            raise ConfigError(message, "scale_webhook")
        if self.name is not None and not self.name:
            raise ConfigError("--node-name must not be empty", "node_name")
        if self.labels and not self.has_engine:
            message = "--node-label is for nodes with an engine, and --no-engine has none"
            raise ConfigError(message, "node_label")
        self.parse_labels()

    def parse_labels(self) -> dict[str, str]:
        """The labels by their keys. Raises ConfigError."""
        try:
            return node_labels(self.labels, "--node-label")
        except InvalidRequest as error:
            raise ConfigError(error.message, "node_label") from None


async def start_fleet(
    args: FleetArgs,
    engine_args: EngineArgs,
    watchdog_s: float,
    contents: Contents,
    blobs: Blobs | None,
) -> FleetClient:
    """Start this process's engine, if it is to have one, and find the other nodes. Without an
    engine it waits for one of them.

    `contents`: the adapters' files on this machine, which other nodes may fetch. `blobs`: those of
    a shared registry, used for adapters whose folder, as another node names it, is not here.
    Raises ConfigError, and what the engine's start raises.
    """

    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(FETCHES, "weft-fetch")

    async def locate(source: AdapterSource) -> AdapterSource:
        if blobs is None:
            return source
        return await loop.run_in_executor(threads, located, source, blobs)

    own = None
    if args.has_engine:
        host, _, port = args.listen.rpartition(":")
        check_free(host, int(port), "--fleet-listen")
        start = partial(start_process, report_s=REPORT_S)
        engine = await start_supervised(engine_args, start, watchdog_s)
        try:
            own = OwnNode(
                args.name,
                engine,
                args.listen,
                args.key,
                locate,
                contents,
                has_api=args.has_api,
                labels=args.parse_labels(),
            )
        except BaseException:
            await engine.close()
            raise
    client = FleetClient(own)
    if blobs is not None:
        peers = PeerContents(args.key, client.process)
        blobs.peers, blobs.holders = peers, partial(holders_of, client.nodes)
        client.helpers.append(peers)
    name = own.name if own is not None else ""
    client.helpers.append(Members(args.where if args.has_api else None, args.key, name, client))
    if args.has_api:
        client.helpers.append(Controller(client, args.target, args.webhook))
    try:
        await client.until_joined()
    except BaseException:
        await client.close()
        raise
    return client
