"""Contents in a registry's store: published once and whole, and removed when nobody needs them."""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from packed_adapters import TEMPLATE, adapter, digest, read, written

from weft.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    RegistryUnavailable,
)
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.core.folders import Folder
from weft.registry import blobs as blobs_module
from weft.registry.blobs import BLOBS, Blobs, key_of
from weft.registry.contents import STALE_S, Contents, Listing
from weft.registry.records import Name, Version
from weft.registry.stores import DirectoryStore, Store
from weft.registry.sweep import (
    GRACE_S,
    KEEP_S,
    LEASE_S,
    TURN_S,
    Collector,
    ReplicaLease,
    running_leases,
)

FILES = adapter()
DIGEST = digest(FILES)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "registry")


def blobs_of(store: Store, tmp_path: Path) -> Blobs:
    return Blobs(store, Contents(tmp_path / "cache"))


def test_what_is_put_is_opened(store: Store, tmp_path: Path) -> None:
    blobs = blobs_of(store, tmp_path)
    files = adapter(chat_template__jinja=b"{{ x }}")
    assert not blobs.exists(DIGEST)
    with pytest.raises(AdapterNotFound, match=DIGEST):
        blobs.open(DIGEST)
    listing = blobs.put(files).listing
    assert blobs.put(files) == Version(DIGEST, sum(map(len, files.values())), listing=listing)
    assert blobs.put(files).digest == DIGEST and blobs.exists(DIGEST)
    with blobs.open(DIGEST) as folder:
        assert {n: bytes(folder.read(n, 1 << 20) or b"") for n in files} == files
        place = store.folder(f"{BLOBS}{DIGEST}/")
        assert place is None or folder.path == str(place.resolve())
    blobs.verify(DIGEST)


def test_folders_and_streams_are_put_alike(store: Store, tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {**FILES, "README.md": b"never published"})
    with Folder(str(folder)) as opened:
        assert Blobs(store).put(opened).digest == DIGEST
    streams: dict[str, BinaryIO] = {name: io.BytesIO(content) for name, content in FILES.items()}
    assert Blobs(store).put(streams).digest == DIGEST
    assert f"{BLOBS}{DIGEST}/README.md" not in set(store.list(BLOBS))


def test_the_same_weights_with_another_template_are_refused(store: Store) -> None:
    """The digest does not tell them apart, so only one of the two can be there."""
    Blobs(store).put({**FILES, TEMPLATE: b"one"})
    for other in ({**FILES, TEMPLATE: b"two"}, FILES):
        with pytest.raises(AdapterConflict, match=TEMPLATE) as error:
            Blobs(store).put(other)
        assert error.value.param == TEMPLATE
    Blobs(store).verify(DIGEST)


def test_what_is_no_adapter_leaves_nothing(store: Store) -> None:
    with pytest.raises(AdapterNotFound):
        Blobs(store).put({CONFIG_FILE: b"{}"})
    with pytest.raises(AdapterInvalid):
        Blobs(store).put({**FILES, "../../x": b""})
    with pytest.raises(AdapterInvalid):
        Blobs(store).put({**FILES, TEMPLATE: bytes((1 << 20) + 1)})
    assert not list(store.list(BLOBS))


class Breaking(MemoryStore):
    """Stops answering after some requests, and breaks downloads off after some bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.requests_left: int | None = None
        self.piece: int | None = None
        self.downloads = 0

    def _count(self) -> None:
        if self.requests_left is not None:
            if not self.requests_left:
                raise RegistryUnavailable("the store is gone")
            self.requests_left -= 1

    def put(self, key: str, content: bytes) -> bool:
        self._count()
        return super().put(key, content)

    def get(self, key: str) -> bytes | None:
        self._count()
        return super().get(key)

    def list(self, prefix: str) -> Iterator[str]:
        self._count()
        return super().list(prefix)

    def get_file(self, key: str, file: BinaryIO) -> bool:
        content = super().get(key)
        if content is None or self.piece is None:
            return super().get_file(key, file)
        self.downloads += 1
        start = file.seek(0, io.SEEK_END)
        file.write(content[start : start + self.piece])
        if start + self.piece < len(content):
            raise RegistryUnavailable("broken off")
        return True


def test_a_publication_may_die_anywhere_and_be_repeated(tmp_path: Path) -> None:
    for requests in range(20):
        store = Breaking()
        store.requests_left = requests
        try:
            blobs_of(store, tmp_path).put(FILES)
            break
        except RegistryUnavailable:
            store.requests_left = None
        assert not Blobs(store).exists(DIGEST) or requests > 5
        Blobs(store).put(FILES)
        Blobs(store).verify(DIGEST)
    assert requests > 5


def test_downloads_go_on_where_they_broke_off(tmp_path: Path) -> None:
    store = Breaking()
    Blobs(store).put(FILES)
    store.piece = 100
    with blobs_of(store, tmp_path).open(DIGEST) as folder:
        assert read(Path(folder.path)) == FILES
    store.piece = 0
    with blobs_of(store, tmp_path).open(DIGEST):
        pass  # it is here already
    store.downloads = 0
    with pytest.raises(RegistryUnavailable):
        blobs_of(store, tmp_path / "elsewhere").open(DIGEST)
    assert store.downloads == blobs_module.ATTEMPTS


def test_a_content_that_has_no_place_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = MemoryStore()
    blobs = Blobs(store, Contents(tmp_path / "file" / "cache"))
    listing = blobs.put(FILES).listing
    for sha256 in ("", listing):
        with pytest.raises(AdapterUnavailable, match="can't be kept on this machine: Not a dir"):
            blobs.open(DIGEST, sha256=sha256)


def test_a_download_that_finds_no_room_takes_none(tmp_path: Path) -> None:
    class Large(MemoryStore):
        """After its first bytes the disk is full."""

        def get_file(self, key: str, file: BinaryIO) -> bool:
            file.write(b"some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Large()
    Blobs(store).put(FILES)
    with pytest.raises(AdapterUnavailable, match="No space left on device"):
        blobs_of(store, tmp_path).open(DIGEST)
    assert not [path for path in (tmp_path / "cache/stage").rglob("*") if path.stat().st_size]


def test_what_downloads_leave_behind_goes_while_a_process_lives(tmp_path: Path) -> None:
    store, stage = MemoryStore(), tmp_path / "cache" / "stage"
    contents, left = Contents(tmp_path / "cache"), adapter(chat_template__jinja=b"never whole")
    blobs = Blobs(store, contents)
    blobs.put(left)
    store.delete(key_of(DIGEST, WEIGHTS_FILE))
    with pytest.raises(AdapterUnavailable):
        blobs.open(DIGEST)
    assert len(list(stage.iterdir())) == 2, "the files that came, and a lock"
    other = {**FILES, CONFIG_FILE: FILES[CONFIG_FILE] + b" "}
    blobs.put(other)
    for path in stage.iterdir():
        os.utime(path, (0, time.time() - STALE_S - 1))
    blobs.open(digest(other)).close()
    assert [path.name[:64] for path in stage.iterdir()] == [digest(other)]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, TEMPLATE])
def test_damage_is_seen(name: str, store: Store, tmp_path: Path) -> None:
    files = {**FILES, TEMPLATE: b"{{ x }}"}
    Blobs(store).put(files)
    key = key_of(DIGEST, name)
    store.delete(key)
    for content in (None, files[name][:-1], files[name][:-1] + b"\1"):
        if content is not None:
            store.delete(key)
            store.put(key, content)
        with pytest.raises((AdapterUnavailable, AdapterNotFound)):
            Blobs(store).verify(DIGEST)
        is_seen = content is None or len(content) < len(files[name])
        if store.folder("blobs/") is None or is_seen:  # sizes are all that is looked at in a folder
            with pytest.raises((AdapterUnavailable, AdapterNotFound)):
                blobs_of(store, tmp_path).open(DIGEST)
    store.delete(key)
    store.put(key, files[name])
    with blobs_of(store, tmp_path).open(DIGEST) as folder:
        assert bytes(folder.read(name, 1 << 20) or b"") == files[name]


def test_a_content_that_is_removed_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "store")
    blobs = Blobs(store)
    blobs.put(FILES)
    check = blobs_module._check_sizes

    def check_and_remove(path: Path, listing: Listing) -> None:
        check(path, listing)
        shutil.rmtree(path)

    monkeypatch.setattr(blobs_module, "_check_sizes", check_and_remove)
    with pytest.raises(AdapterUnavailable, match="can't be opened"):
        blobs.open(DIGEST)


@pytest.mark.parametrize("field", ["digest", "name"])
def test_a_list_of_files_leads_out_of_no_folder(field: str, tmp_path: Path) -> None:
    """Whoever writes to the store could put files of any name on the servers that follow it."""
    outside, other = tmp_path / "outside", tmp_path / "other"
    digest, name = (str(outside), CONFIG_FILE) if field == "digest" else (DIGEST, str(outside))
    said = {"listing": {"digest": digest, "files": [[name, 2, "0" * 64]]}, "made_at": 0.0}
    store = MemoryStore()
    store.put(key_of(DIGEST, "DONE"), msgspec.json.encode(said))
    store.put(key_of(digest, name), b"{}")
    with pytest.raises(RegistryUnavailable, match="DONE is damaged"):
        Blobs(store, Contents(other)).open(DIGEST)
    assert not list(tmp_path.glob("outside*")), "it has written there"


# -- removal ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(blobs_module.time, "time", clock)
    return clock


def steps(store: Store, clock: Clock, names: list[Name], delete: bool = True) -> dict[str, str]:
    found = Collector(store, clock).run(lambda: names, delete)
    return {each.digest: each.step for each in found}


def named(*digests: str, removed_at: float | None = None) -> Name:
    versions = {n: Version(each, 1) for n, each in enumerate(digests, 1)}
    return Name(1, versions, removed_at=removed_at)


def test_what_nobody_needs_is_swept_in_two_runs(store: Store, clock: Clock) -> None:
    blobs = Blobs(store)
    blobs.put(FILES)
    other = blobs.put(adapter(1)).digest
    names = [named(other)]
    assert steps(store, clock, names) == {}, "it is young"
    clock.now += KEEP_S + 1
    before = set(store.list("")) if store.folder("x/") is None else None
    assert steps(store, clock, names, delete=False) == {DIGEST: "doom"}
    assert before is None or set(store.list("")) == before, "a dry run writes nothing"
    assert steps(store, clock, names) == {DIGEST: "doom"}
    clock.now += GRACE_S - 1
    assert steps(store, clock, names) == {DIGEST: "wait"} and blobs.exists(DIGEST)
    clock.now += 2
    assert steps(store, clock, names, delete=False) == {DIGEST: "sweep"} and blobs.exists(DIGEST)
    assert steps(store, clock, names) == {DIGEST: "sweep"}
    assert not [key for key in store.list(BLOBS) if DIGEST in key]
    assert not list(store.list("doomed/")) and blobs.exists(other)
    assert steps(store, clock, names) == {}
    blobs.put(FILES)
    blobs.verify(DIGEST)


def test_names_that_went_and_leases_keep_contents(store: Store, clock: Clock) -> None:
    Blobs(store).put(FILES)
    clock.now += KEEP_S + 1
    gone = [named(DIGEST, removed_at=clock.now - KEEP_S + 60)]
    assert steps(store, clock, gone) == {}
    clock.now += 61
    lease = ReplicaLease(store, "node-1")
    lease.renew([DIGEST])
    clock.now += 1
    lease.renew([DIGEST])
    assert len(list(store.list("leases/"))) == 1
    assert steps(store, clock, gone) == {}
    clock.now += LEASE_S + GRACE_S + 1
    assert steps(store, clock, gone) == {DIGEST: "doom"}
    assert not list(store.list("leases/"))


def test_other_files_are_not_counted(store: Store, clock: Clock) -> None:
    for key in ("leases/notes.txt", "leases/node-1/README", "collecting/notes.txt"):
        store.put(key, b"odd")
    others = [f"{BLOBS}Thumbs.db", f"{BLOBS}a/b", f"doomed/{DIGEST}/x.at", "doomed/x/1.at"]
    for key in others:
        store.put(key, b"odd")
    Blobs(store).put(FILES)
    ReplicaLease(store, "node-1").renew([DIGEST])
    assert running_leases(store).keys() == {"node-1"}
    clock.now += KEEP_S + 1
    assert steps(store, clock, []) == {DIGEST: "doom"}
    clock.now += GRACE_S + 1
    assert steps(store, clock, []) == {DIGEST: "sweep"}
    assert all(store.get(key) == b"odd" for key in others)


def test_damaged_notes_of_replicas_and_collectors(store: Store, clock: Clock) -> None:
    """Nobody knows what a replica serves whose lease can't be read, so nothing is removed."""
    store.put("collecting/0000000001", b"?")
    assert steps(store, clock, []) == {}
    lease = f"leases/node-1/{int((clock.now + LEASE_S) * 1000):015d}"
    store.put(lease, b"{")
    with pytest.raises(RegistryUnavailable, match=f"{lease} is damaged"):
        running_leases(store)
    with pytest.raises(RegistryUnavailable, match=f"{lease} is damaged"):
        steps(store, clock, [])


def test_a_publisher_stops_a_removal(store: Store, clock: Clock) -> None:
    Blobs(store).put(FILES)
    clock.now += KEEP_S + 1
    assert steps(store, clock, []) == {DIGEST: "doom"}
    clock.now += GRACE_S + 1
    Blobs(store).put(FILES)
    assert steps(store, clock, []) == {DIGEST: "rescued"}, "the log does not name it yet"
    assert steps(store, clock, [named(DIGEST)]) == {}
    Blobs(store).verify(DIGEST)


def test_what_is_needed_again_is_doomed_no_more(store: Store, clock: Clock) -> None:
    Blobs(store).put(FILES)
    clock.now += KEEP_S + 1
    assert steps(store, clock, []) == {DIGEST: "doom"}
    assert steps(store, clock, [named(DIGEST)]) == {}
    clock.now += GRACE_S + 1
    assert steps(store, clock, []) == {DIGEST: "doom"}, "the old doom does not count"


def test_what_was_never_finished_goes_too(store: Store, clock: Clock) -> None:
    Blobs(store).put(FILES)
    store.delete(key_of(DIGEST, "DONE"))
    for _ in range(2):
        clock.now += KEEP_S + GRACE_S
        steps(store, clock, [])
    assert not list(store.list(BLOBS))


def test_one_collector_at_a_time(store: Store, clock: Clock) -> None:
    collector = Collector(store, clock)

    def second() -> list[Name]:
        with pytest.raises(RegistryUnavailable, match="another collector has worked"):
            Collector(store, clock).run(list, delete=True)
        Collector(store, clock).run(list, delete=False)
        return []

    collector.run(second, delete=True)
    store.put(max(store.list("collecting/"))[:-15] + "0000000009", str(clock.now).encode())
    with pytest.raises(RegistryUnavailable):
        collector.run(list, delete=True)
    clock.now += TURN_S + 1  # whoever it was has died
    collector.run(list, delete=True)


class Stepped(MemoryStore):
    """Lets something else happen before each request."""

    def __init__(self, contents: MemoryStore) -> None:
        self.__dict__.update(contents.__dict__)
        self.before: dict[int, object] = {}
        self.count = 0
        self.between = lambda: None
        self.at = -1

    def _step(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.between()

    def put(self, key: str, content: bytes) -> bool:
        self._step()
        return super().put(key, content)

    def get(self, key: str) -> bytes | None:
        self._step()
        return super().get(key)

    def list(self, prefix: str) -> Iterator[str]:
        self._step()
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._step()
        super().delete(key)


@settings(max_examples=30, deadline=None)
@given(at=st.integers(1, 40), dies=st.booleans())
def test_publishing_and_sweeping_at_once(at: int, dies: bool) -> None:
    """Whoever publishes in the middle of a sweep, even of one that dies there, either is told to
    try again, or has a content that stays."""
    clock, plain = Clock(), MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs_module.time, "time", clock)
        Blobs(plain).put(FILES)
        clock.now += KEEP_S + 1
        Collector(plain, clock).run(list, delete=True)
        clock.now += GRACE_S + 1
        store, names = Stepped(plain), []

        def publish() -> None:
            try:
                Blobs(plain).put(FILES)
                names.append(named(DIGEST))
            except RegistryUnavailable:
                pass
            if dies:
                raise SystemExit

        store.at, store.between = at, publish
        try:
            Collector(store, clock).run(list, delete=True)
        except SystemExit:
            clock.now += TURN_S + 1
        if names:
            Blobs(plain).verify(DIGEST)
        for _ in range(3):
            Collector(plain, clock).run(lambda: names, delete=True)
            clock.now += GRACE_S + 1
        if names:
            Blobs(plain).verify(DIGEST)
        else:
            assert not list(plain.list(BLOBS))
        Blobs(plain).put(FILES)
        Blobs(plain).verify(DIGEST)
