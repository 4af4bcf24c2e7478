"""Tenants and their keys: roles, grants, and what a key may do.

All of it is immutable. Other modules decide where it is kept and when it changes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from weft.core.errors import Unauthorized
from weft.core.tenants import Tenant

Role = Literal["use", "publish", "admin"]
"""use: ask models and tokenize. publish: load and unload adapters of one's own namespace. admin:
everything, in all namespaces."""
ROLES: frozenset[Role] = frozenset(get_args(Role))


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sends a request. Where nobody has set up tenants, everybody may do everything."""

    tenant: str = ""
    """Empty only where there are no tenants."""
    roles: frozenset[Role] = ROLES
    key_id: str = ""
    may_use: frozenset[str] = frozenset()
    """Adapters of other tenants: `acme/sql`, or `acme/*` for all of acme's."""

    def may(self, role: Role) -> bool:
        return role in self.roles or "admin" in self.roles

    def owns(self, adapter: str) -> bool:
        """Whether the adapter of this whole name is in the caller's namespace, or the caller is an
        admin."""
        return self.may("admin") or adapter.startswith(f"{self.tenant}/")

    def sees(self, adapter: str) -> bool:
        """Whether the caller may know and use the adapter of this whole name."""
        namespace, slash, _ = adapter.partition("/")
        shared = not slash
        granted = adapter in self.may_use or f"{namespace}/*" in self.may_use
        return shared or granted or self.owns(adapter)


@dataclass(frozen=True, slots=True)
class TenantKey:
    """One of a tenant's keys. The key itself is not stored, only its digest."""

    id: str
    """What logs call it."""
    sha256: str
    """The digest of the key, in hex."""
    roles: frozenset[Role]
    expires: datetime | None = None
    """The key is invalid from this time on. It has a time zone."""


@dataclass(frozen=True, slots=True)
class Member:
    """A tenant with all that belongs to it."""

    tenant: Tenant
    keys: tuple[TenantKey, ...] = ()
    may_use: frozenset[str] = frozenset()
    """As in `Caller`."""
    lora_roots: tuple[Path, ...] = ()
    """The folders below which it may load adapters."""

    def caller(self, key: TenantKey) -> Caller:
        return Caller(self.tenant.name, key.roles, key.id, self.may_use)


class Keychain:
    """Finds the caller that a request's key belongs to."""

    def __init__(self, entries: Iterable[tuple[bytes, Caller, datetime | None]]) -> None:
        """Each entry is the sha256 of a key, whose it is, and when it expires."""
        self._salt = secrets.token_bytes(32)
        self._entries = {self._blinded(d): (caller, expires) for d, caller, expires in entries}

    def caller(self, secret: bytes, now: datetime) -> Caller:
        """Whose key this is. Raises Unauthorized if it is nobody's, or has expired."""
        found = self._find(secret)
        if found is None:
            raise Unauthorized("Incorrect API key provided")
        caller, expires = found
        if expires is not None and now >= expires:
            since = expires.isoformat()
            raise Unauthorized(f"Expired API key provided; it was valid until {since}")
        return caller

    def owner(self, secret: bytes) -> Caller | None:
        """Whose key this is, or was until it expired; None if it is nobody's."""
        found = self._find(secret)
        return found and found[0]

    def _find(self, secret: bytes) -> tuple[Caller, datetime | None] | None:
        return self._entries.get(self._blinded(hashlib.sha256(secret).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        """The salted hash by which a key is looked up. As nobody outside knows the salt, the time
        of a look-up says nothing about the digests that exist."""
        return hashlib.blake2b(digest, key=self._salt, digest_size=32).digest()


class Change(NamedTuple):
    """One difference between two sets of tenants."""

    action: str
    """What was done, e.g. `add key` or `grant`."""
    tenant: str
    name: str | None = None
    """The key's id, or the adapters that the tenant may use, or no longer."""


@dataclass(frozen=True, slots=True)
class Directory:
    """All tenants of a server at one time, by name."""

    members: Mapping[str, Member] = field(default_factory=dict)

    @property
    def tenants(self) -> list[Tenant]:
        return [member.tenant for member in self.members.values()]

    def entries(self) -> Iterator[tuple[bytes, Caller, datetime | None]]:
        """All keys, as a `Keychain` takes them."""
        for member in self.members.values():
            for key in member.keys:
                yield bytes.fromhex(key.sha256), member.caller(key), key.expires

    def keychain(self) -> Keychain:
        return Keychain(self.entries())

    def lora_roots(self, tenant: str) -> tuple[Path, ...]:
        """The folders below which a tenant may load adapters. A tenant that is not there has
        none."""
        member = self.members.get(tenant)
        return member.lora_roots if member else ()

    def changes_to(self, new: Directory) -> list[Change]:
        """The differences from this directory to `new`."""
        changes: list[Change] = []
        for name in sorted(self.members.keys() | new.members.keys()):
            before, after = self.members.get(name), new.members.get(name)
            if before is None or after is None:
                changes.append(Change("remove tenant" if after is None else "add tenant", name))
            elif (before.tenant, before.lora_roots) != (after.tenant, after.lora_roots):
                changes.append(Change("change tenant", name))
            changes += _changed_keys(name, before, after)
            had = before.may_use if before else frozenset()
            has = after.may_use if after else frozenset()
            changes += [Change("revoke", name, adapters) for adapters in sorted(had - has)]
            changes += [Change("grant", name, adapters) for adapters in sorted(has - had)]
        return changes


def _changed_keys(tenant: str, before: Member | None, after: Member | None) -> list[Change]:
    old = {key.id: key for key in before.keys} if before else {}
    new = {key.id: key for key in after.keys} if after else {}
    changes: list[Change] = []
    for key_id in sorted(old.keys() | new.keys()):
        if old.get(key_id) != new.get(key_id):
            what = "add" if key_id not in old else "remove" if key_id not in new else "change"
            changes.append(Change(f"{what} key", tenant, key_id))
    return changes
