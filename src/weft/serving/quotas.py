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
"""Loads that run side by side. One tenant may have at most three quarters of them, so that its
loads never block everybody else's."""
MAX_WAITING = 256
"""How many loads of one tenant may wait for a place."""
RETRY_S = 5


class Quotas:
    """Counts adapters and loads by tenant. The part of an adapter's name before its first "/" says
    whose it is. Names for which there is no such tenant count together, as one tenant's."""

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
        """How many loads of each name have begun and not ended."""

    def check_bytes(self, name: str, info: AdapterInfo) -> None:
        """Raise AdapterConflict if this adapter would exceed the bytes that its tenant may have."""
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
        """Hold a place for a load, after a wait if all are taken. Raises AdapterConflict if the
        tenant has too many adapters, and Overloaded if it has too many loads."""
        with self._counted(name, self._tenant(name)):
            async with self.place(name):
                yield

    @asynccontextmanager
    async def place(self, name: str, patient: bool = False) -> AsyncIterator[None]:
        """Hold a place for a load that is not counted as another adapter of its tenant. Raises
        Overloaded if the tenant has too many loads; a `patient` load waits instead."""
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
            self._coming += Counter()  # drops the names whose count is 0

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
        """Give a place back. Waiting loads get it, of tenants with the fewest running loads first;
        several may start, if a cap was raised meanwhile."""
        self._running[name] -= 1
        waiting = [name for name, places in self._waiting.items() if places]
        for name in sorted(waiting, key=lambda name: self._running[name]):
            while self._waiting[name] and self._has_place(name):
                place = self._waiting[name].popleft()
                if not place.done():  # else the waiting load was cancelled
                    self._running[name] += 1
                    place.set_result(None)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert 0 <= self._running.total() <= self._max_loads
        assert all(count >= 0 for count in self._running.values())
        for name, places in self._waiting.items():
            assert not (places and self._has_place(name)), "a load waits beside a free place"
