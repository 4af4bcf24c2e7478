"""When a node that is silent is taken to hang."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.fleet.patience import LEAST, MOST, Patience


def silence(patience: Patience, ticks: int) -> int:
    """Be silent for so long. How often the node was said to hang."""
    return sum(patience.tick() for _ in range(ticks))


def test_a_node_that_never_pauses_is_known_to_hang_after_four_ticks() -> None:
    patience = Patience()
    for _ in range(100):
        patience.tick()
        patience.heard()
    assert silence(patience, LEAST) == 0 and not patience.over
    assert silence(patience, 100) == 1 and patience.over
    patience.heard()
    assert not patience.over


def test_a_node_that_pauses_gets_more_time_for_a_while() -> None:
    patience = Patience()
    silence(patience, LEAST)
    patience.heard()
    assert silence(patience, 2 * LEAST) == 0
    patience.heard()
    for _ in range(2000):
        patience.tick()
        patience.heard()
    assert patience.limit == LEAST


def test_a_node_that_is_late_again_and_again_is_soon_waited_for() -> None:
    patience, hangs = Patience(), 0
    for _ in range(30):
        hangs += silence(patience, 12)
        patience.heard()
    assert hangs == 1


@given(st.lists(st.integers(0, 100)))
def test_patience_is_bounded_and_hangs_are_told_once(pauses: list[int]) -> None:
    patience = Patience()
    for ticks in pauses:
        limit = patience.limit
        assert LEAST <= limit <= MOST
        assert silence(patience, ticks) == (ticks > limit)
        patience.heard()
