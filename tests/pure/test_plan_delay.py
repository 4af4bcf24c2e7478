"""The delay of steps, against a device that takes so long for each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.delay import MARGIN_S, MAX_DELAY_S, MOST_MORE_S, PROMPT_S, PlanDelay


class Bed:
    """A host and a device that runs one step at a time, in virtual time."""

    def __init__(self, host_s: float) -> None:
        self.delay = PlanDelay()
        self.host_s = host_s
        self.now = self.free_s = self.idle_s = 0.0
        """`free_s`: when the device has run all that was launched."""

    def step(self, step_s: float, alike: bool = True, short: bool = False) -> float:
        """Plan and launch a step after the one that runs, and wait for that; how long it was until
        the plan was made."""
        delay_s = max(self.delay.left_s(self.now, begins=False), 0.0)
        self.now += delay_s + self.host_s
        ends_s = self.free_s
        self.idle_s += max(self.now - ends_s, 0.0)
        self.free_s = max(self.free_s, self.now) + step_s
        waited_s = max(ends_s - self.now, 0.0)
        self.now += waited_s
        self.delay.ended(self.now, waited_s, alike, short)
        return delay_s


def steady(host_s: float, step_s: float) -> Bed:
    """After many steps that took equally long."""
    bed = Bed(host_s)
    for _ in range(60):
        bed.step(step_s)
    return bed


@given(st.floats(1e-4, 1e-3), st.floats(2e-3, 2e-2))
def test_steps_are_planned_late_and_the_device_does_not_wait(host_s: float, step_s: float) -> None:
    bed = steady(host_s, step_s)
    bed.idle_s = 0.0
    delays = [bed.step(step_s) for _ in range(50)]
    assert bed.idle_s == 0
    assert min(delays) >= min(step_s - host_s - 1.1 * MARGIN_S, MAX_DELAY_S) - 1e-9


@settings(max_examples=30)
@given(st.floats(1e-4, 1e-3), st.integers(0, 99))
def test_shorter_steps_cost_the_device_little(host_s: float, seed: int) -> None:
    """Whenever steps get shorter than the delay allows, which may grow once more before that is
    seen, it waits for four times as long as they differ, at most."""
    rng, bed = random.Random(seed), Bed(host_s)
    bed.step(5e-3)
    for step_s in [rng.uniform(3e-3, 9e-3) for _ in range(20)]:
        bed.idle_s, before_s = 0.0, bed.delay._delay_s
        for _ in range(30):
            bed.step(step_s)
        assert bed.idle_s <= 4 * max(before_s + MOST_MORE_S + host_s - step_s, 0.0) + 1e-9


def test_steps_with_prompts_are_planned_late_too_and_teach_nothing() -> None:
    bed = steady(1e-3, 5e-3)
    before_s = bed.delay._delay_s
    for _ in range(3):
        bed.step(50e-3, alike=False)
    assert bed.delay.left_s(bed.now, begins=False) == pytest.approx(before_s)
    assert bed.delay.left_s(bed.now, begins=True) == pytest.approx(before_s - PROMPT_S)


def test_a_short_step_is_ended_at_once() -> None:
    """And those behind it are planned as late as before."""
    bed = steady(1e-3, 5e-3)
    before_s = bed.delay._delay_s
    bed.step(2e-3, alike=False, short=True)
    assert bed.step(5e-3) == 0
    assert bed.step(5e-3) == pytest.approx(before_s)


def test_prompts_that_are_shorter_than_decodes_soon_wait_no_more() -> None:
    """As where all requests ask for one token, so that nothing is learnt from decodes."""
    bed = steady(1e-3, 9e-3)
    for _ in range(8):
        bed.step(3e-3, alike=False)
    bed.idle_s = 0.0
    for _ in range(50):
        bed.step(3e-3, alike=False)
    assert bed.idle_s == 0


def test_one_long_step_delays_no_other() -> None:
    bed = steady(1e-3, 5e-3)
    before_s = bed.step(1.0)
    assert max(bed.step(5e-3) for _ in range(5)) <= before_s + 1.5 * MOST_MORE_S


def test_a_host_that_is_late_once_keeps_most_of_the_delay() -> None:
    """That holds for a step with a prompt too, which takes the host longer than one of decodes."""
    bed = steady(1e-3, 5e-3)
    before_s = bed.step(5e-3)
    bed.host_s = 3e-3
    bed.step(5e-3)
    bed.host_s = 1e-3
    late_s = bed.step(5e-3)
    assert before_s - MOST_MORE_S - 1e-9 <= late_s < before_s
    for _ in range(60):
        bed.step(5e-3)
    bed.host_s = 2e-3
    bed.step(5e-3, alike=False)
    bed.host_s = 1e-3
    bed.step(5e-3)
    assert bed.step(5e-3) >= before_s - MOST_MORE_S
