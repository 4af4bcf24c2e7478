"""The state that follows from a registry's log. It is a pure function of the log's entries, refused
changes included, so that all readers of the same entries have the same state.

A change of these rules or constants needs a new FORMAT: processes that apply different rules would
disagree about the state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.core.errors import InvalidRequest
from weft.registry.frozen_map import FrozenMap
from weft.registry.labels import pin_of
from weft.registry.names import namespace_of
from weft.registry.records import (
    Change,
    Done,
    HistoryEntry,
    Label,
    Name,
    NotDone,
    Publish,
    Release,
    Remove,
    RemoveTenant,
    Result,
    Route,
    SetTenant,
    Share,
    TenantRecord,
    Version,
    shown_route,
)

FORMAT: Final = 1
EPOCH: Final = 1024
"""Entries from one snapshot to the next."""
KEPT_VERSIONS: Final = 64
"""How many of its newest versions a name keeps, besides those in its route."""
KEPT_HISTORY: Final = 32
MAX_NAME_LENGTH: Final = 200
MAX_LABELS: Final = 16
MAX_LABEL: Final = 1024
"""Characters of a label's key, or of its value."""
_DIGEST = re.compile("[0-9a-f]{64}")
_HOUR_S = 3600.0


class Op(Struct, frozen=True, array_like=True, gc=False):
    """One change that somebody asks for."""

    nonce: str
    """Unique among all ops, ever."""
    actor: str
    change: Change


class Entry(Struct, frozen=True, gc=False):
    """One entry of the log: changes that are applied in this order."""

    time: float
    """Seconds since 1970, by the clock of its writer."""
    ops: tuple[Op, ...]
    format: int = FORMAT


class Usage(Struct, frozen=True, array_like=True, gc=False):
    """How much of its quotas a namespace uses."""

    num_names: int = 0
    num_bytes: int = 0
    published: float = 0.0
    """How much of the hourly allowance was used up at `published_at`. It comes back evenly."""
    published_at: float = 0.0


class _Caps(Struct, frozen=True):
    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    max_publishes_per_hour: int | None = None


class _Settings(Struct, frozen=True):
    """The part of a tenant's settings that the rules of the log depend on."""

    caps: _Caps = _Caps()


class State(Struct, frozen=True):
    """A registry at one time. It never changes; `apply` makes the next one."""

    seq: int = 0
    """How many entries led to this state."""
    time: float = 0.0
    """When the last entry was written. It never decreases: a writer whose clock is behind an
    earlier writer's gets the earlier time."""
    names: FrozenMap[Name] = FrozenMap()
    """Removed ones too: their `removed_at` is not None."""
    tenants: FrozenMap[TenantRecord] = FrozenMap()
    removed_tenants: FrozenMap[int] = FrozenMap()
    """The generations that tenants had when they were removed."""
    usage: FrozenMap[Usage] = FrozenMap()
    """By namespace: what a name has before its first slash."""
    results: FrozenMap[Result] = FrozenMap()
    """The results of the newest entries' ops, by nonce: of this epoch so far, or of the whole last
    epoch if nothing came after it."""
    results_before: FrozenMap[Result] = FrozenMap()
    """The same for the epoch before."""
    epoch: int = EPOCH

    def apply(self, entry: Entry) -> State:
        """The state after one more entry."""
        state = self
        if self.seq % self.epoch == 0:
            state = replace(state, results=FrozenMap(), results_before=self.results)
        state = replace(state, seq=self.seq + 1, time=max(self.time, entry.time))
        for op in entry.ops:
            result: Result
            try:
                state, result = _made(state, op.change, op.actor)
            except _NotMade as refusal:
                result = refusal.refused
            state = replace(state, results=state.results.having(op.nonce, result))
        return state

    def result(self, nonce: str) -> Result | None:
        """The result of an op; None if it is not in the newest entries."""
        return self.results.get(nonce) or self.results_before.get(nonce)

    def oldest_result(self) -> int:
        """The first entry whose ops' results are known."""
        epochs_before = max(self.seq - 1, 0) // self.epoch - 1
        return max(epochs_before, 0) * self.epoch + 1

    def dump(self) -> bytes:
        """Write it as a snapshot."""
        return msgspec.json.encode(
            _Snapshot(
                FORMAT, self.epoch, self.seq, self.time, self.names.plain(), self.tenants.plain(),
                self.removed_tenants.plain(), self.usage.plain(), self.results.plain(),
                self.results_before.plain(),
            )
        )  # fmt: skip

    @classmethod
    def load(cls, snapshot: bytes) -> State:
        """Read a snapshot. Raises ValueError for one that this version can't read."""
        s = _snapshots.decode(snapshot)
        if s.format != FORMAT:
            raise ValueError(f"its format is {s.format}, and this version of Weft reads {FORMAT}")
        return cls(
            s.seq, s.time, FrozenMap(s.names), FrozenMap(s.tenants), FrozenMap(s.removed_tenants),
            FrozenMap(s.usage), FrozenMap(s.results), FrozenMap(s.results_before), s.epoch,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        used: dict[str, tuple[int, int]] = {}
        for key, name in self.names.items():
            assert name.generation > 0 and name.history[-1].generation == name.generation
            assert {share.number for share in name.route.shares} <= name.versions.keys()
            assert name.removed_at is None or name.route == Route()
            space = namespace_of(key)
            if space and name.removed_at is None:
                count, size = used.get(space, (0, 0))
                used[space] = count + 1, size + _size(name)
        usage = {s: (u.num_names, u.num_bytes) for s, u in self.usage.items()}
        assert used == {s: u for s, u in usage.items() if u != (0, 0)}
        assert not self.tenants.keys() & self.removed_tenants.keys()


class _Snapshot(Struct, frozen=True):
    format: int
    epoch: int
    seq: int
    time: float
    names: dict[str, Name]
    tenants: dict[str, TenantRecord]
    removed_tenants: dict[str, int]
    usage: dict[str, Usage]
    results: dict[str, Result]
    results_before: dict[str, Result]


_snapshots = msgspec.json.Decoder(_Snapshot)
_settings = msgspec.json.Decoder(_Settings)
_NOBODY = Name()
_NOTHING = Usage()


class _NotMade(Exception):
    def __init__(self, refused: NotDone) -> None:
        self.refused = refused


def _refuse(kind: Literal["conflict", "not_found", "quota", "invalid"], message: str) -> NoReturn:
    raise _NotMade(NotDone(kind, message))


def _made(state: State, change: Change, actor: str) -> tuple[State, Done]:
    """Make a change. Raises _NotMade."""
    match change:
        case Publish():
            return _publish(state, change, actor)
        case Release():
            return _release(state, change, actor)
        case Remove():
            return _remove(state, change, actor)
        case Label():
            return _label(state, change, actor)
        case SetTenant():
            return _set_tenant(state, change)
        case RemoveTenant():
            return _remove_tenant(state, change)


# -- changes of names ------------------------------------------------------------------------------


def _publish(state: State, change: Publish, actor: str) -> tuple[State, Done]:
    _check_name(change.name)
    version = change.version
    if not _DIGEST.fullmatch(version.digest) or version.num_bytes < 0:
        _refuse("invalid", "a version needs a sha256 digest in hex and a size of 0 or more")
    if version.listing and not _DIGEST.fullmatch(version.listing):
        _refuse("invalid", "a version's listing is a sha256 in hex")
    old = _expected(state, change.name, change.expect)
    kept = old.versions if _exists(old) else {}
    number = next((n for n, v in kept.items() if v.digest == version.digest), None)
    if number is None:
        number = max(old.versions, default=0) + 1
        kept = kept | {number: version}
    route = Route((Share(number, 1.0),)) if change.release else old.route
    versions = _pruned(kept, route)
    pinned = change.pinned or (old.pinned and not change.release)
    new = replace(old, versions=versions, route=route, pinned=pinned, removed_at=None)
    state = _charge(state, change.name, old, new)
    what = f"publish v{number}" + ("" if change.release else ", not released")
    return _written(state, change.name, new, actor, what, number)


def _release(state: State, change: Release, actor: str) -> tuple[State, Done]:
    old = _there(state, change.name, change.expect)
    shares, shadow = change.route.shares, change.route.shadow
    numbers = [share.number for share in shares]
    if len(set(numbers)) < len(numbers):
        _refuse("invalid", "a route names each version once")
    if not all(0 < share.weight < math.inf for share in shares):
        _refuse("invalid", "a route's weights are more than 0")
    wanted = numbers if shadow is None else [*numbers, shadow]
    for number in wanted:
        if number not in old.versions:
            _refuse("not_found", f"{change.name!r} has no version v{number}")
    new = replace(old, route=change.route)
    return _written(state, change.name, new, actor, f"release {shown_route(change.route)}", None)


def _remove(state: State, change: Remove, actor: str) -> tuple[State, Done]:
    old = _there(state, change.name, change.expect)
    new = replace(old, route=Route(), pinned=False, labels={}, removed_at=state.time)
    state = _charge(state, change.name, old, new)
    return _written(state, change.name, new, actor, "remove", None)


def _label(state: State, change: Label, actor: str) -> tuple[State, Done]:
    old = _there(state, change.name, change.expect)
    all_labels = {**old.labels, **change.labels}
    labels = {key: value for key, value in all_labels.items() if value is not None}
    texts = [*labels, *labels.values()]
    if len(labels) > MAX_LABELS or not all(t.isprintable() and len(t) <= MAX_LABEL for t in texts):
        most = f"{MAX_LABELS} labels of {MAX_LABEL} printable characters"
        _refuse("invalid", f"a name has at most {most}")
    try:
        pin_of(labels)
    except InvalidRequest as error:
        _refuse("invalid", error.message)
    words = [f"{k}-" if v is None else f"{k}={v}" for k, v in change.labels.items()]
    what = f"label {' '.join(words)}"
    return _written(state, change.name, replace(old, labels=labels), actor, what, None)


def _check_name(name: str) -> None:
    """Check that stores and terminals can take the name. Who may have it is not checked here."""
    parts = name.split("/")
    if not name.isprintable() or len(name) > MAX_NAME_LENGTH or {"", ".", ".."} & set(parts):
        _refuse("invalid", f"a name has 1 to {MAX_NAME_LENGTH} printable characters, got {name!r}")


def _expected(state: State, name: str, expect: int | None) -> Name:
    found = state.names.get(name, _NOBODY)
    _check_generation(name, found.generation, expect)
    return found


def _there(state: State, name: str, expect: int | None) -> Name:
    found = _expected(state, name, expect)
    if not _exists(found):
        _refuse("not_found", f"the registry has no adapter {name!r}")
    return found


def _check_generation(name: str, generation: int, expect: int | None) -> None:
    if expect is not None and expect != generation:
        _refuse("conflict", f"{name!r} is at generation {generation}, not at {expect}")


def _pruned(versions: Mapping[int, Version], route: Route) -> dict[int, Version]:
    routed = {share.number for share in route.shares} | {route.shadow}
    newest = sorted(versions)[-KEPT_VERSIONS:]
    return {n: v for n, v in versions.items() if n in routed or n >= newest[0]}


def _written(
    state: State, key: str, new: Name, actor: str, what: str, number: int | None
) -> tuple[State, Done]:
    generation = new.generation + 1
    happened = HistoryEntry(generation, state.time, actor, what, new.route)
    history = (*new.history, happened)[-KEPT_HISTORY:]
    new = replace(new, generation=generation, history=history)
    return replace(state, names=state.names.having(key, new)), Done(generation, number)


# -- tenants ---------------------------------------------------------------------------------------


def _set_tenant(state: State, change: SetTenant) -> tuple[State, Done]:
    generation = _tenant_generation(state, change.name, change.expect) + 1
    try:
        _settings.decode(change.settings)
    except msgspec.ValidationError as error:
        _refuse("invalid", f"the tenant's settings: {error}")
    except msgspec.DecodeError as error:
        _refuse("invalid", f"the tenant's settings are not JSON: {error}")
    record = TenantRecord(generation, change.settings)
    state = replace(
        state,
        tenants=state.tenants.having(change.name, record),
        removed_tenants=state.removed_tenants.lacking(change.name),
    )
    return state, Done(generation)


def _remove_tenant(state: State, change: RemoveTenant) -> tuple[State, Done]:
    generation = _tenant_generation(state, change.name, change.expect) + 1
    if change.name not in state.tenants:
        _refuse("not_found", f"the registry has no tenant {change.name!r}")
    state = replace(
        state,
        tenants=state.tenants.lacking(change.name),
        removed_tenants=state.removed_tenants.having(change.name, generation),
    )
    return state, Done(generation)


def _tenant_generation(state: State, name: str, expect: int | None) -> int:
    """The generation that a tenant is at, there or removed."""
    record = state.tenants.get(name)
    generation = record.generation if record else state.removed_tenants.get(name, 0)
    _check_generation(name, generation, expect)
    return generation


# -- quotas ----------------------------------------------------------------------------------------


def _charge(state: State, key: str, old: Name, new: Name) -> State:
    """The state in which the namespace of `key` is charged for `new` instead of `old`. A change
    that uses less is never refused."""
    space = namespace_of(key)
    if not space:
        return state
    used = state.usage.get(space, _NOTHING)
    num_names = used.num_names + _exists(new) - _exists(old)
    num_bytes = used.num_bytes + _size(new) - _size(old)
    published, published_at = used.published, used.published_at
    if new.versions.keys() - old.versions.keys():
        caps = _caps(state, space)
        rate = caps.max_publishes_per_hour
        gone = (state.time - published_at) / _HOUR_S * rate if rate else published
        published, published_at = max(published - gone, 0.0) + 1, state.time
        if rate is not None and published > rate:
            _refuse("quota", f"{space!r} may publish {rate} versions an hour; try again later")
        _keep_below(caps.max_stored_bytes, num_bytes, f"{space!r} would keep", "bytes")
        if num_names > used.num_names:
            _keep_below(caps.max_adapters, num_names, f"{space!r} would have", "adapters")
    usage = Usage(num_names, num_bytes, published, published_at)
    return replace(state, usage=state.usage.having(space, usage))


def _keep_below(most: int | None, wanted: int, who: str, what: str) -> None:
    if most is not None and wanted > most:
        message = f"{who} {wanted} {what} in the registry, and {most} are allowed; remove one first"
        _refuse("quota", message)


def _caps(state: State, tenant: str) -> _Caps:
    record = state.tenants.get(tenant)
    return _settings.decode(record.settings).caps if record else _Caps()


def _exists(name: Name) -> bool:
    return name.removed_at is None and bool(name.versions)


def _size(name: Name) -> int:
    if name.removed_at is not None:
        return 0
    return sum(version.num_bytes for version in name.versions.values())
