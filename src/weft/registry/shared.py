"""A process's view of a shared registry, and the way to change it.

A thread reads new entries of the log a few times a second, or sooner after a hint. It also commits
changes: all that are waiting go into one entry.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from weft.core.errors import (
    AdapterNotFound,
    ConfigError,
    GenerationConflict,
    InvalidRequest,
    QuotaExceeded,
    RegistryReadOnly,
    RegistryUnavailable,
    WeftError,
    for_clients,
)
from weft.registry.log import Delete, Get, ListKeys, Log, Put, Request, Steps
from weft.registry.records import Change, Done, HistoryEntry, NotDone, Result
from weft.registry.state import Entry, Op, State
from weft.registry.stores import Store, probe

_T = TypeVar("_T")
Told = Callable[[State, frozenset[str]], None]

PATIENCE_S: Final = 5.0
"""How long a change is retried while the store does not answer."""
MAX_CHANGE_BYTES: Final = 1 << 20
_MAX_ENTRY_BYTES: Final = 4 << 20
_MAX_RIVALS: Final = 16
_MAX_IN_A_ROW: Final = 4
_MAX_HELD_S: Final = 0.1
_ERRORS: Final[dict[str, type[WeftError]]] = {
    "conflict": GenerationConflict,
    "not_found": AdapterNotFound,
    "quota": QuotaExceeded,
    "invalid": InvalidRequest,
}
_ops = msgspec.json.Decoder(Op)
STALE_S = 10.0
"""`/ready` and the log mention a registry once it has not answered for this long."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A change that is not committed yet."""

    op: Op
    num_bytes: int
    future: Future[Done]
    until: float
    """When it is given up if the store does not answer, by the monotonic clock."""


class SharedRegistry:
    """Follows a registry's state, and commits changes to it."""

    def __init__(self, store: Store, *, poll_s: float = 0.25, writes: bool = True) -> None:
        """Reads the registry. Before that, it checks that the store can hold one; without `writes`,
        it does so before the first change, if there is ever one. Raises ConfigError,
        RegistryUnavailable: RegistryReadOnly if the store could only be read."""
        self.store = store
        self._ask = _Driver(store)
        if writes:
            self._ask.prove()
        self._log = Log()
        self._ask.run(self._log.boot())
        self.state = self._log.state
        self._answered_at = time.monotonic()
        self._poll_s = poll_s
        self._mark = f"{secrets.token_hex(8)}."
        """The prefix of the nonces of this process's changes."""
        self._polls = (0, 0)
        """The numbers of the last poll that was begun, and of the last one that was answered."""
        self._driving = RLock()
        """Held by the thread that works on the log."""
        self._queue = _Queue()
        self._turns = _Turns()
        self._told: list[Told] = []
        self._news = Event()
        self._closed = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Follow the registry from now on. A second call does nothing."""
        with self._queue.lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = Thread(target=self._follow, name="registry", daemon=True)
                self._thread.start()
                if folder := self.store.folder("log/"):
                    args = (folder, self, self._closed)
                    Thread(target=_watch, args=args, name="registry-watch", daemon=True).start()

    def close(self) -> None:
        """Commit the changes that are waiting, and stop. Later changes are refused."""
        self._queue.close()
        self._closed.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    # -- read ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read all entries committed by now. Raises RegistryUnavailable."""
        begun, _ = self._polls
        with self._driving:
            last, answered = self._polls
            if answered > begun:
                return
            self._polls = (last + 1, answered)
            self._drive(self._log.poll())
            self._polls = (last + 1, last + 1)

    def hint(self) -> None:
        """Have the thread read soon: there may be new entries."""
        self._news.set()

    def listen(self, told: Told) -> None:
        """Call `told` with each new state and the names that changed, which may be none, as when
        tenants did. The calls come one after the other, from the thread that has read the news,
        and nothing is read or committed until they return."""
        with self._driving:
            self._told.append(told)

    def history(self, name: str) -> list[HistoryEntry]:
        """The last changes of a name, the oldest first."""
        found = self.state.names.get(name)
        return list(found.history) if found else []

    def stale_s(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self._answered_at

    def check(self, change: Change) -> None:
        """Raise what `submit` would for a change that can't be made in the newest state, or
        RegistryUnavailable."""
        self.poll()
        result = self.state.apply(Entry(time.time(), (Op("", "", change),))).result("")
        if isinstance(result, NotDone):
            raise _ERRORS[result.kind](result.message)

    # -- change --------------------------------------------------------------------------------

    def change(self, change: Change, actor: str = "") -> Done:
        """Make a change, and wait until it is committed. Raises what the future of `submit`
        raises."""
        return self.submit(change, actor).result()

    def submit(self, change: Change, actor: str = "") -> Future[Done]:
        """Queue a change. `actor`, who asks for it, is kept in the history.

        The future raises GenerationConflict, QuotaExceeded, AdapterNotFound, InvalidRequest; and
        RegistryUnavailable if the store does not answer for some seconds: the message says whether
        the change may have been made all the same.
        """
        future: Future[Done] = Future()
        future.set_running_or_notify_cancel()
        op = Op(f"{self._mark}{secrets.token_hex(8)}", actor, change)
        try:
            content = msgspec.json.encode(op)
            op = _ops.decode(content)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"the change is not well formed: {error}") from error
        if len(content) > MAX_CHANGE_BYTES:
            message = f"the change takes {len(content)} bytes, and {MAX_CHANGE_BYTES} are allowed"
            raise InvalidRequest(message)
        until = time.monotonic() + PATIENCE_S
        if self._thread is None:
            self.start()
        self._queue.add(_Waiting(op, len(content), future, until))
        self._news.set()
        return future

    def collect(self, delete: bool = True) -> list[str]:
        """Delete the log's keys that a newer snapshot replaces, and return them; `delete=False`
        only returns them. Safe at any time. Raises RegistryUnavailable."""
        return self._ask.run(self._log.collect() if delete else self._log.needless())

    # -- the thread ----------------------------------------------------------------------------

    def _follow(self) -> None:
        unexpected = ""  # the unexpected error that was logged last
        is_away = False  # whether the log says that the registry does not answer
        while True:
            try:
                if not self._commit():
                    self.poll()
                if is_away:
                    is_away = False
                    _log.warning("the registry answers again")
            except RegistryUnavailable as error:
                self._give_up(error)
                if not is_away and (stale_s := self.stale_s()) >= STALE_S:
                    is_away = True
                    message = "the registry has not answered for %.0f s: %s; its last state is used"
                    _log.warning(message, stale_s, error)
            except Exception as error:
                if repr(error) != unexpected:
                    unexpected = repr(error)
                    _log.exception("the registry %s can't be followed", self.store.uri)
                full = f"the registry can't be followed: {error}"
                self._give_up(RegistryUnavailable(for_clients("can't be followed"), full=full))
            if self._closed.is_set() and not self._queue:
                return
            self._news.wait(self._poll_s)
            self._news.clear()

    def _commit(self) -> bool:
        """Commit the waiting changes, and those that come meanwhile, in few entries. Returns
        whether there were any."""
        any_waited = False
        while self._queue:
            any_waited = True
            try:
                self._ask.prove()
            except ConfigError as error:
                raise RegistryReadOnly(for_clients("can't be used"), full=error.message) from error
            self._turns.wait()
            with self._driving:
                begun, before = time.monotonic(), self.state.seq
                settled = self._drive(self._log.commit(self._queue.batch(), time.time()))
                others = self.state.seq - before - bool(settled)
            for nonce, result in settled.items():
                self._settle(nonce, result)
            self._turns.took(begun, others, bool(settled))
            if settled:
                with self._driving:
                    self._drive(self._log.save())
        return any_waited

    def _settle(self, nonce: str, result: Result | None) -> None:
        future = self._queue.take(nonce).future
        match result:
            case Done():
                future.set_result(result)
            case NotDone():
                future.set_exception(_ERRORS[result.kind](result.message))
            case None:
                message = "it can't be known any more whether the change was made: look at the name"
                future.set_exception(RegistryUnavailable(message))

    def _give_up(self, error: RegistryUnavailable) -> None:
        """Tell those who have waited long enough that the store does not answer; and all, if it
        answers that it can't be written."""
        refused = isinstance(error, RegistryReadOnly)
        for each in self._queue.overdue(math.inf if refused else time.monotonic()):
            self._queue.take(each.op.nonce)
            sent = self._log.was_sent(each.op)
            made = "it is not known whether the change was made" if sent else "nothing was changed"
            message, full = f"{error.message}; {made}", f"{error}; {made}"
            each.future.set_exception(type(error)(message, full=full))

    def _drive(self, steps: Steps[_T]) -> _T:
        """Run an operation of the log, and tell listeners what it has read, even if it fails half
        way. If the last operation failed, first check that the store holds the same registry."""
        try:
            if self._ask.failed:
                self._ask.run(self._log.confirm())
            result = self._ask.run(steps)
            self._answered_at = time.monotonic()
            return result
        finally:
            old, self.state = self.state, self._log.state
            if self.state is not old:
                self._tell(old)

    def _tell(self, old: State) -> None:
        changed = self.state.names.changed_since(old.names)
        for told in self._told:
            try:
                told(self.state, changed)
            except Exception:
                _log.exception("a listener of the registry failed")


class _Queue:
    """The changes that wait, the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self.lock = Lock()
        self._is_closed = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, each: _Waiting) -> None:
        """Raises RegistryUnavailable after `close`."""
        with self.lock:
            if self._is_closed:
                raise RegistryUnavailable("the registry is being closed")
            self._waiting[each.op.nonce] = each

    def batch(self) -> list[Op]:
        """The ops for one entry: the oldest, as many as it has room for."""
        with self.lock:
            waiting = list(self._waiting.values())
        totals = accumulate(each.num_bytes for each in waiting)
        fitting = sum(total <= _MAX_ENTRY_BYTES for total in totals)
        return [each.op for each in waiting[: max(1, fitting)]]

    def take(self, nonce: str) -> _Waiting:
        with self.lock:
            return self._waiting.pop(nonce)

    def overdue(self, now: float) -> list[_Waiting]:
        with self.lock:
            return [each for each in self._waiting.values() if each.until < now]

    def close(self) -> None:
        with self.lock:
            self._is_closed = True


class _Turns:
    """Makes writers of several processes take turns. A writer that lost to entries of others
    pauses, after its own entry, for about as many. A writer that never loses can't know of those
    that always do: after writing for a while without a pause, it pauses for as long."""

    def __init__(self) -> None:
        self._rivals = 0
        self._ahead = 0
        """Entries of others since this writer began to try."""
        self._num_written, self._since = 0, 0.0
        """Entries without a pause, and since when."""
        self._ended = self._not_before = 0.0

    def wait(self) -> None:
        time.sleep(max(0.0, self._not_before - time.monotonic()))

    def took(self, begun: float, others: int, settled: bool) -> None:
        """Record an attempt, begun at that time, that found `others` entries of other writers."""
        now = time.monotonic()
        seconds = now - begun
        self._ahead += others
        if self._ahead or begun - self._ended > seconds:
            self._num_written, self._since = 0, begun
        self._ended = now
        pause = random.random() * seconds / 2
        if settled:
            self._num_written += 1
            self._rivals = min(max(self._ahead, self._rivals // 2), _MAX_RIVALS)
            self._ahead = 0
            pause = random.uniform(0.5, 1.5) * self._rivals * seconds
            if self._num_written >= _MAX_IN_A_ROW and now - self._since > _MAX_HELD_S:
                pause = now - self._since
        self._not_before = now + pause


class _Driver:
    """Carries out the requests of a log's operation on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        is_near = store.folder("log/") is not None
        self._readers = None if is_near else ThreadPoolExecutor(8, "registry-read")
        self.failed = False
        """Whether the last operation ended without an answer."""
        self._is_proven = False

    def prove(self) -> None:
        """Check that the store can hold a registry, unless that is known. Raises ConfigError,
        RegistryUnavailable."""
        if not self._is_proven:
            probe(self._store)
            self._is_proven = True

    def run(self, steps: Steps[_T]) -> _T:
        """Raises RegistryUnavailable."""
        self.failed = True
        try:
            request = next(steps)
            while True:
                request = steps.send(self._answer(request))
        except StopIteration as end:
            self.failed = False
            result: _T = end.value
            return result

    def _answer(self, request: Request) -> object:
        match request:
            case Put():
                return self._store.put(request.key, request.content)
            case Get():
                return self._get(request.keys)
            case ListKeys():
                return list(self._store.list(request.prefix))
            case Delete():
                self._store.delete(request.key)
                return None

    def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        if self._readers is None or len(keys) == 1:
            return [self._store.get(key) for key in keys]
        return list(self._readers.map(self._store.get, keys))


def _watch(folder: Path, registry: SharedRegistry, closed: Event) -> None:
    """Hint when this machine writes to the folder. Writes of other machines to a shared file system
    are not seen here, which is why the registry also polls."""
    try:
        import watchfiles
    except ImportError:
        return
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells of every change
    try:
        folder.mkdir(exist_ok=True)
        for _ in watchfiles.watch(folder, stop_event=closed, step=1, debounce=20, recursive=False):
            registry.hint()
    except (OSError, RuntimeError) as error:
        _log.warning("changes of the registry are not hinted at: %s", error)
