"""An EngineClient that starts its engine again when it dies or hangs.

    up ──(the engine ends)──> down ──(started, and all holds repeated)──> up
                               └──(a start fails)──> down, and after a pause another start

Requests that were open when the engine died end with EngineDead, and so do those that come while
it is down. Requests that engines die of are refused; see `weft.fleet.suspects`. An engine answers
between two steps; one that gives no answer for too long is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.config import EngineArgs
from weft.core.duty import end_tasks, going_on
from weft.core.errors import AdapterUnavailable, EngineDead, RequestRefused, WeftError, to_wire
from weft.core.load import EngineLoad
from weft.core.requests import EngineRequest, TokenEvent, error_event
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant
from weft.fleet.client import LinkClient, Put
from weft.fleet.suspects import Suspects

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""The pause between the first and the second start after a death; it doubles each time."""
MAX_PAUSE_S = 30.0
"""The longest pause. An engine that has lived for longer is started again without one."""
WATCHDOG_S = 300.0
"""How long an engine may give no answer, and so how long a step may take."""
START_TIMES = 3.0
"""A restart may take the watchdog's time plus this many times that of the first start."""
Start = Callable[[EngineArgs], Awaitable[LinkClient]]


async def start_supervised(
    args: EngineArgs, start: Start | None = None, watchdog_s: float = WATCHDOG_S
) -> Supervisor:
    """Start an engine, by `start` or else in a process of its own, and supervise it. With 0 as
    `watchdog_s`, an engine that hangs is not noticed.

    Raises what the first start raises. A later start that fails is logged and tried again.
    """
    if start is None:
        from weft.fleet.process import start_process  # it needs ZeroMQ

        start = start_process
    begun_s = time.monotonic()
    engine = await start(args)
    return Supervisor(args, start, engine, watchdog_s, time.monotonic() - begun_s)


@dataclass(slots=True)
class _Wanted:
    """Content that every engine is to hold."""

    info: AdapterInfo
    """What the last engine said of it."""
    holders: dict[str, tuple[AdapterSource, bool]] = field(default_factory=dict)
    """The source and the pin of each hold, the newest last."""
    lost: WeftError | None = None
    """Why it could not be read again for this engine."""


class Supervisor:
    """An EngineClient over one engine after another; `start_supervised` makes it."""

    def __init__(
        self, args: EngineArgs, start: Start, engine: LinkClient, watchdog_s: float, start_s: float
    ) -> None:
        """`start_s`: how long the start of this engine has taken."""
        self.restarts = 0
        self._watchdog_s = watchdog_s
        self._start_limit_s = watchdog_s + START_TIMES * start_s if watchdog_s else None
        self._args = args
        self._start = start
        self._engine = engine
        self._down: str | None = None
        """Why nothing is served now; None while an engine is up."""
        self._wanted: dict[str, _Wanted] = {}
        """What engines are to hold, by digest."""
        self._tenants: tuple[Tenant, ...] | None = None
        """The tenants that share every engine; None until `set_tenants`."""
        self._suspects = Suspects()
        self.on_pulse: Callable[[], None] = lambda: None
        """Called with each sign of life of an engine, and when one has died."""
        self.death: WeftError | None = None
        """What the last engine died of."""
        engine.on_pulse = self._pulsed
        self._task = asyncio.create_task(self._supervise())

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        """Whether an engine is up, and has loaded all wanted content that it could."""
        return self._down is None and self._engine.alive

    @property
    def troubles(self) -> list[str]:
        return self._engine.troubles if self._down is None else [self._down]

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        if error := self._refusal(request):
            return _ending(request.request_id, error)
        try:
            return self._suspects.admit(request, self._engine.generate(request))
        except RequestRefused as refused:
            return _ending(request.request_id, refused)

    def follow(self, request: EngineRequest, put: Put) -> None:
        """See `LinkClient.follow`. Raises WeftError for a request that can't be served. One that
        engines may have died of (`is_suspect`) must be given to `generate` instead."""
        if error := self._refusal(request):
            raise error
        self._engine.follow(request, put)

    def is_suspect(self, request: EngineRequest) -> bool:
        """Whether a request was there when an engine died."""
        return self._suspects.remembers(request)

    def leave(self, request_id: str, error: WeftError) -> None:
        """See `LinkClient.leave`."""
        self._engine.leave(request_id, error)

    @property
    def load(self) -> EngineLoad | None:
        """See `LinkClient.load`; None while no engine is up."""
        return self._engine.load if self.alive else None

    def _refusal(self, request: EngineRequest) -> WeftError | None:
        if self._down is not None:
            return EngineDead(self._down)
        for digest in request.digests:
            wanted = self._wanted.get(digest)
            if wanted is not None and wanted.lost is not None:
                return wanted.lost
        return None

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        """Until it is released, all later engines hold the content too."""
        engine = self._up()
        info = await engine.hold(source, holder, pinned)
        if engine is not self._engine or not engine.alive:
            raise EngineDead("the engine died while the adapter was loaded")
        wanted = self._wanted.setdefault(info.digest, _Wanted(info))
        wanted.info = info
        wanted.holders.pop(holder, None)
        wanted.holders[holder] = (source.again(), pinned)
        if wanted.lost is not None:
            await self._hold_again(engine, info.digest)
        return info

    async def release(self, digest: str, holder: str) -> None:
        """This also succeeds while the engine is down, or dies: later ones get no such hold."""
        wanted = self._wanted.get(digest)
        if wanted is not None:
            wanted.holders.pop(holder, None)
            if not wanted.holders:
                del self._wanted[digest]
        with contextlib.suppress(EngineDead):
            await self._engine.release(digest, holder)

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Later engines get these tenants too, so this succeeds while the engine is down."""
        self._tenants = tuple(tenants)
        with contextlib.suppress(EngineDead):
            await self._engine.set_tenants(self._tenants)

    async def stats(self) -> EngineStats:
        return await self._up().stats()

    async def close(self) -> None:
        self._down = "the engine was stopped"
        await end_tasks([self._task])
        await self._engine.close()

    def _pulsed(self) -> None:
        self.on_pulse()

    def _up(self) -> LinkClient:
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
            self._suspects.died(self._engine.lost, error)
            logger.error("%s; it is started again", error.message)
            self._down, self.death = "the engine has died and is being started again", error
            with going_on("clients were not told that the engine died"):
                self.on_pulse()
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
    def _watched(self, engine: LinkClient) -> Iterator[None]:
        """Give the engine up if it hangs within this context."""
        watch = asyncio.create_task(self._watch(engine))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, engine: LinkClient) -> None:
        with contextlib.suppress(EngineDead):
            while self._watchdog_s:
                try:
                    async with asyncio.timeout(self._watchdog_s):
                        await engine.stats()
                except TimeoutError:
                    engine.died(EngineDead(f"no answer from the engine in {self._watchdog_s:g} s"))
                await asyncio.sleep(self._watchdog_s / 10)

    async def _start_again(self) -> bool:
        """Try once to start a new engine that holds what the one before it held."""
        try:
            await self._engine.close()
            self._engine = engine = await self._started()
            engine.on_pulse = self._pulsed
            if self._tenants is not None:
                await engine.set_tenants(self._tenants)
            calls = [self._hold_again(engine, digest) for digest in self._wanted]
            with self._watched(engine):
                await asyncio.gather(*calls)
        except Exception as error:  # of any kind: the next attempt may succeed
            logger.error("the engine could not be started again: %s", to_wire(error)[1])
            return False
        return True

    async def _started(self) -> LinkClient:
        """A new engine. Raises what its start raises, and EngineDead if that takes too long."""
        try:
            async with asyncio.timeout(self._start_limit_s):
                return await self._start(replace(self._args, first_adapters=self._first()))
        except TimeoutError:
            raise EngineDead(f"it was not ready within {self._start_limit_s:.0f} s") from None

    def _first(self) -> tuple[AdapterSource, ...]:
        """Where the next engine finds what it will be asked to hold."""
        return tuple(
            next(reversed(wanted.holders.values()))[0].again(digest, wanted.info.checked)
            for digest, wanted in self._wanted.items()
        )

    async def _hold_again(self, engine: LinkClient, digest: str) -> None:
        """Let an engine hold content for all its holders, from the newest of their folders that
        still has it. May be repeated."""
        wanted = self._wanted.get(digest)
        if wanted is None:  # it was released meanwhile
            return
        wanted.lost, reason = None, ""
        for source in dict.fromkeys(source for source, _ in reversed(wanted.holders.values())):
            try:
                await self._hold_from(engine, source, digest)
            except EngineDead:
                raise
            except WeftError as error:
                reason = reason or error.message
                continue
            return
        if digest not in self._wanted:
            return
        wanted.lost = AdapterUnavailable(
            f"the adapter could not be loaded again when the engine was restarted: {reason}",
            "model",
        )
        logger.error("%s", wanted.lost.message)

    async def _hold_from(self, engine: LinkClient, source: AdapterSource, digest: str) -> None:
        """Tell an engine of all holds of some content, and of those that change meanwhile."""
        wanted = self._wanted.get(digest)
        if wanted is None:
            return
        info, source = wanted.info, source.again(digest, wanted.info.checked)
        for holder in list(wanted.holders):
            told: tuple[AdapterSource, bool] | None = None
            while told != (hold := self._hold_of(digest, holder)):
                if hold is None:
                    await engine.release(digest, holder)
                else:
                    info = await engine.hold(source, holder, hold[1])
                told = hold
        if digest in self._wanted:
            self._wanted[digest].info = info

    def _hold_of(self, digest: str, holder: str) -> tuple[AdapterSource, bool] | None:
        wanted = self._wanted.get(digest)
        return wanted.holders.get(holder) if wanted else None


async def _ending(request_id: str, error: WeftError) -> AsyncGenerator[TokenEvent, None]:
    """The events of a request that no engine gets: its error. An EngineDead is raised instead."""
    if isinstance(error, EngineDead):
        raise error
    yield error_event(request_id, error)
