"""The engine's end of the processes that compile forms; the other end is `weft.grammar.mother`."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from weft.core.errors import Overloaded, from_wire
from weft.core.sampling import StructuredOutputs
from weft.grammar.compiler import Limits
from weft.grammar.mother import (
    COMMAND,
    MAX_COMPILED_BYTES,
    FormAnswer,
    Setup,
)
from weft.grammar.schema import FIELD, refusal
from weft.grammar.vocabulary import Vocabulary

START_S = 120.0
"""How long the mother of these processes may take to start."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_ANSWER = msgspec.msgpack.Decoder(FormAnswer)


class CompilerProcesses:
    """Has forms compiled by processes that can't harm this one. Safe to use from several threads.

    The process that they are forked from starts at once, and again if somebody has killed it. It
    ends with this one, however that ends.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._setup = Setup(list(vocabulary.spelled), list(vocabulary.eos_ids), limits)
        self._lock = threading.Lock()
        self._closed = False
        self._mother = _Mother(self._setup)

    def compile(self, form: StructuredOutputs) -> FormAnswer:
        """The compiled form. Raises InvalidRequest with what is wrong with the form, or if it needs
        more than it may have, and Overloaded if there can be no process."""
        ours, theirs = _pair()
        with ours:
            with self._lock, theirs:
                self._ready_mother().tell(b"F", theirs)
            try:
                ours.send_bytes(msgspec.msgpack.encode(form))
                if not ours.poll(self._setup.limits.wall_s + START_S):
                    raise EOFError
                answer = _ANSWER.decode(ours.recv_bytes(2 * MAX_COMPILED_BYTES))
            except (OSError, EOFError) as error:
                limit = f"{self._setup.limits.cpu_s:g} s"
                more = f"longer than {limit}, or more memory than it may have"
                raise refusal(f"compiling it takes {more}") from error
        if answer.error is not None:
            raise from_wire(answer.error)
        return answer

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._closed = True
            self._mother.close()

    def _ready_mother(self) -> _Mother:
        if self._closed:
            raise Overloaded("the engine stops", FIELD)
        if not self._mother.alive:
            self._mother.close()
            self._mother = _Mother(self._setup)
        self._mother.get_ready()
        return self._mother


class _Mother:
    """The process that the others are forked from. It starts at once, and knows its vocabulary when
    it is ready."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ready = False
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        # It has no secrets: neither keys nor tokens are in its environment.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    def get_ready(self) -> None:
        """Wait until it can fork. Raises Overloaded."""
        if self._ready:
            return
        ours, theirs = _pair()
        with ours:
            with theirs:
                self.tell(b"V", theirs)
            try:
                ours.send_bytes(msgspec.msgpack.encode(self._setup))
                self._ready = bool(self._control.recv(1))
            except OSError:
                self.close()
        if not self._ready:
            raise Overloaded("no process that compiles structured outputs can be started", FIELD)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tell(self, what: bytes, connection: Connection) -> None:
        try:
            socket.send_fds(self._control, [what], [connection.fileno()])
        except OSError as error:
            raise Overloaded("the compilers of structured outputs have ended", FIELD) from error

    def close(self) -> None:
        atexit.unregister(self.close)
        self._control.close()
        self._process.kill()
        self._process.wait()


def _pair() -> tuple[Connection, Connection]:
    """Two ends of a connection that keeps the borders of messages."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())
