"""The tenants of a shared registry, as a server uses them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.core.errors import ConfigError
from weft.core.tenants import Tenant
from weft.registry.shared import SharedRegistry
from weft.registry.tenants import Caller, Change, Directory, Keychain, Member
from weft.registry.tenants_file import check_unique, read_tenant

logger = logging.getLogger(__name__)


class SharedTenants:
    """The tenants in a server's shared registry, and the operator's own keys.

    Without any key or tenant, everybody may do everything. Once there has been a tenant, every
    request needs a key, even after the last tenant is removed.
    """

    def __init__(
        self,
        shared: SharedRegistry,
        operator_keys: Iterable[bytes] = (),
        lora_roots: Sequence[Path] = (),
    ) -> None:
        """`operator_keys` are sha256 digests of keys that may do everything; `lora_roots` are as in
        `TenantsFile`."""
        self._shared = shared
        self._operator = [(digest, Caller(), None) for digest in operator_keys]
        self._lora_roots = tuple(lora_roots)
        self._closed = bool(self._operator)
        self._read: object = None
        """The table of tenants that was read last."""
        self.directory = Directory()
        self.by_name: dict[str, Tenant] = {}
        """The tenants, for those who look one up at any time."""
        self.keychain: Keychain | None = None
        """None: no key is needed."""
        self.update()

    def update(self) -> list[Change]:
        """Follow the registry, and return what changed. A tenant whose settings can't be used is
        left out, and the server's log says why."""
        state = self._shared.state
        if self._read is state.tenants:
            return []
        members: dict[str, Member] = {}
        for name in sorted(state.tenants):
            try:
                members[name] = read_tenant(name, state.tenants[name].settings, self._lora_roots)
            except ConfigError as error:
                _left_out(name, error)
        try:
            check_unique(members)
        except ConfigError:
            members = _unique(members)
        before, self.directory = self.directory, Directory(members)
        self._read = state.tenants
        self._closed |= bool(state.tenants) or bool(state.removed_tenants)
        if self._closed:
            self.keychain = Keychain([*self.directory.entries(), *self._operator])
        self.by_name.clear()
        self.by_name.update((tenant.name, tenant) for tenant in self.directory.tenants)
        return before.changes_to(self.directory)


def _unique(members: dict[str, Member]) -> dict[str, Member]:
    """The members, without those that share a name, a key or a key's id with an earlier one."""
    unique: dict[str, Member] = {}
    for name, member in members.items():
        try:
            check_unique({**unique, name: member})
            unique[name] = member
        except ConfigError as error:
            _left_out(name, error)
    return unique


def _left_out(name: str, error: ConfigError) -> None:
    logger.error("the registry's tenant %s is left out: %s", name, error.message)
