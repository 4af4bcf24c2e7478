"""The records of a shared registry, and the changes that can be made to it.

A *name* such as `acme/sql` has numbered versions (`acme/sql@v7`), which never change, and a
*route*: the versions that requests for the bare name go to, and their weights. Each change of a
name raises its *generation* by one; a change may state the generation that it expects, and is
refused if another came first.

All records are immutable, hold plain data only, and are written as JSON.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct


class Version(Struct, frozen=True, omit_defaults=True, gc=False):
    """One immutable content of an adapter, under one name. Its files are a blob of the same
    registry."""

    digest: str
    """sha256 of its content, in hex."""
    num_bytes: int
    """The size of its files."""
    source: str = ""
    """Where it came from, as its publisher wrote it."""
    base: str = ""
    """The base model that it was checked against; empty if nobody has checked it."""
    metadata: dict[str, str] = {}
    """What its publisher wants to be kept with it, such as the training step."""
    listing: str = ""
    """sha256 of the list of its files, with the sha256 of each, so that whoever knows this record
    can believe anybody's list; empty if the list has to come from the registry's store."""


class Share(Struct, frozen=True, array_like=True, gc=False):
    """A version's share of a name's requests."""

    number: int
    """1 for `v1`."""
    weight: float
    """Its share is this weight divided by the sum of the route's weights."""


class Route(Struct, frozen=True, omit_defaults=True, gc=False):
    """Where requests for a bare name go. It is empty for a name that was removed, or has versions
    but was never released."""

    shares: tuple[Share, ...] = ()
    shadow: int | None = None
    """The version that also runs these requests; nobody sees its answers, only its metrics."""


class HistoryEntry(Struct, frozen=True, array_like=True, gc=False):
    """One change of a name."""

    generation: int
    """The name's generation after it."""
    time: float
    """Seconds since 1970, by the clock of whoever made the change; never less than before."""
    actor: str
    """Who asked for it, as stated by the process that made the change."""
    what: str
    """The change in a few words, such as `publish v7` or `release v7 90, v8 10`."""
    route: Route = Route()
    """Where its requests went after it."""


def shown_route(route: Route) -> str:
    """A route in words, such as `v7 90%, v8 10%, shadow v9`."""
    total = sum(share.weight for share in route.shares) or 1.0
    words = [f"v{share.number} {100 * share.weight / total:.3g}%" for share in route.shares]
    if len(words) == 1:
        words = [f"v{route.shares[0].number}"]
    if route.shadow is not None:
        words.append(f"shadow v{route.shadow}")
    return ", ".join(words) or "nothing"


class Name(Struct, frozen=True, omit_defaults=True, gc=False):
    """A registry's entry for one name, at one time."""

    generation: int = 0
    """How many changes there were. A name that is not there has generation 0; one that was removed
    keeps counting."""
    versions: dict[int, Version] = {}
    """The newest versions by number, and older ones while the route names them. A number is never
    given twice."""
    route: Route = Route()
    pinned: bool = False
    """Whether nodes keep the routed versions on their devices."""
    labels: dict[str, str] = {}
    """Instructions for the nodes that serve the name; see `weft.registry.labels`."""
    removed_at: float | None = None
    """When it was removed, in seconds since 1970; None while it exists. A removed name keeps its
    versions until somebody publishes it again, but no route leads to them."""
    history: tuple[HistoryEntry, ...] = ()
    """Its last changes, the oldest first."""


class Publish(Struct, frozen=True, tag="publish", omit_defaults=True):
    """Add a version to a name. Content that the name has already keeps its number."""

    name: str
    version: Version
    release: bool = True
    """Whether all requests for the bare name go to it from now on."""
    pinned: bool = False
    """Whether the name is pinned from now on. Without a release, False leaves that as it is."""
    expect: int | None = None
    """The generation that the name must have; None for any."""


class Release(Struct, frozen=True, tag="release", omit_defaults=True):
    """Let requests for a name go to versions that it has."""

    name: str
    route: Route
    expect: int | None = None


class Remove(Struct, frozen=True, tag="remove", omit_defaults=True):
    """Forget a name. Its content stays until nobody needs it and a grace period is over; a later
    name of the same spelling continues its generations and numbers."""

    name: str
    expect: int | None = None


class Label(Struct, frozen=True, tag="label", omit_defaults=True):
    """Set labels of a name, and remove others."""

    name: str
    labels: dict[str, str | None]
    """By key; None removes it."""
    expect: int | None = None


class TenantRecord(Struct, frozen=True, gc=False):
    """What a registry knows of one tenant."""

    generation: int
    settings: str
    """As in `SetTenant`."""


class SetTenant(Struct, frozen=True, tag="set_tenant", omit_defaults=True):
    """Create a tenant, or replace all that is known of it: caps, quotas, keys (hashed), grants."""

    name: str
    settings: str
    """The tenant's table of a tenants file, as JSON. The registry's reader checks it by the same
    model as the file."""
    expect: int | None = None


class RemoveTenant(Struct, frozen=True, tag="remove_tenant", omit_defaults=True):
    """Forget a tenant. Its adapters stay; only admins reach them."""

    name: str
    expect: int | None = None


Change: TypeAlias = Publish | Release | Remove | Label | SetTenant | RemoveTenant


class Done(Struct, frozen=True, tag="done", omit_defaults=True):
    """The result of an accepted change."""

    generation: int
    number: int | None = None
    """The version's number, after a `Publish`."""


class NotDone(Struct, frozen=True, tag="refused"):
    """Why a change was not made. Every reader of the log comes to the same result."""

    kind: Literal["conflict", "not_found", "quota", "invalid"]
    """conflict: the name has another generation than was expected."""
    message: str


Result: TypeAlias = Done | NotDone
