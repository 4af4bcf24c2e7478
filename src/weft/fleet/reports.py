"""The reports that nodes send each other several times a second.

Readers get whole reports (`NodeReport`). What is sent are updates (`ReportUpdate`), because the
adapters and prefixes of a node change little from one report to the next:

    EngineLoad --> ReportSender --ReportUpdate, ReportUpdate, ...--> ReportReceiver --> NodeReport

Updates travel on links that lose and reorder nothing; a new link begins with a whole report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from weft.core.load import EngineLoad

REPORT_S = 0.05
"""The time between two reports of a node."""

_EMPTY: frozenset[int] = frozenset()


class NodeReport(msgspec.Struct, frozen=True):
    """What is known of a node: all that routing needs."""

    node: str
    """Its name, which no other node of the fleet has."""
    epoch: int
    """Which life of its engine this is: it grows with each start."""
    seq: int
    """Reports of this life are numbered from 1 on."""
    load: EngineLoad
    draining: bool = False
    """It takes no new requests, and those that it has go elsewhere."""
    idle: bool = False
    """As when draining, but because the other nodes suffice; it is ready to serve again."""
    controller: str = ""
    """The process that decides for the fleet while this node is the first of those that serve: the
    one of its own API, or one that is linked to it. See `weft.fleet.controller`."""
    labels: dict[str, str] = {}
    """The labels that it was started with, by which adapters are kept on some nodes."""


class KeyChange(msgspec.Struct, frozen=True):
    """How a set of keys changed since the last update."""

    added: list[int] = []
    removed: list[int] = []

    @classmethod
    def between(cls, old: frozenset[int], new: frozenset[int]) -> KeyChange:
        if old == new:
            return cls()
        return cls(sorted(new - old), sorted(old - new))

    def apply(self, old: frozenset[int]) -> frozenset[int]:
        if not self.added and not self.removed:
            return old
        return (old - frozenset(self.removed)) | frozenset(self.added)


class ReportUpdate(msgspec.Struct, frozen=True):
    """A report that has only the changes of its large sets."""

    report: NodeReport
    """It lacks the sets of adapters and prefixes; its labels too, unless `whole`."""
    resident: KeyChange
    host: KeyChange
    prefixes: KeyChange
    whole: bool = False
    """The changes start from empty sets: what was known before is void."""


def update_between(old: EngineLoad | None, report: NodeReport) -> ReportUpdate:
    """The update from the load `old` to this report; a whole one if `old` is None."""
    before, new = old or EngineLoad(), report.load
    bare = replace(new, resident=_EMPTY, host=_EMPTY, prefixes=_EMPTY)
    labels = report.labels if old is None else {}
    return ReportUpdate(
        msgspec.structs.replace(report, load=bare, labels=labels),
        KeyChange.between(before.resident, new.resident),
        KeyChange.between(before.host, new.host),
        KeyChange.between(before.prefixes, new.prefixes),
        whole=old is None,
    )


class ReportSender:
    """Makes the updates of one node, all readers of which get the same ones."""

    def __init__(self, node: str, epoch: int, labels: Mapping[str, str] | None = None) -> None:
        self._node = node
        self._epoch = epoch
        self._labels = dict(labels or {})
        self.report: NodeReport | None = None
        """The newest one."""

    def update(
        self, load: EngineLoad, draining: bool = False, idle: bool = False, controller: str = ""
    ) -> ReportUpdate:
        """The next report, as an update for readers that have all the earlier ones."""
        last = self.report
        seq = last.seq + 1 if last else 1
        self.report = NodeReport(
            node=self._node,
            epoch=self._epoch,
            seq=seq,
            load=load,
            draining=draining,
            idle=idle,
            controller=controller,
            labels=self._labels,
        )
        return update_between(last.load if last else None, self.report)

    def whole(self) -> ReportUpdate | None:
        """The newest report, for readers that have none; None before the first report."""
        return update_between(None, self.report) if self.report else None


class ReportReceiver:
    """Puts the updates of one node together."""

    def __init__(self) -> None:
        self.report: NodeReport | None = None

    def receive(self, update: ReportUpdate) -> NodeReport:
        """The node's newest report, put together from this update and the earlier ones."""
        last = None if update.whole else self.report
        old = EngineLoad() if last is None else last.load
        load = replace(
            update.report.load,
            resident=update.resident.apply(old.resident),
            host=update.host.apply(old.host),
            prefixes=update.prefixes.apply(old.prefixes),
        )
        labels = update.report.labels if last is None else last.labels
        self.report = msgspec.structs.replace(update.report, load=load, labels=labels)
        return self.report
