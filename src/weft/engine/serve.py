"""Runs an engine on a thread or in a process of its own: takes commands from a queue, runs steps
while there is work, and emits reports."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from weft.core.config import EngineArgs
from weft.core.errors import WeftError, to_wire
from weft.core.load import EngineLoad
from weft.core.messages import Command, Pulse, Report, Started, StartFailed, Stop, Tokens, Wake
from weft.core.processes import freeze_heap
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.schedule.journal import CacheEvent

SWITCH_S = 5e-4
"""How long a thread keeps the GIL while others want it: a tenth of Python's default."""
PULSE_S = 1.0
"""The time between two signs of life."""
WAIT_S = 0.02
"""How long an engine without work waits for a command while requests wait for something else."""


PublishCache = Callable[[Sequence[CacheEvent]], None]


class Progress:
    """For how long the engine's thread has been busy, and the engine's load; any thread may ask."""

    def __init__(self, report_s: float | None = None) -> None:
        """`report_s`: how often the load is to be published; None: never."""
        self._since_s: float | None = None
        self.report_s = report_s
        self._published_s = 0.0
        self.load: EngineLoad | None = None
        """The newest load that was published."""

    def begin(self) -> None:
        """The engine's thread begins a step or a command."""
        self._since_s = time.monotonic()

    def rest(self) -> None:
        """The engine's thread waits for something to do."""
        self._since_s = None

    def publish(self, engine: Engine) -> None:
        """Update `load`, unless that was done within `report_s`; always when the engine has no more
        work, as its thread may then wait for long."""
        now = time.monotonic()
        if self.report_s and (not engine.working or now - self._published_s >= self.report_s):
            self._published_s, self.load = now, engine.load()

    @property
    def busy_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s


def settle_process() -> None:
    """Prepare a process that has just built its engine for serving. The garbage collector leaves
    out what exists by now, and Python switches threads more often, so that threads that load
    adapters hold up the engine's thread for less time."""
    freeze_heap()
    sys.setswitchinterval(SWITCH_S)


def run_engine(
    args: EngineArgs,
    inbox: SimpleQueue[Command],
    emit: Callable[[Report], None],
    pulse: Callable[[Pulse], None] | None = None,
    report_s: float | None = None,
    open_publisher: Callable[[], PublishCache] | None = None,
) -> None:
    """Build an engine and serve until Stop; if it can't be built, emit StartFailed. `pulse`: only
    for an engine in a process of its own, which then ends when another rank is gone; called
    regularly on another thread. `report_s`: how often; pulses then have the engine's load.
    `open_publisher` returns what gets the prefix index's changes; it may raise WeftError."""
    on_lost = (lambda: None) if pulse is None else lambda: os._exit(1)
    try:
        publish = None if open_publisher is None else open_publisher()
        engine = build_engine(args, lambda: inbox.put(Wake()), on_lost)
    except WeftError as error:
        emit(StartFailed(to_wire(error)))
        return
    progress = Progress(report_s)
    if publish is not None:
        engine.record_cache()
    if report_s is not None:
        engine.measure()
        progress.publish(engine)
    if pulse is not None:
        settle_process()
        threading.Thread(target=_beat, args=(engine, progress, pulse), daemon=True).start()
    emit(Started(engine.info))
    try:
        serve(engine, inbox, emit, progress, publish)
    except Exception:
        if pulse is None:  # nobody else frees what it holds
            engine.close()
        raise


def serve(
    engine: Engine,
    inbox: SimpleQueue[Command],
    emit: Callable[[Report], None],
    progress: Progress,
    publish: PublishCache | None = None,
) -> None:
    """Run until Stop. Every request that was submitted gets its terminal event."""
    while True:
        progress.rest()
        for command in _commands(inbox, engine):
            progress.begin()
            if isinstance(command, Stop):
                emit(Tokens(engine.close()))
                return
            report = engine.apply(command)
            if report is not None:
                emit(report)
            progress.rest()
        progress.begin()
        for report in engine.step():
            emit(report)
        if publish is not None and (events := engine.take_cache_events()):
            publish(events)
        progress.publish(engine)


def _beat(engine: Engine, progress: Progress, pulse: Callable[[Pulse], None]) -> None:
    """Give signs of life until the process ends."""
    told: EngineLoad | None = None
    while True:
        load = progress.load
        busy_s = {"step": progress.busy_s, **engine.stuck_s()}
        pulse(Pulse(busy_s, load if load is not told else None))
        told = load
        time.sleep(progress.report_s or PULSE_S)


def _commands(inbox: SimpleQueue[Command], engine: Engine) -> Iterator[Command]:
    """Yields the commands that are there or come before the next step has to be planned, each as
    soon as it comes. If there is nothing else to do, waits for one."""
    some = False
    with suppress(Empty):
        if engine.working:
            while (spare_s := engine.spare_s(some)) > 0:
                yield inbox.get(timeout=spare_s)
                some = True
        else:
            yield inbox.get(timeout=WAIT_S if engine.scheduler.busy else None)
        for _ in range(inbox.qsize()):
            yield inbox.get_nowait()
