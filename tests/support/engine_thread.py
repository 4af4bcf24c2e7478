"""The engine in a thread of this process, with the client that a server has of its own process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from weft.core.config import EngineArgs
from weft.core.errors import EngineDead, to_wire
from weft.core.messages import Command, Report
from weft.engine.engine import Engine
from weft.engine.serve import run_engine
from weft.fleet.client import LinkClient


async def start_in_process(args: EngineArgs) -> LinkClient:
    """Start an engine in a thread of this process, and return its client."""
    client = LinkClient()
    return await client.start(ThreadLink(args, client))


@contextlib.contextmanager
def held(holds: Callable[[Engine], bool]) -> Iterator[None]:
    """Within this context the engines of this process make no step while `holds` says so of them.
    They still take commands."""
    step = Engine.step

    def step_unless_held(self: Engine) -> list[Report]:
        if holds(self):
            time.sleep(0.001)
            return []
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step_unless_held)
        yield


class ThreadLink:
    """The link to an engine in a daemon thread, which can't be ended by force."""

    def __init__(self, args: EngineArgs, client: LinkClient) -> None:
        self._args = args
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def join(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        def emit(report: Report) -> None:
            self._post(lambda: self._client.dispatch(report))

        try:
            run_engine(self._args, self._inbox, emit)
            error = EngineDead("the engine was stopped")
        except Exception as failure:
            error = EngineDead(f"the engine failed: {to_wire(failure)[1]}")
        self._post(lambda: self._client.died(error))

    def _post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call)
