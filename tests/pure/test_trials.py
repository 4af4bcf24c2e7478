"""Who made a step fail is found, whoever else was in it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.schedule.trials import MAX_BLAMED, MAX_IN_VAIN, Trials


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_those_to_blame_are_found_and_nobody_else(chance: Random, count: int) -> None:
    """With any number of them, in batches that have room for a few; some end meanwhile."""
    waiting = [str(i) for i in range(count)]
    bad = set(chance.sample(waiting, min(count, chance.randrange(MAX_BLAMED))))
    seats = chance.randint(1, count)
    trials = Trials()
    running: list[str] = []
    blamed: set[str] = set()
    for _ in range(20 * count + 20):
        for each in [w for w in waiting if trials.admits(w)]:
            if len(running) < seats:
                waiting.remove(each)
                running.append(each)
        if bad & set(running):
            found = trials.failed(running)
            waiting, running = sorted(waiting + running, key=int), []
            if found is not None:
                blamed.add(found)
                waiting.remove(found)
        else:
            trials.passed(running)
            if running and chance.random() < 0.5:
                running.pop(0)
        trials.check()
        assert not trials.hopeless
        if not waiting and not trials.groups:
            break
    assert blamed == bad and not waiting


@pytest.mark.parametrize("size", [1, 2, 7])
def test_it_is_hopeless_if_everything_fails(size: int) -> None:
    trials, count = Trials(), 0
    ids = {str(i) for i in range(100)}
    while not trials.hopeless and count < 1000:
        found = trials.failed([each for each in sorted(ids) if trials.admits(each)][:size])
        ids.discard(found or "")
        count += 1
    assert trials.hopeless and len(ids) == 100 - MAX_BLAMED


def test_it_is_hopeless_if_only_all_together_fail() -> None:
    trials = Trials()
    for turn in range(MAX_IN_VAIN):
        assert not trials.hopeless, turn
        assert trials.failed("ab") is None
        while trials.groups:
            trials.passed([each for each in "ab" if trials.admits(each)])
    assert trials.hopeless
    trials.passed("ab")
    assert trials.quiet
