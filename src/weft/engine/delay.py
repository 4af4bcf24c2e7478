"""Decides when to plan the next step while the device still runs one."""

from __future__ import annotations

MARGIN_S = 0.1e-3
"""How long the host should at least wait for a step after it has launched the next one. The device
begins the next one before its launch is over, as sampling is launched last."""
PROMPT_S = 0.6e-3
"""How much longer the host takes to plan and launch a step that begins a request."""
NO_WAIT_S = 3e-5
"""If the host waited for less than this, it was late, by an unknown time."""
GAIN, MOST_MORE_S = 0.15, 0.25e-3
"""The next delay grows by GAIN times the wait beyond MARGIN_S, but by at most MOST_MORE_S, as a
single long step is no reason for a much longer delay. If the wait was shorter, the delay shrinks by
GAIN times the difference."""
LATE_S = 0.1e-3
"""By how much the delay is shorter when the host was late once, or twice in a row."""
MAX_DELAY_S = 8e-3
"""The longest delay. When steps suddenly get shorter, the device waits for the host for at most
four times as long."""


class PlanDelay:
    """Plans each step as late as the device allows, so that a request that comes meanwhile is in
    that step already:

        device   ├──────── step 7 ────────┼──────── step 8 ────────┼── step 9
        host          delay ... plan 8 ├w─┤    delay ... plan 9 ├w─┤

    The delay is adjusted by how long the host waited (w) for earlier steps, so that a short wait is
    left and the device seldom waits for the host. It is learnt from successive decode-only steps,
    which are alike, and also used for steps with prompts, which mostly take longer. If a step with
    prompts has fewer tokens than the step before, the next step is planned at once, so that the
    first token does not wait for that plan. A host that is late once or twice was held up by
    something else; if it is late again, the delay is too long.
    """

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._times_late = 0
        """How often in a row the host was late."""
        self._from_s: float | None = None
        """When the running step began; None: the next plan is not to be delayed."""
        self._alike = False
        """Whether the running step has decodes alone."""

    def ended(self, now: float, waited_s: float, next_alike: bool, next_short: bool) -> None:
        """A step has ended, for which the host has waited `waited_s`. `next_alike`: whether the one
        that runs from now on has decodes alone; `next_short`: whether it has prompts, and fewer
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
        """For how many seconds the next step need not be planned yet; 0 or less: plan it now.
        `begins`: whether it may begin a request."""
        if self._from_s is None:
            return 0.0
        return self._from_s + self._delay_s - (PROMPT_S if begins else 0.0) - now
