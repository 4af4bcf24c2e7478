"""Limits how many adapters tenants may have, and how many of their loads run side by side."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from weft.core.adapters import AdapterInfo
from weft.core.errors import AdapterConflict, Overloaded
from weft.core.tenants import Tenant, tenant_in
from weft.registry import AdapterRegistry
from weft.registry.names import namespace_of

MAX_LOADS = 16
"""Loads that run side by side. A tenant may have three quarters of them, so that its loads never
keep all others waiting."""
MAX_WAITING = 256
"""Loads of one tenant that may wait."""
RETRY_S = 5


class Quotas:
    """Counts adapters and loads by namespace: what a name has before its first "/" if that is a
    tenant's name. All other names are one tenant's together."""

    def __init__(
        self, registry: AdapterRegistry, tenants: Mapping[str, Tenant], max_loads: int = MAX_LOADS
    ) -> None:
        """`tenants` may change while the server runs."""
        self._registry = registry
        self._tenants = tenants
        self._max_loads = max_loads
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._coming: Counter[str] = Counter()
        """Names that are being loaded."""

    def check_bytes(self, name: str, info: AdapterInfo) -> None:
        """Raise AdapterConflict if the tenant's adapters are too large with this one."""
        tenant = self._tenant(name)
        most = tenant.caps.max_adapter_bytes
        if most is None:
            return
        each = self._registry.adapters().items()
        own = {r.name: i.num_bytes for r, i in each if self._tenant(r.name).name == tenant.name}
        total = sum((own | {name: info.num_bytes}).values())
        if total > most:
            raise AdapterConflict(
                f"your adapters would take {total} bytes with this one, and may take {most}; "
                "unload one first",
                "lora_name",
            )

    @asynccontextmanager
    async def load(self, name: str) -> AsyncIterator[None]:
        """Hold a place for a load, for which it may have to wait. Raises AdapterConflict for one
        adapter too many, and Overloaded for too many loads."""
        with self._counted(name, self._tenant(name)):
            async with self.place(name):
                yield

    @asynccontextmanager
    async def place(self, name: str, patient: bool = False) -> AsyncIterator[None]:
        """Hold a place for a load that adds no adapter to those of this server. Raises Overloaded
        for too many loads, unless it is `patient`: then it waits, however many there are."""
        tenant = self._tenant(name)
        await self._enter(tenant, patient)
        try:
            yield
        finally:
            self._leave(tenant.name)

    def _tenant(self, name: str) -> Tenant:
        return tenant_in(self._tenants, namespace_of(name))

    @contextmanager
    def _counted(self, name: str, tenant: Tenant) -> Iterator[None]:
        most = tenant.caps.max_adapters
        if most is not None:
            known = {ref.name for ref in self._registry.adapters()} | self._coming.keys()
            own = {each for each in known if self._tenant(each).name == tenant.name}
            if name not in own and len(own) >= most:
                raise AdapterConflict(
                    f"you have {len(own)} adapters, and may have {most}; unload one first",
                    "lora_name",
                )
        self._coming[name] += 1
        try:
            yield
        finally:
            self._coming[name] -= 1
            self._coming += Counter()  # names without loads are dropped

    async def _enter(self, tenant: Tenant, patient: bool) -> None:
        waiting = self._waiting.setdefault(tenant.name, deque())
        under_way = self._running[tenant.name] + len(waiting)
        most = tenant.caps.max_loads or self._max_loads + MAX_WAITING
        if under_way >= most and not patient:
            message = f"{under_way} adapters of yours are being loaded, and {most} may be"
            raise Overloaded(f"{message}; try again later", "lora_name", RETRY_S)
        if self._has_place(tenant.name):
            self._running[tenant.name] += 1
            return
        place = asyncio.get_running_loop().create_future()
        waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in waiting:
                waiting.remove(place)
            elif not place.cancelled():
                self._leave(tenant.name)
            raise

    def _has_place(self, name: str) -> bool:
        of_one = self._max_loads - self._max_loads // 4 if self._tenants else self._max_loads
        of_one = min(of_one, tenant_in(self._tenants, name).caps.max_loads or of_one)
        return self._running.total() < self._max_loads and self._running[name] < of_one

    def _leave(self, name: str) -> None:
        """Give a place back; it goes to the waiting tenant that has fewest. Where a cap was raised,
        there may be more places."""
        self._running[name] -= 1
        waiting = [name for name, places in self._waiting.items() if places]
        for name in sorted(waiting, key=lambda name: self._running[name]):
            while self._waiting[name] and self._has_place(name):
                place = self._waiting[name].popleft()
                if not place.done():  # else whoever waited has left
                    self._running[name] += 1
                    place.set_result(None)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert 0 <= self._running.total() <= self._max_loads
        assert all(count >= 0 for count in self._running.values())
        for name, places in self._waiting.items():
            assert not (places and self._has_place(name)), "a load waits beside a free place"
