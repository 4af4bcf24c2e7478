"""Keeps finished responses for a while, so that later requests can continue from them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.api.bodies import Message
from weft.core.errors import ResponseNotFound


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end, without its instructions."""

    shown: dict[str, Any]
    messages: tuple[Message, ...]


class StoredResponses:
    """The newest responses of each tenant, in bounded memory.

    When there is no room, the oldest response of the tenant with the most bytes goes, so that
    nobody's responses are pushed out by others who store more.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0 keeps nothing."""
        self.max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, tuple[StoredResponse, int]]] = {}
        """By tenant and id, the oldest first, each with its size."""
        self._sizes: Counter[str] = Counter()

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response under its id."""
        size = len(msgspec.json.encode(stored.shown)) + sum(map(_size, stored.messages))
        if size > self.max_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[stored.shown["id"]] = stored, size
        self._sizes[tenant] += size
        while self._sizes.total() > self.max_bytes:
            largest, _ = max(self._sizes.items(), key=lambda item: item[1])
            self.delete(largest, next(iter(self._kept[largest])))

    def get(self, tenant: str, response_id: str, field: str | None = None) -> StoredResponse:
        """A tenant's own response. Raises ResponseNotFound, naming the field."""
        found = self._find(tenant, response_id)
        if found is None:
            raise _gone("response", response_id, field)
        return found

    def item(self, tenant: str, given: str, field: str) -> dict[str, Any]:
        """The item of a tenant's own response that has the given id, made by `id_of_item`. Raises
        ResponseNotFound, naming the field."""
        own = given.partition("_")[2].rpartition("_")[0]
        found = self._find(tenant, f"resp_{own}")
        items: list[dict[str, Any]] = found.shown["output"] if found else []
        item = next((each for each in items if each["id"] == given), None)
        if item is None:
            raise _gone("item", given, field)
        return item

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        kept = self._kept.get(tenant)
        found = None if kept is None else kept.get(response_id)
        return None if found is None else found[0]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. Raises ResponseNotFound."""
        self.get(tenant, response_id)
        _, size = self._kept[tenant].pop(response_id)
        self._sizes[tenant] -= size
        if not self._kept[tenant]:
            del self._kept[tenant], self._sizes[tenant]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        sizes = {name: sum(size for _, size in kept.values()) for name, kept in self._kept.items()}
        assert sizes == dict(self._sizes)
        assert all(self._kept.values())
        assert self._sizes.total() <= self.max_bytes


def id_of_item(kind: str, response_id: str, number: int) -> str:
    """The id of an item of a response, from which the response can be found."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{number}"


def _gone(what: str, given: str, field: str | None) -> ResponseNotFound:
    message = f"there is no stored {what} {given[:80]!r}; it may have made way for newer ones"
    return ResponseNotFound(message, field)


def _size(message: Message) -> int:
    return len(message.model_dump_json(exclude_none=True))
