"""Tracks which requests engines die of, and refuses them, so that no further engine dies.

    open at a death ──(again, the only one that was)──────────────> refused
                  └───(again, and so were others)──> suspect ──(at a death, while alone)──> refused

A suspect is let in while no other one waits for its first token. Two requests are the same if they
have the same prompt and adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from enum import Enum

from weft.core.errors import EngineDead, RequestRefused, WeftError
from weft.core.requests import EngineRequest, TokenEvent

KEEP_S = 3600.0
"""For how long a request is remembered after the last death at which it was open."""
MAX_KEPT = 10_000


class _Record(Enum):
    OPEN = 1
    SUSPECT = 2
    REFUSED = 3


class Suspects:
    """Owner of what is remembered of requests that were open when engines died."""

    def __init__(self) -> None:
        self._records: dict[bytes, tuple[_Record, float]] = {}
        """By request, with the time of the death, the oldest first."""
        self._alone = asyncio.Lock()
        self._on_trial: bytes | None = None
        """The suspect that waits for its first token."""
        self._tried: tuple[WeftError, bytes] | None = None
        """The error of a death at which a suspect was on trial, and that suspect's key."""

    def admit(
        self, request: EngineRequest, events: AsyncGenerator[TokenEvent]
    ) -> AsyncGenerator[TokenEvent]:
        """The events of a request; a suspect's wait for their turn. Raises RequestRefused."""
        if not self._records:
            return events
        key = _key(request)
        record, _ = self._records.get(key, (None, 0.0))
        if record is _Record.REFUSED:
            raise RequestRefused(
                "engines died while they computed this prompt: it is refused for an hour", "prompt"
            )
        return events if record is not _Record.SUSPECT else self._try(key, events)

    def remembers(self, request: EngineRequest) -> bool:
        """Whether this request, or another like it, was open at a death."""
        return bool(self._records) and _key(request) in self._records

    def died(self, requests: Iterable[EngineRequest], error: WeftError) -> None:
        """An engine has died while these requests were open. If it was killed, none is blamed."""
        if isinstance(error, EngineDead) and error.killed:
            return
        keys = {_key(request) for request in requests}
        self._forget_old()
        tried = self._tried[1] if self._tried and self._tried[0] is error else self._on_trial
        if tried is not None and tried in keys:
            self._note(tried, _Record.REFUSED)
            return
        again = keys & self._records.keys()
        for key in keys:
            self._note(key, _Record.SUSPECT if key in again else _Record.OPEN)
        if len(again) == 1:
            self._note(again.pop(), _Record.REFUSED)

    async def _try(
        self, key: bytes, events: AsyncGenerator[TokenEvent]
    ) -> AsyncGenerator[TokenEvent]:
        async with aclosing(events):
            async with self._alone:
                self._on_trial = key
                try:
                    first = await anext(events)
                except EngineDead as error:
                    if self._tried is None or self._tried[0] is not error:
                        self._tried = (error, key)
                    raise
                finally:
                    self._on_trial = None
            yield first
            async for event in events:
                yield event

    def _note(self, key: bytes, record: _Record) -> None:
        self._records.pop(key, None)
        self._records[key] = (record, time.monotonic())

    def _forget_old(self) -> None:
        for key, (_, when_s) in list(self._records.items()):
            if len(self._records) <= MAX_KEPT and when_s > time.monotonic() - KEEP_S:
                break
            del self._records[key]


def _key(request: EngineRequest) -> bytes:
    adapter = request.adapter.digest if request.adapter else ""
    return hashlib.blake2b(
        array("Q", request.prompt_ids).tobytes() + adapter.encode(), digest_size=16
    ).digest()
