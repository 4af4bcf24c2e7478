"""Starts and drives the processes of a model's other ranks, from the first rank.

                      ring: orders, for all ranks alike
    first rank  ────────────────────────────────────────────────>  other rank
                <───────────────────────────────────────────────>
                      a socket for each: parcels down, answers up

The first rank lives in the engine's process. If a rank ends or gives no sign of life, all end, as
the others no longer have the whole model.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import mmap
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from weft.checkpoint.pack import AdapterImage
from weft.core.config import EngineArgs
from weft.core.errors import EngineDead, WeftError
from weft.core.locked_folder import LockedFolder
from weft.kernels.collective.base import Ranks
from weft.kernels.collective.group import join_group, leave_group
from weft.schedule.extents import Move
from weft.schedule.plan import StepResult
from weft.worker.gathered import Part
from weft.worker.inputs import StepInputs
from weft.worker.memory import host_bytes, shared_file
from weft.worker.others import OtherRanks
from weft.worker.parcels import content_of, fill, parcels
from weft.worker.protocol import Flight, ProbeResult
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
    packed,
)
from weft.worker.ring import RingWriter, ring_bytes
from weft.worker.spawn import TRACES, spawn
from weft.worker.starting import BUILT, IMPORTS, Starting
from weft.worker.threads import wait_for

logger = logging.getLogger(__name__)

PREFIX = "weft-ranks-"
RING_BYTES = 16 << 20
WAIT_S = 0.01
"""How long to wait between two looks at the progress of a start."""
WATCH_S = 0.5
"""How long to wait between two looks whether ranks hang."""
SETTLE_S = 30.0
"""How long ranks may take to come to rest after a failed step; and how long they may be silent."""
END_S = 3.0
"""How long a rank may take to end by itself, and this one to tell ranks and leave the group."""
TRACES_S = 0.5
"""How long a rank that hangs may take to write down where it is."""


@dataclass(slots=True)
class _Peer:
    """One other rank."""

    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    connection: Connection
    """The same socket, for whole messages."""
    silent_s: float = 0.0
    """For how long it has given no sign of life. Pauses of the machine, or of the container, do not
    count, since it is paused too."""
    stuck_s: dict[str, float] = field(default_factory=dict)


class Peers(OtherRanks):
    """Starts the other ranks, sends them orders, and takes their answers. Safe to use from any
    thread; orders from one thread keep their order."""

    def __init__(self, args: EngineArgs, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called, on another thread, when a rank is gone or hangs. The processes end
        with this one."""
        self.num_ranks = args.model.tensor_parallel_size
        self.host_fd = shared_file(host_bytes(args.lora.adapter_host_memory))
        """The memory for images on the host, which all ranks map."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._waiting: dict[tuple[int, int], Future[Any]] = {}
        """By call and rank."""
        self._trouble: EngineDead | None = None
        """Why there are no ranks any more."""
        self._step_failed = ""
        self._newest: StepInputs | None = None
        """The last step that was ordered."""
        self._closing = False
        self._ranks: Ranks | None = None
        """This process as the first rank, once it has joined."""
        self._folder = LockedFolder(PREFIX)
        self._starting = Starting(self.num_ranks, time.monotonic())
        self._start(args)
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, args: EngineArgs) -> None:
        others = range(1, self.num_ranks)
        # The system kills a process with the thread that started it, and others than this may end.
        lasts = threading.current_thread() is threading.main_thread()
        parent_pid = os.getpid() if lasts else None
        bells = [os.eventfd(0) for _ in others]
        ring_fd = os.memfd_create("weft-ring")
        os.ftruncate(ring_fd, ring_bytes(RING_BYTES, len(bells)))
        self._ring = RingWriter(mmap.mmap(ring_fd, 0), bells)
        self._peers: list[_Peer] = []
        for rank, bell in zip(others, bells, strict=True):
            process, link = spawn([ring_fd, bell, self.host_fd])
            peer = _Peer(rank, process, link, Connection(os.dup(link.fileno())))
            self._peers.append(peer)
            setup = RankSetup(args, rank, parent_pid, str(self._folder.path), _logs())
            with contextlib.suppress(OSError):  # `_listen` sees that it is gone
                peer.connection.send_bytes(pickle.dumps(setup))
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        os.close(ring_fd)

    def meet(self) -> None:
        """Wait until all ranks have imported what they need. Raises EngineDead."""
        self.stage_ended(IMPORTS)
        self._wait_until(IMPORTS)

    def join(self, device: torch.device, make_ranks: Callable[[], Ranks]) -> Ranks:
        """Make this process the first rank: join the group, then return `make_ranks()`. Call `meet`
        before. Raises ConfigError, EngineDead."""
        join_group(0, self.num_ranks, str(self._folder.path), device)
        self._ranks = make_ranks()
        return self._ranks

    def stage_ended(self, stage: str) -> None:
        """Note that the first rank has ended a stage of its start."""
        self._starting.end(0, stage, time.monotonic())

    def wait(self) -> None:
        """Wait until all other ranks can take steps. Raises EngineDead."""
        self._wait_until(BUILT)

    def _wait_until(self, stage: str) -> None:
        while not self._starting.others_ended(stage):
            self.check()
            time.sleep(WAIT_S)
        self.check()

    def why_lost(self, timeout_s: float) -> EngineDead | None:
        """Why the other ranks are gone, if that becomes known within `timeout_s`; else None. An
        operation of all ranks may fail before that is known."""
        deadline = time.monotonic() + timeout_s
        while self._trouble is None and time.monotonic() < deadline:
            time.sleep(WAIT_S)
        return self._trouble

    # -- what all ranks do in one order --------------------------------------------------------

    def step(self, inputs: StepInputs) -> None:
        self.check_steps()
        self._order(StepOrder.after(self._newest, inputs))
        self._newest = inputs

    def joined(self, flight: Flight) -> Flight:
        return _Joined(flight, self.check_steps)

    def move(self, moves: Sequence[Move]) -> None:
        self._order(MoveOrder(tuple(moves)))

    def clear(self, slots: Sequence[int]) -> None:
        self._order(ClearOrder(tuple(slots)))

    def install(self, slot: int, start: int, image: AdapterImage) -> None:
        self._order(InstallOrder(slot, start, image.layout))

    def settle(self) -> None:
        for done in self._ask(SettleOrder):
            try:
                error = done.result(SETTLE_S)
            except TimeoutError:
                error = f"a rank has not finished its steps within {SETTLE_S:.0f} s"
            if error:
                raise EngineDead(f"the ranks of the model can't go on: {error}")
        self._step_failed = ""

    def check_steps(self) -> None:
        """Raises RuntimeError if a step has failed on another rank, and EngineDead if one is gone.
        A step that fails on one rank fails for all; `settle` then is the end of it."""
        self.check()
        if self._step_failed:
            raise RuntimeError(self._step_failed)

    def check(self) -> None:
        """Raises EngineDead if a rank is gone."""
        if self._trouble is not None:
            raise self._trouble

    # -- what runs beside the steps ------------------------------------------------------------

    def write(self, start: int, image: AdapterImage, offset: int | None) -> list[Future[int]]:
        num, where = image.layout.num_elements, DataPlace(offset)
        with self._parts(image, where) as files:
            return self._ask(lambda call: WriteOrder(call, start, num, where), files)

    def probe(
        self, image: AdapterImage, offset: int | None, *, paced: bool
    ) -> list[Future[ProbeResult | WeftError]]:
        # Not a view of the data, with which all of them would be sent.
        bare, where = replace(image, data=image.data.new_empty(0)), DataPlace(offset)
        with self._parts(image, where) as files:
            return self._ask(lambda call: ProbeOrder(call, bare, where, paced), files)

    def parts(self, part: Part, dtype: torch.dtype) -> list[torch.Tensor]:
        """See `OtherShares.parts`."""
        with parcels(len(self._peers)) as files:
            shapes = _results(self._ask(lambda call: PartOrder(call, part), files))
            return [content_of(f, dtype).view(s) for f, s in zip(files, shapes, strict=True)]

    def row_squares(
        self, part: Part, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """See `OtherShares.row_squares`."""
        adapter_rank = len(pairs[0][0])
        with parcels(len(self._peers)) as files:
            for file, pair in zip(files, pairs, strict=True):
                fill(file, torch.cat([matrix.flatten() for matrix in pair]))
            asked = self._ask(lambda call: SquaresOrder(call, part, adapter_rank), files)
        return [torch.from_numpy(squares) for squares in _results(asked)]

    def stuck_s(self) -> dict[str, float]:
        """For how many seconds the other ranks' threads have been stuck, by what they do; and under
        "ranks", for how long a rank has been silent."""
        found = {"ranks": self._silent_s()}
        for peer in self._peers:
            for part, stuck_s in peer.stuck_s.items():
                found[part] = max(found.get(part, 0.0), stuck_s)
        return found

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._trouble is None:
            # A rank may not read any more.
            wait_for("telling ranks to end", lambda: self._send(CloseOrder()), END_S)
        self._ring.closed = True
        if self._ranks is not None:
            wait_for("leaving the group of ranks", leave_group, END_S)
        deadline = time.monotonic() + END_S
        for peer in self._peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.process.wait(max(deadline - time.monotonic(), 0.01))
            peer.process.kill()
            peer.process.wait()
            peer.link.close()
        self._ring.close()
        os.close(self.host_fd)
        self._folder.remove()

    # -- orders and answers --------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        self.check()
        self._send(order)

    def _send(self, order: Order) -> None:
        self._ring.write(packed(order))

    @contextlib.contextmanager
    def _parts(self, image: AdapterImage, where: DataPlace) -> Iterator[list[int]]:
        """A context with a file for each other rank, which has its part of the image; without any
        if the ranks read it from the host's memory."""
        with parcels(len(self._peers) if where.offset is None else 0) as files:
            for peer, file in zip(self._peers, files, strict=False):
                fill(file, image.data_of(peer.rank))
            yield files

    def _ask(self, order: Callable[[int], Order], files: Sequence[int] = ()) -> list[Future[Any]]:
        """Give an order with a call id, and each rank its file as a parcel. Returns their
        answers."""
        call = next(self._calls)
        futures: list[Future[Any]] = [Future() for _ in self._peers]
        with self._lock:
            self.check()
            for peer, future in zip(self._peers, futures, strict=True):
                self._waiting[call, peer.rank] = future
        for peer, file in zip(self._peers, files, strict=False):
            with contextlib.suppress(OSError):  # `_listen` sees that it is gone
                socket.send_fds(peer.link, [call.to_bytes(8, "little")], [file])
        self._send(order(call))
        return futures

    def _listen(self, peer: _Peer) -> None:
        """Take what a rank reports, until it is gone."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._take(peer, pickle.loads(peer.connection.recv_bytes()))
        if not self._closing:
            code = peer.process.wait()
            self._lose(f"rank {peer.rank} of the model has ended with exit code {code}")

    def _take(self, peer: _Peer, report: Report) -> None:
        peer.silent_s = 0.0
        match report:
            case RankAnswer(call, result):
                with self._lock:
                    future = self._waiting.pop((call, peer.rank))
                future.set_result(result)
            case StageEnded(stage):
                self._starting.end(peer.rank, stage, time.monotonic())
            case StepFailed(message):
                logger.error("a step failed on rank %d: %s", peer.rank, message)
                failed = self._step_failed = f"a step failed on rank {peer.rank}: {message}"
                threading.Thread(target=self._expect_settled, args=(failed,), daemon=True).start()
            case RankAlive(stuck_s):
                peer.stuck_s = stuck_s
            case RankLost(message):
                self._lose(f"rank {peer.rank} of the model: {message}")

    def _watch(self) -> None:
        """End all ranks if one hangs: during the start, or later, without a sign of life."""
        while not self._closing and self._trouble is None:
            time.sleep(WATCH_S)
            for peer in self._peers:
                peer.silent_s += WATCH_S
            problem = self._starting.hangs(time.monotonic())
            silent_s = self._silent_s()
            if self._starting.is_over and silent_s > SETTLE_S:
                problem = f"a rank has given no sign of life for {silent_s:.0f} s"
            if problem:
                self._trace()
                self._lose(problem)

    def _silent_s(self) -> float:
        return max((peer.silent_s for peer in self._peers), default=0.0)

    def _trace(self) -> None:
        """Have all ranks log where their threads are, as one of them hangs."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # there may be no log
            faulthandler.dump_traceback()
        for peer in self._peers:
            peer.process.send_signal(TRACES)
        time.sleep(TRACES_S)

    def _expect_settled(self, failed: str) -> None:
        """End all ranks unless the failed step is settled in time: the first rank may wait, within
        the step, for a rank that has given up. A later failed step has its own time."""
        time.sleep(SETTLE_S)
        if self._step_failed is failed and not self._closing:
            self._lose(failed)

    def _lose(self, message: str) -> None:
        with self._lock:
            if self._trouble is not None or self._closing:
                return
            self._trouble = EngineDead(message)
            self._ring.closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        logger.critical("%s: the engine ends", message)
        for peer in self._peers:  # none can go on without the others
            peer.process.kill()
        for future in waiting:
            future.set_exception(self._trouble)
        self._on_lost()
        if self._ranks is not None:
            self._ranks.abandon(lambda: self._closing)


def _results(asked: Sequence[Future[Any]]) -> list[Any]:
    """What ranks answer. Raises WeftError if one could not do what it was asked."""
    results = [done.result() for done in asked]
    for result in results:
        if isinstance(result, WeftError):
            raise result
    return results


def _logs() -> tuple[str, bool] | None:
    """(level, whether JSON) of this process's log; None if logging is not configured."""
    try:
        from weft.metrics.logs import configured_logging
    except ModuleNotFoundError:  # benchmarks do without what servers need
        return None
    logs = configured_logging()
    return None if logs is None else (logs.level, logs.json)


class _Joined:
    """The flight of a step that all ranks have to get through."""

    def __init__(self, own: Flight, check: Callable[[], None]) -> None:
        self._own = own
        self._check = check

    def result(self) -> StepResult:
        result = self._own.result()
        self._check()
        return result
