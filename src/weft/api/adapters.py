"""Loading and unloading adapters under traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.errors import AdapterNotFound, AdapterPathRefused, EngineDead, WeftError
from weft.core.protocols import EngineClient
from weft.registry import (
    AdapterRegistry,
    AdapterRoots,
    Retired,
    fetch_adapter,
    is_hub_uri,
    parse_hub_id,
)
from weft.text import AdapterTokenizers

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AdapterAdmin:
    """Keeps the engine's adapters equal to the registry's.

    A version is in the engine from before its name is published until after its last request:
    the registration that a load makes is undone when the load publishes nothing new, or when the
    version that it published has drained. The newest registration of some content says whether
    the engine keeps it on the device.
    """

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        roots: AdapterRoots,
        allow_hub: bool = False,
        tokenizers: AdapterTokenizers | None = None,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._roots = roots
        self._allow_hub = allow_hub
        self._tokenizers = tokenizers or AdapterTokenizers(None)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(
        self, name: str, path: str, replace: bool = False, pinned: bool = False
    ) -> AdapterRef:
        """Make an adapter servable under `name`; a failure changes nothing.

        `path` is a folder, or an id on the Hugging Face hub where that is allowed. With `replace`
        the name moves to the new version: running requests end on the old one. `pinned` keeps
        the content on the device, until a load of the same content says otherwise. Finishes also
        when the caller is cancelled.
        """
        return await asyncio.shield(self._spawn(self._load(name, path, replace, pinned)))

    async def unload(self, name: str) -> None:
        """Forget the name at once; returns when its requests have ended and it is dropped.

        The drop happens also when the caller is cancelled. Raises AdapterNotFound.
        """
        retired = self._registry.retire(name)
        self._tokenizers.put(name, None)
        await asyncio.shield(self._spawn(self._drop_when_drained(retired)))

    async def close(self) -> None:
        """Cancel drops that still wait for requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, name: str, path: str, replace: bool, pinned: bool) -> AdapterRef:
        with self._registry.reserve(name, path):
            folder = await asyncio.to_thread(self._find, path)
            own = await asyncio.to_thread(self._tokenizers.load, folder)
            info = await self._engine.register_adapter(str(folder), pinned)
            before = self._registry.current(name)
            try:
                ref = self._registry.publish(name, info, path, replace, self._drop_soon, pinned)
            except WeftError:
                await self._undo(name, info, str(folder), pinned)
                raise
            self._tokenizers.put(name, own)
            if ref == before:
                await self._drop(ref)
            return ref

    def _find(self, path: str) -> Path:
        """The folder of an adapter; one from the hub is downloaded first. For a thread."""
        hub_id = parse_hub_id(path)
        if hub_id is None or (not is_hub_uri(path) and self._roots.hold(path)):
            return self._roots.resolve(path)
        if self._allow_hub:
            return fetch_adapter(hub_id)
        why = "adapters are fetched from the Hugging Face hub only with --allow-hub-adapters"
        if is_hub_uri(path):
            raise AdapterPathRefused(f"lora_path {path!r}: {why}", "lora_path")
        raise AdapterNotFound(f"lora_path {path!r}: no such folder, and {why}", "lora_path")

    async def _undo(self, name: str, info: AdapterInfo, folder: str, pinned: bool) -> None:
        """Take a registration back, and what it said of the pin of content that has a name."""
        ref = AdapterRef(name, 0, info.digest)
        before = self._registry.pinned(info.digest)
        if before is not None and before != pinned:
            await self._engine.register_adapter(folder, before)
            await self._drop(ref)
        await self._drop(ref)

    async def _drop_when_drained(self, retired: Retired) -> None:
        drained = asyncio.Event()
        retired.on_drained(lambda _: drained.set())
        await drained.wait()
        await self._drop(retired.ref)

    def _drop_soon(self, ref: AdapterRef) -> None:
        self._spawn(self._drop(ref))

    async def _drop(self, ref: AdapterRef) -> None:
        """Undo one registration."""
        try:
            await self._engine.drop_adapter(ref)
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
