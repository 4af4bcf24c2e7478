"""An engine in the thread of its caller: it runs steps while the caller waits for answers."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.config import EngineArgs
from weft.core.errors import EngineDead, from_wire
from weft.core.interrupts import interrupts_later
from weft.core.messages import Abort, Hold, Reply, Report, SetTenants, Submit, Tokens
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.engine.serve import WAIT_S
from weft.worker.memory import give_back


@dataclass(slots=True)
class _Inbox:
    """What came for the requests of one `run` and was not taken yet."""

    events: deque[TokenEvent] = field(default_factory=deque)
    num_open: int = 0


class DirectClient:
    """EngineClient over an engine in this thread.

    Its coroutines never wait for an event loop: they step the engine until it has the answer.
    Events of other requests that come meanwhile are kept for their readers. Ctrl-C raises its
    KeyboardInterrupt between steps, so that no step is lost.
    """

    def __init__(self, args: EngineArgs) -> None:
        """Raises ConfigError if the engine can't start like this."""
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._engine: Engine | None = build_engine(args, lambda: self._wakeups.put(None))
        self.alive = True
        self._pid = os.getpid()
        self.troubles: tuple[str, ...] = ()
        self._call_ids = itertools.count()
        self._replies: dict[int, Reply] = {}
        self._inboxes: dict[str, _Inbox] = {}
        """By request that is open."""

    @property
    def engine(self) -> Engine:
        """Raises EngineDead once it is closed, and in a process that was forked."""
        if not self.alive or self._engine is None:
            raise EngineDead("this engine is closed")
        if os.getpid() != self._pid:
            raise EngineDead("this engine stayed in the process that this one was forked from")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def run(self, requests: Sequence[EngineRequest]) -> Generator[TokenEvent, None, None]:
        """The events of several requests as they come, up to the last one of each. Closing the
        iterator aborts what still runs."""
        inbox = _Inbox()
        try:
            for request in requests:
                self._inboxes[request.request_id] = inbox
                inbox.num_open += 1
                with interrupts_later():
                    self._take(self.engine.apply(Submit(request)))
            while inbox.events or inbox.num_open:
                if inbox.events:
                    yield inbox.events.popleft()
                else:
                    self._step()
        finally:
            with interrupts_later():
                for request in requests:
                    if self._inboxes.get(request.request_id) is inbox:
                        self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request without a further event, if it is open."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None:
            inbox.num_open -= 1
            if self._engine is not None:
                self._engine.apply(Abort(request_id))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        for event in self.run([request]):
            yield event

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        call_id = next(self._call_ids)
        self._take(self.engine.apply(Hold(call_id, source, holder, pinned)))
        while (reply := self._replies.pop(call_id, None)) is None:
            self._step()
        if reply.error is not None:
            raise from_wire(reply.error)
        assert reply.info is not None
        return reply.info

    async def hold_tensors(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        holder: str,
        pinned: bool = False,
    ) -> AdapterInfo:
        """As `hold`, of an adapter in memory, which is copied."""
        return self.engine.hold_tensors(config, tensors, holder, pinned)

    async def release(self, digest: str, holder: str) -> None:
        self.engine.release(digest, holder)

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        self.engine.apply(SetTenants(tuple(tenants)))

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def close(self) -> None:
        self.alive = False
        if self._engine is None or os.getpid() != self._pid:
            return  # in a fork, its threads are not here, and its processes not ours
        self._take(Tokens(self._engine.close()))
        self._engine = None
        give_back()

    def _step(self) -> None:
        with interrupts_later():
            reports = self.engine.step()
            for report in reports:
                self._take(report)
        if not reports and not self.engine.working:
            with suppress(Empty):
                self._wakeups.get(timeout=WAIT_S)

    def _take(self, report: Report | None) -> None:
        if isinstance(report, Reply):
            self._replies[report.call_id] = report
        for event in report if isinstance(report, Tokens) else ():
            inbox = self._inboxes.get(event.request_id)
            if inbox is None:
                continue
            inbox.events.append(event)
            if event.finish_reason is not None:
                del self._inboxes[event.request_id]
                inbox.num_open -= 1
