"""Distributes texts to worker processes, and refuses those that would wait too long."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.core.errors import AdapterInvalid, InvalidRequest, Overloaded, WeftError, from_wire
from weft.core.forked import ProcessEnded
from weft.text.sandbox import limits
from weft.text.sandbox.jobs import (
    Answer,
    Chat,
    Job,
    LoadedTokenizer,
    LoadTokenizer,
    Material,
    Refused,
)
from weft.text.sandbox.limits import WorkerKind
from weft.text.sandbox.processes import TextProcess


class Owner(NamedTuple):
    """Whom a text belongs to. Only one text of each owner is worked on at a time."""

    author: str
    """Whose tokenizer or template is used; "": the operator's own."""
    tenant: str
    """Who sent the text; "": nobody knows."""


class Portable(Protocol):
    """A tokenizer that workers can run."""

    @property
    def material(self) -> Material: ...


@dataclass(slots=True, eq=False)
class Call:
    """A job for any worker."""

    job: Job
    tokenizer: Portable
    owner: Owner
    param: str
    """The field that the text came in, which errors name."""
    size: int
    """Its characters or tokens."""
    answer: Future[Answer] = field(default_factory=Future)
    came_s: float = field(default_factory=time.monotonic)

    @property
    def trusted(self) -> bool:
        """Whether the tokenizer is the operator's own, so that only long texts take long."""
        return not self.owner.author

    @property
    def cpu_s(self) -> float:
        more = self.size * limits.CPU_S_PER_CHAR if self.trusted else 0.0
        return limits.CPU_S + more

    @property
    def due_s(self) -> float:
        """The call with the smallest is next: short texts overtake long ones, but not for ever."""
        return self.came_s + 2 * self.size * limits.CPU_S_PER_CHAR


class Sandbox:
    """Runs templates and tokenizers in worker processes, which start when they are needed and end
    when they are idle. Safe to use from several threads.

    An owner has one text worked on at a time, so that others' go on beside a slow one. After a
    worker had to be ended, that author's texts are refused for a while.
    """

    def __init__(self, num_workers: int = limits.NUM_WORKERS) -> None:
        self._num_workers = num_workers
        self._num_threads = 0
        self._num_idle = 0
        self._changed = threading.Condition()
        self._waiting: list[Call] = []
        self._busy: set[Owner] = set()
        self._refused_until_s: dict[Owner, float] = {}
        self._loaders = threading.BoundedSemaphore(limits.NUM_LOADERS)

    def submit(self, call: Call) -> Future[Answer]:
        """The future answer. It may raise InvalidRequest, which names the call's field, or
        Overloaded, which this method raises too."""
        with self._changed:
            self._waiting = [each for each in self._waiting if not each.answer.cancelled()]
            self._check(call)
            self._waiting.append(call)
            if self._num_idle < len(self._waiting) and self._num_threads < self._num_workers:
                self._num_threads += 1
                threading.Thread(target=self._run, name="weft-texts", daemon=True).start()
            self._changed.notify()
        return call.answer

    def load(self, job: LoadTokenizer, file: str) -> LoadedTokenizer:
        """An adapter's tokenizer, by a worker of its own. Raises AdapterInvalid, which names the
        `file` if no other is known, and Overloaded."""
        with self._loaders:
            worker = TextProcess(WorkerKind.LOADS)
            try:
                answer = worker.ask(job, None, limits.LOAD_CPU_S)
            except ProcessEnded as error:
                raise AdapterInvalid(f"{file}: when it is read, {error.why}", file) from None
            else:
                if isinstance(answer, Refused):
                    file = answer.param or file
                    raise AdapterInvalid(answer.message, file)
                assert isinstance(answer, LoadedTokenizer)
                return answer
            finally:
                worker.end()

    def _check(self, call: Call) -> None:
        if call.trusted:
            return
        now_s = time.monotonic()
        left_s = self._refused_until_s.get(call.owner, 0.0) - now_s
        if left_s > 0:
            raise Overloaded(
                f"{call.param}: the last text for this template or tokenizer had to be given up;"
                " try again later",
                call.param,
                int(left_s) + 1,
            )
        if sum(other.owner == call.owner for other in self._waiting) >= limits.MAX_WAITING:
            raise Overloaded(
                f"{call.param}: too many texts wait for this template or tokenizer", call.param, 1
            )

    # -- one thread for each worker ----------------------------------------------------------------

    def _run(self) -> None:
        worker: TextProcess | None = None
        try:
            while (call := self._next()) is not None:
                try:
                    worker = self._ready(worker, call)
                    self._answer(call, worker)
                except Exception as error:
                    call.answer.set_exception(error)
                finally:
                    with self._changed:
                        self._busy.discard(call.owner)
                        self._changed.notify_all()
        finally:
            if worker is not None:
                worker.end()

    def _next(self) -> Call | None:
        """The next call; None, after a long time without any, if this thread should end."""
        until_s = time.monotonic() + limits.IDLE_S
        with self._changed:
            while True:
                if (call := self._pick()) is not None:
                    return call
                left_s = until_s - time.monotonic()
                if left_s <= 0 and not self._waiting:
                    self._num_threads -= 1
                    return None
                self._num_idle += 1
                self._changed.wait(max(left_s, 1.0))
                self._num_idle -= 1

    def _pick(self) -> Call | None:
        while free := [call for call in self._waiting if call.owner not in self._busy]:
            call = min(free, key=lambda call: call.due_s)
            self._waiting.remove(call)
            if not call.answer.set_running_or_notify_cancel():
                continue
            waited_s = time.monotonic() - call.came_s
            if not call.trusted and waited_s > limits.MAX_WAIT_S:
                call.answer.set_exception(self._late(call))
                continue
            self._busy.add(call.owner)
            return call
        return None

    @staticmethod
    def _late(call: Call) -> WeftError:
        return Overloaded(
            f"{call.param}: texts for this template or tokenizer take too long", call.param, 5
        )

    @staticmethod
    def _ready(worker: TextProcess | None, call: Call) -> TextProcess:
        """A worker that can do this call: the given one or a new one."""
        kind = WorkerKind.CHATS if isinstance(call.job, Chat) else WorkerKind.TEXTS
        if worker is not None and not worker.spent and worker.kind >= kind:
            return worker
        if worker is not None:
            worker.end()
        return TextProcess(kind)

    def _answer(self, call: Call, worker: TextProcess) -> None:
        """Set the answer of a call."""
        begin_s = time.monotonic()
        try:
            answer = worker.ask(call.job, call.tokenizer.material, call.cpu_s)
        except (ValueError, TypeError, OverflowError) as error:
            said = f"{call.param}: can't be passed on: {str(error)[:100]}"
            call.answer.set_exception(InvalidRequest(said, call.param))
        except ProcessEnded as error:
            self._punish(call, time.monotonic() - begin_s)
            what = "this template or tokenizer" if call.owner.author else "the text"
            said = f"{call.param}: {what} can't be worked on: {error.why}"
            call.answer.set_exception(InvalidRequest(said, call.param))
        else:
            if isinstance(answer, Refused):
                wire = (answer.kind, answer.message, answer.param or call.param)
                call.answer.set_exception(from_wire(wire))
            else:
                call.answer.set_result(answer)

    def _punish(self, call: Call, took_s: float) -> None:
        if call.trusted:
            return
        with self._changed:
            now_s = time.monotonic()
            kept = {o: until_s for o, until_s in self._refused_until_s.items() if until_s > now_s}
            self._refused_until_s = kept | {call.owner: now_s + limits.PENALTY * took_s}
            waiting = [other for other in self._waiting if other.owner == call.owner]
            self._waiting = [other for other in self._waiting if other.owner != call.owner]
        for other in waiting:
            if other.answer.set_running_or_notify_cancel():
                other.answer.set_exception(self._late(other))
