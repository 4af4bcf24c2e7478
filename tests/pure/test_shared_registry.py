"""A process follows a shared registry and changes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_store import MemoryStore
from patience import PATIENCE_S, wait_until

from weft.core.errors import (
    AdapterNotFound,
    GenerationConflict,
    InvalidRequest,
    RegistryUnavailable,
)
from weft.registry.records import Done, Publish, Release, Remove, Route, SetTenant, Share, Version
from weft.registry.shared import SharedRegistry
from weft.registry.state import State
from weft.registry.stores import DirectoryStore, Store
from weft.registry.sweep import running_leases
from weft.serving.reports import Reports

A, B = (Version(letter * 64, 10) for letter in "ab")


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path)


@pytest.fixture
def pair(store: Store) -> Iterator[tuple[SharedRegistry, SharedRegistry]]:
    with SharedRegistry(store, poll_s=0.01) as one, SharedRegistry(store, poll_s=0.01) as two:
        yield one, two
        one.state.check()


def test_what_one_commits_another_sees(pair: tuple[SharedRegistry, SharedRegistry]) -> None:
    one, two = pair
    seen: list[tuple[State, frozenset[str]]] = []
    two.listen(lambda state, names: seen.append((state, names)))
    assert one.change(Publish("acme/sql", A), "alice") == Done(1, 1)
    assert one.change(Publish("acme/sql", B, release=False)) == Done(2, 2)
    two.poll()
    name = two.state.names["acme/sql"]
    assert name.versions == {1: A, 2: B} and name.route == Route((Share(1, 1.0),))
    assert [(e.generation, e.actor, e.what) for e in two.history("acme/sql")] == [
        (1, "alice", "publish v1"),
        (2, "", "publish v2, not released"),
    ]
    two.change(Release("acme/sql", Route((Share(1, 0.9), Share(2, 0.1))), expect=2))
    wait_until(lambda: one.state.names["acme/sql"].generation == 3)
    assert seen[-1] == (two.state, frozenset({"acme/sql"}))


def test_refusals_are_typed(pair: tuple[SharedRegistry, SharedRegistry]) -> None:
    one, two = pair
    one.change(Publish("sql", A))
    with pytest.raises(GenerationConflict, match="at generation 1, not at 7"):
        two.change(Remove("sql", expect=7))
    with pytest.raises(AdapterNotFound):
        two.change(Remove("other"))
    with pytest.raises(AdapterNotFound, match="no version v2"):
        two.change(Release("sql", Route((Share(2, 1.0),))))
    with pytest.raises(InvalidRequest):
        two.change(Publish("x" * 300, A))
    assert one.change(Remove("sql", expect=1)) == Done(2)


@pytest.mark.parametrize(
    "change",
    [
        Publish("\ud800", A),
        Publish("x", Version("a" * 64, 1, metadata={"n": 1})),  # type: ignore[dict-item]
        Release("x", Route((Share(1, float("nan")),))),
        Publish("x", Version("a" * 64, 1, source="s" * (2 << 20))),
    ],
    ids=["text", "type", "number", "size"],
)
def test_what_others_could_not_read_is_never_written(change: Publish) -> None:
    registry = SharedRegistry(MemoryStore())
    with pytest.raises(InvalidRequest):
        registry.submit(change)
    registry.close()
    assert registry.state.seq == 0


def test_what_waits_goes_into_one_entry(pair: tuple[SharedRegistry, SharedRegistry]) -> None:
    one, two = pair
    with one._driving, two._driving:  # nothing is written meanwhile
        futures = [each.submit(Publish("sql", A)) for each in pair for _ in range(100)]
    assert sorted(f.result().generation for f in futures) == list(range(1, 201))
    one.poll()
    two.poll()
    assert one.state == two.state
    assert one.state.seq < 20


def test_tenants_are_heard_of_too(pair: tuple[SharedRegistry, SharedRegistry]) -> None:
    one, two = pair
    heard = threading.Event()
    two.listen(lambda state, names: heard.set())
    one.change(SetTenant("acme", '{"weight": 2.0}'))
    assert heard.wait(PATIENCE_S)
    assert two.state.tenants["acme"].settings == '{"weight": 2.0}'


def test_a_listener_that_fails_harms_nobody(
    pair: tuple[SharedRegistry, SharedRegistry], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = pair
    one.listen(lambda state, names: 1 / 0)
    one.change(Publish("sql", A))
    assert one.change(Publish("sql", B)) == Done(2, 2)
    assert "a listener of the registry failed" in caplog.text


class Away(MemoryStore):
    """It does not answer while `away` is set, and makes what it does not answer if `makes` is."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.makes = False

    def put(self, key: str, content: bytes) -> bool:
        if self.away and not self.makes:
            raise RegistryUnavailable("away")
        new = super().put(key, content)
        if self.away:
            raise RegistryUnavailable("away")
        return new

    def get(self, key: str) -> bytes | None:
        if self.away:
            raise RegistryUnavailable("away")
        return super().get(key)


@pytest.mark.parametrize("makes", [False, True], ids=["not made", "made"])
def test_a_store_that_is_away(
    makes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.registry.shared.PATIENCE_S", 0.05)
    monkeypatch.setattr("weft.registry.shared.STALE_S", 0.05)
    store = Away()
    with SharedRegistry(store, poll_s=0.01) as registry:
        registry.change(Publish("sql", A))
        store.makes = makes
        store.away = True
        with pytest.raises(RegistryUnavailable, match="not known whether the change was made"):
            registry.change(Publish("sql", B))
        with pytest.raises(RegistryUnavailable):
            registry.poll()
        assert registry.state.names["sql"].generation == 1
        wait_until(lambda: registry.stale_s() > 0.1)
        wait_until(lambda: "its last state is used" in caplog.text)
        store.away = False
        wait_until(lambda: registry.stale_s() < 0.1)
        registry.poll()
        assert registry.state.names["sql"].generation == 1 + makes
        wait_until(lambda: "the registry answers again" in caplog.text)


def test_an_entry_that_cant_be_read_ends_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a backup left a folder or a link that leads nowhere."""
    monkeypatch.setattr("weft.registry.shared.PATIENCE_S", 0.05)
    with SharedRegistry(DirectoryStore(tmp_path), poll_s=0.01) as registry:
        (tmp_path / "log/00000000000000000001").mkdir(parents=True)
        with pytest.raises(RegistryUnavailable, match="is there, but can't be read"):
            registry.submit(Publish("sql", A)).result(PATIENCE_S)
        (tmp_path / "log/00000000000000000001").rmdir()
        assert registry.change(Publish("sql", A)) == Done(1, 1)


def test_a_change_outlives_a_short_absence() -> None:
    store = Away()
    with SharedRegistry(store, poll_s=0.01) as registry:
        store.makes = store.away = True
        future = registry.submit(Publish("sql", A))
        wait_until(lambda: registry.stale_s() > 0.05)
        store.away = False
        assert future.result() == Done(1, 1)


@pytest.mark.parametrize("other", [[], [B]], ids=["missing", "another"])
def test_nothing_is_written_to_another_registry_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: list[Version]
) -> None:
    """As where a file system is not mounted, and somebody publishes to the folder below it."""
    monkeypatch.setattr("weft.registry.shared.PATIENCE_S", 0.05)
    place, right, wrong = (tmp_path / name for name in ("place", "right", "wrong"))
    with SharedRegistry(DirectoryStore(place), poll_s=0.01) as registry:
        registry.change(Publish("sql", A))
        place.rename(right)
        with pytest.raises(RegistryUnavailable, match="does not answer"):
            registry.poll()
        with SharedRegistry(DirectoryStore(place)) as stranger:
            for version in other:
                stranger.change(Publish("sql", version))
        with pytest.raises(RegistryUnavailable, match=r"another registry .*0001 is.*; nothing was"):
            registry.change(Publish("faq", A))
        assert registry.state.names["sql"].versions == {1: A}
        place.rename(wrong)
        right.rename(place)
        assert registry.change(Publish("faq", A)) == Done(1, 1)


class Odd(MemoryStore):
    """It fails in a way that nobody foresaw while `odd` is set."""

    odd = False

    def get(self, key: str) -> bytes | None:
        if self.odd:
            raise RuntimeError("can't start new thread")
        return super().get(key)


def test_what_nobody_foresaw_ends_no_registry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.registry.shared.PATIENCE_S", 0.05)
    store = Odd()
    with SharedRegistry(store, poll_s=0.01) as registry:
        store.odd = True
        future = registry.submit(Publish("sql", A))
        with pytest.raises(RegistryUnavailable, match="start new thread"):
            future.result(PATIENCE_S)
        store.odd = False
        wait_until(lambda: "sql" in registry.state.names)
        assert registry.submit(Publish("sql", B)).result(PATIENCE_S) == Done(2, 2)
    assert "can't start new thread" in caplog.text


async def test_a_server_goes_on_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a report that failed in a way that nobody foresaw."""
    monkeypatch.setattr("weft.serving.reports.REPORT_EVERY_S", 0.01)
    monkeypatch.setattr("weft.serving.reports.RENEW_S", 0.01)

    class Failing(MemoryStore):
        odd = True

        def put(self, key: str, content: bytes) -> bool:
            if self.odd:
                self.odd = False
                raise RuntimeError("can't start new thread")
            return super().put(key, content)

    store = Failing()
    reports = Reports(store, lambda: ["a" * 64], 0)
    reports.start()
    async with asyncio.timeout(PATIENCE_S):
        while reports.name not in running_leases(store):
            await asyncio.sleep(0.005)
    await reports.close()


def test_closing_makes_what_waits_and_refuses_the_rest() -> None:
    registry = SharedRegistry(MemoryStore())
    future = registry.submit(Publish("sql", A))
    registry.close()
    assert future.done() and future.result() == Done(1, 1)
    with pytest.raises(RegistryUnavailable, match="closed"):
        registry.submit(Remove("sql"))
