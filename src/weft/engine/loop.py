"""One step of the engine: plan, start loads, build, launch, commit.

The plain loop commits each step before it plans the next. The overlapped loop commits step N
after it has launched step N+1, so that the device computes while the host plans. A step that has
guesses, or drafts those of the next step, is always committed before the next is planned.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from weft.core.errors import WeftError
from weft.core.messages import Tokens
from weft.core.requests import TokenEvent
from weft.core.stats import Times
from weft.engine.catalog import LoadEnded
from weft.engine.delay import PlanDelay
from weft.engine.meter import Meter
from weft.engine.residency import Residency
from weft.schedule.plan import Admitted, Matcher, StepPlan
from weft.schedule.scheduler import Scheduler
from weft.worker.inputs import RowState
from weft.worker.protocol import Flight, Worker

logger = logging.getLogger(__name__)

PollGrammars = Callable[[], Sequence[tuple[str, Matcher | WeftError]]]
PollAdapters = Callable[[], Sequence[LoadEnded]]
"""Both return what has ended since the last call: grammars by request id, or loads of adapters."""


class QueueTimes:
    """Measures how long requests wait for their first step. A request's last event makes it forget
    the request."""

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._waited: dict[str, tuple[float, float]] = {}
        """`queue_s` and `adapter_wait_s` of requests that have begun and have had no event."""
        self.adapter_waits = Times()
        """How long requests waited for their adapters, of those that had to."""

    def receive(self, request_id: str) -> None:
        self._received[request_id] = time.monotonic()

    def begin(self, admitted: Admitted, now: float) -> None:
        """The request was admitted to a step; only its first one counts."""
        received = self._received.pop(admitted.request_id, None)
        if received is not None:
            self._waited[admitted.request_id] = (now - received, admitted.adapter_wait_s)
            if admitted.adapter_wait_s:
                self.adapter_waits.add(admitted.adapter_wait_s)

    def stamp(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """The events, the first of each request with `queue_s` and `adapter_wait_s`."""
        if not self._waited and not self._received:
            return events
        return [self._stamped(event) for event in events]

    def _stamped(self, event: TokenEvent) -> TokenEvent:
        if event.finish_reason is not None:
            self._received.pop(event.request_id, None)
        waited = self._waited.pop(event.request_id, None)
        if waited is None:
            return event
        return event._replace(queue_s=waited[0], adapter_wait_s=waited[1])


def _has_decodes(plan: StepPlan) -> bool:
    return any(c == n == 1 for c, n in zip(plan.counts, plan.num_samples, strict=True))


class _Failed:
    """The Flight of a step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error


class Loop:
    """Runs steps over parts that others own."""

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        rows: RowState,
        worker: Worker,
        poll_grammars: PollGrammars,
        poll_adapters: PollAdapters,
        overlap: bool,
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._rows = rows
        self._worker = worker
        self._poll_grammars = poll_grammars
        self._poll_adapters = poll_adapters
        self._ahead = 1 if overlap else 0
        self._flights: deque[tuple[StepPlan, Flight]] = deque()
        """The steps that were launched and are not committed, the oldest first."""
        self.queue_times = QueueTimes()
        self.steps = 0
        self.host_s = 0.0
        """Seconds of all steps, less those for which the host has waited for the device."""
        self.idle = True
        """Whether the last step had nothing to run and nothing to wait for on the device."""
        self._delay = PlanDelay()
        self.meter: Meter | None = None
        """Measures steps; None: nobody needs that."""
        self._ended_s = 0.0
        """When the last step ended, or, after a pause, when the first step began."""

    def step(self) -> list[Tokens]:
        """Run one step. Returns the tokens of the steps that have ended by now, in their order."""
        begun_s = time.monotonic()
        if self.idle:
            self._ended_s = begun_s
        tokens = [Tokens(self._apply_loads() + self._apply_grammars())]
        if self._flights and self._flights[-1][0].awaited:
            tokens += self._land(0)
        now = time.monotonic()
        plan = self._scheduler.plan(now)
        self._residency.start(plan.loads)
        for admitted in plan.admitted:
            self.queue_times.begin(admitted, now)
        if not plan.empty:
            self.steps += 1
            self._flights.append((plan, self._launch(plan)))
        ahead = 0 if plan.empty or self._scheduler.trials.groups else self._ahead
        tokens += self._land(ahead)
        tokens = [each for each in tokens if each]
        self.idle = plan.empty and not self._flights and not tokens
        for each in tokens:  # those that follow are never the first ones
            each.events[:] = self.queue_times.stamp(each.events)
        self.host_s += time.monotonic() - begun_s
        return tokens

    def _land(self, ahead: int) -> list[Tokens]:
        """Wait for all steps in flight except the last `ahead`, and commit them."""
        tokens: list[Tokens] = []
        while len(self._flights) > ahead:
            planned, flight = self._flights.popleft()
            begun_s = time.monotonic()
            try:
                result = flight.result()
            except Exception as error:
                tokens.append(Tokens(self._recover(planned, error)))
            else:
                self._note_wait(begun_s, planned)
                self._measure(planned)
                tokens.append(self._scheduler.commit(planned, result))
        return tokens

    def spare_s(self, begins: bool) -> float:
        """For how many seconds the next step need not be planned yet, as a request of another
        tenant may come that should be in it. `begins`: whether the step may begin a request."""
        shared = self._scheduler.batch.waiting.shared
        return self._delay.left_s(time.monotonic(), begins) if shared else 0.0

    def _note_wait(self, begun_s: float, ended: StepPlan) -> None:
        """Note that the host has waited since `begun_s` for the step `ended`."""
        now = time.monotonic()
        self.host_s -= now - begun_s
        if self._scheduler.batch.waiting.shared:
            following = self._flights[0][0] if self._flights else None
            alike = following is not None and following.decodes
            short = following is not None and not alike and following.num_tokens < ended.num_tokens
            self._delay.ended(now, now - begun_s, alike, short)

    def _measure(self, plan: StepPlan) -> None:
        """Measure a step that has just ended: it took the time since the one before it ended."""
        begun_s, self._ended_s = self._ended_s, time.monotonic()
        seconds = self._ended_s - begun_s
        self._scheduler.lengths.measure(plan, seconds)
        if self.meter is not None:
            self._tell(self.meter, plan, seconds)

    def _tell(self, meter: Meter, plan: StepPlan, seconds: float) -> None:
        """Give a step's time to the meter, and to the pace of chunks if there is one."""
        rows = sum(1 for count in plan.num_samples if count)
        adapters = len(self._scheduler.running_adapters())
        tokens = max(plan.num_tokens - rows, 0)
        meter.step(rows, adapters, tokens, seconds)
        if self._scheduler.pace and tokens and _has_decodes(plan):
            delay_s = meter.chunk_delay(rows, adapters, seconds)
            self._scheduler.pace.measure(tokens, delay_s)

    def _launch(self, plan: StepPlan) -> Flight:
        try:
            return self._worker.step(self._rows.build(plan))
        except Exception as error:
            return _Failed(error)

    def _recover(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """Recover from a failed step: later ones in flight are void too, as they need its tokens.
        Returns events. Raises an error if the device is lost or every step fails from now on."""
        logger.error("a step failed; its requests are tried again in parts", exc_info=error)
        plans = [plan, *(planned for planned, _ in self._flights)]
        for _, flight in self._flights:
            with suppress(Exception):
                flight.result()
        self._flights.clear()
        self._worker.settle()
        reason = WeftError(f"the request could not be computed: {type(error).__name__}")
        events = self._scheduler.fail(plans, reason)
        if self._scheduler.trials.hopeless:
            raise error
        return events

    def _apply_grammars(self) -> list[TokenEvent]:
        events = [self._scheduler.grammar_ended(*ended) for ended in self._poll_grammars()]
        return [event for event in events if event is not None]

    def _apply_loads(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for end in self._poll_adapters():
            if end.error is not None:
                events += self._scheduler.adapter_failed(end.digest, end.error)
        return events
