"""Triton kernels compiled ahead of their use, side by side.

Triton compiles each variant of a kernel when it is first called, while the caller waits. All that
the steps of a model need, one after the other, takes minutes. So they are called once without
being run:

    with compiling_ahead():
        forward()           kernels that are not compiled yet go to a pool of threads
    forward()               all of them are there

What kernels would have written is undefined meanwhile. Most of the compiler runs outside of
Python's lock, so that threads do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Let calls of Triton kernels that this thread makes inside return at once: kernels compiled
    before run, the others don't, and are compiled by the end. Raises what the compiler raises."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, _Ahead(pool):
        yield


class _NotYet:
    """What stands in for a kernel that is being compiled: its launches do nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


class _Ahead(AsyncCompileMode):  # type: ignore[misc]
    """A mode in which nothing waits for a kernel, as a launch does in Triton's own mode."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self._pool = pool
        self._kernels: dict[str, tuple[Future[Any], list[Callable[[Any], None]]]] = {}
        """By a kernel's content: what compiles it, and what makes it known to its callers."""

    def submit(self, key: str, compile_one: Callable[[], Any], keep: Any, *_: object) -> _NotYet:
        """Compile a kernel. `keep` puts it, or None to compile anew, where the next call looks."""
        if key not in self._kernels:
            self._kernels[key] = (self._pool.submit(compile_one), [])
        self._kernels[key][1].append(keep)
        kernel = _NotYet()
        keep(kernel)
        return kernel

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        failure: BaseException | None = None
        for future, keeps in self._kernels.values():
            kernel = None
            if not future.cancelled():
                failure = failure or future.exception()
                kernel = None if future.exception() else future.result()
            for keep in keeps:
                keep(kernel)
        if failure is not None and error is None:
            raise failure
