"""The process that compiles forms: it forks a child for each, so that none can harm another.

The engine starts it and tells it what to do over a socket that keeps the borders of messages:

    b"V" and a connection     the vocabulary comes by it                  -> b"V" when all is ready
    b"F" and a connection     fork a child: a form comes by it, and a `FormAnswer` goes back

A child ends after its form, or is ended by the kernel when its time is over. All of it ends when
the other end of the socket closes. This process itself never looks at a form.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from weft.core.errors import WeftError, to_wire
from weft.core.processes import die_with_parent, forbid_new_privileges
from weft.core.sampling import StructuredOutputs
from weft.grammar.compiler import Compiler, Limits, refusal_of
from weft.grammar.schema import refusal
from weft.grammar.trial import try_masks
from weft.grammar.vocabulary import Vocabulary

CHEAP_S = 1.0
"""Who wants a form that is compiled faster than this compiles it again, which is mostly faster than
to write and read it as text."""
MAX_COMPILED_BYTES = 32 << 20
"""The longest text of a compiled form."""
NICENESS = 5
COMMAND = "from weft.grammar.mother import main; main()"


class Setup(NamedTuple):
    """What the mother is told at first: the parts of the `Vocabulary`, and limits."""

    spelled: list[bytes]
    eos_ids: list[int]
    limits: Limits


class FormAnswer(NamedTuple):
    """What came of a form."""

    error: tuple[str, str, str | None] | None = None
    """Why it is refused: see `weft.core.errors.from_wire`."""
    text: str = ""
    """The compiled form; empty if it is compiled so fast that it need not be passed on."""
    resident_bytes: int = 0
    """How much memory the compiled form takes, about."""


class _StandIn(ModuleType):
    """A module from which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


def main() -> None:
    """`python -c COMMAND FD`: serve the socket of that number until its other end closes."""
    _import_xgrammar()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    prepared: tuple[Compiler, Limits] | None = None
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        connection = Connection(fds[0])
        if message == b"V":
            prepared = _prepare(connection)
            control.send(message)
        elif prepared is not None:
            with contextlib.suppress(OSError):  # no process can be had: the other end will see it
                _fork(connection, *prepared)
        connection.close()


def _import_xgrammar() -> None:
    """Import it without torch and transformers, which take seconds and 300 MB and are of no use
    here; with them if a version of it can't do without."""
    if sys.argv[2:] == ["whole"]:
        return
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]
        with contextlib.suppress(ImportError):
            import tvm_ffi  # noqa: F401
        for name in ("torch", "transformers"):
            sys.modules[name] = _StandIn(name)
        import xgrammar  # noqa: F401
    except Exception:
        os.execv(sys.executable, [sys.executable, "-P", "-c", COMMAND, sys.argv[1], "whole"])


def _prepare(connection: Connection) -> tuple[Compiler, Limits]:
    setup = msgspec.msgpack.decode(connection.recv_bytes(), type=Setup)
    compiler = Compiler(Vocabulary(setup.spelled, setup.eos_ids), num_threads=1)
    for form in (StructuredOutputs(choice=("a",)), StructuredOutputs(regex="a(")):
        with contextlib.suppress(WeftError):  # it is about what is imported on the way
            compiler.compile(form)
    gc.collect()
    gc.freeze()
    return compiler, setup.limits


def _fork(connection: Connection, compiler: Compiler, limits: Limits) -> None:
    mother = os.getpid()
    if os.fork():
        return
    try:
        _confine(mother, connection.fileno(), limits)
        form = msgspec.msgpack.decode(connection.recv_bytes(), type=StructuredOutputs)
        answer = _answer(form, compiler)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _confine(mother: int, connection: int, limits: Limits) -> None:
    """Take from this child all that it does not need: it may compute for a while, and answer."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    die_with_parent(mother)
    forbid_new_privileges()
    os.closerange(0, connection)
    os.closerange(connection + 1, 1024)
    os.nice(NICENESS)
    memory = _pages(0) * resource.getpagesize() + limits.memory_bytes
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _pages(column: int) -> int:
    """Memory of this process, in pages: all of it (0), or what is resident (1)."""
    with open("/proc/self/statm") as file:  # noqa: PTH123  # pathlib is slower
        return int(file.read().split()[column])


def _answer(form: StructuredOutputs, compiler: Compiler) -> FormAnswer:
    before, begin_s = _pages(1), time.process_time()
    try:
        compiled = compiler.compile(form)
        taken_s = time.process_time() - begin_s
        resident_bytes = (_pages(1) - before) * resource.getpagesize()
        try_masks(compiler, compiled)
        text = compiled.serialize_json() if taken_s > CHEAP_S else ""
        if len(text) > MAX_COMPILED_BYTES:
            raise refusal("it is too large when it is compiled")
    except Exception as error:
        return FormAnswer(to_wire(refusal_of(error)))
    return FormAnswer(None, text, max(resident_bytes, compiled.memory_size_bytes))
