"""What worker threads have ended, on its way to the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from weft.checkpoint.pack import AdapterImage
from weft.core.errors import WeftError
from weft.core.messages import Hold

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Registered:
    """A call of `Residency.register` has ended: with the image, which is not known yet, or an
    error."""

    call: Hold
    result: AdapterImage | WeftError
    checked: bool = False
    """See `AdapterInfo.checked`."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended; `error` None means that the adapter is resident."""

    digest: str
    error: WeftError | None


Ended = Registered | LoadEnded


class Inbox:
    """Any thread leaves here what is left to do, and the engine's thread does it between two
    steps: so all state belongs to that thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on other threads when there is something to do."""
        self._wake = wake
        self._left: SimpleQueue[Callable[[], Ended | None]] = SimpleQueue()

    def expect(self, future: Future[Result], apply: Callable[[Result], Ended | None]) -> None:
        """When the future has its result, it is to be applied. One that is cancelled never is."""

        def leave(done: Future[Result]) -> None:
            if not done.cancelled():
                self._left.put(lambda: apply(done.result()))
                self._wake()

        future.add_done_callback(leave)

    def put(self, ended: Ended) -> None:
        """Leave an end that is known already; on the engine's thread."""
        self._left.put(lambda: ended)

    def empty(self) -> Iterator[Ended]:
        """Do all that is left to do, one after another: the next is done when it is asked for, so
        that what was registered can be added before."""
        while True:
            try:
                ended = self._left.get_nowait()()
            except Empty:
                return
            if ended is not None:
                yield ended
