"""Starts and ends the engine behind a server, its own or that of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weft.core.config import EngineArgs
from weft.core.errors import EngineDead
from weft.fleet.supervisor import Supervisor, start_supervised
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents

if TYPE_CHECKING:
    from weft.fleet.fleet_client import FleetClient
    from weft.fleet.start import FleetArgs

LEAVING_S = 0.3
"""How long other nodes may take to hear of a node that leaves, and to take their requests away."""


async def start_engine(
    args: EngineArgs,
    fleet: FleetArgs | None,
    watchdog_s: float,
    contents: Contents,
    blobs: Blobs | None,
) -> Supervisor | FleetClient:
    """Start what serves requests; see `start_fleet` for what a fleet's node does with `contents`
    and `blobs`. Raises WeftError."""
    if fleet is None:
        return await start_supervised(args, watchdog_s=watchdog_s)
    from weft.fleet.start import start_fleet

    return await start_fleet(fleet, args, watchdog_s, contents, blobs)


def leave_fleet(engine: Supervisor | FleetClient) -> None:
    """If this is a node of a fleet, move all its requests to other nodes, including its own
    clients'."""
    if not isinstance(engine, Supervisor) and engine.own is not None:
        engine.own.drain(True)


async def until_empty(engine: Supervisor | FleetClient, timeout_s: float) -> None:
    """Wait until an engine has no requests left, and those who took them away know it."""
    with contextlib.suppress(TimeoutError, EngineDead):
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(LEAVING_S)
            while (stats := await engine.stats()).num_running + stats.num_waiting:
                await asyncio.sleep(LEAVING_S / 10)
