"""Changes adapters for a caller: checks the namespace and the folders, and writes the audit log.

If there is a shared registry, a change is made there, and all servers that follow it take it over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from weft.api.audit import AuditLog
from weft.api.callers import Tenants, caller_var
from weft.api.service import Service
from weft.core.adapters import AdapterInfo
from weft.core.errors import InvalidRequest, Overloaded, WeftError
from weft.registry import Access, AdapterRoots, Sources
from weft.registry.records import Name, shown_route
from weft.registry.sources import UPLOAD
from weft.serving import LoopExecutor, Publisher
from weft.serving.releases import Order, Releases, Wait

T = TypeVar("T")

MAX_UPLOADS = 8
"""How many adapters may be uploaded at a time. One tenant may have three quarters of these."""
RETRY_S = 5


class AdapterDesk:
    """Loads and unloads adapters for the caller of the current request, within its rights. A change
    continues if the client leaves, and is logged when it ends."""

    def __init__(
        self,
        service: Service,
        publisher: Publisher,
        releases: Releases | None,
        sources: Sources,
        executor: LoopExecutor,
        audit: AuditLog,
        tenants: Tenants | None,
    ) -> None:
        """`releases` changes the shared registry, if there is one."""
        self._service = service
        self._publisher = publisher
        self._shared = releases
        self._all = sources
        self._executor = executor
        self._audit = audit
        self._tenants = tenants
        self._uploads: Counter[str] = Counter()

    async def load(
        self, name: str, path: str, replace: bool = False, pinned: bool = False, wait: Wait = "here"
    ) -> str:
        """As `Publisher.load` or `Releases.load`; returns the adapter's whole name. Raises
        PermissionDenied too."""
        work = self._load(name, path, replace, pinned, wait)
        return (await self._executor.to_the_end(work))[0]

    @property
    def max_upload_bytes(self) -> int:
        """The most bytes that an uploaded adapter may have, packed or not."""
        return self._all.max_bytes

    async def upload(
        self,
        name: str,
        receive: Callable[[Path], Awaitable[str]],
        replace: bool,
        pinned: bool,
        wait: Wait,
    ) -> tuple[str, str]:
        """Load an adapter that the client sends: `receive` writes it to a new file, as a tar or a
        safetensors file, and returns its checksum. Returns the adapter's whole name and digest.

        Raises what `load` raises, what `receive` raises, and Overloaded.
        """
        try:
            self._service.access.to_publish(name)  # before the upload
        except WeftError:
            with self._audit.entry("load", name, f"{UPLOAD}://"):
                raise
        with self.receiving(), ExitStack() as stack:
            packed = stack.enter_context(self._all.contents.stage()) / "packed"
            path = f"{UPLOAD}://sha256:{await receive(packed)}"
            work = self._load(name, path, replace, pinned, wait, packed)
            return await self._executor.to_the_end(_closing(stack.pop_all(), work))

    async def examine(
        self, name: str, receive: Callable[[Path], Awaitable[str]], pinned: bool
    ) -> tuple[str, AdapterInfo]:
        """Try an adapter that the client sends, as for `upload`, without loading it. Returns its
        whole name, and what the engine reports of it. Raises what `upload` raises."""
        access = self._service.access
        whole = access.to_publish(name)
        with self.receiving(), ExitStack() as stack:
            packed = stack.enter_context(self._all.contents.stage()) / "packed"
            path = f"{UPLOAD}://sha256:{await receive(packed)}"
            sources = self._sources(access).with_upload(packed)

            async def examine() -> tuple[str, AdapterInfo]:
                opened = self._publisher.tried(whole, lambda: sources.open(path), pinned)
                async with opened as tried:
                    return whole, tried.info

            return await self._executor.to_the_end(_closing(stack.pop_all(), examine()))

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count an upload while it runs. Raises Overloaded for one too many."""
        tenant = self._service.access.caller.tenant
        of_one = MAX_UPLOADS - MAX_UPLOADS // 4 if self._tenants else MAX_UPLOADS
        if self._uploads.total() >= MAX_UPLOADS or self._uploads[tenant] >= of_one:
            message = "too many adapters are being uploaded; try again later"
            raise Overloaded(message, retry_after_s=RETRY_S)
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # tenants without uploads are dropped

    async def unload(self, name: str, wait: Wait = "here") -> str:
        """As `Publisher.unload` or `Releases.remove`; returns the adapter's whole name. Raises
        PermissionDenied too."""
        return await self._executor.to_the_end(self._unload(name, wait))

    async def release(
        self, name: str, order: Order | None, expect: int | None = None, wait: Wait = "here"
    ) -> tuple[str, Name]:
        """As `Releases.release`; returns the whole name, and what the registry has of it then.
        Raises PermissionDenied too, and InvalidRequest without a shared registry."""
        return await self._executor.to_the_end(self._release(name, order, expect, wait))

    async def _unload(self, name: str, wait: Wait) -> str:
        with self._audit.entry("unload", name) as entry:
            whole = entry.name = self._service.access.to_retire(name)
            if self._shared is None:
                entry.digest = (await self._publisher.unload(whole)).digest
            else:
                entry.digest = await self._shared.remove(whole, _actor(), wait)
            return whole

    async def _load(
        self,
        name: str,
        path: str,
        replace: bool,
        pinned: bool,
        wait: Wait,
        packed: Path | None = None,
    ) -> tuple[str, str]:
        """The adapter's whole name, and its digest. `packed`: what the client sent."""
        with self._audit.entry("load", name, path) as entry:
            access = self._service.access
            whole = entry.name = access.to_publish(name)
            if replace and access.digest_of(whole) is not None:
                entry.action = "replace"
            sources = self._sources(access)
            if packed is not None:
                sources = sources.with_upload(packed)
            if self._shared is None:
                load = self._publisher.load(whole, path, replace, pinned, sources)
                entry.digest = (await load).digest
            else:
                entry.digest = await self._shared.load(
                    whole, path, sources, replace, pinned, _actor(), wait
                )
            return whole, entry.digest

    async def _release(
        self, name: str, order: Order | None, expect: int | None, wait: Wait
    ) -> tuple[str, Name]:
        if self._shared is None:
            raise InvalidRequest("this server has no shared registry (--registry)")
        with self._audit.entry("rollback" if order is None else "release", name) as entry:
            whole = entry.name = self._service.access.to_retire(name)
            now = await self._shared.release(whole, order, expect, _actor(), wait)
            entry.source = shown_route(now.route)
            return whole, now

    def _sources(self, access: Access) -> Sources:
        """Where the caller's adapters may come from."""
        if self._tenants is None or access.caller.may("admin"):
            return self._all
        roots = self._tenants.directory.lora_roots(access.caller.tenant)
        return self._all.within(AdapterRoots(roots, "your tenant's folders"))


async def _closing(stack: ExitStack, work: Coroutine[Any, Any, T]) -> T:
    with stack:
        return await work


def _actor() -> str:
    """Who sends the request under way, as a registry's history names it."""
    caller = caller_var.get()
    return f"{caller.tenant}/{caller.key_id}".strip("/") if caller is not None else ""
