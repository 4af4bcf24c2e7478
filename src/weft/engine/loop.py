"""The step: plan, start loads, build, launch, commit.

The plain loop commits each step before it plans the next. The overlapped loop commits step N
after step N+1 was launched, so that planning and building hide behind the device.
"""

from __future__ import annotations

from collections import deque

from weft.core.types import TokenEvent
from weft.engine.inputs import RowState
from weft.engine.plan import StepPlan
from weft.engine.runner import Flight, Runner
from weft.engine.scheduler import Scheduler
from weft.residency.residency import LoadEnded, Registered, Residency


class Loop:
    """Runs steps over parts that others own."""

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        rows: RowState,
        runner: Runner,
        overlap: bool,
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._rows = rows
        self._runner = runner
        self._ahead = 1 if overlap else 0
        self._flights: deque[tuple[StepPlan, Flight]] = deque()
        self.steps = 0
        self.idle = True
        """Whether the last step had nothing to run and nothing to wait for on the device."""

    def step(self) -> tuple[list[TokenEvent], list[Registered]]:
        """One step: token events, and the calls of `Residency.register` that ended."""
        events, registered = self._apply(self._residency.poll())
        plan = self._scheduler.plan()
        self._residency.start(plan.loads)
        if not plan.empty:
            self.steps += 1
            self._flights.append((plan, self._runner.launch(self._rows.build(plan))))
        while len(self._flights) > (0 if plan.empty else self._ahead):
            planned, flight = self._flights.popleft()
            events += self._scheduler.commit(planned, flight.result())
        for digest in self._scheduler.take_dropped():
            self._residency.forget(digest)
        self.idle = plan.empty and not self._flights and not events
        return events, registered

    def _apply(
        self, ended: list[Registered | LoadEnded]
    ) -> tuple[list[TokenEvent], list[Registered]]:
        events: list[TokenEvent] = []
        registered: list[Registered] = []
        for end in ended:
            if isinstance(end, Registered):
                registered.append(end)
                if end.info is not None:
                    self._scheduler.keep_adapter(end.info.digest)
            elif end.error is not None:
                events += self._scheduler.adapter_failed(end.digest, end.error)
        return events, registered
