"""The caller of the current request, found by its key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol

from weft.core.errors import InvalidRequest, Unauthorized
from weft.core.tenants import Tenant
from weft.registry.tenants import Caller, Directory, Keychain

caller_var: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who sent the current HTTP request, or whose expired key it has. None: the request needed no key,
or has a key that is nobody's."""
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
    """Who sends a request with this header. Raises Unauthorized."""
    hint = "send it as 'Authorization: Bearer KEY'"
    if not authorization:
        raise Unauthorized(f"No API key provided; {hint}")
    scheme, key = _scheme_and_key(authorization)
    try:
        caller = keychain.caller(key, datetime.now(UTC))
    except Unauthorized as error:
        if keychain.owner(key) is not None:  # an expired key, which was sent as it should be
            raise
        raise Unauthorized(f"{error.message}; {hint}") from None
    if scheme != "bearer":
        raise Unauthorized(f"Incorrect API key provided; {hint}")
    return caller


def owner_of(authorization: str | None, keychain: Keychain) -> Caller | None:
    """Whose key this header has, even if it has expired; None if it is nobody's."""
    return keychain.owner(_scheme_and_key(authorization)[1]) if authorization else None


def _scheme_and_key(authorization: str) -> tuple[str, bytes]:
    scheme, _, key = authorization.partition(" ")
    return scheme.lower(), key.strip().encode("latin-1")


def tenant_of_key(key: bytes, keychain: Keychain) -> str:
    """The tenant whose key this is; "" if it is nobody's."""
    try:
        return keychain.caller(key, datetime.now(UTC)).tenant
    except Unauthorized:
        return ""
