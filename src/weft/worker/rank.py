"""The process of any rank of a model but the first: it does what the first rank does.

It reads orders from the ring, one by one, and carries them out as `weft.worker.protocol` says.
Slow orders run on other threads, and are answered over the socket. The process ends when the
socket closes, or with the thread that started it.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.checkpoint.base import row_squares
from weft.core.errors import AdapterUnavailable, WeftError, to_wire
from weft.core.processes import die_with_parent, freeze_heap
from weft.core.stages import Stages
from weft.kernels.collective import make_ranks
from weft.kernels.collective.group import join_group, leave_group
from weft.models.loading import device_of
from weft.worker.build import DeviceParts, allocate, loading, prepare, row_bytes
from weft.worker.inputs import StepInputs
from weft.worker.memory import HostMemory
from weft.worker.parcels import content_of, fill
from weft.worker.protocol import Flight, ProbeResult
from weft.worker.reading import aside
from weft.worker.records import (
    ClearOrder,
    CloseOrder,
    DataPlace,
    InstallOrder,
    MoveOrder,
    Order,
    PartOrder,
    ProbeOrder,
    RankAlive,
    RankAnswer,
    RankLost,
    RankSetup,
    Report,
    SettleOrder,
    SquaresOrder,
    StageEnded,
    StepFailed,
    StepOrder,
    WriteOrder,
)
from weft.worker.ring import RingReader
from weft.worker.selfcheck import probed
from weft.worker.spawn import TRACES, received
from weft.worker.starting import BUILT, IMPORTS
from weft.worker.threads import WatchedThreads
from weft.worker.worker import DeviceSteps

PULSE_S = 1.0
"""The time between two signs of life."""
SPIN_S = 2e-3
"""How long a rank with a GPU polls for the next order before it sleeps."""
AHEAD = 2
"""The most steps that may be under way on the device."""


class _Link:
    """The socket to the first rank: reports go up, and parcels come down on a thread."""

    def __init__(self, down: socket.socket, connection: Connection) -> None:
        """`connection`: the same socket, for whole messages."""
        self._down = down
        self._connection = connection
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        self._parcels: dict[int, int] = {}
        """Files by call id."""

    def report(self, report: Report) -> None:
        with self._sending:
            self._connection.send_bytes(pickle.dumps(report))

    def listen(self) -> None:
        """Take parcels until the first rank is gone, which ends this process."""
        try:
            while True:
                call, (file,), _, _ = socket.recv_fds(self._down, 8, 1)
                with self._arrived:
                    self._parcels[int.from_bytes(call, "little")] = file
                    self._arrived.notify_all()
        except (OSError, ValueError):  # no file comes, or this process has too many
            os._exit(1)

    @contextmanager
    def parcel(self, call: int) -> Iterator[int]:
        """A context with the file that came with an order."""
        with self._arrived:
            self._arrived.wait_for(lambda: call in self._parcels)
            file = self._parcels.pop(call)
        try:
            yield file
        finally:
            os.close(file)


class RankLoop:
    """Carries out orders, on one thread."""

    def __init__(self, parts: DeviceParts, host: HostMemory, link: _Link) -> None:
        self._parts = parts
        self._host = host
        self._link = link
        self._steps = DeviceSteps(parts.model, parts.pool, parts.executor, parts.activity)
        self._flights: deque[Flight] = deque()
        self._newest: StepInputs | None = None
        """The last step that was ordered."""
        self._threads = {
            "loaders": WatchedThreads(2, "weft-loader"),
            "registrars": WatchedThreads(2, "weft-registrar"),
        }

    def run(self, ring: RingReader) -> None:
        while True:
            order: Order = pickle.loads(ring.read())
            if isinstance(order, CloseOrder):
                self._settle()  # another rank may be waiting for the sums of a step under way
                return
            self._carry_out(order)

    def beat(self) -> None:
        """Give signs of life until the process ends."""
        while True:
            stuck_s = {name: threads.stuck_s() for name, threads in self._threads.items()}
            self._link.report(RankAlive(stuck_s))
            time.sleep(PULSE_S)

    def _carry_out(self, order: Order) -> None:
        steps = self._steps
        match order:
            case StepOrder():
                self._newest = order.inputs(self._newest)
                self._step(self._newest)
            case MoveOrder(moves):
                steps.move(moves)
            case ClearOrder(slots):
                steps.clear(slots)
            case InstallOrder(slot, start, layout):
                steps.place(slot, start, layout)
            case SettleOrder(call):
                self._link.report(RankAnswer(call, self._settle()))
            case WriteOrder():
                self._answer("loaders", order.call, self._write, order, steps.wait_moved)
            case ProbeOrder():
                self._answer("registrars", order.call, self._probe, order)
            case PartOrder():
                self._answer("registrars", order.call, self._part, order)
            case SquaresOrder():
                self._answer("registrars", order.call, self._squares, order)

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, inputs: StepInputs) -> None:
        """Launch a step. Only a failure is reported, as the first rank has the same tokens."""
        while len(self._flights) >= AHEAD:
            self._end(self._flights.popleft())
        try:
            flight = self._steps.step(inputs)
        except Exception as error:
            self._failed(error)
            return
        if isinstance(flight, Future):
            flight.add_done_callback(self._look_at)
        self._flights.append(flight)

    def _end(self, flight: Flight) -> None:
        try:
            flight.result()
        except Exception as error:
            if not isinstance(flight, Future):
                self._failed(error)

    def _look_at(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._link.report(StepFailed(f"{type(error).__name__}: {error}"))

    def _settle(self) -> str:
        """Wait for all steps. Returns why the device is unusable, or ""."""
        while self._flights:
            self._end(self._flights.popleft())
        try:
            self._steps.settle()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # -- on threads ----------------------------------------------------------------------------

    def _answer(self, threads: str, call: int, work: Callable[..., object], *args: object) -> None:
        def run() -> None:
            try:
                result = work(*args)
            except Exception as error:
                result = AdapterUnavailable(to_wire(error)[1], "model")
            self._link.report(RankAnswer(call, result))

        self._threads[threads].submit(run)

    def _write(self, order: WriteOrder, wait_moved: Callable[[], object]) -> int:
        data = self._data(order.call, order.where, order.num_elements)
        wait_moved()
        return self._steps.pool.write(order.start, data)

    def _probe(self, order: ProbeOrder) -> ProbeResult:
        check = self._parts.self_check
        assert check is not None, "there are no checks"
        data = self._data(order.call, order.where, order.image.layout.num_elements)
        return probed(check, replace(order.image, data=data), order.paced, time.monotonic)

    def _part(self, order: PartOrder) -> tuple[int, ...]:
        with self._link.parcel(order.call) as file, aside(self._parts.model.device):
            part = order.part.of(self._parts.model.weights)
            fill(file, part.contiguous())
        return tuple(part.shape)

    def _squares(self, order: SquaresOrder) -> NDArray[np.float32]:
        with self._link.parcel(order.call) as file, aside(self._parts.model.device):
            part = order.part.of(self._parts.model.weights)
            pair, rank = content_of(file, torch.float32), order.adapter_rank
            end = rank * part.shape[1]
            a, b = pair[:end].view(rank, -1), pair[end:].view(-1, rank)
            return row_squares(part, a, b).numpy()

    def _data(self, call: int, where: DataPlace, num_elements: int) -> torch.Tensor:
        """This rank's part of an image."""
        dtype = self._parts.model.dtype
        num_bytes = num_elements * dtype.itemsize
        memory = self._host.memory
        if where.offset is None or memory is None:
            with self._link.parcel(call) as file:
                return content_of(file, dtype)
        start = where.offset + self._parts.model.shard.rank * num_bytes
        return memory[start : start + num_bytes].view(dtype)


def main() -> None:
    """Serve until the first rank says to end, or is gone."""
    down = socket.socket(fileno=int(sys.argv[1]))
    files = received(down, 3)
    if not files:
        return
    ring_fd, bell, host_fd = files
    connection = Connection(os.dup(down.fileno()))
    setup: RankSetup = pickle.loads(connection.recv_bytes())
    if setup.parent_pid is not None:
        die_with_parent(setup.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to all; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    if setup.logs is not None:
        from weft.metrics.logs import configure_logging  # it needs what benchmarks do without

        configure_logging(*setup.logs)
    faulthandler.register(TRACES)
    link = _Link(down, connection)
    threading.Thread(target=link.listen, daemon=True).start()
    args, size = setup.args, setup.args.model.tensor_parallel_size
    stages = Stages(lambda stage: link.report(StageEnded(stage)))
    stages.end(IMPORTS)
    try:
        device = device_of(args.model.device, setup.rank)
        width = row_bytes(args.model, device)
        model = loading(args, setup.rank)
        join_group(setup.rank, size, setup.folder, device)
        ranks = make_ranks(device, width)
        stages.end("ranks")
        parts = allocate(args, stages, ranks, model.result)
        loop = RankLoop(parts, prepare(args, parts, stages, ranks, host_fd), link)
        memory = mmap.mmap(ring_fd, 0)
        spin_s = SPIN_S if device.type == "cuda" else 0.0
        ring = RingReader(memory, size - 1, setup.rank - 1, bell, spin_s)
        threading.Thread(target=loop.beat, daemon=True).start()
        freeze_heap()
        stages.end(BUILT)
        loop.run(ring)
        leave_group()
    except Exception as error:
        message = error.message if isinstance(error, WeftError) else repr(error)
        link.report(RankLost(message))
        os._exit(1)
    os._exit(0)
