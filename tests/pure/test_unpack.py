"""Adapters in one file, most of them hostile."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from packed_adapters import CONFIG, TEMPLATE, adapter, digest, read, tar, written
from safetensors.numpy import save

from weft.core.errors import AdapterInvalid, AdapterNotFound, AdapterUnavailable
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.registry.contents import Contents, listing_of, opened
from weft.registry.unpack import tar_of, unpack

FILES = adapter()
MAX = 1 << 20


def unpacked(content: bytes, tmp_path: Path, max_bytes: int = MAX) -> dict[str, bytes]:
    packed, into = tmp_path / "packed", tmp_path / "into"
    packed.write_bytes(content)
    into.mkdir()
    unpack(packed, into, max_bytes)
    return read(into)


def refusal(content: bytes, tmp_path: Path, max_bytes: int = MAX) -> str:
    with pytest.raises(AdapterInvalid) as error:
        unpacked(content, tmp_path, max_bytes)
    assert error.value.param
    return error.value.message


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("folder", ["", "./", "adapter/", "./a/b/"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_people_pack(mode: str, folder: str, form: int, tmp_path: Path) -> None:
    """Whatever tar they have, with the folder or without, and with what else lies in it."""
    beside = {"README.md": b"hi", "training_args.bin": bytes(5000), f"._{CONFIG_FILE}": b"mac"}
    files = {folder + name: content for name, content in {**beside, **FILES}.items()}

    def change(info: tarfile.TarInfo) -> None:
        info.mtime = 1.5
        info.uname = "ü"

    assert unpacked(tar(files, mode, change, form), tmp_path) == FILES


def test_what_weft_packs(tmp_path: Path) -> None:
    files = adapter(chat_template__jinja=b"{{ messages }}")
    streams = {name: io.BytesIO(content) for name, content in files.items()}
    assert unpacked(b"".join(tar_of(streams)), tmp_path) == files


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("/etc/" + CONFIG_FILE, "leads out"),
        ("../" + CONFIG_FILE, "leads out"),
        ("a/../../" + CONFIG_FILE, "leads out"),
        ("..\\" + CONFIG_FILE, "leads out"),
        ("b/" + CONFIG_FILE, "several folders"),
        ("a/./" + CONFIG_FILE, "twice"),
    ],
)
def test_names_that_mean_something_else(name: str, part: str, tmp_path: Path) -> None:
    files = {f"a/{each}": content for each, content in FILES.items()}
    assert part in refusal(tar({**files, name: b"{}"}), tmp_path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S", b"V", b"M"]
)
def test_only_plain_files_are_taken(kind: bytes, tmp_path: Path) -> None:
    def change(info: tarfile.TarInfo) -> None:
        if info.name == WEIGHTS_FILE:
            info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    message = refusal(tar(FILES, "w", change, tarfile.GNU_FORMAT), tmp_path)
    assert "plain files" in message or "can't be unpacked" in message
    assert not (tmp_path / "into" / WEIGHTS_FILE).exists()


def test_sparse_files_of_newer_tars_are_refused(tmp_path: Path) -> None:
    def change(info: tarfile.TarInfo) -> None:
        sparse = {"major": "1", "minor": "0", "name": info.name, "realsize": str(1 << 40)}
        info.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}

    files = {WEIGHTS_FILE: b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)}
    assert "sparse" in refusal(tar(files, "w", change), tmp_path)


@pytest.mark.parametrize("field", ["map", "size", "realsize", "major"])
def test_sparse_files_whose_map_is_no_map_are_refused(field: str, tmp_path: Path) -> None:
    """tarfile has a ValueError for them."""

    def change(info: tarfile.TarInfo) -> None:
        info.pax_headers = {"GNU.sparse.minor": "0", f"GNU.sparse.{field}": "1"}
        if field != "major":
            info.pax_headers[f"GNU.sparse.{field}"] = "x"

    assert "can't be unpacked" in refusal(tar(FILES, "w", change), tmp_path)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"S"])
def test_headers_that_are_huge_take_no_memory(kind: bytes, tmp_path: Path) -> None:
    """Some MB of gzip stand for a header of a GB, which tarfile would read at once."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    if kind == b"S":  # the header goes on: there are more extents, over and over
        block = bytearray(header)
        block[482] = 1
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
        header = bytes(block) + (bytes(504) + b"\1" + bytes(7)) * 2000
    packed = gzip.compress(header + bytes(4 << 20), 1)
    tracemalloc.start()
    try:
        assert "too large" in refusal(packed, tmp_path, 1 << 34)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_header_of_small_lists_takes_no_memory(tmp_path: Path) -> None:
    """Made into objects, they would take 20 times as much, and hold up all other threads."""
    header = b'{"a":[' + b"[]," * (1 << 20) + b"[]]}"
    tracemalloc.start()
    try:
        assert "metadata" in refusal(len(header).to_bytes(8, "little") + header, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_sizes_are_bounded(tmp_path: Path) -> None:
    bomb = gzip.compress(tar({"zeros": bytes(8 << 20), **FILES}), 1)
    assert "more than" in refusal(bomb, written(tmp_path / "a", {}))
    large = tar({**FILES, TEMPLATE: bytes(2 << 20)})
    assert TEMPLATE in refusal(large, written(tmp_path / "b", {}), 1 << 30)
    many = tar({f"f{n}": b"" for n in range(1001)})
    assert "entries" in refusal(many, written(tmp_path / "c", {}), 1 << 30)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_what_is_cut_off_or_damaged(mode: str, tmp_path: Path) -> None:
    whole = tar(FILES, mode)
    ends = (1, 100, 512, 700, 1030, 1700) if mode == "w" else (1, 15, 300, len(whole) // 2)
    for n, end in enumerate(ends):
        place = written(tmp_path / str(n), {})
        try:
            files = unpacked(whole[:end], place)
        except AdapterInvalid:
            continue
        with pytest.raises((AdapterInvalid, AdapterNotFound)):
            Contents(place / "root").keep(written(place / "again", files))


def test_a_safetensors_file_with_its_config(tmp_path: Path) -> None:
    tensors = {"a": np.ones((2, 2), np.float32)}
    whole = save(tensors, {"adapter_config": json.dumps(CONFIG)})
    assert unpacked(whole, tmp_path) == {
        CONFIG_FILE: json.dumps(CONFIG).encode(),
        WEIGHTS_FILE: whole,
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x80\x04\x95" + bytes(100),
        b"PK\x03\x04" + bytes(600),
        save({"a": np.ones(1, np.float32)}),
        save({"a": np.ones(1, np.float32)}, {"adapter_config": ""})[:-5],
        (10).to_bytes(8, "little") + b'["a", "b"]',
        (1 << 24).to_bytes(8, "little") + b"[" * (1 << 24),
        (44).to_bytes(8, "little") + b'{"__metadata__":{"adapter_config":"\\ud800"}}',
        (44).to_bytes(8, "little") + b'{"__metadata__":{"adapter_config":"\xff....."}}',
    ],
)
def test_what_is_no_adapter(content: bytes, tmp_path: Path) -> None:
    try:
        files = unpacked(content, tmp_path)
    except AdapterInvalid as error:
        assert error.param
        return
    with pytest.raises(AdapterInvalid):
        Contents(tmp_path / "root").keep(written(tmp_path / "again", files))


# -- the folder of contents ------------------------------------------------------------------------


def kept(contents: Contents, files: dict[str, bytes]) -> Path:
    with contents.stage() as stage, contents.keep(written(stage / "x", files)) as folder:
        return Path(folder.path)


def test_contents_are_kept_once_and_whole(tmp_path: Path) -> None:
    contents = Contents(tmp_path / "root")
    path = kept(contents, FILES)
    assert read(path) == FILES and path == kept(contents, FILES)
    assert path != kept(contents, {**FILES, TEMPLATE: b"{{ x }}"}), "the same weights, other texts"
    assert not list((tmp_path / "root/stage").iterdir())
    (path / WEIGHTS_FILE).write_bytes(b"")  # as after a power cut
    assert read(kept(contents, FILES)) == FILES


def test_what_was_used_least_recently_makes_way(tmp_path: Path) -> None:
    used: set[str] = set()
    adapters = [adapter(n, size=1000) for n in range(4)]
    size = sum(map(len, adapters[0].values()))
    contents = Contents(tmp_path / "root", 2 * size, lambda: used)
    paths = [kept(contents, files) for files in adapters[:2]]
    with opened(paths[0]) as streams:
        assert contents.find(listing_of(streams))
    paths.append(kept(contents, adapters[2]))
    assert [path.exists() for path in paths] == [True, False, True]
    used |= {digest(adapters[0]), digest(adapters[2])}
    with pytest.raises(AdapterUnavailable, match="adapter-cache-bytes"):
        kept(contents, adapters[3])
    assert [path.exists() for path in paths] == [True, False, True]


def test_a_folder_of_its_own_goes_with_it() -> None:
    contents = Contents(None)
    path = kept(contents, FILES)
    assert path.exists()
    del contents
    assert not path.exists()


def test_no_other_files_are_taken(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match="evil"):
        listing_of({"evil": io.BytesIO(b"")})
    with pytest.raises(AdapterNotFound, match=WEIGHTS_FILE):
        listing_of({CONFIG_FILE: io.BytesIO(b"{}")})
    for config in (b"[]", b"{", b'{"peft_type": "PROMPT_TUNING"}'):
        with pytest.raises(AdapterInvalid):
            kept(Contents(tmp_path), {**FILES, CONFIG_FILE: config})
