"""Whose request it is: that of the key's name, else of who the adapter belongs to.

    --api-key KEY         a key without a name
    --api-key NAME=KEY    one of the tenant NAME
    --api-key =KEY        one without a name that holds a "=" itself

What ends in "=" and has no other, as base64 does, is a key without a name too.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import NamedTuple

from weft.core.errors import ConfigError

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})?=(?!=*$)(.+)")

key_name_var: ContextVar[str] = ContextVar("key_name", default="")
"""The name of the key that the HTTP request under way carries; "": it has none."""


class ApiKey(NamedTuple):
    """A key that requests may carry."""

    secret: str
    name: str
    """The tenant; "": none."""


def parse_key(text: str) -> ApiKey:
    """A key as an operator writes it; see above. Raises ConfigError."""
    named = _NAMED.fullmatch(text)
    name, secret = (named[1] or "", named[2]) if named else ("", text)
    if not (secret and secret.isascii() and secret.isprintable()):
        raise ConfigError("--api-key must be printable ASCII and not empty", "api_key")
    return ApiKey(secret, name)


def tenant_of(adapter: str | None) -> str:
    """The tenant of a request for an adapter by name (None: for the base): the name of its key,
    else what the adapter's name has before the first "/", or all of it; "" for the base. A sum
    of adapters is the first one's."""
    first = (adapter or "").partition(",")[0]
    return key_name_var.get() or first.partition("/")[0]
