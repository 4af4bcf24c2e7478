"""Loading and unloading adapters under traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.errors import EngineDead, WeftError
from weft.core.protocols import EngineClient
from weft.registry import (
    AdapterRegistry,
    Retired,
    Sources,
)
from weft.text import AdapterTokenizers

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AdapterAdmin:
    """Keeps the engine's adapters equal to the registry's.

    A name holds the content of its version in the engine from before the version is published
    until its last request has ended. Content stays on the device while any of its names pins it.
    """

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        sources: Sources,
        tokenizers: AdapterTokenizers | None = None,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._sources = sources
        self._tokenizers = tokenizers or AdapterTokenizers(None)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """For each name that changes: one hold or release at a time, so that none is undone by
        an older one."""

    async def load(
        self, name: str, path: str, replace: bool = False, pinned: bool = False
    ) -> AdapterRef:
        """Make an adapter servable under `name`; a failure changes nothing.

        `path` is a name that `Sources` understands. With `replace`
        the name moves to the new version: running requests end on the old one. `pinned` keeps
        the content on the device, until the same name is loaded without it, or unloaded. The load
        goes on when the caller is cancelled.
        """
        return await asyncio.shield(self._spawn(self._load(name, path, replace, pinned)))

    async def unload(self, name: str) -> None:
        """Forget the name at once; returns when its requests have ended and it is released.

        It is released also when the caller is cancelled. Raises AdapterNotFound.
        """
        retired = self._registry.retire(name)
        self._tokenizers.put(name, None)
        await asyncio.shield(self._spawn(self._release_when_drained(retired)))

    async def close(self) -> None:
        """Cancel releases that still wait for requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, name: str, path: str, replace: bool, pinned: bool) -> AdapterRef:
        path = self._sources.plain(path)
        with self._registry.reserve(name, path):
            folder = await asyncio.to_thread(self._sources.resolve, path)
            own = await asyncio.to_thread(self._tokenizers.load, folder)
            async with self._turn(name):
                info = await self._engine.hold(AdapterSource(str(folder)), name, pinned)
                try:
                    ref = self._registry.publish(
                        name, info, path, replace, self._release_soon, pinned
                    )
                except WeftError:
                    await self._release(AdapterRef(name, 0, info.digest))
                    raise
                self._tokenizers.put(name, own)
                return ref

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _release_when_drained(self, retired: Retired) -> None:
        drained = asyncio.Event()
        retired.on_drained(lambda _: drained.set())
        await drained.wait()
        await self._release_in_turn(retired.ref)

    def _release_soon(self, ref: AdapterRef) -> None:
        self._spawn(self._release_in_turn(ref))

    async def _release_in_turn(self, ref: AdapterRef) -> None:
        async with self._turn(ref.name):
            await self._release(ref)

    async def _release(self, ref: AdapterRef) -> None:
        """Let go of content that its name does not need; it may need it again meanwhile."""
        if self._registry.needs(ref):
            return
        try:
            await self._engine.release(ref.digest, ref.name)
        except EngineDead:
            logger.warning("adapter %r went with the dead engine", ref.name)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, WeftError) else logging.ERROR
            logger.log(level, "adapter task failed: %s", error)
