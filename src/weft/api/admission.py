"""Limits how many requests may be open, in all and for each tenant, and refuses further ones.

A tenant that is alone may have all places. When others come while it holds them, each may open its
share of the limit, even beyond that limit, and whoever holds more than its share is refused:

    max_open        ├──────────────────────────────────────┤
    a, alone        ├──────────────────────────────────────┤ full: refused
    b comes         ├──────────────────────────────────────┼──────────────────┤ b has its half
    a's requests    ├──────────────────┼──────────────────┤  end, and a is refused until it has
                                                             no more than its half either

So no flood makes the server refuse other tenants. With n tenants, at most about 1 + ln(n) times
`max_open` requests are open, and a little more, as a tenant with nothing open may always enter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from weft.core.errors import InvalidRequest, Overloaded
from weft.core.tenants import Tenant, tenant_in

_RECENT_S = 30.0
_UNKNOWN_RETRY_S, _MAX_RETRY_S = 5, 30


@dataclass(slots=True)
class _Open:
    """One tenant's open requests."""

    num_open: int = 0
    num_tokens: int = 0
    ended_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """The times at which its last requests ended, which tell the throughput."""

    def retry_after_s(self, needed: int) -> int:
        """The seconds until `needed` places should be free, if requests end as fast as of late."""
        now_s = time.monotonic()
        recent = [ended_s for ended_s in self.ended_s if ended_s > now_s - _RECENT_S]
        if not recent:
            return _UNKNOWN_RETRY_S
        seconds_each = (now_s - recent[0]) / len(recent)
        return min(max(math.ceil(needed * seconds_each), 1), _MAX_RETRY_S)


class Admission:
    """Counts open engine requests. Those beyond the limit are refused instead of queued, so that no
    accepted request waits for an unbounded time."""

    def __init__(self, max_open: int, tenants: Mapping[str, Tenant] | None = None) -> None:
        """`tenants` may change while the server runs; unknown names count as one tenant."""
        self._max_open = max_open
        self._tenants: Mapping[str, Tenant] = {} if tenants is None else tenants
        self._open: dict[str, _Open] = {}
        self.num_open = 0

    def check_early(self, name: str = "", count: int = 1) -> None:
        """Refuse a tenant early, before work is put into its request. Raises as `enter`."""
        tenant = tenant_in(self._tenants, name)
        self._check_size(tenant, count, 0)
        self._check_room(tenant, count, 0)

    @contextmanager
    def enter(self, count: int, name: str = "", num_tokens: int = 0) -> Iterator[None]:
        """Hold `count` places, all or none, for a tenant's requests that may come to `num_tokens`
        together. Raises Overloaded, or InvalidRequest if they could never be admitted."""
        tenant = tenant_in(self._tenants, name)
        self._check_size(tenant, count, num_tokens)
        self._check_room(tenant, count, num_tokens)
        own = self._open.setdefault(tenant.name, _Open())
        self.num_open += count
        own.num_open += count
        own.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_open -= count
            own.num_open -= count
            own.num_tokens -= num_tokens
            own.ended_s.extend([time.monotonic()] * count)

    def _check_size(self, tenant: Tenant, count: int, num_tokens: int) -> None:
        """Raise InvalidRequest for requests that could never be admitted."""
        own = tenant.caps.max_open_requests
        if count > min(self._max_open, own or self._max_open):
            limit = f"the server takes {self._max_open} at a time"
            if own is not None and own < self._max_open:
                limit = f"you may have {own} open at a time"
            raise InvalidRequest(f"this request asks for {count} sequences, and {limit}")
        most = tenant.caps.max_tokens_in_flight
        if most is not None and num_tokens > most:
            raise InvalidRequest(
                f"this request may come to {num_tokens} tokens with its answers, and you may have "
                f"{most} in flight; ask for fewer with max_tokens",
                "max_tokens",
            )

    def _check_room(self, tenant: Tenant, count: int, num_tokens: int) -> None:
        """Raise Overloaded if there is no room now for this many of the tenant's requests."""
        own, caps = self._open.get(tenant.name) or _Open(), tenant.caps
        total = self.num_open
        room = self._max_open - (total if own.num_open else 0)
        if count > room:
            room = self._room(tenant, own, total)
        if count > room:
            raise Overloaded(
                f"{total} requests are open, {own.num_open} of them yours, and the server takes "
                f"{self._max_open}; try again later",
                retry_after_s=own.retry_after_s(count - room),
            )
        if caps.max_open_requests is not None:
            missing = own.num_open + count - caps.max_open_requests
            if missing > 0:
                raise Overloaded(
                    f"you have {own.num_open} requests open, and may have "
                    f"{caps.max_open_requests}; try again later",
                    retry_after_s=own.retry_after_s(missing),
                )
        if caps.max_tokens_in_flight is not None:
            missing = own.num_tokens + num_tokens - caps.max_tokens_in_flight
            if missing > 0:
                num_requests = math.ceil(missing * own.num_open / max(own.num_tokens, 1))
                raise Overloaded(
                    f"your open requests may come to {own.num_tokens} tokens, and you may have "
                    f"{caps.max_tokens_in_flight} in flight; try again later",
                    retry_after_s=own.retry_after_s(num_requests),
                )

    def _room(self, tenant: Tenant, own: _Open, total: int) -> int:
        """How many more requests a tenant may open: all that are free, or what its share leaves."""
        active = {name for name, each in self._open.items() if each.num_open}
        weights = sum(tenant_in(self._tenants, name).weight for name in active | {tenant.name})
        share = int(self._max_open * tenant.weight / weights)
        return max(self._max_open - total, share - own.num_open)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.num_open == sum(each.num_open for each in self._open.values())
        for each in self._open.values():
            assert each.num_open >= 0 and each.num_tokens >= 0
            assert each.num_open or not each.num_tokens
