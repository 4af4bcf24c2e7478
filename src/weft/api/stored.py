"""Keeps finished responses for a while, so that later requests can continue from them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from weft.api.bodies import Message
from weft.core.errors import ResponseNotFound

_CONVERSATION = TypeAdapter(tuple[Message, ...])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end, without its instructions. Both are JSON, as
    objects take up to 20 times as much memory."""

    shown: bytes
    conversation: bytes

    @classmethod
    def of(cls, shown: dict[str, Any], messages: Sequence[Message]) -> StoredResponse:
        conversation = _CONVERSATION.dump_json(tuple(messages), exclude_none=True)
        return cls(msgspec.json.encode(shown), conversation)

    @property
    def messages(self) -> tuple[Message, ...]:
        return _CONVERSATION.validate_json(self.conversation)

    @property
    def num_bytes(self) -> int:
        return len(self.shown) + len(self.conversation)


class StoredResponses:
    """The newest responses of each tenant, in bounded memory.

    When there is no room, the oldest response of the tenant with the most bytes goes, so that
    nobody's responses are pushed out by others who store more.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0 keeps nothing."""
        self.max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        """By tenant and id, the oldest first."""
        self._sizes: Counter[str] = Counter()

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response under its id, which is new."""
        if stored.num_bytes > self.max_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[response_id] = stored
        self._sizes[tenant] += stored.num_bytes
        while self._sizes.total() > self.max_bytes:
            largest, _ = max(self._sizes.items(), key=lambda item: item[1])
            self.delete(largest, next(iter(self._kept[largest])))

    def get(self, tenant: str, response_id: str, field: str | None = None) -> StoredResponse:
        """A tenant's own response. Raises ResponseNotFound, naming the field."""
        found = self._find(tenant, response_id)
        if found is None:
            raise _gone("response", response_id, field)
        return found

    def finder(self, tenant: str) -> Callable[[str, str], dict[str, Any]]:
        """Finds items of the tenant's own responses by their ids, made by `id_of_item`, for a
        field. It raises ResponseNotFound, naming the field. Each response is read once."""
        items: dict[str, dict[str, dict[str, Any]]] = {}

        def find(given: str, field: str) -> dict[str, Any]:
            response_id = "resp_" + given.partition("_")[2].rpartition("_")[0]
            if response_id not in items:
                found = self._find(tenant, response_id)
                output = msgspec.json.decode(found.shown)["output"] if found else []
                items[response_id] = {item["id"]: item for item in output}
            if given not in items[response_id]:
                raise _gone("item", given, field)
            return items[response_id][given]

        return find

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        kept = self._kept.get(tenant)
        return None if kept is None else kept.get(response_id)

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. Raises ResponseNotFound."""
        self.get(tenant, response_id)
        self._sizes[tenant] -= self._kept[tenant].pop(response_id).num_bytes
        if not self._kept[tenant]:
            del self._kept[tenant], self._sizes[tenant]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        sizes = {n: sum(each.num_bytes for each in k.values()) for n, k in self._kept.items()}
        assert sizes == dict(self._sizes)
        assert all(self._kept.values())
        assert self._sizes.total() <= self.max_bytes


def id_of_item(kind: str, response_id: str, number: int) -> str:
    """The id of an item of a response, from which the response can be found."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{number}"


def _gone(what: str, given: str, field: str | None) -> ResponseNotFound:
    why = "it may have made way for newer ones, or be on another server"
    return ResponseNotFound(f"there is no stored {what} {given[:80]!r}; {why}", field)
