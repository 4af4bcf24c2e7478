"""The server's side of worker processes: it starts them, asks them and ends them."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec

from weft.core.errors import Overloaded
from weft.text.sandbox import frames
from weft.text.sandbox.jobs import Answer, Answered, Job, Material, Missing, Task
from weft.text.sandbox.limits import MAX_ANSWER_BYTES, WALL_FACTOR, WALL_S, WorkerKind
from weft.text.sandbox.mother import PID

_START_S = 120.0
"""How long a worker may take to be forked: the first waits for imports."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_TIME", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_COMMAND = "from weft.text.sandbox.mother import main; main()"


class Mother:
    """The process that forks workers. All of this process share one, which is started when the
    first worker is needed, and anew if it has died. It ends when this process does."""

    _shared: Mother | None = None
    _lock = threading.Lock()

    @classmethod
    def shared(cls) -> Mother:
        with cls._lock:
            if cls._shared is None or cls._shared._process.poll() is not None:
                cls._shared = Mother()
            return cls._shared

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_S)
        # It has no secrets: neither keys nor tokens are in its environment.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(self, kind: WorkerKind, connection: socket.socket) -> int:
        """Start a worker that serves the other end of this socket. Returns its pid."""
        with self._turn:
            socket.send_fds(self._control, [b"F" + bytes([kind])], [connection.fileno()])
            return self._reply()

    def end(self, pid: int) -> int:
        """End a worker. Returns its wait status."""
        with self._turn:
            self._control.send(b"E" + PID.pack(pid))
            return self._reply()

    def close(self) -> None:
        """End it, and its workers with it."""
        atexit.unregister(self.close)
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _reply(self) -> int:
        reply = self._control.recv(PID.size)
        if not reply:
            raise ConnectionError("the process that forks workers has ended")
        (number,) = PID.unpack(reply)
        return int(number)


class ProcessEnded(Exception):
    """A worker did not answer, and has been ended."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class TextProcess:
    """One worker process, for one thread. Raises Overloaded if there can be none now."""

    def __init__(self, kind: WorkerKind) -> None:
        self.kind = kind
        self._worn = False
        self._keys: set[str] = set()
        """The tokenizers that it has been given."""
        self._connection, other = socket.socketpair()
        self._status: int | None = None
        self._mother = Mother.shared()
        try:
            with other:
                self.pid = self._mother.fork(kind, other)
        except OSError as error:
            self._connection.close()
            self._mother.close()
            raise Overloaded(f"no process for texts can be started now: {error}") from error

    @property
    def spent(self) -> bool:
        """Whether it must be replaced: it has ended, or wants to."""
        if self._worn or self._status is not None:
            return True
        self._connection.setblocking(False)
        try:  # nothing is to be read now but the end
            self._connection.recv(1)
        except BlockingIOError:
            return False
        return True

    def ask(self, job: Job, material: Material | None, cpu_s: float) -> Answer:
        """Its answer. Raises ProcessEnded if none comes in time."""
        until_s = time.monotonic() + WALL_FACTOR * cpu_s + WALL_S
        key = material.key if material is not None else ""
        answer = self._exchange(
            Task(job, cpu_s, key, None if key in self._keys else material), until_s
        )
        if isinstance(answer, Missing):
            answer = self._exchange(Task(job, cpu_s, key, material), until_s)
        self._keys.add(key)
        return answer

    def end(self) -> int:
        """End it. Returns its wait status. A second call does nothing."""
        if self._status is None:
            self._status = 0
            self._connection.close()
            with contextlib.suppress(OSError):  # it has died with the mother
                self._status = self._mother.end(self.pid)
        return self._status

    def _exchange(self, task: Task, until_s: float) -> Answer:
        question = msgspec.msgpack.encode(task)
        try:
            self._connection.settimeout(max(until_s - time.monotonic(), 1e-3))
            frames.send(self._connection, question)
            message = frames.receive(self._connection, MAX_ANSWER_BYTES, until_s)
            report = msgspec.msgpack.decode(message, type=Answered)
        except (OSError, EOFError, ValueError) as error:
            raise ProcessEnded(self._why(error, task.cpu_s)) from error
        self._worn = report.worn
        return report.answer

    def _why(self, error: Exception, cpu_s: float) -> str:
        status = self.end()
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if isinstance(error, TimeoutError) or killed_by == signal.SIGPROF:
            return f"it takes more than {cpu_s:g} s"
        if isinstance(error, ValueError):
            return "the answer is too large"
        return "it crashes, or takes more memory than it may have"
