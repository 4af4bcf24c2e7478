"""The log of a shared registry: numbered entries, each written exactly once.

    log/00000000000000000007   an entry; the write of this key is the moment of the change
    snap/000000000003          the state after three epochs of entries
    end/000000000002           a mark, never deleted: entries of this epoch may be gone

All of it is sans-I/O: an operation is a generator that yields requests to a store and is sent
their answers, so that tests can interrupt it at every request.

A store has one useful promise: a key is written once. Deleting old entries breaks it: a writer that
was suspended meanwhile would find an old key free again, write it, and believe its change made. So
`collect` writes the mark of an epoch before it deletes any of its entries, and what is read or
written in an epoch counts only if its mark is still absent *afterwards*.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from weft.core.errors import RegistryUnavailable
from weft.registry.records import Result
from weft.registry.state import FORMAT, Entry, Op, State

_MAX_AHEAD: Final = 32
"""How many entries a reader that has fallen behind reads at once."""
_AHEAD_OF_LOSERS: Final = 2
_MAX_LISTED: Final = 10


class Put(NamedTuple):
    """Write a key that is not there yet. The answer is whether it was not."""

    key: str
    content: bytes


class Get(NamedTuple):
    """Read keys, in any order or side by side. The answer has the content of each, or None."""

    keys: tuple[str, ...]


class ListKeys(NamedTuple):
    """List the keys with this prefix."""

    prefix: str


class Delete(NamedTuple):
    """Delete a key, if it is there."""

    key: str


Request: TypeAlias = Put | Get | ListKeys | Delete
_T = TypeVar("_T")
Steps: TypeAlias = Generator[Request, Any, _T]
"""Requests to a store, one after the other. An operation may be given up at each of them, when the
store does not answer, and begun anew."""


def entry_key(seq: int) -> str:
    return f"log/{seq:020d}"


def snapshot_key(epoch: int) -> str:
    """The key of the state after this many epochs."""
    return f"snap/{epoch:012d}"


def end_key(epoch: int) -> str:
    return f"end/{epoch:012d}"


class Log:
    """One reader and writer of a log, and what it has read. One operation runs at a time."""

    def __init__(self, state: State | None = None) -> None:
        self.state = State() if state is None else state
        self._sent: dict[str, int] = {}
        """The ops of the last attempt, by nonce, with the number of the entry that was to have
        them."""
        self._to_save: State | None = None
        """The state at the end of the last epoch, if its snapshot may be missing."""
        self._ended_here = False
        """Whether this writer wrote that epoch's last entry."""
        self._last: bytes | None = None
        """The entry that was read last; None if a snapshot was."""

    def boot(self) -> Steps[None]:
        """Load the newest snapshot, if there is one, and read the entries after it."""
        if (yield from _list("snap/")):
            yield from self._load(0)
        yield from self.poll()

    def poll(self, ahead: int = 1) -> Steps[None]:
        """Read the entries committed by now. Without new ones, that takes two reads. `ahead` is the
        number of entries to look for at first."""
        while True:
            first = self.state.seq + 1
            last = min(first + ahead - 1, self._last_of_epoch(first))
            found = yield from _get([entry_key(seq) for seq in range(first, last + 1)])
            if (yield from self._jumped(first)):
                continue
            for content in found:
                if content is None:
                    return
                self._take(content)
            ahead = min(2 * ahead, _MAX_AHEAD)

    def confirm(self) -> Steps[None]:
        """Raises RegistryUnavailable unless the store still has the entry that was read last, or
        the mark of an ended epoch, after which that entry may have been deleted. Without both, the
        store holds another registry, for example because a file system came back without its
        content. Call it after the store did not answer."""
        seq = self.state.seq
        if seq == 0:
            return
        content, mark = yield from _get([entry_key(seq), end_key((seq - 1) // self.state.epoch)])
        is_same = mark is not None if content is None else self._last in (None, content)
        if not is_same:
            message = "another registry is in the place of the one that was read before:"
            what = "missing" if content is None else "another one"
            remedy = "put the right one back, or start this process again"
            raise RegistryUnavailable(f"{message} {entry_key(seq)} is {what}; {remedy}")

    def commit(self, ops: Sequence[Op], now: float) -> Steps[dict[str, Result | None]]:
        """Try once to make changes, all in one entry. Returns the results of the ops that are
        settled, by nonce; None is the result if it can't be known any more. Try the others again:
        another entry came first. `now` is in seconds since 1970. Raises RegistryUnavailable if that
        entry can't be read."""
        if settled := self._settled(ops):
            return settled
        seq = self.state.seq + 1
        self._sent = dict.fromkeys((op.nonce for op in ops), seq)
        content = msgspec.json.encode(Entry(now, tuple(ops)))
        if not (yield from _put(entry_key(seq), content)):
            yield from self.poll(_AHEAD_OF_LOSERS)
            if self.state.seq < seq:
                message = f"{entry_key(seq)} of the registry is there, but can't be read"
                raise RegistryUnavailable(message, "registry")
        elif not (yield from self._jumped(seq)):
            self._take(content)
            self._ended_here |= seq % self.state.epoch == 0
        return self._settled(ops)

    def was_sent(self, op: Op) -> bool:
        """Whether an unsettled op may be in the log nevertheless."""
        return op.nonce in self._sent

    def save(self) -> Steps[None]:
        """Write the snapshot of the last epoch, if it is this writer's task. To be called after a
        commit. The writer that ended the epoch writes it at once, others if it is missing later."""
        state = self._to_save
        if state is None:
            return
        key = snapshot_key(state.seq // state.epoch)
        if not self._ended_here:
            if self.state.seq < state.seq + state.epoch // 8:
                return
            if key in (yield from _list("snap/")):
                self._to_save = None
                return
        yield from _put(key, state.dump())
        self._to_save, self._ended_here = None, False

    def collect(self) -> Steps[list[str]]:
        """Delete the keys that `needless` lists, and return them. Safe at any time, concurrently,
        and when interrupted anywhere."""
        keys = yield from self.needless()
        entries = [_number(key) for key in keys if key.startswith("log/")]
        for epoch in sorted({(seq - 1) // self.state.epoch for seq in entries}):
            yield from _put(end_key(epoch), b"over")
        for key in keys:
            yield Delete(key)
        return keys

    def needless(self) -> Steps[list[str]]:
        """The keys that the newest snapshot replaces, in the order in which they may be deleted."""
        snapshots = sorted((yield from _list("snap/")))
        if not snapshots:
            return []
        last = _number(snapshots[-1]) * self.state.epoch
        entries = yield from _list("log/")
        return [*sorted(key for key in entries if _number(key) <= last), *snapshots[:-1]]

    def _take(self, content: bytes) -> None:
        self.state, self._last = self._after(content), content
        if self.state.seq % self.state.epoch == 0:
            self._to_save, self._ended_here = self.state, False

    def _after(self, content: bytes) -> State:
        """The state after the entry with this content."""
        with _reading(entry_key(self.state.seq + 1), content):
            entry = _entries.decode(content)
            if entry.format != FORMAT:
                raise ValueError(f"its format is {entry.format}, not {FORMAT}")
        return self.state.apply(entry)

    def _jumped(self, seq: int) -> Steps[bool]:
        """Whether this entry's epoch has its mark, so that nothing read or written in it counts. If
        so, the newest snapshot is loaded."""
        over = yield from self._is_over((seq - 1) // self.state.epoch)
        if over:
            yield from self._load(seq)
        return over

    def _load(self, least: int) -> Steps[None]:
        """Take the newest snapshot, which has `least` entries or more. One that is deleted between
        listing and reading has a newer one beside it."""
        for _ in range(_MAX_LISTED):
            keys = yield from _list("snap/")
            newest = max(keys, default=snapshot_key(0))
            (content,) = yield from _get([newest])
            if content is None:
                continue
            state = self._loaded(newest, content)
            if state.seq >= least:
                self.state, self._to_save, self._last = state, None, None
                return
        raise RegistryUnavailable("the registry's newest snapshot is missing")

    def _loaded(self, key: str, content: bytes) -> State:
        with _reading(key, content):
            return State.load(content)

    def _is_over(self, epoch: int) -> Steps[bool]:
        (mark,) = yield from _get([end_key(epoch)])
        return mark is not None

    def _settled(self, ops: Iterable[Op]) -> dict[str, Result | None]:
        """The results of settled ops, by nonce; None for those whose result can't be known any
        more."""
        settled: dict[str, Result | None] = {}
        for op in ops:
            sent = self._sent.get(op.nonce)
            result = self.state.result(op.nonce)
            if result is not None or (sent is not None and sent < self.state.oldest_result()):
                settled[op.nonce] = result
        return settled

    def _last_of_epoch(self, seq: int) -> int:
        length = self.state.epoch
        return ((seq - 1) // length + 1) * length


@contextmanager
def _reading(key: str, content: bytes) -> Iterator[None]:
    """Raise RegistryUnavailable for a key that is damaged, or in a newer version's format."""
    try:
        yield
    except (ValueError, msgspec.DecodeError) as error:
        why = _other_format(content) or error
        raise RegistryUnavailable(f"{key} of the registry can't be read: {why}") from error


def _other_format(content: bytes) -> str | None:
    """That the content is in another format, whatever else is different in it."""
    try:
        found = msgspec.json.decode(content, type=_Formatted).format
    except msgspec.DecodeError:
        return None
    wanted = f"this version of Weft reads {FORMAT}"
    return None if found == FORMAT else f"its format is {found}, and {wanted}"


def _put(key: str, content: bytes) -> Steps[bool]:
    new: bool = yield Put(key, content)
    return new


def _get(keys: Sequence[str]) -> Steps[list[bytes | None]]:
    contents: list[bytes | None] = yield Get(tuple(keys))
    return contents


def _list(prefix: str) -> Steps[list[str]]:
    """The log's keys with this prefix, without other files that somebody has put beside them."""
    keys: list[str] = yield ListKeys(prefix)
    return [key for key in keys if key.removeprefix(prefix).isdecimal()]


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


class _Formatted(msgspec.Struct):
    format: int = FORMAT


_entries = msgspec.json.Decoder(Entry)
