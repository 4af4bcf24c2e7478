"""The engine in its own process, joined by ZeroMQ over a local socket, msgpack on the wire."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import zmq
import zmq.asyncio

from weft.core.config import EngineArgs
from weft.core.duty import going_on
from weft.core.errors import EngineDead
from weft.core.locked_folder import LockedFolder
from weft.core.messages import Command, Pulse, Report, Started, Stop, Submit, SubmitAgain
from weft.core.processes import die_with_parent
from weft.fleet.client import LinkClient
from weft.fleet.sent_requests import ReceivedRequests, SentRequests
from weft.fleet.wire import COMMANDS, ORDERS, REPORTS, EngineOrder
from weft.metrics.logs import configure_logging, configured_logging
from weft.worker.spawn import spawn_ahead

logger = logging.getLogger(__name__)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

SOCKETS = "weft-link-"
"""How the name of the folder begins that has the sockets of a link."""
FLUSH_MS = 1000
"""How long an engine's process waits at its end for its last reports to be sent."""
DRAIN_S = 0.005
"""How long the last reports of a dead engine may take to arrive over the local socket."""
END_S = 3.0
"""How long the process may take to end by itself before it is killed."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""It is there if this machine has a GPU."""


async def start_process(args: EngineArgs, report_s: float | None = None) -> LinkClient:
    """Start an engine in a process of its own, and return its client. With `report_s`, the engine
    gives a sign of life every `report_s` seconds, with its load."""
    client = LinkClient()
    return await client.start(ProcessLink(args, client, report_s))


class _Spawned:
    """An engine's process, which imports torch before it is told what to run."""

    def __init__(self, tensor_parallel_size: int) -> None:
        self.folder = LockedFolder(SOCKETS)
        folder = f"ipc://{self.folder.path}"
        self.down, self.up = f"{folder}/commands", f"{folder}/reports"
        self.process = multiprocessing.get_context("spawn").Process(
            target=_main,
            args=(self.down, self.up, tensor_parallel_size),
            name="weft-engine",
            daemon=True,
        )
        resource_tracker.ensure_running()  # its own start would lift the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()  # it inherits the mask: Ctrl-C does not end its imports
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        atexit.register(self.process.kill)  # before multiprocessing waits for it


_ahead: list[_Spawned] = []


def spawn_engine_ahead(tensor_parallel_size: int) -> None:
    """Start the process of the engine that this process will start next, so that both import what
    they need side by side."""
    _ahead.append(_Spawned(tensor_parallel_size))


class ProcessLink:
    """The API's end of the link: it starts the process, watches it and carries messages."""

    def __init__(self, args: EngineArgs, client: LinkClient, report_s: float | None = None) -> None:
        self._client = client
        spawned = _ahead.pop() if _ahead else _Spawned(args.model.tensor_parallel_size)
        self._folder, self._process = spawned.folder, spawned.process
        self._context = zmq.asyncio.Context()
        self._down = _socket(zmq.Context.shadow(self._context.underlying), zmq.PUSH)
        self._down.connect(spawned.down)  # not bind: sending to nobody must not block the loop
        self._up = _socket(self._context, zmq.PULL)
        self._up.bind(spawned.up)
        self._down.send(ORDERS.encode(EngineOrder(args, configured_logging(), report_s)))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._ended)
        self._sent = SentRequests()
        self._has_started = False
        self._receiver = asyncio.create_task(self._receive())

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            command = self._sent.pack(command.request)
        # Commands to an engine that is gone are lost; its death reaches `LinkClient.died`.
        with contextlib.suppress(zmq.Again):
            self._down.send(COMMANDS.encode(command), zmq.DONTWAIT)

    async def join(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._process.join, min(timeout_s, END_S))
        if self._process.is_alive():
            if self._has_started:  # else it may still import what it needs, and has read no command
                logger.warning("the engine has not ended by itself and is killed")
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._close()

    async def _receive(self) -> None:
        while True:
            report = REPORTS.decode(await self._up.recv())
            self._has_started = self._has_started or isinstance(report, Started)
            with going_on("a report of the engine was not processed"):
                self._client.dispatch(report)

    def _ended(self) -> None:
        """Report that the process is gone, after what it still sent has been delivered."""
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(DRAIN_S, self._report_death)

    def _report_death(self) -> None:
        code = self._process.exitcode
        message = f"the engine process ended with exit code {code}"
        self._client.died(EngineDead(message, killed=code == -signal.SIGKILL))

    def _close(self) -> None:
        atexit.unregister(self._process.kill)
        self._loop.remove_reader(self._process.sentinel)
        self._receiver.cancel()
        self._down.close()
        self._up.close()
        self._context.term()
        self._folder.remove()


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    return socket


def _main(down: str, up: str, tensor_parallel_size: int) -> None:
    """Run the engine process. It ends by Stop, by an error, or when its parent is gone."""
    _end_with_parent()
    # These are often sent to both processes; the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    spawn_ahead(tensor_parallel_size)
    if NVIDIA_DRIVER.exists():
        threading.Thread(target=_read_compiler, daemon=True).start()
    started = threading.Event()
    inbox: SimpleQueue[Command] = SimpleQueue()
    context: Context = zmq.Context()
    commands = _socket(context, zmq.PULL)  # here, as the context may end before the thread begins
    commands.bind(down)
    orders: SimpleQueue[EngineOrder] = SimpleQueue()
    threading.Thread(target=_pull, args=(commands, orders, inbox, started), daemon=True).start()
    # Here, as the API process need not wait for torch.
    from weft.engine.serve import PublishCache, run_engine

    order = orders.get()
    args = order.args
    if order.logs is not None:
        configure_logging(order.logs.level, order.logs.json)

    reports = _socket(context, zmq.PUSH)
    reports.linger = FLUSH_MS
    reports.connect(up)

    beats: Any = None

    def pulse(report: Pulse) -> None:
        """Called on a thread, which has its own socket; at the end, nobody waits for that one."""
        nonlocal beats
        if beats is None:
            beats = _socket(zmq.Context(), zmq.PUSH)
            beats.connect(up)
        beats.send(REPORTS.encode(report))

    def emit(report: Report) -> None:
        if isinstance(report, Started):
            started.set()
        reports.send(REPORTS.encode(report))

    def open_publisher() -> PublishCache:
        from weft.fleet.kv_events import KvEventPublisher  # few want it

        assert args.kv_events is not None
        return KvEventPublisher(args.kv_events, args.cache.block_size).publish

    code = 0
    try:
        publisher = None if args.kv_events is None else open_publisher
        run_engine(args, inbox, emit, pulse, order.report_s, publisher)
    except Exception:
        logger.exception("the engine failed")
        code = 1
    reports.close()
    context.term()
    os._exit(code)


def _read_compiler() -> None:
    """Read the compiler of kernels while torch is imported."""
    with contextlib.suppress(ImportError):
        from weft.kernels.compiling import read_compiler

        read_compiler()


def _pull(
    commands: zmq.Socket[bytes],
    orders: SimpleQueue[EngineOrder],
    inbox: SimpleQueue[Command],
    started: threading.Event,
) -> None:
    """Put the first message into `orders`, and the commands after it into `inbox`, up to Stop. A
    Stop that comes before the engine has started ends the process at once, as a start may take
    minutes."""
    received = ReceivedRequests()
    with contextlib.suppress(zmq.ContextTerminated):
        orders.put(ORDERS.decode(commands.recv()))
        while True:
            command = COMMANDS.decode(commands.recv())
            if isinstance(command, Stop) and not started.is_set():
                os._exit(0)
            if isinstance(command, Submit | SubmitAgain):
                command = received.unpack(command)
            inbox.put(command)
            if isinstance(command, Stop):
                break
    commands.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    die_with_parent(parent.pid)

    def watch(join: Callable[[], None]) -> None:
        join()
        os._exit(1)

    threading.Thread(target=watch, args=(parent.join,), daemon=True).start()
