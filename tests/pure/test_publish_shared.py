"""Publishing into a shared registry without an engine, and cleaning it up."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner
from packed_adapters import CONFIG, adapter, digest, read, written

import weft
from weft.cli.args import ServeFlags
from weft.cli.main import app
from weft.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    ConfigError,
    InvalidRequest,
    RegistryReadOnly,
    RegistryUnavailable,
)
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.registry import sweep
from weft.registry.blobs import BLOBS, Blobs
from weft.registry.records import Label, Remove
from weft.registry.shared import SharedRegistry
from weft.registry.stores import DirectoryStore

FILES = adapter()
MODULE = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def names_of(place: Path) -> dict[str, list[str]]:
    with SharedRegistry(DirectoryStore(place)) as shared:
        return {n: [v.digest for v in e.versions.values()] for n, e in shared.state.names.items()}


def test_a_folder_and_tensors(tmp_path: Path) -> None:
    place, folder = tmp_path / "registry", written(tmp_path / "a", FILES)
    version = weft.publish(place, "acme/sql", folder, metadata={"step": "7"})
    assert (version.digest, version.source) == (digest(FILES), str(folder))
    tensors = {MODULE.format("A"): np.ones((1, 8)), MODULE.format("B"): np.ones((8, 1), np.float32)}
    with SharedRegistry(DirectoryStore(place)) as shared:
        second = weft.publish(shared, "acme/sql", tensors, CONFIG, release=False)
        again = weft.publish(shared, "acme/sql", dict(reversed(tensors.items())), CONFIG)
        entry = shared.state.names["acme/sql"]
        assert second.digest == again.digest and sorted(entry.versions) == [1, 2]
        assert entry.versions[1].metadata == {"step": "7"} and entry.route.shares[0].number == 2
        with Blobs(shared.store).open(version.digest) as opened:
            assert FILES.items() <= read(Path(opened.path)).items()


def test_bad_ones_leave_nothing_behind(tmp_path: Path) -> None:
    place = tmp_path / "registry"
    bad = {**FILES, WEIGHTS_FILE: FILES[WEIGHTS_FILE][:-4]}
    with pytest.raises(AdapterInvalid, match=WEIGHTS_FILE):
        weft.publish(place, "a", written(tmp_path / "bad", bad))
    with pytest.raises(AdapterNotFound, match=WEIGHTS_FILE):
        weft.publish(place, "a", written(tmp_path / "half", {CONFIG_FILE: b"{}"}))
    for tensors, config, field in (
        ({"a": [1]}, CONFIG, "a"),
        ({"a": np.ones(1)}, None, "config"),
        ({"a": np.ones(1)}, {"peft_type": "X"}, "peft_type"),
        ({"a": np.ones(1, np.int64)}, CONFIG, "a"),
        ({"a": np.ones(1)}, [1], "config"),
        ({"a": np.ones(1, object)}, CONFIG, "tensors"),
        ({1: np.ones(1)}, CONFIG, "tensors"),
        ({"\ud800": np.ones(1)}, CONFIG, "tensors"),
        ({}, CONFIG, WEIGHTS_FILE),
        ({"a": np.ones(1), "b": np.array([1, np.nan])}, CONFIG, "b"),
        ({"a": np.array([-np.inf, 1], np.float16)}, CONFIG, "a"),
    ):
        with pytest.raises(AdapterInvalid) as error:
            weft.publish(place, "a", tensors, config)
        assert error.value.param == field
    with pytest.raises(AdapterInvalid, match="config"):
        weft.publish(place, "a", tmp_path / "bad", CONFIG)
    assert names_of(place) == {} and not list(DirectoryStore(place).list(BLOBS))


def test_arguments_of_other_types_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "a", FILES)
    monkeypatch.chdir(tmp_path)
    for registry, name, metadata, param in (
        (None, "a", None, "registry"),
        ("registry", 3, None, "lora_name"),
        ("registry", "a", [1], "metadata"),
        ("registry", "a", {"step": 400}, "metadata"),
        ("registry", "a", {400: "step"}, "metadata"),
    ):
        with pytest.raises((ConfigError, InvalidRequest)) as error:
            weft.publish(registry, name, folder, metadata=metadata)
        assert error.value.param == param
    flags: dict[str, Any]
    for flags in ({"release": "no"}, {"pinned": None}, {"actor": 3}):
        with pytest.raises(InvalidRequest) as refused:
            weft.publish("registry", "a", folder, **flags)
        assert refused.value.param in flags
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def run(*args: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == status, result.output
    return result.output


def test_names_that_no_server_takes_leave_nothing_behind(tmp_path: Path) -> None:
    place, folder = tmp_path / "registry", written(tmp_path / "a", FILES)
    for name in ("a,b", "../a", "/a", "a\n", ""):
        with pytest.raises(InvalidRequest, match="lora_name must not"):
            weft.publish(place, name, folder)
    for name in ("sql@v1", f"sql@sha256:{'0' * 64}", "n" * 190, "./a", "a//b", "a/"):
        with pytest.raises(InvalidRequest, match=r"lora_name must not (end like|be|have)"):
            weft.publish(place, name, folder)
    assert not place.exists()


def test_verify_names_each_version_that_is_not_whole(tmp_path: Path) -> None:
    place, all_files = tmp_path / "registry", [adapter(seed) for seed in range(5)]
    for i, files in enumerate(all_files):
        weft.publish(place, "acme/sql", written(tmp_path / f"{i}", files))
    blobs = [place / BLOBS / digest(files) for files in all_files]
    (blobs[0] / "DONE").write_bytes(b"{")
    (blobs[1] / WEIGHTS_FILE).unlink()
    (blobs[2] / CONFIG_FILE).unlink()
    (blobs[2] / CONFIG_FILE).mkdir()
    (blobs[3] / WEIGHTS_FILE).write_bytes(b"")
    shown = run("registry", "verify", "--registry", place, status=1)
    for i, files in enumerate(all_files[:4]):
        assert f"sha256:{digest(files)} of acme/sql@v{i + 1}: " in shown
    assert "1 contents are whole, 4 are missing or damaged" in shown
    for blob, files in zip(blobs[:4], all_files, strict=False):  # as docs/registry.md says
        shutil.rmtree(blob)
        weft.publish(place, "acme/sql", written(tmp_path / "again", files))
    assert "5 contents are whole, 0" in run("registry", "verify", "--registry", place)


def test_a_registry_is_read_without_room_or_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("--registry", tmp_path)
    weft.publish(tmp_path, "acme/sql", written(tmp_path / "a", FILES))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "aside/old").touch()
    os.utime(tmp_path / "aside/old", (0, 0))
    monkeypatch.setattr(Path, "hardlink_to", full)
    monkeypatch.setattr(Path, "unlink", full)
    assert "acme/sql  v1" in run("registry", "ls", *to)
    assert "1 contents are whole" in run("registry", "verify", *to)
    assert "publish v1" in run("history", "acme/sql", *to)
    assert "0 contents" in run("registry", "gc", *to)
    run("tenants", "list", *to)


def test_a_server_only_reads_a_registry_until_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weft.publish(tmp_path, "acme/sql", written(tmp_path / "a", FILES))

    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    for number, why in (
        (errno.ENOSPC, "is full: No space left on device"),
        (errno.EROFS, "can't be read or written: Read-only file system"),
    ):
        why = f"the registry {tmp_path} {why}"
        with monkeypatch.context() as disk:
            disk.setattr(Path, "hardlink_to", refused)
            shared = ServeFlags(registry=str(tmp_path)).shared_registry()
            assert shared is not None and f"{why}: this server serves what is there" in caplog.text
            assert Blobs(shared.store).open(digest(FILES)).read(WEIGHTS_FILE, 1 << 20)
            with pytest.raises(RegistryReadOnly, match=f"{why}; nothing was changed"):
                shared.change(Label("acme/sql", {"a": str(number)}))
            with monkeypatch.context() as unsuitable:
                unsuitable.setattr(DirectoryStore, "put", lambda *_: True)
                with pytest.raises(RegistryReadOnly, match="several writers create"):
                    shared.change(Label("acme/sql", {"a": str(number)}))
        shared.change(Label("acme/sql", {"a": str(number)}))
        assert shared.state.names["acme/sql"].labels == {"a": str(number)}
        shared.close()
    with monkeypatch.context() as away:
        away.setattr(Path, "hardlink_to", refused)
        number = errno.EIO
        with pytest.raises(RegistryUnavailable, match="does not answer"):
            ServeFlags(registry=str(tmp_path)).shared_registry()


def test_a_full_disk_has_room_enough_to_be_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is as much room as the file `spare` gives back."""
    to, spare, link = ("--registry", tmp_path), tmp_path / "spare", Path.hardlink_to
    clean = ("registry", "gc", "--delete", *to)
    weft.publish(tmp_path, "a", written(tmp_path / "a", FILES))
    with SharedRegistry(DirectoryStore(tmp_path)) as shared:
        shared.change(Remove("a"))

    def link_if_free(path: Path, target: Path) -> None:
        if spare.exists() or not has_spare:
            raise OSError(errno.ENOSPC, "No space left on device")
        link(path, target)

    has_spare = spare.stat().st_size > 0
    monkeypatch.setattr(Path, "hardlink_to", link_if_free)
    monkeypatch.setattr(sweep, "KEEP_S", -10.0)
    full = f"the registry {tmp_path} is full: No space left on device"
    assert full in run("push", tmp_path / "a", "b", *to, status=1)
    assert run(*clean).count("  marked\n") == 1
    monkeypatch.setattr(sweep, "GRACE_S", -10.0)
    assert run(*clean).count("  removed") == 1
    assert spare.exists() and not list(DirectoryStore(tmp_path).list(BLOBS))
    has_spare = False
    assert re.search(f"{full}; .*: free 1 MB on that disk", run(*clean, status=1))


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, folder = tmp_path / "registry", written(tmp_path / "a", FILES)
    to = ("--registry", place)
    pushed = run("push", folder, "acme/sql", *to)
    assert digest(FILES) in pushed and "a new registry begins there" in pushed
    other = adapter(1)
    pushed = run("push", written(tmp_path / "b", other), "acme/sql", "--no-release", *to)
    assert "new registry" not in pushed
    assert "acme/sql  v1  (newest v2)" in run("registry", "ls", *to)
    assert "--to" in run("release", "acme/sql", *to, status=1)
    assert "2 contents are whole" in run("registry", "verify", *to)
    run("push", folder, "acme/sql", status=1)
    run("push", folder, "acme/sql", "--url", "http://127.0.0.1:9", status=1)
    with SharedRegistry(DirectoryStore(place)) as shared:
        shared.change(Remove("acme/sql"))
    assert "0 contents" in run("registry", "gc", *to)
    monkeypatch.setattr(sweep, "KEEP_S", -10.0)
    assert run("registry", "gc", *to).count("would be marked") == 2
    assert run("registry", "gc", "--delete", *to).count("  marked\n") == 2
    assert run("registry", "gc", "--delete", *to).count("marked already") == 2
    monkeypatch.setattr(sweep, "GRACE_S", -10.0)
    assert run("registry", "gc", *to).count("would be removed") == 2
    assert run("registry", "gc", "--delete", *to).count("  removed") == 2
    assert not list(DirectoryStore(place).list(BLOBS))
    blob = place / BLOBS / digest(FILES)
    run("push", folder, "acme/again", *to)
    os.truncate(blob / WEIGHTS_FILE, 10)
    assert "damaged" in run("registry", "verify", *to, status=1)


def test_only_a_release_unpins_a_name(tmp_path: Path) -> None:
    place = tmp_path / "registry"
    folders = [written(tmp_path / f"{seed}", adapter(seed)) for seed in range(3)]
    for folder, flags, pinned in (
        (folders[0], ["--pinned"], True),
        (folders[1], ["--no-release"], True),
        (folders[0], ["--no-release"], True),
        (folders[2], [], False),
        (folders[1], ["--no-release", "--pinned"], True),
    ):
        run("push", folder, "acme/sql", "--registry", place, *flags)
        with SharedRegistry(DirectoryStore(place)) as shared:
            assert shared.state.names["acme/sql"].pinned == pinned, flags


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_commands_that_only_look_make_no_registry(tmp_path: Path, scheme: str) -> None:
    place = tmp_path / "nowhere"
    for command in (("registry", "ls"), ("history", "acme/sql"), ("tenants", "list")):
        told = run(*command, "--registry", f"{scheme}{place}", status=1)
        assert "there is no such folder" in " ".join(told.split())
        assert not place.exists()
