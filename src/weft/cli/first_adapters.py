"""Loads the adapters that a server starts with, side by side, and brings them to the device."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from weft.cli.args import LoraModule
from weft.core.adapters import AdapterRef
from weft.core.errors import WeftError
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.fleet.supervisor import Supervisor
from weft.registry import AdapterRegistry
from weft.registry.names import one_form
from weft.serving import Publisher

if TYPE_CHECKING:
    from weft.fleet.fleet_client import FleetClient

logger = logging.getLogger(__name__)

MAX_LOADS = 8
"""Adapters that are loaded side by side."""
TELL_S = 1.0
"""How often the log is told how far this is."""


async def load_adapters(
    modules: list[LoraModule], publisher: Publisher, registry: AdapterRegistry
) -> None:
    """Load the operator's adapters, several at a time. Raises WeftError for the first failure."""
    if not modules:
        return
    coming, begun_s, told_s = iter(modules), time.monotonic(), 0.0
    loaded: list[str] = []

    async def load_some() -> None:
        nonlocal told_s
        for module in coming:
            try:
                ref = await publisher.load(module.name, module.path)
            except WeftError as error:
                raise module.refused(error.message) from error
            loaded.append(ref.name)
            seconds = time.monotonic() - begun_s
            if len(loaded) == len(modules) or seconds - told_s >= TELL_S:
                told_s = seconds
                logger.info("start: %d of %d adapters, %.1f s", len(loaded), len(modules), seconds)

    tasks = [asyncio.create_task(load_some()) for _ in range(MAX_LOADS)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    registry.arrange(name for module in modules if (name := one_form(module.name)) in loaded)


async def bring_to_device(engine: Supervisor | FleetClient, registry: AdapterRegistry) -> None:
    """Let each adapter compute a token, as many as there is room for, so that they are in device
    memory before requests need them."""
    if engine.info.device == "cpu":
        return
    left = engine.info.adapter_memory_bytes
    params, begun_s = SamplingParams(max_tokens=1, temperature=0.0), time.monotonic()

    async def ask(ref: AdapterRef) -> None:
        request = EngineRequest(f"start {ref.name}", [0], params, seed=0, adapter=ref)
        async for _ in engine.generate(request):
            pass

    asked: list[Awaitable[None]] = []
    for ref, info in registry.adapters().items():
        if info.num_bytes <= left:
            left -= info.num_bytes
            asked.append(ask(ref))
    # Those loaded last come first: the host still has them, and reads others into their places.
    await asyncio.gather(*reversed(asked))
    seconds = time.monotonic() - begun_s
    logger.info("start: %d adapters are in device memory, %.1f s", len(asked), seconds)
