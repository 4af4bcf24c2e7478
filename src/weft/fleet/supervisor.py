"""An EngineClient that starts its engine again when it dies, or hangs.

    up ──(the engine ends)──> down ──(started, adapters registered again)──> up
                               └──(a start fails)──> down, and after a pause another start

What was open when the engine died ends with EngineDead, and so does what comes while it is down.
An engine answers between two steps. One that does not for long is given up, and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.config import EngineArgs
from weft.core.errors import AdapterUnavailable, EngineDead, WeftError, to_wire
from weft.core.protocols import EngineClient
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Between the first and the second start after a death; doubled each time."""
MAX_PAUSE_S = 30.0
"""The longest pause. An engine that lives longer than this is taken for a good one."""
WATCHDOG_S = 300.0
"""How long a step may take, at most."""


class Mortal(EngineClient, Protocol):
    """An engine whose end can be waited for: `weft.fleet.client.Client`."""

    async def register_adapter(
        self, path: str, pinned: bool = False, before: AdapterInfo | None = None
    ) -> AdapterInfo: ...

    async def ended(self) -> WeftError: ...

    def died(self, error: WeftError) -> None: ...


Start = Callable[[EngineArgs], Awaitable[Mortal]]


async def start_supervised(
    args: EngineArgs, start: Start | None = None, watchdog_s: float = WATCHDOG_S
) -> Supervisor:
    """A supervised engine, in a process of its own unless `start` makes another one. 0 as
    `watchdog_s`: it is not asked whether it hangs.

    Raises what the first start fails with; later ones are logged and tried again.
    """
    if start is None:
        from weft.fleet.process import start_process  # it needs ZeroMQ

        start = start_process
    return Supervisor(args, start, await start(args), watchdog_s)


@dataclass(slots=True)
class _Adapter:
    """A version that is registered, whether or not the engine has it."""

    info: AdapterInfo
    """What engines said of it, last."""
    registrations: list[tuple[str, bool]] = field(default_factory=list)
    """Path and pin of each, oldest first."""
    num_in_engine: int = 0
    """Registrations that this engine knows of."""
    error: WeftError | None = None
    """Why this engine does not have it."""


class Supervisor:
    """EngineClient over one engine after another. Made by `start_supervised`."""

    def __init__(self, args: EngineArgs, start: Start, engine: Mortal, watchdog_s: float) -> None:
        self.restarts = 0
        self._watchdog_s = watchdog_s
        self._args = args
        self._start = start
        self._engine = engine
        self._down: str | None = None
        """Why nothing is served now."""
        self._adapters: dict[str, _Adapter] = {}
        self._task = asyncio.create_task(self._supervise())

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        """Whether an engine is up, with all adapters that it can have."""
        return self._down is None and self._engine.alive

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
        if self._down is not None:
            return _ending(request.request_id, EngineDead(self._down))
        needed = [part.ref for part in request.parts]
        if request.adapter is not None and not needed:
            needed = [request.adapter]
        for ref in needed:
            adapter = self._adapters.get(ref.digest)
            if adapter is not None and adapter.error is not None:
                return _ending(request.request_id, adapter.error)
        return self._engine.generate(request)

    async def register_adapter(self, path: str, pinned: bool = False) -> AdapterInfo:
        engine = self._up()
        info = await engine.register_adapter(path, pinned)
        if engine is not self._engine or not engine.alive:
            raise EngineDead("the engine died while the adapter was loaded")
        adapter = self._adapters.setdefault(info.digest, _Adapter(info))
        adapter.info = info
        adapter.registrations.append((path, pinned))
        adapter.num_in_engine += 1
        adapter.error = None
        return info

    async def drop_adapter(self, ref: AdapterRef) -> None:
        """Also holds for the engines to come: it succeeds while this one is down, or dies."""
        adapter = self._adapters.get(ref.digest)
        if adapter is None:
            return
        del adapter.registrations[0]
        if not adapter.registrations:
            del self._adapters[ref.digest]
        if adapter.num_in_engine > len(adapter.registrations):
            adapter.num_in_engine -= 1
            with contextlib.suppress(EngineDead):
                await self._engine.drop_adapter(ref)

    async def stats(self) -> EngineStats:
        return await self._up().stats()

    async def close(self) -> None:
        self._down = "the engine was stopped"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._engine.close()

    # -- inside --------------------------------------------------------------------------------

    def _up(self) -> Mortal:
        if self._down is not None:
            raise EngineDead(self._down)
        return self._engine

    async def _supervise(self) -> None:
        clock = asyncio.get_running_loop().time
        pause_s = 0.0
        while True:
            started_s = clock()
            with self._watched(self._engine):
                error = await self._engine.ended()
            died_s = clock()
            logger.error("%s; it is started again", error.message)
            self._down = "the engine has died and is being started again"
            if died_s - started_s > MAX_PAUSE_S:
                pause_s = 0.0
            while self._down is not None:
                await asyncio.sleep(pause_s)
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
                if await self._start_again():
                    self._down = None
            self.restarts += 1
            logger.warning("the engine is up again after %.1f s", clock() - died_s)

    @contextlib.contextmanager
    def _watched(self, engine: Mortal) -> Iterator[None]:
        """Meanwhile the engine is given up when it hangs."""
        watch = asyncio.create_task(self._watch(engine))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, engine: Mortal) -> None:
        with contextlib.suppress(EngineDead):
            while self._watchdog_s:
                try:
                    async with asyncio.timeout(self._watchdog_s):
                        await engine.stats()
                except TimeoutError:
                    engine.died(EngineDead(f"no answer from the engine in {self._watchdog_s:g} s"))
                await asyncio.sleep(self._watchdog_s / 10)

    async def _start_again(self) -> bool:
        """One attempt at a new engine with all adapters."""
        try:
            await self._engine.close()
            for adapter in self._adapters.values():
                adapter.num_in_engine, adapter.error = 0, None
            self._engine = engine = await self._start(self._args)
            calls = [self._register_again(engine, each) for each in self._adapters.values()]
            with self._watched(engine):
                await asyncio.gather(*calls)
        except Exception as error:  # of any kind: the next attempt may succeed
            logger.error("the engine could not be started again: %s", to_wire(error)[1])
            return False
        return True

    async def _register_again(self, engine: Mortal, adapter: _Adapter) -> None:
        """Once, from the newest of its folders that still holds this content."""
        if not adapter.registrations:  # dropped meanwhile
            return
        reason, pinned = "", adapter.registrations[-1][1]
        for path in dict.fromkeys(path for path, _ in reversed(adapter.registrations)):
            try:
                adapter.info = await engine.register_adapter(path, pinned, adapter.info)
            except EngineDead:
                raise
            except WeftError as error:
                reason = reason or error.message
                continue
            adapter.num_in_engine = 1
            if not adapter.registrations:
                await engine.drop_adapter(AdapterRef("", 0, adapter.info.digest))
            return
        adapter.error = AdapterUnavailable(
            f"the adapter could not be loaded again when the engine was restarted: {reason}",
            "model",
        )
        logger.error("%s", adapter.error.message)


async def _ending(request_id: str, error: WeftError) -> AsyncIterator[TokenEvent]:
    """What a request gets that no engine sees."""
    if isinstance(error, EngineDead):
        raise error
    yield TokenEvent(request_id, [], finish_reason="error", error=to_wire(error))
