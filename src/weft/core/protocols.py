"""Interfaces between packages that must not import each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats


class EngineClient(Protocol):
    """One engine, wherever it runs. All methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool: ...

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
        """The request's events; the last one, and only that, has `finish_reason` set.

        Closing the iterator early aborts the request. Engine-side failures of the request come
        as an event with finish_reason "error"; EngineDead is raised when the engine is gone.
        """
        ...

    async def register_adapter(self, path: str, pinned: bool = False) -> AdapterInfo:
        """Read, validate and pack the adapter in a local folder; it is then known by its digest.

        A pinned one is brought to the device as soon as there is room at its place, and stays
        there. The same content may be registered more than once; each success is to be undone by
        one `drop_adapter`, and the last one says whether it is pinned. Raises AdapterInvalid
        (with `param` naming the field or tensor), AdapterConflict (`pinned`: too much would be),
        AdapterNotFound, EngineDead.
        """
        ...

    async def drop_adapter(self, ref: AdapterRef) -> None:
        """Undo one registration of a version. The last one undone frees its memory, once no
        request of it runs."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop the engine. Open requests end with finish_reason "abort"."""
        ...
