"""Compiles Triton kernels in parallel, before they are needed.

Triton compiles each variant of a kernel when it is first called, while the caller waits. One after
the other, all variants for the steps of a model take minutes. So they are called once without being
run:

    with compiling_ahead():
        forward()           kernels that are not compiled yet are noted
    forward()               all of them are there

The outputs of kernels are undefined meanwhile. So kernels that an earlier engine of this process
has compiled don't run either: they might read addresses that were never written.

Processes forked from this one compile what was noted, one for each processor, and leave it in
Triton's cache on disk, from where this process takes it at the end of the block. Threads of one
process would take about twice as long, as a good part of the compiler holds Python's lock.

Several processes that need the same kernels, as the ranks of a model do, share the work: each one
begins with its own part of the kernels, and finds most of the rest in the cache by the time that it
gets to them.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import signal
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from select import select
from typing import Any

import triton
from triton import AsyncCompileMode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

from weft.core.processes import die_with_parent

logger = logging.getLogger(__name__)

STUCK_S = 60.0
"""If no compiling process has finished a kernel for this long, they are given up."""
_INDEX = struct.Struct("<i")


@contextmanager
def compiling_ahead(part: int = 0, num_parts: int = 1) -> Iterator[None]:
    """A context in which this thread's calls of Triton kernels return at once, without running. At
    its end, all of these kernels are compiled. `part`: which of `num_parts` processes, that compile
    the same kernels at the same time, this is. Raises what the compiler raises."""
    token = _is_ahead.set(True)
    _catch_launches(1)
    try:
        with _Ahead(part, num_parts):
            yield
    finally:
        _catch_launches(-1)
        _is_ahead.reset(token)


_is_ahead = ContextVar("weft_compiling_ahead", default=False)
_launch = JITFunction.run
_lock = threading.Lock()
_num_ahead = 0


def _catch_launches(change: int) -> None:
    """Have kernels launched by `_launch_or_compile` while any thread compiles ahead, and else by
    Triton itself, as that is quicker."""
    global _num_ahead
    with _lock:
        _num_ahead += change
        JITFunction.run = _launch_or_compile if _num_ahead else _launch


def _launch_or_compile(
    self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any
) -> Any:
    """What Triton does when a kernel is called, without the launch if this thread is compiling
    ahead. Triton has no mode for that."""
    return _launch(self, *args, grid=grid, warmup=warmup or _is_ahead.get(), **options)


def is_compiling_ahead() -> bool:
    """Whether kernels that this thread calls do not run, so that their outputs are undefined."""
    return _is_ahead.get()


def read_compiler() -> None:
    """Begin to read Triton's compiler, on a thread of its own. Its hash is part of the key of every
    kernel, and takes half a second, which the first kernel would otherwise wait for."""
    threading.Thread(target=triton_key, name="weft-compiler", daemon=True).start()


def tell_of_more() -> None:
    """From now on, log each kernel that is compiled or taken from the cache on disk, as a request
    may be waiting for it."""

    def told(repr: str, fn: Any, is_manual_warmup: bool, **_: object) -> None:
        if not is_manual_warmup:
            logger.warning("compiled late: %s.%s %s", fn.module, fn.name, repr)

    triton.knobs.runtime.jit_post_compile_hook = told


class _NotYet:
    """The placeholder of a kernel that is not compiled yet."""


Compile = Callable[[], Any]
Keep = Callable[[Any], None]
"""Stores a kernel, or None to have it compiled anew, where the next call looks for it."""


class _Ahead(AsyncCompileMode):  # type: ignore[misc]
    """A mode in which nothing waits for a kernel, as a launch does in Triton's own mode."""

    def __init__(self, part: int, num_parts: int) -> None:
        super().__init__(None)
        self._part, self._num_parts = part, num_parts
        self._kernels: dict[str, tuple[Compile, list[Keep]]] = {}
        """By a kernel's key: the function that compiles it, and those that store it."""
        self._todo: list[str] = []
        """The keys of kernels that are neither in the cache on disk nor being compiled."""
        self._aside: list[_Compilers] = []

    def submit(self, key: str, compile_one: Compile, keep: Keep, *_: object) -> _NotYet:
        """Note a kernel that is to be compiled. When as many of this process's part are noted as
        there are processors, other processes begin to compile them."""
        if key not in self._kernels:
            self._kernels[key] = compile_one, []
            if not _is_cached(key):
                self._todo.append(key)
            own = [key for key in self._todo if self._is_own(key)]
            if len(own) >= max(_num_processors(), 2):
                self._begin(own)
        self._kernels[key][1].append(keep)
        kernel = _NotYet()
        keep(kernel)
        return kernel

    def _is_own(self, key: str) -> bool:
        return zlib.crc32(key.encode()) % self._num_parts == self._part

    def _begin(self, keys: list[str]) -> None:
        """Have other processes compile these kernels."""
        self._aside.append(_Compilers([self._kernels[key][0] for key in keys]))
        self._todo = [key for key in self._todo if key not in keys]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        made: list[Future[Any]] = []
        if error is None and self._kernels:
            num_begun = sum(aside.num_kernels for aside in self._aside)
            num, cached = len(self._kernels), len(self._kernels) - num_begun - len(self._todo)
            logger.info("start: %d kernels, %d of them compiled by an earlier start", num, cached)
            if self._todo:
                self._begin(sorted(self._todo, key=self._is_own, reverse=True))
        for aside in self._aside:
            aside.end(STUCK_S if error is None else 0)
        if error is None and self._kernels:
            with ThreadPoolExecutor(_num_processors()) as pool:
                made = [pool.submit(one) for one, _ in self._kernels.values()]
        for i, (_, keeps) in enumerate(self._kernels.values()):
            for keep in keeps:
                keep(made[i].result() if made and made[i].exception() is None else None)
        for each in made:
            each.result()


def _num_processors() -> int:
    return len(os.sched_getaffinity(0))


def _is_cached(key: str) -> bool:
    """Whether Triton's cache on disk has something for this key."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return any(Path(manager.cache_dir).iterdir())


class _Compilers:
    """Processes that compile kernels into Triton's cache. Kernels that they fail to compile are
    left to the caller."""

    def __init__(self, todo: Sequence[Compile]) -> None:
        self.num_kernels = len(todo)
        self._children: list[int] = []
        orders, to_give = os.pipe()
        self._ended, to_tell = os.pipe()
        os.write(to_give, b"".join(map(_INDEX.pack, range(len(todo)))))
        os.close(to_give)
        num, collects = min(_num_processors(), len(todo)), gc.isenabled()
        gc.disable()  # in the forked processes: they must not free memory of the device
        try:
            while num > 1 and len(self._children) < num:
                self._children.append(_fork(orders, to_tell, todo))
        except OSError as error:
            count = len(self._children)
            logger.info("there are only %d processes that compile: %s", count, error)
        if collects:
            gc.enable()
        os.close(orders)
        os.close(to_tell)

    def end(self, stuck_s: float) -> None:
        """Wait for the processes, until none has finished a kernel for `stuck_s` seconds."""
        while select([self._ended], [], [], stuck_s)[0] and os.read(self._ended, 1):
            pass
        os.close(self._ended)
        for child in self._children:
            os.kill(child, signal.SIGKILL)  # one that hangs; the others have ended
            os.waitpid(child, 0)


def _fork(orders: int, to_tell: int, todo: Sequence[Compile]) -> int:
    """Fork a process, and return its pid. It compiles the kernels whose numbers it reads from the
    pipe `orders`, which all such processes share, and reports each. It uses neither the device nor
    anything that other threads were working on."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are other threads
        child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        while order := os.read(orders, _INDEX.size):
            with suppress(Exception):
                kernel = todo[_INDEX.unpack(order)[0]]()
                # What launches it may be C, which is compiled by another compiler.
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            os.write(to_tell, b".")
    finally:
        os._exit(0)
