"""The audit log, which records who changed what, when and from where."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.api.callers import caller_var, client_var
from weft.core.errors import PermissionDenied, WeftError
from weft.metrics.logs import has_room, request_id_var, shown_time

logger = logging.getLogger(__name__)

_MAX_NAME, _MAX_SOURCE = 256, 1024
"""How many characters of a client's texts are kept."""
MAX_CLIENTS, MAX_REFUSALS, REFUSALS_S = 32, 10, 60.0
"""So many addresses get so many lines each about their unauthorized requests, in so many seconds.
All others share their lines. The rest is only counted, so nobody fills a disk.
"""
_SECRETS = re.compile(r"(?<=://)[^/?#]*@|[?#].*", re.DOTALL)
"""The parts of a URI that may hold a password or a token."""

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK, because opening a pipe that nobody reads would wait for ever."""
_DONE = {
    "load": "adapter %r: loaded",
    "replace": "adapter %r: replaced",
    "unload": "adapter %r: unloaded",
    "release": "adapter %r: released",
    "rollback": "adapter %r: rolled back",
    "drain": "node %r: drained",
    "undrain": "node %r: takes requests again",
}
"""How the server's own log words each action."""

told_var: ContextVar[list[AuditEntry] | None] = ContextVar("told", default=None)
"""The refusals that the log has already noted for the current HTTP request."""


@dataclass(slots=True)
class AuditEntry:
    """One line of the audit log."""

    action: str
    """load, replace, unload, drain, ...; refuse, where a key is missing or not good enough; or what
    changed in the file of tenants: grant, `add key`, ..."""
    name: str | None = None
    """The name of the adapter or the node, the key's id, or the refused route."""
    source: str | None = None
    """The adapter's path or URI, as the client gave it."""
    digest: str | None = None
    subject: str | None = None
    """The tenant whose keys or grants changed."""
    outcome: str = "done"
    """done, or the kind of the error that refused it."""
    times: int = 1
    """How often it happened."""


@dataclass(slots=True)
class _Refusals:
    """The refused requests of one address."""

    since_s: float
    times: int = 0


class AuditLog:
    """Writes who changed what, one JSON object a line, and never a secret."""

    def __init__(self, path: Path | None) -> None:
        """`path` is a file to append to, or a pipe that somebody reads; `-` is stderr, and None
        writes nothing. Raises OSError."""
        self._path = path
        self._fd: int | None = None
        self._is_cut = False
        """Whether the last line that was written is not whole."""
        self._refused: OrderedDict[str, _Refusals] = OrderedDict()
        """By address, the one that was first refused longest ago first."""
        self.reopen()

    def reopen(self) -> None:
        """Go on in a new file if the old one was moved away. Raises OSError."""
        if self._path is None or str(self._path) == "-":
            return
        old = self._fd
        try:
            self._fd = os.open(self._path, _APPEND, 0o600)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(errno.ENXIO, "it is a pipe that nobody reads, or a socket") from error
            raise
        self._is_cut = False
        if old is not None:
            os.close(old)

    @contextmanager
    def entry(self, action: str, name: str, source: str | None = None) -> Iterator[AuditEntry]:
        """Write this entry at the end of the context, even if that raises. Fields may be set until
        then."""
        made = AuditEntry(action, name, source)
        try:
            yield made
        except PermissionDenied as error:
            made.outcome = error.kind
            self.refuse(made)
            raise
        except BaseException as error:
            made.outcome = error.kind if isinstance(error, WeftError) else type(error).__name__
            self.write(made)
            raise
        else:
            digest = f", digest {made.digest[:16]}" if made.digest else ""
            logger.info(f"{_DONE[made.action]}%s", made.name, digest)
            self.write(made)

    def write(self, entry: AuditEntry) -> None:
        """Write a line about the request under way."""
        caller = caller_var.get()
        self._write(
            entry,
            tenant=caller.tenant if caller else None,
            key=caller.key_id if caller else None,
            client=client_var.get(),
            request_id=request_id_var.get(),
        )

    def refuse(self, entry: AuditEntry) -> None:
        """Note that the current request's sender is not allowed to make it. If its address has used
        up its lines, the refusal is only counted; see `counting`."""
        told = told_var.get()
        if self._path is None or told:
            return
        if told is not None:
            told.append(entry)
        now_s = time.monotonic()
        self._write_counts(now_s - REFUSALS_S)
        client = client_var.get() or ""
        if client not in self._refused and len(self._refused) >= MAX_CLIENTS:
            client = "others"
        seen = self._refused.setdefault(client, _Refusals(now_s))
        seen.times += 1
        if seen.times <= MAX_REFUSALS:
            self.write(entry)

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        """Inside this context, refusals that are only counted get a line with their number once in
        a while. At its end, the last ones get theirs."""

        async def write_counts() -> None:
            while True:
                await asyncio.sleep(REFUSALS_S)
                self._write_counts(time.monotonic() - REFUSALS_S)

        task = asyncio.create_task(write_counts())
        try:
            yield
        finally:
            task.cancel()
            self._write_counts(math.inf)

    def _write_counts(self, before_s: float) -> None:
        """Write how many refusals of an address had no line, where the first came before this time,
        and count them anew."""
        while self._refused and next(iter(self._refused.values())).since_s < before_s:
            client, seen = self._refused.popitem(last=False)
            if seen.times > MAX_REFUSALS:
                more = AuditEntry("refuse", outcome="repeated", times=seen.times - MAX_REFUSALS)
                self._write(more, client=client)

    def _write(self, entry: AuditEntry, **who: str | None) -> None:
        if self._path is None:
            return
        line = {
            "time": shown_time(time.time()),
            **dict.fromkeys(("tenant", "key", "client", "request_id")),
            **who,
            **asdict(entry),
        }
        line["name"] = entry.name and entry.name[:_MAX_NAME]
        line["source"] = entry.source and _SECRETS.sub("", entry.source)[:_MAX_SOURCE]
        data = b"\n" * self._is_cut + json.dumps(line).encode() + b"\n"
        try:
            fd = sys.stderr.fileno() if self._fd is None else self._fd
            if not has_room(fd, 0.0):
                raise BlockingIOError(errno.EAGAIN, "nobody reads it")
            self._is_cut = os.write(fd, data) < len(data)
            if self._is_cut:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.error("the audit log can't be written (%s): %s", error.strerror, line)
