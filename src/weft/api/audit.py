"""The audit log, which records who changed what, when and from where."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from weft.api.callers import caller_var, client_var
from weft.core.errors import PermissionDenied, WeftError
from weft.metrics.logs import request_id_var

logger = logging.getLogger(__name__)

_MAX_NAME, _MAX_SOURCE = 256, 1024
"""Characters of what clients send that are kept."""
MAX_CLIENTS, MAX_REFUSALS, REFUSALS_S = 32, 10, 60.0
"""So many addresses have so many lines each about requests that are refused for who sends them, in
so many seconds; what is more is counted. All other addresses are like one. So nobody fills a disk.
"""
_SECRETS = re.compile(r"(?<=://)[^/?#]*@|[?#].*", re.DOTALL)
"""The parts of a URI that may hold a password or a token."""

_DONE = {
    "load": "loaded",
    "replace": "replaced",
    "unload": "unloaded",
    "release": "released",
    "rollback": "rolled back",
}
"""What the server's own log calls an action that was done."""

told_var: ContextVar[list[AuditEntry] | None] = ContextVar("told", default=None)
"""What the log has of the HTTP request under way as refused."""


@dataclass(slots=True)
class AuditEntry:
    """One line of the audit log."""

    action: str
    """load, replace, unload; refuse, where a key is missing or not good enough; or what changed in
    the file of tenants: grant, `add key`, ..."""
    name: str | None = None
    """The adapter's, or the key's id, or the route that was refused."""
    source: str | None = None
    """Where the adapter is, in the client's words."""
    digest: str | None = None
    subject: str | None = None
    """The tenant whose keys or grants changed."""
    outcome: str = "done"
    """done, or the kind of the error that refused it."""
    times: int = 1
    """How often it happened."""


@dataclass(slots=True)
class _Refusals:
    """Those of one address."""

    since_s: float
    times: int = 0


class AuditLog:
    """Writes down who changed what, one JSON object a line, and never a secret."""

    def __init__(self, path: Path | None) -> None:
        """A file that is appended to; `-` stands for stderr, and None writes nothing. Raises
        OSError."""
        self._path = path
        self._fd: int | None = None
        self._refused: OrderedDict[str, _Refusals] = OrderedDict()
        """By address, those first that are counted for longest."""
        self.reopen()

    def reopen(self) -> None:
        """Go on in a new file if the old one was moved away. Raises OSError."""
        if self._path is None or str(self._path) == "-":
            return
        old, flags = self._fd, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        if old is not None:
            os.close(old)

    @contextmanager
    def entry(self, action: str, name: str, source: str | None = None) -> Iterator[AuditEntry]:
        """Write a line at the end of the context, also when it raises: what is known by then."""
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
            version = f", version {made.digest[:16]}" if made.digest else ""
            logger.info("adapter %r: %s%s", made.name, _DONE[made.action], version)
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
        """The request under way is refused for who sends it. If its address has had its lines, it
        is only counted, which another line tells later."""
        told = told_var.get()
        if self._path is None or told:
            return
        if told is not None:
            told.append(entry)
        now_s = time.monotonic()
        while self._refused and next(iter(self._refused.values())).since_s < now_s - REFUSALS_S:
            client, seen = self._refused.popitem(last=False)
            if seen.times > MAX_REFUSALS:
                more = AuditEntry("refuse", outcome="repeated", times=seen.times - MAX_REFUSALS)
                self._write(more, client=client)
        client = client_var.get() or ""
        if client not in self._refused and len(self._refused) >= MAX_CLIENTS:
            client = "others"
        seen = self._refused.setdefault(client, _Refusals(now_s))
        seen.times += 1
        if seen.times <= MAX_REFUSALS:
            self.write(entry)

    def _write(self, entry: AuditEntry, **who: str | None) -> None:
        if self._path is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **dict.fromkeys(("tenant", "key", "client", "request_id")),
            **who,
            **asdict(entry),
        }
        line["name"] = entry.name and entry.name[:_MAX_NAME]
        line["source"] = entry.source and _SECRETS.sub("", entry.source)[:_MAX_SOURCE]
        data = json.dumps(line).encode() + b"\n"
        try:
            os.write(sys.stderr.fileno() if self._fd is None else self._fd, data)
        except OSError as error:
            logger.error("the audit log can't be written (%s): %s", error.strerror, line)
