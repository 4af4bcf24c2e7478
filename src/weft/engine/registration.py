"""Registrations of adapters: read, packed and probed.

New content is probed on the device before it is registered: whether it computes what the image
says. What fails is not registered.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from functools import partial

from weft.checkpoint.pack import AdapterImage
from weft.core.errors import WeftError
from weft.core.messages import Hold
from weft.core.stats import CHECK_RESULTS, Spread
from weft.engine.catalog import Catalog
from weft.engine.inbox import Inbox, Registered
from weft.engine.times import StageTimes, Times
from weft.worker.protocol import PackedAdapter, ProbeResult, Worker

logger = logging.getLogger(__name__)

MAX_REGISTERING = 4
"""Registrations begun at a time: each has its image in memory until it was checked."""


class Registrations:
    """Owner of the registrations that wait or are under way, and of what probes have found."""

    def __init__(
        self, catalog: Catalog, worker: Worker, inbox: Inbox, stage_times: StageTimes
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._inbox = inbox
        self._stage_times = stage_times
        self._waiting: deque[Hold] = deque()
        self._num_begun = 0
        self._results: Counter[str] = Counter()
        self._check_times = Times()

    def register(self, call: Hold) -> None:
        """Begin a registration, or let it wait until others have ended."""
        self._waiting.append(call)
        self._begin()

    def probe(self, image: AdapterImage) -> bool:
        """Probe what comes from memory, at once, unless it was checked before. Whether it is right,
        as far as is known; raises AdapterQuarantined."""
        if self._catalog.is_checked(image.digest):
            return True
        if not self._worker.facts.has_checks:
            return False
        verdict = self._worker.probe(image, paced=False).result()
        if isinstance(verdict, WeftError):
            raise verdict
        self._judge(image.digest, "", verdict)
        return verdict.result == "passed"

    def results(self) -> dict[str, int]:
        """How many probes ended how; empty if there are none."""
        if not self._worker.facts.has_checks:
            return {}
        return {result: self._results[result] for result in CHECK_RESULTS}

    def check_times(self) -> Spread:
        """How long probes took."""
        return self._check_times.spread

    def close(self) -> None:
        """Begin no more."""
        self._waiting.clear()

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert 0 <= self._num_begun <= MAX_REGISTERING
        assert not self._waiting or self._num_begun == MAX_REGISTERING

    def _begin(self) -> None:
        while self._waiting and self._num_begun < MAX_REGISTERING:
            self._num_begun += 1
            call = self._waiting.popleft()
            packed = self._worker.pack(call.source.path, call.source.digest)
            self._inbox.expect(packed, partial(self._packed, call))

    def _packed(self, call: Hold, packed: PackedAdapter | WeftError) -> Registered | None:
        if isinstance(packed, WeftError):
            return self._end(Registered(call, packed))
        self._stage_times.add(packed.stage_s)
        image, checked = packed.image, call.source.checked
        if checked or not self._worker.facts.has_checks or self._catalog.is_checked(image.digest):
            return self._end(Registered(call, image, checked))
        probed = self._worker.probe(image, paced=True)
        self._inbox.expect(probed, partial(self._probed, call, image))
        return None

    def _probed(
        self, call: Hold, image: AdapterImage, verdict: ProbeResult | WeftError
    ) -> Registered:
        if isinstance(verdict, WeftError):
            return self._end(Registered(call, verdict))
        try:
            self._judge(image.digest, call.source.path, verdict)
        except WeftError as error:
            return self._end(Registered(call, error))
        return self._end(Registered(call, image, verdict.result == "passed"))

    def _judge(self, digest: str, path: str, verdict: ProbeResult) -> None:
        """Count what a probe has found. Raises AdapterQuarantined if it failed; should the content
        be known, as an earlier probe was skipped or went on beside this one, nothing is served of
        it any more."""
        self._results[verdict.result] += 1
        self._check_times.add(verdict.seconds)
        error = verdict.error
        if error is None:
            return
        logger.error("quarantined: adapter %s %s: %s", digest[:16], path, error.message)
        self._catalog.refuse(digest, error)
        raise error

    def _end(self, registered: Registered) -> Registered:
        self._num_begun -= 1
        self._begin()
        return registered
