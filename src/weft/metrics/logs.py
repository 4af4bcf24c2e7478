"""Logs on stderr: lines for people, or one JSON object a line for collectors. Both tell the time in
UTC, so that the logs of machines in different zones can be read together.

`weft.request` has one line for each request that ended. In JSON it belongs to the level info;
in text, which people read, to debug.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from weft.core.adapters import AdapterRef
from weft.core.sampling import SamplingParams

CHATTY = ("httpx", "httpx2", "httpcore", "httpcore2", "asyncio", "opentelemetry", "urllib3")
"""Loggers that are too verbose below warnings."""

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that is being answered, as its client knows it, for logs. Clients
choose it: it is not unique."""

_requests = logging.getLogger("weft.request")
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName"),
    "color_message",  # uvicorn's, for terminals
}
"""The attributes of every LogRecord, and what is of no use; all others are `extra` fields."""


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request to the engine. Times are in seconds from `start_unix_s`; None if
    the request did not get that far."""

    request_id: str
    model: str
    """The base's name, or the adapter's."""
    adapter: AdapterRef | None
    params: SamplingParams
    start_unix_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float | None = None
    """Seconds from the engine's receipt of the request to its first step."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    duration_s: float = 0.0
    finish_reason: str = "abort"
    """stop, length, abort or error."""
    error: str | None = None
    """The error's kind."""


@dataclass(frozen=True, slots=True)
class LogArgs:
    """How a process logs."""

    level: str
    json: bool


def shown_time(unix_s: float) -> str:
    """The time in UTC to the millisecond, by ISO 8601, such as 2027-01-31T18:00:00.000Z."""
    time = datetime.fromtimestamp(unix_s, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, the request's id, `extra` fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": shown_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := request_id_var.get()) is not None:
            fields["request_id"] = request_id
        for name, value in _extra(record).items():
            fields.setdefault(name, value)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """One line, with the `extra` fields at its end; then the exception."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return shown_time(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        extra = (f" {name}={value}" for name, value in _extra(record).items())
        return super().formatMessage(record) + "".join(extra)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {k: v for k, v in vars(record).items() if k not in _OWN_FIELDS and v is not None}


class UnblockedHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, but does not wait for long if stderr has no room, as a pipe that nobody
    reads, a terminal that was stopped, or a file on a full disk. Until it accepts data again, lines
    are dropped and counted."""

    def __init__(self) -> None:
        super().__init__()
        self._num_lost = 0
        self._is_cut = False
        """Whether the last line that was written is not whole."""

    def emit(self, record: logging.LogRecord) -> None:
        fd = self._descriptor()
        if fd is None:
            super().emit(record)
            return
        try:
            content = self._content(record)
            num_bytes = _write(fd, content, 0.0 if self._num_lost else ROOM_S)
            if num_bytes:
                self._is_cut = num_bytes < len(content)
            self._num_lost = self._num_lost + 1 if num_bytes < len(content) else 0
        except Exception:
            self.handleError(record)

    def _content(self, record: logging.LogRecord) -> bytes:
        """The record's line, preceded by one that says how many were dropped."""
        text = self.format(record) + self.terminator
        if self._num_lost:
            message = "%d lines of the log are lost, as there was no room for them"
            name, level, lost = __name__, logging.WARNING, (self._num_lost,)
            told = logging.LogRecord(name, level, "", 0, message, lost, None)
            text = self.terminator * self._is_cut + self.format(told) + self.terminator + text
        return text.encode(errors="backslashreplace")

    def _descriptor(self) -> int | None:
        try:
            return self.stream.fileno()
        except (OSError, ValueError):  # what a test captures
            return None


ROOM_S = 1.0
"""How long a line waits for room, unless the one before did so in vain."""
_PIECE_BYTES = 4096
"""What a pipe that has room takes at once; see `man 7 pipe`."""


def _write(fd: int, content: bytes, wait_s: float) -> int:
    """Write as much as there is room for. Returns how many bytes that was."""
    num_bytes = 0
    with contextlib.suppress(OSError):  # the disk is full
        while num_bytes < len(content) and has_room(fd, wait_s):
            num_bytes += os.write(fd, content[num_bytes : num_bytes + _PIECE_BYTES])
    return num_bytes


def has_room(fd: int, wait_s: float) -> bool:
    """Whether a write to this file, pipe or terminal would not block, at the latest then."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_s))


_configured: LogArgs | None = None


def configure_logging(level: str, json: bool) -> None:
    """Let this process log to stderr from `level` on, and nowhere else."""
    global _configured
    _configured = LogArgs(level, json)
    handler = UnblockedHandler()
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    shown = json or level == "debug"
    _requests.setLevel(logging.NOTSET if shown else logging.WARNING)


def configured_logging() -> LogArgs | None:
    """How this process logs, for a process that it starts. None means that logging was not
    configured."""
    return _configured


def log_request(record: RequestRecord) -> None:
    """Write the log line of a request that has ended."""
    if not _requests.isEnabledFor(logging.INFO):
        return
    ref = record.adapter
    fields = {
        "id": record.request_id,
        "model": record.model,
        "adapter": ref and ref.name,
        "version": ref and ref.version,
        "digest": ref and ref.digest[:12],
        "finish_reason": record.finish_reason,
        "error": record.error,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_s": _rounded(record.queue_s),
        "ttft_s": _rounded(record.first_token_s),
        "duration_s": _rounded(record.duration_s),
    }
    _requests.info("request ended", extra=fields)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
