"""Decides when to plan the next step while the device still runs one."""

from __future__ import annotations

MARGIN_S = 0.1e-3
"""How long the host waits for a step, at least, after it has launched the next one. The device has
begun that one before the end of the launch, which is the choice of its tokens."""
PROMPT_S = 0.6e-3
"""How much longer the host takes to plan and launch a step that begins a request."""
NO_WAIT_S = 3e-5
"""A host that waited for less than this was late, and can't know by how much."""
GAIN, MOST_MORE_S = 0.15, 0.25e-3
"""The part of the wait beyond MARGIN_S by which the next delay is longer, or shorter where it was
less than that; and the most by which it is longer: a single step that took long is no reason for a
much longer delay."""
LATE_S = 0.1e-3
"""By how much the delay is shorter when the host was late once, or twice in a row."""
MAX_DELAY_S = 8e-3
"""The longest delay. When steps suddenly get shorter, the device waits for the host four times as
long at most."""


class PlanDelay:
    """Plans each step as late as the device allows, so that a request which comes meanwhile is in
    that step already, and has not to wait for one more:

        device   ├──────── step 7 ────────┼──────── step 8 ────────┼── step 9
        host          delay ... plan 8 ├w─┤    delay ... plan 9 ├w─┤

    The delay follows from how long the host waited (w) for the steps before: a little is left, so
    that the device seldom waits for the host. It is learnt from steps of decodes alone, which are
    like each other, and is used for those with prompts, too, which mostly take longer. A step that
    begins a short request while others rest is shorter than one of decodes. The next step is then
    planned at once, so that the first token does not wait for that plan. A host that is late once
    or twice was held up by something else; if it is late again, the delay is wrong.
    """

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._times_late = 0
        """How often in a row the host was late."""
        self._from_s: float | None = None
        """When the step that runs began; None: the next one is not to be delayed."""
        self._alike = False
        """Whether that is one of decodes alone."""

    def ended(self, now: float, waited_s: float, next_alike: bool, next_short: bool) -> None:
        """A step has ended, for which the host has waited so long. `next_alike`: whether the one
        that runs from now on is of decodes alone; `next_short`: whether it is not, and has fewer
        tokens than the one that has ended."""
        late = waited_s < NO_WAIT_S
        self._times_late = self._times_late + 1 if late else 0
        if self._times_late >= 3:
            self._delay_s /= 2
        elif self._alike and next_alike:
            more_s = GAIN * (waited_s - MARGIN_S)
            self._delay_s += -LATE_S if late else min(more_s, MOST_MORE_S)
        self._delay_s = min(max(self._delay_s, 0.0), MAX_DELAY_S)
        self._from_s, self._alike = None if next_short else now, next_alike

    def left_s(self, now: float, begins: bool) -> float:
        """For how many seconds the next step need not be planned yet. `begins`: whether it begins
        a request."""
        if self._from_s is None:
            return 0.0
        return self._from_s + self._delay_s - (PROMPT_S if begins else 0.0) - now
