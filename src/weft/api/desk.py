"""Changing adapters for whoever asks: in whose namespace, from which folders, written down."""

from __future__ import annotations

from weft.api.audit import AuditLog
from weft.api.callers import Tenants
from weft.api.service import Service
from weft.registry import Access, AdapterRoots, Sources
from weft.serving import LoopExecutor, Publisher


class AdapterDesk:
    """Loads and unloads adapters as the caller of the request under way may do it. What has begun
    goes on when the client leaves, and is written down when it has ended."""

    def __init__(
        self,
        service: Service,
        publisher: Publisher,
        executor: LoopExecutor,
        audit: AuditLog,
        tenants: Tenants | None,
    ) -> None:
        self._service = service
        self._publisher = publisher
        self._executor = executor
        self._audit = audit
        self._tenants = tenants

    async def load(self, name: str, path: str, replace: bool = False, pinned: bool = False) -> str:
        """As `Publisher.load`; returns the adapter's whole name. Raises PermissionDenied too."""
        return await self._executor.to_the_end(self._load(name, path, replace, pinned))

    async def unload(self, name: str) -> str:
        """As `Publisher.unload`; returns the adapter's whole name. Raises PermissionDenied too."""
        return await self._executor.to_the_end(self._unload(name))

    async def _unload(self, name: str) -> str:
        with self._audit.entry("unload", name) as entry:
            whole = entry.name = self._service.access.to_retire(name)
            entry.digest = (await self._publisher.unload(whole)).digest
            return whole

    async def _load(self, name: str, path: str, replace: bool, pinned: bool) -> str:
        with self._audit.entry("load", name, path) as entry:
            access = self._service.access
            whole = entry.name = access.to_publish(name)
            if replace and access.digest_of(whole) is not None:
                entry.action = "replace"
            sources = self._sources(access)
            ref = await self._publisher.load(whole, path, replace, pinned, sources)
            entry.digest = ref.digest
            return whole

    def _sources(self, access: Access) -> Sources | None:
        """Where a tenant's adapters may come from; None for those who may load from all roots."""
        if self._tenants is None or access.caller.may("admin"):
            return None
        folders = AdapterRoots(self._tenants.directory.lora_roots(access.caller.tenant))
        return Sources(folders, self._service.settings.allow_hub_adapters)
