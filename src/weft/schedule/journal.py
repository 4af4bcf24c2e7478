"""Records the changes of the prefix index, in order, for others who need to know which prefixes are
cached here. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that can be found from now on, each the successor of the one before."""

    keys: list[bytes]
    parent: bytes | None
    """The key of the block before the first one; None: the first one begins its sequences."""
    token_ids: list[int]
    """The tokens of all the blocks."""
    adapter: str | None
    """The request's name for the adapter that computed them; None: the base did."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that can't be found any more."""

    keys: list[bytes]


CacheEvent = BlocksStored | BlocksRemoved


class Journal:
    """The events since the last `take`. Successive blocks of one sequence are one event."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def store(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int], adapter: str | None
    ) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and (last.keys[-1], last.adapter) == (parent, adapter):
            last.keys.append(key)
            last.token_ids.extend(token_ids)
        else:
            self._events.append(BlocksStored([key], parent, list(token_ids), adapter))

    def remove(self, key: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved([key]))

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
