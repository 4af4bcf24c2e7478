"""The caller of the current request, found by its key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol

from weft.core.errors import InvalidRequest, Unauthorized
from weft.core.tenants import Tenant
from weft.registry.tenants import Caller, Directory, ExpiredKey, Keychain

caller_var: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who sent the current HTTP request, or whose expired key it has. None: it needed no key, or has
nobody's."""
client_var: ContextVar[str | None] = ContextVar("client", default=None)
"""The network address from which it came."""
FAIRNESS = "x-llm-d-inference-fairness-id"
"""The header in which llm-d's gateway says with whom a request shares its place in the queue."""
fairness_var: ContextVar[str] = ContextVar("fairness", default="")
"""The value of that header in the current request."""
MAX_FAIRNESS = 128


def fairness_of(headers: Mapping[str, str]) -> str:
    """Raises InvalidRequest for what can't be a tenant's name."""
    said = headers.get(FAIRNESS, "")
    if len(said) > MAX_FAIRNESS or not (said.isascii() and (not said or said.isprintable())):
        message = f"{FAIRNESS} takes up to {MAX_FAIRNESS} printable ASCII characters"
        raise InvalidRequest(message, FAIRNESS)
    return said


class Tenants(Protocol):
    """A server's tenants. They may change at any time."""

    @property
    def by_name(self) -> Mapping[str, Tenant]:
        """The tenants. It is always the same mapping, which changes in place."""

    @property
    def directory(self) -> Directory: ...

    @property
    def keychain(self) -> Keychain | None:
        """The keys; None if requests need no key and may do everything."""


def keychain_of(keys: Iterable[tuple[str, str]]) -> Keychain:
    """The keys of a server without a file of tenants, each with its name: all may do everything."""
    return Keychain(
        (hashlib.sha256(secret.encode()).digest(), Caller(name), None) for secret, name in keys
    )


def caller_of(authorization: str | None, keychain: Keychain) -> Caller:
    """Who sends a request with this header. Raises Unauthorized, ExpiredKey."""
    hint = "send it as 'Authorization: Bearer KEY'"
    if not authorization:
        raise Unauthorized(f"No API key provided; {hint}")
    scheme, _, token = authorization.partition(" ")
    try:
        caller = keychain.caller(token.strip().encode("latin-1"), datetime.now(UTC))
        if scheme.lower() != "bearer":
            raise Unauthorized("Incorrect API key provided")
    except ExpiredKey:
        raise
    except Unauthorized as error:
        raise Unauthorized(f"{error.message}; {hint}") from None
    return caller


def tenant_of_key(key: bytes, keychain: Keychain) -> str:
    """The tenant whose key this is; "" if it is nobody's."""
    try:
        return keychain.caller(key, datetime.now(UTC)).tenant
    except Unauthorized:
        return ""
