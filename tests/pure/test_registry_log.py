"""The log of a shared registry holds its promises whatever stores and processes do."""

from __future__ import annotations

from typing import TypeVar

import pytest
from registry_simulation import (
    FenceThatIsCollected,
    RememberingLog,
    WithoutDoubt,
    WithoutFence,
    WithoutNonces,
    first_violation,
)

from weft.core.errors import RegistryUnavailable
from weft.registry.log import Delete, Get, ListKeys, Log, Put, Request, Steps, entry_key
from weft.registry.records import Done, Publish, Version
from weft.registry.state import Op, State

A = Version("a" * 64, 10)
_T = TypeVar("_T")


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 10))]
)
def test_no_schedule_breaks_a_promise(part: int) -> None:
    """A thousand short ones, and long ones between."""
    for seed in range(1000 * part, 1000 * (part + 1)):
        violation = first_violation(seed, 400 if seed % 25 == 0 else 60)
        assert violation is None, f"seed {seed}"


@pytest.mark.parametrize(
    "mutant", [WithoutFence, FenceThatIsCollected, WithoutNonces, WithoutDoubt]
)
def test_the_simulation_finds_what_is_wrong(mutant: type[RememberingLog]) -> None:
    assert any(first_violation(seed, 400, mutant) for seed in range(500))


class Requests:
    """A store in a dict, and what was asked of it."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.asked: list[Request] = []

    def run(self, steps: Steps[_T]) -> _T:
        self.asked = []
        try:
            request = next(steps)
            while True:
                self.asked.append(request)
                request = steps.send(self._answer(request))
        except StopIteration as end:
            result: _T = end.value
            return result

    def _answer(self, request: Request) -> object:
        match request:
            case Put(key, content):
                is_new = key not in self.content
                self.content.setdefault(key, content)
                return is_new
            case Get(keys):
                return [self.content.get(key) for key in keys]
            case ListKeys(prefix):
                return [key for key in self.content if key.startswith(prefix)]
            case Delete(key):
                return self.content.pop(key, None)


def publish(store: Requests, log: Log, number: int) -> None:
    op = Op(f"nonce {number}", "", Publish(f"name {number}", A))
    assert store.run(log.commit([op], float(number))) == {op.nonce: Done(1, 1)}
    store.run(log.save())


def a_log(store: Requests, num_entries: int, epoch: int = 4) -> Log:
    log = Log(State(epoch=epoch))
    for number in range(num_entries):
        publish(store, log, number)
    return log


def test_a_commit_takes_two_requests_and_so_does_a_poll_without_news() -> None:
    store = Requests()
    log = a_log(store, 1)
    assert [type(request) for request in store.asked] == []  # nothing to save
    op = Op("nonce", "", Publish("name", A))
    store.run(log.commit([op], 0.0))
    assert [type(request) for request in store.asked] == [Put, Get]
    store.run(log.poll())
    assert [type(request) for request in store.asked] == [Get, Get]


def test_many_entries_are_read_side_by_side() -> None:
    store = Requests()
    written = a_log(store, 100, epoch=1000)
    log = Log(State(epoch=1000))
    store.run(log.poll())
    assert log.state == written.state
    assert len(store.asked) < 20


def test_a_snapshot_stands_for_the_entries_before_it() -> None:
    store = Requests()
    written = a_log(store, 10)
    assert set(store.run(written.collect())) == {
        *(entry_key(seq) for seq in range(1, 9)),
        "snap/000000000001",
    }
    log = Log(State(epoch=4))
    store.run(log.boot())
    assert log.state == written.state
    behind = Log(State(epoch=4))
    store.run(behind.poll())
    assert behind.state == written.state
    assert store.run(log.collect()) == []


def test_other_files_beside_the_log_are_not_of_it() -> None:
    store = Requests()
    store.content |= {"snap/desktop.ini": b"odd", "log/notes.txt": b"odd"}
    written = a_log(store, 10)
    log = Log(State(epoch=4))
    store.run(log.boot())
    assert log.state == written.state
    store.run(log.collect())
    assert {"snap/desktop.ini", "log/notes.txt"} <= store.content.keys()


def test_a_missing_snapshot_is_written_by_another_writer() -> None:
    store = Requests()
    first, second = (Log(State(epoch=8)) for _ in range(2))
    for number in range(8):
        store.run(first.commit([Op(f"n{number}", "", Publish("x", A))], 0.0))
    store.run(second.poll())
    publish(store, second, 8)
    assert "snap/000000000001" in store.content
    assert State.load(store.content["snap/000000000001"]).seq == 8


def test_a_writer_that_lost_finds_its_change_or_makes_it_again() -> None:
    store = Requests()
    one, two = Log(), Log()
    publish(store, one, 1)
    op = Op("late", "", Publish("name 2", A))
    assert store.run(two.commit([op], 0.0)) == {}
    assert store.run(two.commit([op], 0.0)) == {"late": Done(1, 1)}
    assert store.run(two.commit([op], 0.0)) == {"late": Done(1, 1)}
    assert two.state.seq == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"time": 1.0, "ops": [["n", "", {"type": "unheard_of"}]]}',
     b'{"time": 1.0, "ops": [], "format": 2}'],
    ids=["empty", "cut", "unknown change", "newer format"],
)  # fmt: skip
def test_nobody_goes_on_from_what_can_not_be_read(content: bytes) -> None:
    store = Requests()
    log = a_log(store, 1)
    store.content[entry_key(2)] = content
    with pytest.raises(RegistryUnavailable, match=r"log/00000000000000000002 .* can't be read"):
        store.run(log.poll())
    assert log.state.seq == 1


@pytest.mark.parametrize("key", [entry_key(2), "snap/000000000001"])
def test_what_is_different_in_a_newer_format_is_not_taken_for_damage(key: str) -> None:
    store = Requests()
    a_log(store, 1)
    store.content[key] = b'{"time": "late", "ops": [["n", {"type": "unheard_of"}]], "format": 2}'
    with pytest.raises(RegistryUnavailable, match=f"{key} .* its format is 2, and .* reads 1"):
        store.run(Log(State(epoch=4)).boot())


def test_a_snapshot_of_a_newer_format_is_refused() -> None:
    store = Requests()
    a_log(store, 4)
    snapshot = store.content["snap/000000000001"]
    store.content["snap/000000000001"] = snapshot.replace(b'"format":1', b'"format":2')
    with pytest.raises(RegistryUnavailable, match="its format is 2"):
        store.run(Log(State(epoch=4)).boot())
    del store.content["snap/000000000001"]
    store.content["end/000000000000"] = b"over"
    with pytest.raises(RegistryUnavailable, match="newest snapshot is missing"):
        store.run(Log(State(epoch=4)).poll())


def test_what_is_settled_is_told_before_more_is_sent() -> None:
    """Else, if the store did not answer then, it would be forgotten that the op was sent."""
    store = Requests()
    log = a_log(store, 0)
    op, more = Op("late", "", Publish("name", A)), Op("more", "", Publish("name", A))
    steps = log.commit([op], 0.0)
    put = next(steps)
    assert isinstance(put, Put)
    store.content[put.key] = put.content
    steps.close()
    store.run(log.poll())
    assert store.run(log.commit([op, more], 0.0)) == {"late": Done(1, 1)}
    assert store.asked == []
