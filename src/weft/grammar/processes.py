"""The engine's end of the processes that compile forms; `weft.grammar.fork_server` is the other."""

from __future__ import annotations

import threading
import time

import msgspec

from weft.core.errors import Overloaded, from_wire
from weft.core.forked import ForkedProcess, ForkServer, ProcessEnded
from weft.core.sampling import StructuredOutputs
from weft.core.stalls import StallWatch, process_clock
from weft.grammar.compiler import Limits
from weft.grammar.fork_server import COMMAND, MAX_COMPILED_BYTES, FormAnswer, Setup
from weft.grammar.regex import FIELD, refusal
from weft.grammar.vocabulary import Vocabulary

_ANSWER = msgspec.msgpack.Decoder(FormAnswer)


class CompilerProcesses:
    """Compiles forms in other processes, to protect this one. Safe to use from several threads.

    The process that they are forked from starts at once, and again if somebody has killed it.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits, num_threads: int) -> None:
        """`num_threads` is how many forms are compiled at a time, at most."""
        setup = Setup(list(vocabulary.spelled), list(vocabulary.eos_ids), limits)
        self._limits = limits
        self._setup = msgspec.msgpack.encode(setup)
        self._lock = threading.Lock()
        self._closed = False
        self._stalls = StallWatch(num_threads)
        self._server = ForkServer(COMMAND, self._setup)

    def compile(self, form: StructuredOutputs) -> FormAnswer:
        """Compile a form. Raises InvalidRequest if the form is wrong, or takes too much time or
        memory, and Overloaded if no process can be started."""
        question = msgspec.msgpack.encode(form)
        cpu_s, wall_s, _ = self._limits
        try:
            with (
                ForkedProcess(self._living_server()) as process,
                self._stalls.watching(process_clock(process.pid)),
            ):
                until_s = time.monotonic() + wall_s
                said = process.ask(question, 2 * MAX_COMPILED_BYTES, until_s, cpu_s)
        except ProcessEnded as error:
            raise refusal(f"when it is compiled, {error.why}") from error
        except OSError as error:
            raise Overloaded("no process can be started that compiles forms", FIELD) from error
        answer = _ANSWER.decode(said)
        if answer.error is not None:
            raise from_wire(answer.error)
        return answer

    def stuck_s(self) -> float:
        """For how many seconds none of the forms being compiled has made progress."""
        return max(self._server.stuck_s(), self._stalls.stuck_s())

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._closed = True
            self._server.close()

    def _living_server(self) -> ForkServer:
        with self._lock:
            if self._closed:
                raise Overloaded("the engine stops", FIELD)
            if not self._server.alive:
                self._server.close()
                self._server = ForkServer(COMMAND, self._setup)
            return self._server
