"""Routes of a shared registry's names: shares, canaries, shadows, rollbacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidRequest
from weft.registry.records import Name, Publish, Release, Remove, Route, Share, Version, shown_route
from weft.registry.releases import (
    choose,
    number_of,
    released,
    rolled_back,
    split,
)
from weft.registry.state import Entry, Op, State

NAME = "acme/sql"
Changes = list[Publish | Release | Remove]


def version(number: int) -> Version:
    return Version(f"{number:064x}", 100)


def after(state: State, *changes: Publish | Release | Remove) -> State:
    for n, change in enumerate(changes):
        state = state.apply(Entry(0.0, (Op(f"{state.seq}-{n}", "me", change),)))
    return state


def published(count: int) -> State:
    return after(State(), *(Publish(NAME, version(n)) for n in range(1, count + 1)))


def routed(state: State, route: Route) -> State:
    return after(state, Release(NAME, route))


def shares_of(route: Route) -> dict[int, float]:
    return {share.number: share.weight for share in route.shares}


@pytest.mark.parametrize(
    ("model", "name", "wanted"),
    [
        ("acme/sql", "acme/sql", ""),
        ("acme/sql@v7", "acme/sql", "@v7"),
        (f"sql@sha256:{'ab' * 32}", "sql", f"@sha256:{'ab' * 32}"),
        ("a@v1@v2", "a@v1", "@v2"),
        *((odd, odd, "") for odd in ("sql@v0", "sql@v", "@v7", "sql@V7", "sql@sha256:ab", "a@b")),
    ],
)
def test_a_version_is_split_off_a_name(model: str, name: str, wanted: str) -> None:
    assert split(model) == (name, wanted)


def test_versions_are_found_by_number_and_digest() -> None:
    entry = published(2).names[NAME]
    assert number_of(entry, "@v2") == number_of(entry, f"@sha256:{2:064x}") == 2
    assert number_of(entry, "@v3") is None and number_of(entry, f"@sha256:{3:064x}") is None


def test_shares_of_many_users_are_those_of_the_weights() -> None:
    route = Route((Share(7, 0.9), Share(8, 0.07), Share(9, 0.03)))
    count = 20_000
    chosen = [choose(NAME, route, f"user {i}") for i in range(count)]
    for share in route.shares:
        assert abs(chosen.count(share.number) / count - share.weight) < 0.01
    assert chosen == [choose(NAME, route, f"user {i}") for i in range(count)]
    others = [choose("another", route, f"user {i}") for i in range(count)]
    assert others != chosen, "the same users are not the canaries of every name"


def test_a_canary_that_grows_keeps_its_users() -> None:
    small, large = (Route((Share(1, 100 - p), Share(2, p))) for p in (10.0, 40.0))
    for i in range(2000):
        if choose(NAME, small, str(i)) == 2:
            assert choose(NAME, large, str(i)) == 2


def test_a_canary_leaves_the_others_their_proportions() -> None:
    entry = Name(1, {n: version(n) for n in (1, 2, 3)}, Route((Share(1, 3.0), Share(2, 1.0))))
    route = released(NAME, entry, "v3", canary=20)
    assert shares_of(route) == {1: 60.0, 2: 20.0, 3: 20.0}
    assert shares_of(released(NAME, entry, "3")) == {3: 1.0}
    assert shown_route(released(NAME, entry, "v1", 10, "v3")) == "v2 90%, v1 10%, shadow v3"
    shadowed = released(NAME, entry, shadow=f"sha256:{3:064x}")
    assert (shadowed.shares, shadowed.shadow) == (entry.route.shares, 3)


def test_a_rollback_takes_back_what_came_last() -> None:
    state = published(2)
    one, two = Route((Share(1, 1.0),)), Route((Share(2, 1.0),))
    canary = Route((Share(1, 90.0), Share(2, 10.0)))
    state = routed(routed(state, one), canary)
    assert rolled_back(NAME, state.names[NAME]) == one
    more = routed(routed(state, Route((Share(1, 50.0), Share(2, 50.0)), None)), two)
    assert rolled_back(NAME, more.names[NAME]) == one, "not to a canary on its way"
    back = routed(more, rolled_back(NAME, more.names[NAME]))
    assert rolled_back(NAME, back.names[NAME]) == two, "a second one takes the first one back"
    with pytest.raises(InvalidRequest, match="no earlier release"):
        rolled_back(NAME, published(1).names[NAME])
    again = after(published(1), Remove(NAME), Publish(NAME, version(5)))
    with pytest.raises(InvalidRequest, match="no earlier release"):
        rolled_back(NAME, again.names[NAME])


@pytest.mark.parametrize("canary", [0, 100, -5, 250])
def test_a_canary_gets_a_part_of_the_requests(canary: float) -> None:
    with pytest.raises(InvalidRequest, match=f"above 0 and below 100, got {canary}"):
        released(NAME, published(2).names[NAME], "v1", canary)


@given(st.lists(st.tuples(st.integers(1, 4), st.none() | st.floats(0.5, 99)), max_size=12))
def test_releases_and_rollbacks_are_always_accepted(
    orders: list[tuple[int, float | None]],
) -> None:
    """What is made of a name as it is, the log takes; and weights are a hundred with a canary."""
    state = published(4)
    for number, canary in orders:
        entry = state.names[NAME]
        try:
            route = released(NAME, entry, f"v{number}", canary)
        except InvalidRequest:
            assert canary is not None and set(shares_of(entry.route)) == {number}
            route = rolled_back(NAME, entry)
        state = routed(state, route)
        assert state.names[NAME].route == route
        if len(route.shares) > 1:
            assert sum(shares_of(route).values()) == pytest.approx(100)
        assert choose(NAME, route, "someone") in shares_of(route)
    state.check()
