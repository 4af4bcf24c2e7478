"""Images on disk: what is written comes back, and nothing else ever does."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import build_table

from weft.checkpoint.pack import AdapterImage
from weft.core.targets import ImageLayout
from weft.worker import images
from weft.worker.images import ImageStore, fingerprint

SIZE = 5000
"""Elements, more than a page."""


def make(digest: str = "d", size: int = SIZE, seed: int = 0) -> AdapterImage:
    layout = ImageLayout((4, 0), (0, -1), (64, -1), size, scale_offset=(128, -1))
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(size, generator=generator).to(torch.bfloat16)
    return AdapterImage(digest, layout, data, ("q_proj", "norm"))


def store(folder: Path, base: str = "base", **options: Any) -> ImageStore:
    options = {"dtype": torch.bfloat16, "max_bytes": 1 << 30, **options}
    return ImageStore(folder, base, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def same(found: AdapterImage | None, image: AdapterImage) -> bool:
    assert found is not None
    names = [field.name for field in fields(AdapterImage) if field.name != "data"]
    alike = [getattr(found, name) == getattr(image, name) for name in names]
    return all(alike) and torch.equal(found.data, image.data)


@pytest.mark.parametrize("size", [64, 2048, SIZE, (1 << 19) + 64])
def test_what_is_written_comes_back(tmp_path: Path, size: int) -> None:
    image = make(size=size)
    store(tmp_path / "new" / "folder").save(image)
    found = store(tmp_path / "new" / "folder").load("d")
    assert same(found, image)
    [file] = files(tmp_path / "new" / "folder")
    assert file.stat().st_size % images.PAGE == 2 * size % images.PAGE


def test_into_memory_that_is_there(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.save(make())
    room = torch.zeros(2 * SIZE + 100, dtype=torch.uint8)
    found = one.load("d", room)
    assert same(found, make())
    assert found is not None and found.data.data_ptr() == room.data_ptr()
    assert not room[2 * SIZE :].any()


@pytest.mark.parametrize(
    "other",
    [
        {"base": "another"},
        {"dtype": torch.float16},
        {"num_ranks": 2},
    ],
)
def test_what_is_of_another_kind_is_not_found(tmp_path: Path, other: dict[str, Any]) -> None:
    store(tmp_path).save(make())
    assert store(tmp_path, **other).load("d") is None
    assert len(files(tmp_path)) == 1, "it is somebody else's"


def test_a_base_is_known_by_its_shapes_and_files(tmp_path: Path) -> None:
    table = build_table([("linear", 8, [("a", 8), ("b", 8)])])
    again = build_table([("linear", 8, [("a", 8), ("b", 8)])])
    wider = build_table([("linear", 8, [("a", 8), ("b", 16)])])
    biased = build_table([("linear", 8, [("a", 8), ("b", 8)])], bias=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x")
    first = fingerprint(table, tmp_path, "m")
    assert fingerprint(again, tmp_path, "m") == first
    os.utime(weights, (1, 1))
    prints = {first, fingerprint(table, tmp_path, "m"), fingerprint(wider, tmp_path, "m")}
    prints.add(fingerprint(biased, tmp_path, "m"))
    prints |= {fingerprint(table, None, "m"), fingerprint(table, None, "m", "fp8")}
    assert len(prints) == 6


def spoilt(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        content = bytearray(file.read_bytes())
        change(content)
        file.write_bytes(content)

    return spoil


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b"") and None,
    "only a prefix": lambda file: os.truncate(file, 15),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "a page is lost": lambda file: os.truncate(file, file.stat().st_size - 4096),
    "longer": spoilt(lambda content: content.extend(b"\0")),
    "a bit of the data": spoilt(lambda content: content.__setitem__(-5000, content[-5000] ^ 16)),
    "the last byte": spoilt(lambda content: content.__setitem__(-1, content[-1] ^ 1)),
    "pages exchanged": spoilt(
        lambda c: c.__setitem__(slice(4096, 12288), c[8192:12288] + c[4096:8192])
    ),
    "zeros": spoilt(lambda content: content.__setitem__(slice(-4096, None), bytes(4096))),
    "an offset": spoilt(
        lambda c: c.__setitem__(slice(None), bytes(c).replace(b"[64, -1]", b"[65, -1]"))
    ),
    "the magic": spoilt(lambda content: content.__setitem__(0, 0)),
    "the length": spoilt(lambda content: content.__setitem__(slice(12, 20), b"\xff" * 8)),
    "another's": lambda file: file.write_bytes(_other(file)) and None,
    "text": lambda file: file.write_text("hello" * 1000) and None,
    "a link to the same content": lambda file: file.symlink_to(file.rename(f"{file}.moved")),
    "a pipe that nobody writes to": lambda file: file.unlink() or os.mkfifo(file),
}


def _other(file: Path) -> bytes:
    folder = file.parent / "other"
    store(folder).save(make("other"))
    return next(folder.glob("*.image")).read_bytes()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_damaged_is_dropped(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    one = store(tmp_path / "cache")
    one.save(make())
    [file] = files(tmp_path / "cache")
    damage(file)
    assert one.load("d") is None and not file.exists()
    assert (one.stats().errors, one.stats().misses) == (1, 1)
    one.save(make())
    assert same(one.load("d"), make())


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_changed_byte_is_served(
    tmp_path_factory: pytest.TempPathFactory, at: float, flip: int
) -> None:
    """Unless it is in the gap before the data."""
    folder = tmp_path_factory.mktemp("cache")
    store(folder).save(make(size=640))
    [file] = files(folder)
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= flip
    file.write_bytes(content)
    found = store(folder).load("d")
    assert found is None or same(found, make(size=640))


def test_an_unfinished_file_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full halfway: nothing is left, one warning, and later ones are written."""
    one = store(tmp_path)
    write, calls = images._write_all, []

    def full(file: Any, content: memoryview) -> None:
        calls.append(len(content))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, content)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(images, "_write_all", full)
        for _ in range(3):
            one.save(make())
            assert files(tmp_path) == []
    assert one.stats().errors == 3
    assert [r.message.count("No space left") for r in caplog.records] == [1]
    one.save(make())
    assert same(one.load("d"), make())


def test_a_folder_that_can_not_be_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    one = store(tmp_path / "file" / "cache")
    one.save(make())
    assert one.load("d") is None
    assert one.stats().errors >= 1 and len(caplog.records) == 1


def test_a_folder_that_can_not_be_looked_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = store(tmp_path / ("x" * 300))
    assert not found.has("d") and found.load("d") is None
    found.save(make())
    assert found.stats().errors and "File name too long; serving goes on" in caplog.text


def test_a_folder_that_goes_away_comes_again(tmp_path: Path) -> None:
    one = store(tmp_path / "cache")
    one.save(make())
    files(tmp_path / "cache")[0].unlink()
    (tmp_path / "cache").rmdir()
    assert one.load("d") is None
    one.save(make())
    assert same(one.load("d"), make())
    assert one.stats().errors == 0


def test_those_used_least_recently_go(tmp_path: Path) -> None:
    one = store(tmp_path, max_bytes=50_000)
    for age, digest in enumerate("abc"):
        one.save(make(digest))
        [file] = tmp_path.glob(f"{digest}-*")
        os.utime(file, (time.time() - 100 + age,) * 2)
    assert one.load("a") is not None
    one.save(make("d"))
    assert [file.name[0] for file in files(tmp_path)] == ["a", "c", "d"]
    stats = one.stats()
    assert (stats.num_adapters, stats.evictions) == (3, 1)
    assert stats.num_bytes == sum(file.stat().st_size for file in files(tmp_path)) <= 50_000
    one.save(make("huge", size=50_000))
    assert len(files(tmp_path)) == 3, "nobody makes way for what does not fit"
    assert store(tmp_path, max_bytes=20_000).stats().num_adapters == 1


def test_what_processes_left_that_died_is_removed(tmp_path: Path) -> None:
    for name in (".old.part", ".new.part"):
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / ".old.part", (1, 1))
    store(tmp_path)
    assert [file.name for file in files(tmp_path)] == [".new.part"]


def test_stores_that_share_a_folder(tmp_path: Path) -> None:
    """Each reads whole images while the others write and remove them."""
    stores = [store(tmp_path, max_bytes=60_000) for _ in range(3)]
    wrong: list[str] = []

    def work(one: ImageStore, seed: int) -> None:
        for number in range(150):
            digest = "abcdefg"[(number * seed) % 7]
            image = make(digest, seed=ord(digest))
            one.save(image)
            found = one.load(digest)
            if found is not None and not same(found, image):
                wrong.append(digest)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(stores, (1, 2, 3), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(one.stats().hits for one in stores) > 100
    assert all(one.stats().errors == 0 for one in stores)
    assert not list(tmp_path.glob("*.part"))
