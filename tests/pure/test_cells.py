"""Cells: an adapter keeps its cell, and overflows to one other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft.fleet.cells import FULL_AT, FULL_FROM, choose_cell

CELLS = [f"cell-{k}" for k in range(8)]
IDLE = dict.fromkeys(CELLS, 0.3)


def cells_of(loads: dict[str, float], tenant: str = "acme", adapter: str = "sql") -> Counter[str]:
    return Counter(choose_cell(tenant, adapter, str(k), loads) for k in range(200))


def home_of(adapter: str) -> str:
    (home,) = {choose_cell("acme", adapter, str(k), IDLE) for k in range(10)}
    return home


def test_an_adapter_has_one_cell_and_all_cells_have_adapters() -> None:
    homes = Counter(home_of(f"a{k}") for k in range(200))
    assert set(homes) == set(CELLS)
    assert max(homes.values()) < 3 * min(homes.values())


def test_a_full_cell_overflows_to_one_other_bit_by_bit() -> None:
    (home,) = cells_of(IDLE)
    assert set(cells_of({**IDLE, home: FULL_FROM})) == {home}
    half = cells_of({**IDLE, home: (FULL_FROM + FULL_AT) / 2})
    assert len(half) == 2
    assert 60 < half[home] < 140
    (other,) = cells_of({**IDLE, home: 2.0})
    assert set(half) == {home, other}
    assert set(cells_of({**IDLE, home: 2.0, other: 3.0})) == {home}, "the other one is fuller"


@given(st.text(max_size=3), st.text(max_size=3), st.sets(st.sampled_from(CELLS), min_size=1))
def test_a_cell_that_goes_moves_its_own_adapters_alone(
    tenant: str, adapter: str, left: set[str]
) -> None:
    before = choose_cell(tenant, adapter, "r", IDLE)
    after = choose_cell(tenant, adapter, "r", {cell: IDLE[cell] for cell in left})
    assert after == before if before in left else after in left
