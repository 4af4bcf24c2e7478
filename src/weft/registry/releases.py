"""Routes of names: how requests choose a version, and how releases and rollbacks change that.

    acme/sql              the version that the route of acme/sql chooses for this request
    acme/sql@v7           its seventh version
    acme/sql@sha256:...   its version with this content

All of it is pure.
"""

from __future__ import annotations

import hashlib
import math
import re

from weft.core.errors import InvalidRequest
from weft.registry.records import Name, Route, Share

_VERSION = re.compile(r"(.+)(@v[1-9][0-9]{0,8}|@sha256:[0-9a-f]{64})", re.DOTALL)
MAX_SHARES = 16
"""Versions that share the requests of one name."""


def split(model: str) -> tuple[str, str]:
    """Split `acme/sql@v7` into the name and the version, `@v7`; "" where no version is named."""
    found = _VERSION.fullmatch(model) if "@" in model else None
    return (found[1], found[2]) if found else (model, "")


def number_of(entry: Name, version: str) -> int | None:
    """The number of the version that `@v7` or `@sha256:...` names; None if there is none."""
    if version.startswith("@v"):
        number = int(version[2:])
        return number if number in entry.versions else None
    digest = version.removeprefix("@sha256:")
    return next((n for n, each in entry.versions.items() if each.digest == digest), None)


def choose(name: str, route: Route, sticky: str) -> int:
    """The version that a request for a bare name gets.

    It is the same for the same `sticky`, such as the name of a user. Over many values of `sticky`,
    each version gets its share, and a change of weights moves as few of them as possible (weighted
    rendezvous hashing). `route` must have shares.
    """
    if len(route.shares) == 1:
        return route.shares[0].number
    return max(route.shares, key=lambda share: _score(name, share, sticky)).number


def _score(name: str, share: Share, sticky: str) -> float:
    """A pseudo-random score, such that each share has the largest score with a probability in
    proportion to its weight."""
    said = f"{name}@v{share.number}\0{sticky}".encode()
    drawn = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest()) >> 12
    return share.weight / -math.log((drawn + 0.5) / 2**52)


def numbers_of(route: Route) -> set[int]:
    """The versions that a node needs for requests of the bare name."""
    numbers = {share.number for share in route.shares}
    return numbers if route.shadow is None else numbers | {route.shadow}


def main_number(route: Route) -> int | None:
    """The version with the largest weight, the newest of equals; None for an empty route."""
    shares = route.shares
    return max(shares, key=lambda share: (share.weight, share.number)).number if shares else None


def released(
    name: str,
    entry: Name,
    to: str | None = None,
    canary: float | None = None,
    shadow: str | None = None,
) -> Route:
    """The route of a name after a release.

    `to` gets all requests or, with `canary`, that percentage of them; the versions of the old route
    share the rest as before. `shadow` also runs the requests, but nobody sees its answers; a
    release without it ends an earlier shadow. Versions are written as `v8`, `8` or `sha256:...`.
    Raises InvalidRequest, naming the field.
    """
    if to is None and shadow is None:
        raise InvalidRequest("a release needs a version in 'to' or in 'shadow'", "to")
    beside = None if shadow is None else _existing(name, entry, shadow, "shadow")
    if to is None:
        if canary is not None:
            raise InvalidRequest("canary needs 'to', the version that gets it", "canary")
        shares = entry.route.shares
    else:
        shares = _shares(name, entry, _existing(name, entry, to, "to"), canary)
    if beside in {share.number for share in shares}:
        raise InvalidRequest(f"v{beside} answers requests, so it can't be the shadow", "shadow")
    return Route(shares, beside)


def _shares(name: str, entry: Name, to: int, canary: float | None) -> tuple[Share, ...]:
    if canary is None:
        return (Share(to, 1.0),)
    if not 0 < canary < 100:
        raise InvalidRequest(f"canary must be above 0 and below 100, got {canary:g}", "canary")
    others = [share for share in entry.route.shares if share.number != to and share.weight > 0]
    if not others:
        raise InvalidRequest(f"no other version of {name!r} answers requests", "canary")
    if len(others) >= MAX_SHARES:
        raise InvalidRequest(f"at most {MAX_SHARES} versions may share the requests", "to")
    total = sum(share.weight for share in others)
    rest = [Share(s.number, (100 - canary) * s.weight / total) for s in others]
    return (*rest, Share(to, float(canary)))


def _existing(name: str, entry: Name, version: str, field: str) -> int:
    said = version if version.startswith(("v", "sha256:")) else f"v{version}"
    number = number_of(entry, f"@{said}") if _VERSION.fullmatch(f"{name}@{said}") else None
    if number is None:
        newest = max(entry.versions, default=0)
        known = f"its newest is v{newest}" if newest else "it has none"
        raise InvalidRequest(f"{field}: {name!r} has no version {version!r}; {known}", field)
    return number


def rolled_back(name: str, entry: Name) -> Route:
    """The route of a name after a rollback: the newest earlier route that lacks a version which
    answers now. So a rollback ends a canary, or a version that has replaced another, through all
    its steps of weights; a second rollback undoes the first.

    Raises InvalidRequest if no such route is known, or its versions are gone.
    """
    now = {share.number for share in entry.route.shares}
    for change in reversed(entry.history):
        numbers = {share.number for share in change.route.shares}
        if numbers and not now <= numbers and numbers <= entry.versions.keys():
            return Route(change.route.shares)
    raise InvalidRequest(f"{name!r} has no earlier release to go back to", "name")
