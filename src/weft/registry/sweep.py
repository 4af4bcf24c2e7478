"""Removes contents that nobody needs, safely even while others publish the same ones.

A collector first dooms a content. A run that begins a grace period later sweeps it:

    doomed/DIGEST/TIME.at         "nobody needed it at that time"
    doomed/DIGEST/TIME.verdict    "rescued" by a publisher, or "swept" by a collector
    collecting/NUMBER             who collects: one at a time, as a number is given once
    leases/REPLICA/TIME           what a replica serves until then

A verdict is written once, by whoever comes first, so a publisher and a collector never both believe
that they have won. A publisher that found no doom names its content in the log well within the
grace period, and a collector reads the log after that period before it sweeps.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from weft.core.errors import RegistryUnavailable
from weft.registry.blobs import BLOBS, DONE, DOOMED, FILES, RESCUED, SWEPT, Claim
from weft.registry.records import Name
from weft.registry.stores import Store

COLLECTING, LEASES = "collecting/", "leases/"

GRACE_S = 3600.0
"""How long a content is doomed before it is swept. Whoever publishes names a content within this
time after putting it, and clocks differ by far less."""
KEEP_S = 24 * 3600.0
"""How long contents stay after their publication, and those of names after their removal."""
TURN_S = 3600.0
"""A collector that has not ended after so long is taken to be dead. It does nothing in the last
quarter of that time."""
MAX_TURNS = 100
"""How many numbers are kept, so that a suspended collector can't take one a second time."""
LEASE_S = 10.0
_BLOB = re.compile(f"{BLOBS}([0-9a-f]{{64}})/")
_DOOM = re.compile(rf"{DOOMED}([0-9a-f]{{64}})/[0-9]+\.at")


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica's report about itself."""

    digests: list[str]
    """The contents that it serves, whether or not a name still needs them."""
    seq: int
    """How many of the log's entries it has carried out."""


class ReplicaLease:
    """The lease of one replica. A renewal lasts for LEASE_S."""

    def __init__(self, store: Store, replica: str) -> None:
        self._store = store
        self._prefix = f"{LEASES}{replica}/"
        self._held: str | None = None

    def renew(self, digests: Iterable[str], seq: int = 0) -> None:
        """Renew the lease with this report. Raises RegistryUnavailable."""
        key = f"{self._prefix}{_millis(time.time() + LEASE_S)}"
        self._store.put(key, msgspec.json.encode(ReplicaReport(sorted(digests), seq)))
        if self._held != key:
            self.end()
        self._held = key

    def end(self) -> None:
        """The replica serves nothing any more. Raises RegistryUnavailable."""
        if self._held is not None:
            self._store.delete(self._held)
            self._held = None


def running_leases(store: Store) -> dict[str, ReplicaReport]:
    """The reports of the replicas whose leases run, by replica. Raises RegistryUnavailable."""
    now, found = _millis(time.time()), dict[str, ReplicaReport]()
    for key in sorted(_leases(store)):
        replica, _, until = key.removeprefix(LEASES).rpartition("/")
        if until > now and (content := store.get(key)) is not None:
            found[replica] = _report(key, content)
    return found


def _report(key: str, content: bytes) -> ReplicaReport:
    try:
        return msgspec.json.decode(content, type=ReplicaReport)
    except msgspec.DecodeError as error:
        raise RegistryUnavailable(f"{key} is damaged: {error}", "registry") from None


def _leases(store: Store) -> Iterator[str]:
    """The keys of leases, without other files that somebody has put beside them."""
    return (key for key in store.list(LEASES) if key.rpartition("/")[2].isdecimal())


# -- the collector ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unneeded:
    """A content that nobody needs, and what becomes of it in this run."""

    digest: str
    num_bytes: int
    step: Literal["doom", "wait", "sweep", "rescued"]
    """doom: it can be swept a grace from now. wait: it is doomed, but not for long enough.
    rescued: somebody is publishing it."""


def needed_by(names: Iterable[Name], now: float) -> set[str]:
    """The contents of all versions of names that exist, or were removed not long ago."""
    alive = (n for n in names if n.removed_at is None or n.removed_at > now - KEEP_S)
    return {version.digest for name in alive for version in name.versions.values()}


class Collector:
    """Finds contents that nobody needs, and removes them in two runs."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def run(self, names: Callable[[], Iterable[Name]], delete: bool) -> list[Unneeded]:
        """Doom or sweep the contents that neither a name (as `names()` returns them) nor a lease
        needs, and return them. Without `delete`, nothing is changed.

        Raises RegistryUnavailable, also if another collector is at work.
        """
        if not delete:
            return list(self._look(names, None))
        with self._turn() as until:
            return list(self._look(names, until))

    def _look(self, names: Callable[[], Iterable[Name]], until: float | None) -> Iterator[Unneeded]:
        """`until`: when this collector must have ended; None if it changes nothing."""
        now = self._clock()
        needed = needed_by(names(), now) | self._leased(now, until is not None)
        blobs: dict[str, list[str]] = defaultdict(list)
        for key in self._store.list(BLOBS):  # somebody may have put other files beside them
            if found := _BLOB.match(key):
                blobs[found[1]].append(key)
        dooms: dict[str, list[str]] = defaultdict(list)
        for key in self._store.list(DOOMED):
            if found := _DOOM.fullmatch(key):
                dooms[found[1]].append(key.removesuffix(".at"))
        # What is doomed comes first: to remove it frees the room that more dooms take.
        for digest in sorted(blobs.keys() | dooms.keys(), key=lambda d: (d not in dooms, d)):
            if until is not None and self._clock() > until:
                return
            if digest in needed:
                for doom in dooms[digest] if until is not None else ():
                    self._forget(doom)
                continue
            made_at, num_bytes = self._facts(digest)
            if made_at > now - KEEP_S:
                continue
            step = self._step(digest, sorted(dooms[digest]), now, until is not None)
            if step == "sweep" and until is not None:
                self._sweep(blobs[digest], dooms[digest])
            yield Unneeded(digest, num_bytes, step)

    def _step(
        self, digest: str, dooms: list[str], now: float, change: bool
    ) -> Literal["doom", "wait", "sweep", "rescued"]:
        if not dooms:
            if change:
                self._store.put(f"{DOOMED}{digest}/{_millis(now)}.at", b"")
            return "doom"
        doom = dooms[-1]
        verdict = self._store.get(f"{doom}.verdict")
        if verdict is None and int(doom.rpartition("/")[2]) / 1000 > now - GRACE_S:
            return "wait"
        if verdict is None and change and not self._store.put(f"{doom}.verdict", SWEPT):
            verdict = self._store.get(f"{doom}.verdict")
        if verdict == RESCUED:
            if change:
                self._forget(doom)  # whoever rescued it will have named it a grace from now
            return "rescued"
        return "sweep"

    def _sweep(self, keys: list[str], dooms: list[str]) -> None:
        """DONE goes first and FILES last, so that what is left of a blob can't be taken for one."""
        order = {DONE: 0, FILES: 2}
        for key in sorted(keys, key=lambda key: order.get(key.rpartition("/")[2], 1)):
            self._store.delete(key)
        for doom in dooms:
            self._forget(doom)

    def _forget(self, doom: str) -> None:
        self._store.delete(f"{doom}.at")
        self._store.delete(f"{doom}.verdict")

    def _facts(self, digest: str) -> tuple[float, int]:
        """When the publication of a content began, and its size; zeros if only remains are left."""
        for name in (DONE, FILES):
            with suppress(msgspec.DecodeError):
                if (content := self._store.get(f"{BLOBS}{digest}/{name}")) is not None:
                    claim = msgspec.json.decode(content, type=Claim)
                    return claim.made_at, claim.listing.num_bytes
        return 0.0, 0

    def _leased(self, now: float, change: bool) -> set[str]:
        """The contents that replicas serve. Clocks differ, so a lease counts a grace period
        longer."""
        found: set[str] = set()
        for key in _leases(self._store):
            if int(key.rpartition("/")[2]) / 1000 < now - GRACE_S:
                if change:
                    self._store.delete(key)
            elif (content := self._store.get(key)) is not None:
                found.update(_report(key, content).digests)
        return found

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """A context in which no other collector is at work; gives the time when it must end."""
        now = self._clock()
        found = self._store.list(COLLECTING)
        keys = sorted(key for key in found if key[len(COLLECTING) :][:10].isdecimal())
        last = keys[-1] if keys else f"{COLLECTING}{0:010d}"
        if keys and not last.endswith(".over"):
            since = 0.0  # also if the disk has damaged what it says
            with suppress(ValueError):
                since = float(self._store.get(last) or b"0")
            if since > now - TURN_S:
                message = f"another collector has worked for {now - since:.0f} s; try again later"
                raise RegistryUnavailable(message, "registry")
        mine = f"{COLLECTING}{int(last.removeprefix(COLLECTING)[:10]) + 1:010d}"
        if not self._store.put(mine, str(now).encode()):
            raise RegistryUnavailable("another collector has just begun", "registry")
        try:
            for key in keys[: -2 * MAX_TURNS]:
                self._store.delete(key)
            yield now + 0.75 * TURN_S
        finally:
            self._store.put(f"{mine}.over", b"")


def _millis(seconds: float) -> str:
    return f"{int(seconds * 1000):015d}"
