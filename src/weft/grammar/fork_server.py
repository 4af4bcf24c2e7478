"""The process that forks workers, each of which compiles one form; see `weft.core.forked`.

It reads the vocabulary from its standard input. A worker gets its form as `StructuredOutputs`, and
answers with a `FormAnswer`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import msgspec

from weft.core import frames
from weft.core.errors import WeftError, to_wire
from weft.core.forked import WorkerTask, run_fork_server
from weft.core.processes import freeze_heap
from weft.core.sampling import StructuredOutputs
from weft.grammar.compiler import Compiler, Limits, refusal_of
from weft.grammar.regex import refusal
from weft.grammar.trial import try_masks
from weft.grammar.vocabulary import Vocabulary

CHEAP_S = 1.0
"""A form that compiles faster than this is not passed on as text: the engine compiles it again."""
MAX_COMPILED_BYTES = 32 << 20
"""The longest text of a compiled form."""
COMMAND = "from weft.grammar.fork_server import main; main()"


class Setup(NamedTuple):
    """What this process reads from its standard input: the parts of the `Vocabulary`, and
    limits."""

    spelled: list[bytes]
    eos_ids: list[int]
    limits: Limits


class FormAnswer(NamedTuple):
    """A worker's answer about its form."""

    error: tuple[str, str, str | None] | None = None
    """Why it is refused: see `weft.core.errors.from_wire`."""
    text: str = ""
    """The compiled form as text; empty if it compiles so fast that it need not be passed on."""
    resident_bytes: int = 0
    """About how many bytes of memory the compiled form takes."""


class _StandIn(ModuleType):
    """A module from which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


def main() -> NoReturn:
    _import_xgrammar()
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Setup)
    compiler = Compiler(Vocabulary(setup.spelled, setup.eos_ids), num_threads=1)
    for form in (StructuredOutputs(choice=("a",)), StructuredOutputs(regex="a(")):
        with contextlib.suppress(WeftError):  # it is about what is imported on the way
            compiler.compile(form)
    freeze_heap()
    work = WorkerTask(partial(_serve, compiler, setup.limits), setup.limits.memory_bytes)
    run_fork_server(lambda _: work)


def _import_xgrammar() -> None:
    """Import xgrammar without torch and transformers, which take seconds and 300 MB and are not
    needed; with them only if this version of it requires them."""
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


def _serve(compiler: Compiler, limits: Limits, connection: socket.socket) -> None:
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    form = msgspec.msgpack.decode(frames.receive(connection), type=StructuredOutputs)
    answer = _answer(form, compiler)
    signal.setitimer(signal.ITIMER_PROF, 0)
    frames.send(connection, msgspec.msgpack.encode(answer))


def _resident_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(form: StructuredOutputs, compiler: Compiler) -> FormAnswer:
    before, begin_s = _resident_bytes(), time.process_time()
    try:
        compiled = compiler.compile(form)
        taken_s = time.process_time() - begin_s
        resident_bytes = _resident_bytes() - before
        try_masks(compiler, compiled)
        text = compiled.serialize_json() if taken_s > CHEAP_S else ""
        if len(text) > MAX_COMPILED_BYTES:
            raise refusal("it is too large when it is compiled")
    except Exception as error:
        return FormAnswer(to_wire(refusal_of(error)))
    return FormAnswer(None, text, max(resident_bytes, compiled.memory_size_bytes))
