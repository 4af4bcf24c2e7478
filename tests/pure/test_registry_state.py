"""What the log of a shared registry adds up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.registry.frozen_map import FrozenMap
from weft.registry.records import (
    Change,
    Done,
    Label,
    Name,
    NotDone,
    Publish,
    Release,
    Remove,
    RemoveTenant,
    Result,
    Route,
    SetTenant,
    Share,
    TenantRecord,
    Version,
)
from weft.registry.state import KEPT_HISTORY, KEPT_VERSIONS, Entry, Op, State

A, B, C = (Version(letter * 64, 10) for letter in "abc")


@dataclass
class Changes:
    """A state to which changes are made one by one."""

    state: State = field(default_factory=lambda: State(epoch=5))
    time: float = 0.0
    num_made: int = 0

    def make(self, change: Change, actor: str = "") -> Result:
        self.num_made += 1
        op = Op(f"{self.num_made}", actor, change)
        self.state = self.state.apply(Entry(self.time, (op,)))
        self.state.check()
        result = self.state.result(op.nonce)
        assert result is not None
        return result

    def refused(self, change: Change) -> str:
        before = self.state
        result = self.make(change)
        assert isinstance(result, NotDone)
        assert self.state.names == before.names and self.state.tenants == before.tenants
        return f"{result.kind}: {result.message}"

    def caps(self, **caps: int) -> None:
        assert isinstance(self.make(SetTenant("t", json.dumps({"caps": caps}))), Done)


@pytest.fixture
def changes() -> Changes:
    return Changes()


def version(number: int, num_bytes: int = 10) -> Version:
    return Version(f"{number:064x}", num_bytes)


class TestNames:
    def test_versions_are_numbered_and_content_keeps_its_number(self, changes: Changes) -> None:
        assert changes.make(Publish("t/a", A)) == Done(1, 1)
        assert changes.make(Publish("t/a", B)) == Done(2, 2)
        assert changes.make(Publish("t/a", Version("a" * 64, 10, source="again"))) == Done(3, 1)
        name = changes.state.names["t/a"]
        assert name.versions == {1: A, 2: B} and name.route == Route((Share(1, 1.0),))

    def test_a_version_may_wait_for_its_release(self, changes: Changes) -> None:
        changes.make(Publish("t/a", A, release=False))
        assert changes.state.names["t/a"].route == Route()
        route = Route((Share(1, 3.0),), shadow=1)
        assert changes.make(Release("t/a", route)) == Done(2)
        changes.make(Publish("t/a", B, release=False, pinned=True))
        name = changes.state.names["t/a"]
        assert name.route == route and name.pinned

    def test_a_name_that_comes_again_continues_its_numbers(self, changes: Changes) -> None:
        changes.make(Publish("t/a", A))
        changes.make(Publish("t/a", B))
        changes.time = 7.0
        assert changes.make(Remove("t/a", expect=2)) == Done(3)
        gone = changes.state.names["t/a"]
        assert gone.removed_at == 7.0 and gone.route == Route() and gone.versions
        assert changes.refused(Release("t/a", Route())).startswith("not_found")
        assert changes.refused(Remove("t/a")).startswith("not_found")
        assert changes.refused(Publish("t/a", A, expect=2)).startswith("conflict")
        assert changes.make(Publish("t/a", A, expect=3)) == Done(4, 3)
        assert changes.state.names["t/a"].versions == {3: A}

    def test_labels_stay_until_they_are_removed_or_the_name_is(self, changes: Changes) -> None:
        changes.make(Publish("t/a", A))
        assert changes.make(Label("t/a", {"weft.nodes": "n1,n2", "team": "x"})) == Done(2)
        assert changes.make(Label("t/a", {"weft.nodes": "n3", "team": None}, expect=2)) == Done(3)
        changes.make(Publish("t/a", B))
        assert changes.state.names["t/a"].labels == {"weft.nodes": "n3"}
        assert changes.state.names["t/a"].history[2].what == "label weft.nodes=n3 team-"
        assert State.load(changes.state.dump()).names["t/a"].labels == {"weft.nodes": "n3"}
        changes.make(Remove("t/a"))
        changes.make(Publish("t/a", A))
        assert changes.state.names["t/a"].labels == {}

    @pytest.mark.parametrize(
        ("labels", "why"),
        [
            ({"weft.nodes": "a,,b"}, "weft.nodes takes 1 to 64 names"),
            ({"weft.nodes": ""}, "weft.nodes takes 1 to 64 names"),
            ({"weft.replicas": "many"}, "weft.replicas takes a number of nodes, got 'many'"),
            ({"weft.replicas": "0"}, "weft.replicas must be from 1 to 64"),
            ({"weft.replicas": "2", "weft.nodes": "a"}, "weft.replicas=2 can't be met by the 1"),
            ({"weft.node": "a"}, "weft.node: labels of Weft are weft.nodes, weft.node-labels"),
            ({"weft.node-labels": ""}, "weft.node-labels takes KEY=VALUE"),
            ({"weft.node-labels": "gpu"}, "weft.node-labels takes KEY=VALUE"),
            ({"weft.node-labels": "a=b,a=c"}, "weft.node-labels has 'a' twice"),
            ({"weft.node-labels": "weft.x=c"}, "no label of a node begins with weft."),
            ({"weft.node-labels": "a=b", "weft.nodes": "a"}, "can't both say which nodes"),
            ({"x": "y" * 2000}, "at most 16 labels of 1024"),
            ({f"{i}": "" for i in range(17)}, "at most 16 labels"),
        ],
    )
    def test_labels_that_can_not_be_met_are_refused(
        self, labels: dict[str, str | None], why: str, changes: Changes
    ) -> None:
        changes.make(Publish("t/a", A))
        assert why in changes.refused(Label("t/a", labels))

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (Publish("", A), "invalid: a name has 1 to 200"),
            (Publish("x" * 201, A), "invalid: a name"),
            (Publish("a/../b", A), "invalid: a name"),
            (Publish("a\n", A), "invalid: a name"),
            (Publish("a", Version("A" * 64, 1)), "invalid: a version"),
            (Publish("a", Version("a" * 64, -1)), "invalid: a version"),
            (Release("t/a", Route((Share(1, 1.0), Share(1, 1.0)))), "invalid: a route names each"),
            (Release("t/a", Route((Share(1, 0.0),))), "invalid: a route's weights"),
            (Release("t/a", Route((Share(1, float("inf")),))), "invalid: a route's weights"),
            (Release("t/a", Route((Share(2, 1.0),))), "not_found: 't/a' has no version v2"),
            (Release("t/a", Route((Share(1, 1.0),), shadow=9)), "not_found: 't/a' has no version"),
            (Release("other", Route()), "not_found: the registry has no adapter 'other'"),
            (Publish("t/a", B, expect=0), "conflict: 't/a' is at generation 1, not at 0"),
            (SetTenant("t", "{"), "invalid: the tenant's settings are not JSON"),
            (SetTenant("t", '{"caps": {"max_adapters": "x"}}'), "invalid: the tenant's settings"),
            (RemoveTenant("t"), "not_found: the registry has no tenant 't'"),
        ],
    )
    def test_refusals_say_why_and_change_nothing(
        self, changes: Changes, change: Change, why: str
    ) -> None:
        changes.make(Publish("t/a", A))
        assert changes.refused(change).startswith(why)

    def test_old_versions_and_history_are_let_go(self, changes: Changes) -> None:
        for number in range(1, 100):
            changes.make(Publish("t/a", version(number), release=number in (1, 3)))
            if number == 3:
                changes.make(Release("t/a", Route((Share(3, 1.0),), shadow=1)))
        name = changes.state.names["t/a"]
        assert sorted(name.versions) == [1, 3, *range(100 - KEPT_VERSIONS, 100)]
        assert len(name.history) == KEPT_HISTORY
        assert name.history[-1].what == "publish v99, not released"
        assert changes.state.usage["t"].num_bytes == 10 * (KEPT_VERSIONS + 2)

    def test_time_never_goes_back(self, changes: Changes) -> None:
        for changes.time in (5.0, 3.0, 6.0):
            changes.make(Publish("t/a", A), "somebody")
        assert [e.time for e in changes.state.names["t/a"].history] == [5.0, 5.0, 6.0]


class TestTenants:
    def test_generations_continue_after_a_removal(self, changes: Changes) -> None:
        assert changes.make(SetTenant("t", "{}", expect=0)) == Done(1)
        assert changes.refused(SetTenant("t", "{}", expect=0)).startswith("conflict")
        assert changes.make(RemoveTenant("t", expect=1)) == Done(2)
        assert "t" not in changes.state.tenants
        assert changes.refused(SetTenant("t", "{}", expect=0)).startswith("conflict")
        assert changes.make(SetTenant("t", '{"weight": 2}', expect=2)) == Done(3)
        assert changes.state.tenants["t"] == TenantRecord(3, '{"weight": 2}')

    def test_adapters_are_counted_while_they_are_there(self, changes: Changes) -> None:
        changes.caps(max_adapters=1)
        changes.make(Publish("t/a", A))
        changes.make(Publish("t/a", B))
        changes.make(Publish("other/a", A))
        changes.make(Publish("shared", A))
        assert "would have 2 adapters" in changes.refused(Publish("t/b", A))
        changes.make(Remove("t/a"))
        assert changes.make(Publish("t/b", A)) == Done(1, 1)

    def test_bytes_are_those_of_all_kept_versions(self, changes: Changes) -> None:
        changes.caps(max_stored_bytes=100)
        changes.make(Publish("t/a", version(1, 60)))
        changes.make(Publish("t/a", version(1, 60)))
        assert "would keep 110 bytes" in changes.refused(Publish("t/b", version(2, 50)))
        assert isinstance(changes.make(Publish("t/b", version(3, 40))), Done)
        changes.make(Remove("t/a"))
        assert isinstance(changes.make(Publish("t/b", version(4, 60))), Done)

    def test_a_smaller_cap_takes_nothing_away(self, changes: Changes) -> None:
        changes.make(Publish("t/a", A))
        changes.make(Publish("t/b", A))
        changes.caps(max_adapters=1, max_stored_bytes=1)
        for change in (Publish("t/a", A), Release("t/a", Route()), Remove("t/a")):
            assert isinstance(changes.make(change), Done)

    def test_publishing_too_often(self, changes: Changes) -> None:
        changes.caps(max_publishes_per_hour=4)
        for number in range(4):
            changes.make(Publish("t/a", version(number)))
        assert "4 versions an hour" in changes.refused(Publish("t/a", version(9)))
        assert isinstance(changes.make(Publish("t/a", version(1))), Done)
        changes.time = 1000.0
        assert isinstance(changes.make(Publish("t/a", version(9))), Done)
        assert changes.refused(Publish("t/a", version(10))).startswith("quota")


NAMES = st.sampled_from(["t/a", "t/b", "u/a", "shared"])
NUMBERS = st.integers(0, 4)
EXPECTED = st.none() | st.integers(0, 6)
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(Publish, NAMES, st.sampled_from([A, B, C]), st.booleans(), st.booleans(), EXPECTED),
    st.builds(
        Release,
        NAMES,
        st.builds(
            lambda numbers, shadow: Route(tuple(Share(n, 1.0 + n) for n in numbers), shadow),
            st.lists(NUMBERS, max_size=2),
            st.none() | NUMBERS,
        ),
        EXPECTED,
    ),
    st.builds(Remove, NAMES, EXPECTED),
    st.builds(
        SetTenant,
        st.sampled_from("tu"),
        st.sampled_from(['{"caps": {"max_adapters": 1}}', '{"caps": {"max_stored_bytes": 25}}']),
        EXPECTED,
    ),
    st.builds(RemoveTenant, st.sampled_from("tu"), EXPECTED),
)


@given(st.lists(CHANGES, max_size=25), st.integers(1, 5))
def test_changes_in_one_entry_or_in_many_come_to_the_same(
    made: Sequence[Change], per_entry: int
) -> None:
    """Also when somebody has read a part of them from a snapshot."""
    ops = [Op(str(i), "", change) for i, change in enumerate(made)]
    one_by_one = together = State(epoch=3)
    for op in ops:
        before = one_by_one
        one_by_one = one_by_one.apply(Entry(1.0, (op,)))
        one_by_one.check()
        _is_one_change(before, one_by_one, op)
        loaded = State.load(one_by_one.dump())
        assert loaded == one_by_one
    for first in range(0, len(ops), per_entry):
        together = State.load(together.dump())
        together = together.apply(Entry(1.0, tuple(ops[first : first + per_entry])))
    assert together.names == one_by_one.names
    assert together.tenants == one_by_one.tenants
    assert together.usage == one_by_one.usage


def _is_one_change(before: State, after: State, op: Op) -> None:
    """A change that was made has raised one generation by one; a refused one nothing."""
    changed = after.names.changed_since(before.names)
    match after.result(op.nonce):
        case NotDone():
            assert not changed and after.tenants == before.tenants
        case Done(generation=generation):
            assert op.change.expect in (None, generation - 1)
            if not isinstance(op.change, SetTenant | RemoveTenant):
                assert changed == {op.change.name}
                old = before.names.get(op.change.name, Name()).generation
                assert after.names[op.change.name].generation == generation == old + 1


@given(st.lists(st.tuples(st.text("abc", max_size=2), st.none() | st.integers(0, 3))))
def test_a_table_is_a_mapping_that_never_changes(steps: list[tuple[str, int | None]]) -> None:
    table: FrozenMap[int] = FrozenMap()
    model: dict[str, int] = {}
    for key, value in steps:
        before, old = table, dict(model)
        if value is None:
            model.pop(key, None)
            table = table.lacking(key)
        else:
            model[key] = value
            table = table.having(key, value)
        assert dict(before) == old == before.plain()
        assert dict(table) == model and len(table) == len(model)
        assert table.changed_since(before) == {k for k in [key] if old.get(k) != model.get(k)}
        assert (key in table) == (key in model) and table.get(key) == model.get(key)
    assert table == FrozenMap(model)
    assert FrozenMap(model).changed_since(FrozenMap()) == model.keys()
