"""The server's side of worker processes for texts: it starts them, asks them and ends them."""

from __future__ import annotations

import threading
import time

import msgspec

from weft.core.errors import Overloaded
from weft.core.forked import ForkedProcess, ForkServer, ProcessEnded
from weft.text.sandbox.fork_server import COMMAND
from weft.text.sandbox.jobs import Answer, Answered, Job, Material, Missing, Task
from weft.text.sandbox.limits import MAX_ANSWER_BYTES, WALL_FACTOR, WALL_S, WorkerKind

_shared: ForkServer | None = None
_sharing = threading.Lock()


def shared_fork_server() -> ForkServer:
    """The fork server that all of this process share. It starts when the first worker is needed,
    and anew if it has died."""
    global _shared
    with _sharing:
        if _shared is None or not _shared.alive:
            _shared = ForkServer(
                COMMAND,
                TRANSFORMERS_NO_ADVISORY_WARNINGS="1",
                TRANSFORMERS_VERBOSITY="error",
                TOKENIZERS_PARALLELISM="false",
                HF_HUB_OFFLINE="1",
            )
        return _shared


class TextProcess:
    """One worker process, for one thread. Raises Overloaded if none can be started."""

    def __init__(self, kind: WorkerKind) -> None:
        self.kind = kind
        self._worn = False
        self._keys: set[str] = set()
        """The tokenizers that it has been given."""
        try:
            self._process = ForkedProcess(shared_fork_server(), bytes([kind]))
        except OSError as error:
            raise Overloaded(f"no process for texts can be started now: {error}") from error
        self.pid = self._process.pid
        self.end = self._process.end

    @property
    def spent(self) -> bool:
        """Whether it must be replaced: it has ended, or wants to."""
        return self._worn or not self._process.alive

    def ask(self, job: Job, material: Material | None, cpu_s: float) -> Answer:
        """Send a job, and return the answer. Raises ProcessEnded if none comes in time."""
        until_s = time.monotonic() + WALL_FACTOR * cpu_s + WALL_S
        key = material.key if material is not None else ""
        answer = self._exchange(
            Task(job, cpu_s, key, None if key in self._keys else material), until_s
        )
        if isinstance(answer, Missing):
            answer = self._exchange(Task(job, cpu_s, key, material), until_s)
        self._keys.add(key)
        return answer

    def _exchange(self, task: Task, until_s: float) -> Answer:
        question = msgspec.msgpack.encode(task)
        message = self._process.ask(question, MAX_ANSWER_BYTES, until_s, task.cpu_s)
        try:
            report = msgspec.msgpack.decode(message, type=Answered)
        except ValueError as error:
            self.end()
            raise ProcessEnded("its answer is malformed") from error
        self._worn = report.worn
        return report.answer
