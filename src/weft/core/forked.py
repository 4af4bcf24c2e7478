"""Runs untrusted work in separate processes, which have limits and can be killed.

        this process            the fork server               a worker
    ForkServer.fork ──────────▶ run_fork_server: forks ─────▶ confined; does its work
    ForkedProcess.ask ◀─────────────────────────────────────▶ by one connection

The fork server has imported what workers need, so that one starts within a millisecond. It never
reads untrusted input. It takes commands by a socket that preserves message boundaries:

    b"F" + kind, and a connection    fork a worker for this connection  -> its pid; -1: it can't
    b"E" + pid                       end a worker                       -> its wait status

All of it ends with this process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Self

from weft.core import frames
from weft.core.processes import die_with_parent, forbid_new_privileges
from weft.core.seccomp import allow_only_computing
from weft.core.stalls import StallWatch, process_clock

START_S = 120.0
"""How long the fork server may take to answer: before its first answer it imports."""
NICENESS = 5
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_TIME", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_NUMBER = struct.Struct("<i")


class ForkServer:
    """A handle of the process that forks workers; making it starts the process. Safe to use from
    several threads. Methods raise OSError if the process can't do what it is asked."""

    def __init__(self, command: str, given: bytes = b"", **environment: str) -> None:
        """command: the Python code of the process, which calls `run_fork_server`. given: the bytes
        at its standard input. It gets `environment`, but none of this process's keys and tokens."""
        self._turn = threading.Lock()
        self._stalls = StallWatch(1)
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        environment |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with other, tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", command, str(other.fileno())],
                stdin=stdin,
                pass_fds=[other.fileno()],
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stuck_s(self) -> float:
        """For how many seconds it has kept a caller waiting without computing anything."""
        return self._stalls.stuck_s()

    def fork(self, kind: bytes, connection: socket.socket) -> int:
        """Start a worker that serves the other end of this connection. Returns its pid."""
        pid = self._ask(b"F" + kind, connection.fileno())
        if pid < 0:
            raise OSError("no process can be started")
        return pid

    def end(self, pid: int) -> int:
        """End a worker. Returns its wait status."""
        return self._ask(b"E" + _NUMBER.pack(pid))

    def close(self) -> None:
        """End it, and its workers with it."""
        atexit.unregister(self.close)
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, message: bytes, *descriptors: int) -> int:
        with self._turn, self._stalls.watching(process_clock(self._process.pid)):
            socket.send_fds(self._control, [message], descriptors)
            reply = self._control.recv(_NUMBER.size)
        if not reply:
            raise ConnectionError("the process that forks workers has ended")
        (number,) = _NUMBER.unpack(reply)
        return int(number)


class ProcessEnded(Exception):
    """A worker did not answer, and has been ended."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class ForkedProcess:
    """One worker, to be used by one thread. Raises OSError if none can be started."""

    def __init__(self, server: ForkServer, kind: bytes = b"") -> None:
        self._server = server
        self._status: int | None = None
        self._connection, other = socket.socketpair()
        try:
            with other:
                self.pid = server.fork(kind, other)
        except OSError:
            self._connection.close()
            server.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as can be seen between two calls of `ask`."""
        if self._status is not None:
            return False
        self._connection.setblocking(False)
        try:  # nothing is to be read now but the end
            self._connection.recv(1)
        except BlockingIOError:
            return True
        return False

    def ask(self, question: bytes, most: int, until_s: float, cpu_s: float) -> bytes:
        """Its answer, of at most `most` bytes. Raises ProcessEnded if there is none by `until_s` on
        the monotonic clock. cpu_s: the worker's own time limit, only for the error's message."""
        try:
            self._connection.settimeout(max(until_s - time.monotonic(), 1e-3))
            frames.send(self._connection, question)
            return frames.receive(self._connection, most, until_s)
        except (OSError, EOFError, ValueError) as error:
            status = self.end()
            killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if isinstance(error, TimeoutError) or killed_by in (signal.SIGPROF, signal.SIGALRM):
                raise ProcessEnded(f"it takes more than {cpu_s:g} s") from error
            if isinstance(error, ValueError):
                raise ProcessEnded("the answer is too large") from error
            raise ProcessEnded("it crashes, or takes more memory than it may have") from error

    def end(self) -> int:
        """End it. Returns its wait status. A second call does nothing."""
        if self._status is None:
            self._status = 0
            self._connection.close()
            with contextlib.suppress(OSError):  # it has died with the fork server
                self._status = self._server.end(self.pid)
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# -- in the fork server ----------------------------------------------------------------------------


class WorkerTask(NamedTuple):
    """What a worker does, and its limits."""

    run: Callable[[socket.socket], None]
    """Serves the connection; the worker ends when this returns."""
    memory_bytes: int
    """Beyond the memory that it was forked with."""
    file_bytes: int = 0
    """The largest file that it may write; 0: it may not even open one."""


def run_fork_server(prepare: Callable[[bytes], WorkerTask]) -> NoReturn:
    """Serve a ForkServer until it closes its socket, whose descriptor is this command's argument.
    `prepare` gets a worker's kind, imports what it needs, and returns its task."""
    control = socket.socket(fileno=int(sys.argv[1]))
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            os._exit(0)
        if message[:1] == b"F":
            with socket.socket(fileno=descriptors[0]) as connection:
                number = _fork(control, connection, prepare(message[1:]))
            children.add(number)
        else:
            (pid,) = _NUMBER.unpack(message[1:])
            number = _end(pid) if pid in children else 0
            children.discard(pid)
        control.send(_NUMBER.pack(number))


def _fork(control: socket.socket, connection: socket.socket, work: WorkerTask) -> int:
    server_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return -1
    if pid:
        return pid
    try:
        control.close()
        _confine(server_pid, connection.fileno(), work)
        work.run(connection)
    finally:
        os._exit(0)


def _confine(server_pid: int, connection: int, work: WorkerTask) -> None:
    """Restrict this process to computing, using its socket and, if `work` allows it, files."""
    die_with_parent(server_pid)
    forbid_new_privileges()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, connection)
    os.closerange(connection + 1, 1024)
    os.nice(NICENESS)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
    memory = pages * resource.getpagesize() + work.memory_bytes
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, work.file_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64 if work.file_bytes else 0),
    ):
        resource.setrlimit(limit, (most, most))
    allow_only_computing(files=work.file_bytes > 0)


def _end(pid: int) -> int:
    """End a worker if it runs still. Returns its wait status."""
    os.kill(pid, signal.SIGKILL)  # it has not been waited for, so nobody else has its number
    return os.waitpid(pid, 0)[1]
