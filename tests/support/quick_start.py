"""Weft's processes without the seconds in which Python imports: forked from one that has done so.

    this process           the fork server         weft serve                its engine
    start_weft(...) ─────▶ forks ────────────────▶ forks a spare ──────────▶ is the spare, told by
    quick_engines ───────▶ forks an engine         and runs the command      multiprocessing
    Forked(code=...) ────▶ forks ────────────────▶ runs the code

A server would spawn its engine, a new Python that imports torch. Here it takes the spare, which was
forked from it before it had any threads. An engine after that one is spawned. Where an engine of
this process has several ranks, the others are forked too. All workers of a run ask one fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from io import BytesIO
from multiprocessing import context, get_context, popen_fork, reduction, util
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest

from weft.worker import spawn

ENGINE = "weft-engine"
"""What the system calls a forked process that runs an engine."""
_NUMBER = struct.Struct("<i")


class _Order(NamedTuple):
    """What the fork server is to start: a command, a process of multiprocessing, or code."""

    args: Sequence[str]
    """Those of the command `weft`."""
    process: bytes
    """Pickled. Its parent ends when the other end of a pipe is closed."""
    code: str
    """What a rank runs, or other code. It has a socket to whoever asks instead of the pipe."""
    environment: dict[str, str]
    folder: str
    max_files: int | None
    """How many it may have open."""


class Forked:
    """What the fork server has forked, with the methods of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        *descriptors: int,
        args: Sequence[str] = (),
        process: bytes = b"",
        code: str = "",
        max_files: int | None = None,
    ) -> None:
        """descriptors: its standard output and error, and the pipe of a `process` or the socket of
        `code`, whose number is the code's argument."""
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        order = _Order(args, process, code, dict(os.environ), str(Path.cwd()), max_files)
        self.pid = fork_server().ask(pickle.dumps(order), *descriptors)
        self.ended = os.pidfd_open(self.pid)
        """It can be read when the process has ended."""
        weakref.finalize(self, os.close, self.ended)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        if not select.select([self.ended], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("weft", timeout_s or 0.0)
        with self._reaping:  # the fork server can wait for it once
            if self.returncode is None:
                status = fork_server().ask(_NUMBER.pack(self.pid))
                self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_weft(args: Sequence[str], log: BinaryIO, max_files: int | None = None) -> Forked:
    """The command `weft`, in a session of its own."""
    return Forked(log.fileno(), log.fileno(), args=args, max_files=max_files)


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """The engines that this process starts meanwhile are the fork server's children, and so are the
    ranks of engines in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.SpawnProcess, "_Popen", staticmethod(_ForkedPopen))
        patch.setattr(spawn, "_start", _start_rank)
        yield


@pytest.fixture
def quick_engines() -> Iterator[None]:
    """The engines that a test starts are forked, and the ranks of those in its own process."""
    with quick_start():
        yield


def children_of(pid: int) -> list[int]:
    """The processes that this one has started, on whatever thread; threads may end meanwhile."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def engine_of(pid: int) -> int:
    """The process that runs a server's engine. The process that multiprocessing keeps for its
    resources may be beside it."""
    found = [child for child in children_of(pid) if _runs_engine(child)]
    assert len(found) == 1, found
    return found[0]


def _runs_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == ENGINE:
            return True
    return b"spawn_main" in command_of(pid)


def command_of(pid: int) -> bytes:
    """Empty if there is no such process, or it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class _ForkServer:
    """The fork server, as this process knows it."""

    def __init__(self) -> None:
        self._turn = get_context("fork").Lock()  # for threads and for forked workers
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from quick_start import fork_as_told; fork_as_told()"
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        atexit.register(self._end)

    def ask(self, message: bytes, *descriptors: int) -> int:
        with self._turn:
            socket.send_fds(self._control, [message], descriptors)
            (number,) = _NUMBER.unpack(self._control.recv(_NUMBER.size))
        return int(number)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


_starting = threading.Lock()


def fork_server() -> _ForkServer:
    """The fork server of this process, and of all processes that are forked from it later. It is
    started by the first call."""
    with _starting:
        return _only_fork_server()


@functools.cache
def _only_fork_server() -> _ForkServer:
    return _ForkServer()


class _ForkedPopen(popen_fork.Popen):
    """How multiprocessing in this process knows a child of the fork server."""

    method = "spawn"

    def _launch(self, process: Any) -> None:
        told, alive = os.pipe()
        self._forked = Forked(1, 2, told, process=_pickled(self, process))
        os.close(told)
        self.pid, self.sentinel = self._forked.pid, self._forked.ended
        self.finalizer = util.Finalize(self, os.close, (alive,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        self.returncode = self._forked.poll() if flag else self._forked.wait()
        return self.returncode


def _start_rank() -> spawn.Spawned:
    ours, theirs = socket.socketpair()
    with theirs:
        forked = Forked(1, 2, theirs.fileno(), code=spawn.COMMAND)
    return spawn.Spawned(forked, ours)


def _pickled(popen: object, process: Any) -> bytes:
    packed = BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(process, packed)
    finally:
        context.set_spawning_popen(None)
    return packed.getvalue()


# -- in the fork server ----------------------------------------------------------------------------


def fork_as_told() -> None:
    """Fork processes, and wait for those that have ended, until the other end of the socket closes
    whose number is the command's argument. Each process leaves this loop and does what it is for.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    # Whoever started this process may have held Ctrl-C back meanwhile, or ignore it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import_all()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 3)
        if not message:
            os._exit(0)
        if len(message) == _NUMBER.size:
            control.send(_NUMBER.pack(os.waitpid(*_NUMBER.unpack(message), 0)[1]))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            break
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(_NUMBER.pack(pid))
    _run(pickle.loads(message), *descriptors)


def _import_all() -> None:
    from tiny import BASE

    from weft.text import load_tokenizer

    commands = ("weft.cli.main", "weft.cli.serve")
    for name in (*commands, "weft.engine.serve", "weft.worker.rank", "xgrammar"):
        importlib.import_module(name)
    load_tokenizer(str(BASE))
    gc.collect()
    gc.freeze()


def _run(order: _Order, out: int, err: int, told: int = -1) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for standard, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, standard)
    for descriptor in {null, out, err}:
        os.close(descriptor)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    if order.max_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (order.max_files, order.max_files))
    if order.process:
        process = pickle.loads(order.process)
        process._parent_pid = os.getppid()
        _run_engine(process, told)
    if order.code:
        _run_code(order.code, told)
    spare = _Spare()
    spawned = context.SpawnProcess._Popen

    def start(process: Any) -> object:
        return spawned(process) if spare.is_taken else _SparePopen(process, spare)

    context.SpawnProcess._Popen = staticmethod(start)
    from weft.cli.main import app

    app(list(order.args), prog_name="weft")


def _run_engine(process: Any, told: int) -> None:
    """Be that process, whose parent has the other end of a pipe. Does not return."""
    code = 1
    try:
        Path("/proc/self/comm").write_text(ENGINE)
        code = process._bootstrap(parent_sentinel=told)
    finally:
        os._exit(code)


def _run_code(code: str, link: int) -> None:
    """Run that code. A rank ends with its socket, as the fork server is not the first rank. Does
    not return."""
    from weft.worker import rank

    rank.die_with_parent = lambda _: None
    sys.argv[1:] = [str(link)]
    failed = 1
    try:
        exec(code, {})
        failed = 0
    except SystemExit as end:
        failed = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


class _Spare:
    """A child that waits until it is told what to run."""

    def __init__(self) -> None:
        self.is_taken = False
        told, self.orders = os.pipe()
        """The end at which this process tells it. It ends when that is closed."""
        self.sentinel, alive = os.pipe()
        """The end that says when the child has ended."""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.orders)
            os.close(self.sentinel)
            with contextlib.suppress(EOFError):
                _run_engine(pickle.load(os.fdopen(told, "rb", buffering=0, closefd=False)), told)
            os._exit(0)
        os.close(told)
        os.close(alive)


class _SparePopen(popen_fork.Popen):
    """How multiprocessing in a server knows the spare."""

    method = "spawn"

    def __init__(self, process: Any, spare: _Spare) -> None:
        self._spare = spare
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        self._spare.is_taken = True
        self.pid, self.sentinel = self._spare.pid, self._spare.sentinel
        os.write(self._spare.orders, _pickled(self, process))
        self.finalizer = util.Finalize(self, util.close_fds, (self._spare.orders, self.sentinel))
