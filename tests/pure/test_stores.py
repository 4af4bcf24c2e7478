"""All stores of a shared registry keep the same promises."""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from buckets import new_bucket, s3_server
from memory_store import MemoryStore
from packed_adapters import adapter, digest, read, tar

from weft.cli.args import ServeFlags
from weft.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterPathRefused,
    ConfigError,
    RegistryReadOnly,
    RegistryUnavailable,
)
from weft.registry import AdapterRoots, Sources
from weft.registry.allowed import Allowed
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.log import entry_key, snapshot_key
from weft.registry.shared import SharedRegistry
from weft.registry.state import State
from weft.registry.stores import DirectoryStore, Store, open_store, probe


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(params=["memory", "directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "directory":
        return open_store(str(tmp_path / "registry"))
    request.getfixturevalue("s3")
    return open_store(new_bucket())


class TestStore:
    def test_a_key_is_written_once(self, store: Store) -> None:
        assert store.put("log/1", b"first")
        assert not store.put("log/1", b"second")
        assert not store.reopen().put("log/1", b"third")
        assert store.get("log/1") == store.reopen().get("log/1") == b"first"

    def test_one_of_many_writers_wins(self, store: Store) -> None:
        handles = [store, store.reopen()]
        contents = [str(i).encode() * 1000 for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda i: handles[i % 2].put("log/7", contents[i]), range(8)))
        assert won.count(True) == 1
        assert store.get("log/7") == contents[won.index(True)]

    def test_what_is_missing_is_none(self, store: Store) -> None:
        assert store.get("log/1") is None
        assert not store.get_file("log/1", io.BytesIO())
        assert list(store.list("log/")) == []
        store.delete("log/1")

    def test_a_deleted_key_is_free_again(self, store: Store) -> None:
        store.put("a/b/c", b"old")
        store.delete("a/b/c")
        assert store.get("a/b/c") is None and list(store.list("a/")) == []
        assert store.put("a/b/c", b"new")

    def test_lists_what_lies_below_a_prefix(self, store: Store) -> None:
        keys = {"blobs/sha256/ab/DONE", "blobs/sha256/ab/config.json", "blobs/sha256/abc/DONE"}
        for key in {*keys, "blobsy", "log/1"}:
            store.put(key, b"")
        assert set(store.list("blobs/")) == keys
        assert len(list(store.list("blobs/sha256/ab/"))) == 2

    @pytest.mark.parametrize("size", [0, 10, 18 << 20], ids=["empty", "small", "large"])
    def test_files_come_back_whole(self, store: Store, size: int) -> None:
        content = os.urandom(size)
        file = io.BytesIO(b"skipped" + content)
        file.seek(7)
        assert store.put_file("blobs/x", file)
        assert not store.put_file("blobs/x", io.BytesIO(content))
        found = io.BytesIO()
        assert store.get_file("blobs/x", found)
        assert found.getvalue() == content

    def test_a_download_goes_on_where_it_ended(self, store: Store) -> None:
        store.put("blobs/x", b"0123456789")
        file = io.BytesIO(b"01234")
        assert store.get_file("blobs/x", file) and store.get_file("blobs/x", file)
        assert file.getvalue() == b"0123456789"

    def test_the_probe_leaves_nothing_behind(self, store: Store) -> None:
        probe(store)
        assert not list(store.list("probe/"))

    def test_a_folder_has_the_keys_as_files(self, store: Store) -> None:
        store.put("blobs/x/config.json", b"{}")
        folder = store.folder("blobs/x/")
        if isinstance(store, DirectoryStore):
            assert folder is not None and (folder / "config.json").read_bytes() == b"{}"
        else:
            assert folder is None


class Overwriting(MemoryStore):
    """As a file system that does not know put-if-absent."""

    def put(self, key: str, content: bytes) -> bool:
        self._contents[key] = content
        return True


class Stale(MemoryStore):
    """As a mount that answers from a cache of its own."""

    def reopen(self) -> MemoryStore:
        return MemoryStore()


class Unlisted(MemoryStore):
    def list(self, prefix: str) -> Iterator[str]:
        return iter(())


class TestProbe:
    @pytest.mark.parametrize(
        ("store", "why"),
        [
            (Overwriting(), "several writers create the same key"),
            (Stale(), "several writers|does not show what was just written"),
            (Unlisted(), "does not list"),
        ],
    )
    def test_refuses_what_can_not_hold_a_registry(self, store: Store, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            probe(store)

    def test_says_that_a_bucket_is_not_there(self, s3: None) -> None:
        with pytest.raises(RegistryUnavailable, match="does not answer: there is no such bucket"):
            probe(open_store("s3://nobody-has-made-it/x"))

    def test_a_bucket_that_is_gone_is_no_bucket_without_news(self, s3: None) -> None:
        """Servers would take what they know for the newest state, and unknown names for missing."""
        with pytest.raises(RegistryUnavailable, match="there is no such bucket"):
            open_store("s3://nobody-has-made-it/x").get("log/1")

    def test_a_bucket_that_never_answers_is_named_and_asked_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buckets = pytest.importorskip("weft.registry.buckets")
        monkeypatch.setattr(buckets, "_ANSWER_S", timedelta(milliseconds=300))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            monkeypatch.setenv("AWS_ENDPOINT", f"http://{address}")
            store = open_store("s3://bucket/x")
            monkeypatch.setattr(store, "delete", None)
            told = f"s3://bucket/x does not answer: .* PUT http://{address}/bucket/.* in 3"
            with pytest.raises(RegistryUnavailable, match=told):
                probe(store)


class TestDirectory:
    def test_what_was_never_finished_is_deleted_after_a_day(self, tmp_path: Path) -> None:
        DirectoryStore(tmp_path)
        old, new = tmp_path / "aside/old", tmp_path / "aside/new"
        for path in (old, new):
            path.touch()
        os.utime(old, (0, 0))
        DirectoryStore(tmp_path)
        assert new.exists() and not old.exists()

    def test_errors_name_the_file(self, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path)
        (tmp_path / "log").touch()
        with pytest.raises(RegistryUnavailable, match=r"answer: log/1: Not a directory$"):
            store.put("log/1", b"")
        with pytest.raises(RegistryUnavailable, match=r"answer: log/1: Not a directory$"):
            store.get_file("log/1", io.BytesIO())
        (tmp_path / "aside").rmdir()
        with pytest.raises(RegistryUnavailable, match=r"answer: No such file or directory$"):
            store.get("log/1")

    def test_keys_stay_inside(self, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path)
        for key in ("../x", "/etc/passwd", "a//b", "a/./b", ""):
            with pytest.raises(ValueError, match="not a key"):
                store.put(key, b"")

    def test_what_a_file_system_puts_there_is_no_key(self, tmp_path: Path) -> None:
        """NFS gives a file another name that is deleted while somebody reads it."""
        store = DirectoryStore(tmp_path / "registry")
        with SharedRegistry(store) as shared:
            store.put(snapshot_key(1), State(seq=1024).dump())
            store.put(entry_key(1), b"{}")
            for folder in ("log", "snap"):
                (tmp_path / "registry" / folder / ".nfs0000000000000001").touch()
            assert shared.collect() == [entry_key(1)]

    def test_a_file_in_its_place_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="can't be in"):
            open_store(str(tmp_path / "file"))

    def test_what_is_in_the_way_inside_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "aside").touch()
        with pytest.raises(ConfigError, match=f"can't be in {tmp_path}: {tmp_path}/aside: File"):
            open_store(str(tmp_path))

    @pytest.mark.parametrize("given", ["{}/registry", "{}/typo/registry", "file://{}/registry"])
    def test_a_server_makes_no_folder_for_its_registry(self, tmp_path: Path, given: str) -> None:
        """An empty registry has no tenants, so it is open: neither a typo nor a file system that is
        not mounted must begin one."""
        uri = given.format(tmp_path)
        with pytest.raises(ConfigError, match=f"^--registry {uri}: there is no such folder; mount"):
            ServeFlags(registry=uri).shared_registry()
        assert not list(tmp_path.iterdir())


def test_a_folder_that_goes_while_a_key_is_written_is_not_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "registry")

    class LastRead(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if (tmp_path / "registry").exists():
                (tmp_path / "registry").rename(tmp_path / "away")
            return super().read(size)

    with pytest.raises(RegistryUnavailable):
        store.put_file("log/1", LastRead(b"one"))
    assert not (tmp_path / "registry").exists()


def test_other_uris_are_refused() -> None:
    with pytest.raises(ConfigError, match="a folder, or begins with"):
        open_store("ftp://host/x")
    for nothing in ("", "file://"):
        with pytest.raises(ConfigError, match="none is named"):
            open_store(nothing)


def test_a_folder_that_is_gone_does_not_answer(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "registry")
    store.put("log/1", b"one")
    away = (tmp_path / "registry").rename(tmp_path / "away")
    for ask in (
        lambda: store.get("log/2"),
        lambda: store.get_file("log/2", io.BytesIO()),
        lambda: list(store.list("log/")),
        lambda: store.put("log/2", b"two"),
    ):
        with pytest.raises(RegistryUnavailable):
            ask()
    away.rename(tmp_path / "registry")
    assert store.get("log/1") == b"one" and store.get("log/2") is None


def test_adapters_in_buckets(s3: None, tmp_path: Path) -> None:
    """A bucket holds a registry's contents, and adapters to load: as tars and as folders."""
    uri, files = new_bucket(), adapter(size=3_000_000)
    bucket = open_store(uri)
    digest_put = Blobs(bucket).put(files).digest
    Blobs(bucket).verify(digest_put)
    with Blobs(bucket, Contents(tmp_path / "cache")).open(digest_put) as folder:
        assert read(Path(folder.path)) == files
    small = adapter(1)
    bucket.put("a/b.tar.gz", tar(small, "w:gz"))
    for name, content in small.items():
        bucket.put(f"folders/a/{name}", content)
    sources = Sources(AdapterRoots([]), Allowed([uri]), Contents(tmp_path / "kept"), 100_000)
    for place in ("/a/b.tar.gz", "/folders/a", f"/folders/a#sha256={digest(small)}"):
        with sources.open(uri + place) as folder:
            assert read(Path(folder.path)) == small
    with pytest.raises(AdapterNotFound, match=r"adapter_config\.json"):
        sources.open(f"{uri}/folders/b")
    with pytest.raises(AdapterInvalid, match="100000 bytes"):
        sources.open(f"{uri}/blobs/sha256/{digest_put}")
    with pytest.raises(AdapterPathRefused, match="--allow-sources"):
        sources.open(new_bucket())


def test_a_disk_that_is_full_is_not_taken_for_a_silent_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    from obstore.exceptions import PermissionDeniedError
    from obstore.store import MemoryStore as ObjectMemory

    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store("s3://bucket/prefix")
    monkeypatch.setattr(store, "_bucket", ObjectMemory())
    assert store.put("a/b", b"content")
    with pytest.raises(OSError, match="No space left"):
        store.get_file("a/b", Full())
    whole = io.BytesIO(b"cont")
    assert store.get_file("a/b", whole) and whole.getvalue() == b"content"
    assert not store.get_file("a/c", whole)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionDeniedError("403 Forbidden")

    monkeypatch.setattr("obstore.put", forbidden)
    with pytest.raises(RegistryReadOnly, match="s3://bucket/prefix refuses access: 403 Forbidden"):
        probe(store)
