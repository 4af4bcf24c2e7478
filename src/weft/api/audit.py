"""The audit log: who changed what, when and from where."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from weft.api.callers import caller_var, client_var
from weft.core.errors import WeftError
from weft.metrics.logs import request_id_var

logger = logging.getLogger(__name__)

_MAX_NAME, _MAX_SOURCE = 256, 1024
"""Characters of what clients send that are kept."""
_SECRETS = re.compile(r"(?<=://)[^/?#]*@|[?#].*", re.DOTALL)
"""The parts of a URI that may hold a password or a token."""


@dataclass(slots=True)
class AuditEntry:
    """One line of the audit log."""

    action: str
    """load, replace, unload; or what changed in the file of tenants: grant, `add key`, ..."""
    name: str | None = None
    """The adapter's, or the key's id."""
    source: str | None = None
    """Where the adapter is, in the client's words."""
    digest: str | None = None
    subject: str | None = None
    """The tenant whose keys or grants changed."""
    outcome: str = "done"
    """done, or the kind of the error that refused it."""


class AuditLog:
    """Writes down who changed what, one JSON object a line, and never a secret."""

    def __init__(self, path: Path | None) -> None:
        """A file that is appended to; `-` stands for stderr, and None writes nothing. Raises
        OSError."""
        self._path = path
        self._fd: int | None = None
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
        except BaseException as error:
            made.outcome = error.kind if isinstance(error, WeftError) else type(error).__name__
            raise
        finally:
            self.write(made)

    def write(self, entry: AuditEntry) -> None:
        if self._path is None:
            return
        caller = caller_var.get()
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "tenant": caller and caller.tenant,
            "key": caller and caller.key_id,
            "client": client_var.get(),
            "request_id": request_id_var.get(),
            **asdict(entry),
        }
        line["name"] = entry.name and entry.name[:_MAX_NAME]
        line["source"] = entry.source and _SECRETS.sub("", entry.source)[:_MAX_SOURCE]
        data = json.dumps(line).encode() + b"\n"
        try:
            os.write(sys.stderr.fileno() if self._fd is None else self._fd, data)
        except OSError as error:
            logger.error("the audit log can't be written (%s): %s", error.strerror, line)
