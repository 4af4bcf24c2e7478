"""The tenants and the audit log of a server, which SIGHUP renews."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from weft.api.audit import AuditEntry, AuditLog
from weft.core.errors import ConfigError, EngineDead
from weft.core.messages import EngineClient
from weft.registry.shared_tenants import SharedTenants
from weft.registry.tenants import Change
from weft.registry.tenants_file import TenantsFile

logger = logging.getLogger(__name__)


class AccessControl:
    """The tenants and the audit log of a server. Its engine is told of the tenants."""

    def __init__(self, tenants: TenantsFile | SharedTenants | None, audit_log: Path | None) -> None:
        """Raises ConfigError."""
        self.tenants = tenants
        try:
            self.audit = AuditLog(audit_log)
        except OSError as error:
            raise ConfigError(f"--audit-log {audit_log}: {error.strerror}", "audit_log") from error
        self._reloads = isinstance(tenants, TenantsFile) or audit_log is not None
        self._engine: EngineClient | None = None
        self._telling: asyncio.Task[None] | None = None

    def is_open(self, keys: Sequence[str]) -> bool:
        """Whether requests need no key, neither one of these nor a tenant's."""
        return not keys and (self.tenants is None or self.tenants.keychain is None)

    def warn_if_open(self, keys: Sequence[str], address: str) -> None:
        """Log if requests need no key and come to an address that other machines may reach.
        `keys`: as for `is_open`."""
        if self.is_open(keys) and not ip_address(address.partition("%")[0]).is_loopback:
            logger.warning(
                "requests need no key, and other machines may reach %s: whoever does may use,"
                " replace and unload all adapters (see --api-key and --tenants)",
                address,
            )

    def on_hangup(self) -> None:
        """Let SIGHUP renew the file of tenants and the audit log, as far as there are any."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.renew)

    async def tell(self, engine: EngineClient) -> None:
        """Tell the engine of the tenants, now and whenever they change."""
        self._engine = engine
        await self._tell()

    def renew(self) -> None:
        """Open a new audit log if the old one was moved away, and read the tenants again. Whatever
        can't be read stays as it was, and the server's log says why."""
        if not self._reloads:
            logger.info("SIGHUP renews --tenants and --audit-log, and neither is given")
        try:
            self.audit.reopen()
        except OSError as error:
            logger.error("the audit log can't be opened again: %s", error.strerror)
        if not isinstance(self.tenants, TenantsFile):
            return
        source = str(self.tenants.path)
        try:
            changes = self.tenants.reload()
        except ConfigError as error:
            logger.error("the tenants stay as they were: %s", error.message)
            self.audit.write(AuditEntry("reload", source=source, outcome=error.kind))
            return
        logger.info("the tenants were read again: %d changes", len(changes))
        self._changed(changes, source)

    def follow(self) -> None:
        """Take over the newest tenants of the registry, if they come from there."""
        if isinstance(self.tenants, SharedTenants) and (changes := self.tenants.update()):
            self._changed(changes, "the registry")

    def _changed(self, changes: Sequence[Change], source: str) -> None:
        for change in changes:
            self.audit.write(AuditEntry(change.action, change.name, source, subject=change.tenant))
        self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        if self._engine is not None and self.tenants is not None:
            with contextlib.suppress(EngineDead):  # it is told again when it has started again
                await self._engine.set_tenants(self.tenants.directory.tenants)
