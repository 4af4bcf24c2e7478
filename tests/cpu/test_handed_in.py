"""Adapters that strangers hand in: whatever they do, it ends as an error of that adapter."""

from __future__ import annotations

import itertools
import json
import re
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from handed_in import CONFIG, PLACES, WEIGHTS, Files, becomes, displace, hostile_contents, lay
from http_api import Web, World
from other_kinds import make, make_adapter
from patience import PATIENCE_S, wait_until
from peft import LoraConfig
from serving import serving_here
from tiny import ADAPTERS, BASE
from toy_tokenizers import byte_level

from weft.checkpoint import fields
from weft.checkpoint.examine import examine
from weft.checkpoint.kinds import parse_config
from weft.checkpoint.read import max_tensors, parse_stored, read_source
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterError, AdapterInvalid, AdapterUnavailable
from weft.core.files import TOKENIZER_FILES
from weft.core.folders import Deadline, read_aside
from weft.core.targets import TargetTable
from weft.registry import AdapterRoots

SECRET = "what lies outside"
FILE = "chat_template.jinja"


async def test_a_template_that_flips_into_a_link_or_a_fifo(tmp_path: Path) -> None:
    """Nothing outside the root is ever read, no load hangs, and later ones succeed."""
    (tmp_path / "root").mkdir()
    (tmp_path / "outside/bot").mkdir(parents=True)
    (tmp_path / "outside/bot" / FILE).write_text(SECRET)
    world = World(tmp_path / "root", byte_level())
    path = world.adapter("a", "A")
    template = Path(path) / FILE
    template.write_text("mine")
    over = threading.Event()

    def flip() -> None:
        for what in itertools.cycle(("link", "text", "FIFO", "text")):
            becomes(template, what)
            if over.wait(0.0005):
                return

    web = Web(world)
    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        for _ in range(3):
            answer = await web.load("a", path, load_inplace=True)
            assert answer.status_code in (200, 400, 404, 503), answer.text
            assert str(tmp_path / "outside") not in answer.text
            if answer.status_code == 200:
                await web.chat(model="a")
                prompt = world.engine.requests[-1].prompt_ids
                assert byte_level().decode(prompt, skip_special_tokens=True) == "mine"
    finally:
        over.set()
        flipping.join()
    becomes(template, "text")
    assert (await web.load("a", path, load_inplace=True)).status_code == 200
    world.check()


async def test_the_halves_of_an_adapter_belong_together(tmp_path: Path, table: TargetTable) -> None:
    """The API reads the tokenizer, the engine the weights: in between nothing may be exchanged."""
    world = World(tmp_path, byte_level())
    a, b = Path(world.adapter("a", "A")), Path(world.adapter("b", "B"))
    (a / FILE).write_text("template of a")
    (tmp_path / "link").symlink_to(a)
    asked: list[AdapterSource] = []
    hold = world.engine.hold

    async def note(source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        asked.append(source)
        return await hold(source, holder, pinned)

    async def change() -> None:
        (a / FILE).write_text("another")

    world.engine.hold = note  # type: ignore[method-assign]
    world.engine.on_hold = change
    web = Web(world)
    answer = await web.load("x", "link")
    assert answer.status_code == 503 and "changed" in answer.text
    assert not world.engine.adapters, "nothing is left of it"
    world.check()
    (source,) = asked
    assert (source.path, source.root) == (str(a), str(tmp_path))
    a.rename(tmp_path / "c")
    b.rename(a)
    with pytest.raises(AdapterUnavailable, match="exchanged"):
        read_source(source, table, 8, Deadline())
    read_source(source.again(), table, 8, Deadline())  # later the content alone says what it is


# what is parsed ---------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


HEADERS: dict[str, Callable[[], bytes]] = {
    "tensors": lambda: json.dumps(
        {f"base_model.model.{i}": ENTRY for i in range(200_000)}
    ).encode(),
    "objects": lambda: b'{"a":[' + b"{}," * 300_000 + b"{}]}",
    "sizes": lambda: (
        b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"0," * 400_000 + b"0]}}"
    ),
    "bytes": lambda: b'{"__metadata__":{"a":"' + b"a" * (9 << 20) + b'"}}',
}


@pytest.mark.parametrize("make_header", HEADERS.values(), ids=HEADERS.keys())
def test_large_headers_are_refused_at_once(
    table: TargetTable, make_header: Callable[[], bytes]
) -> None:
    header = make_header()
    begin = time.thread_time()
    with pytest.raises(AdapterInvalid):
        parse_stored(with_header(header), table)
    assert time.thread_time() - begin < 0.5


@pytest.mark.parametrize(("part", "what"), [(b"{}", "objects"), (b"[]", "lists"), (b"1", "values")])
def test_a_header_of_small_parts_is_not_parsed_for_any_base(part: bytes, what: str) -> None:
    """Where an adapter is kept for bases that are not known yet, a header may have 16 MiB."""
    header = b'{"a":[' + (part + b",") * (5 << 20 if part == b"1" else 1 << 20) + b"0]}"
    with pytest.raises(AdapterInvalid, match=f"too many {what}"):
        parse_stored(with_header(header))


def test_the_largest_header_is_parsed_fast(table: TargetTable) -> None:
    """It has as many tensors as there may be for the base."""
    number = max_tensors(table)
    assert number >= 8 * len(table.targets)
    header = {f"base_model.model.{i}": ENTRY for i in range(number)}
    begin = time.thread_time()
    assert len(parse_stored(with_header(json.dumps(header).encode()), table)) == number
    assert time.thread_time() - begin < 0.5
    with pytest.raises(AdapterInvalid, match="more tensors"):
        parse_stored(with_header(json.dumps({**header, "more": ENTRY}).encode()), table)


PATTERNS = {
    "one": {"|".join(f"{i}x{j}" for j in range(30)): 4 for i in range(2000)},
    "names": {f"model.layers.{i}.q_proj": 4 for i in range(2000)},
}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_configs_are_parsed_within_a_budget(patterns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "Work", partial(fields.Work, budget_s=0.2))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {"rank_pattern": PATTERNS[patterns]}
    begin = time.thread_time()
    if patterns == "one":
        with pytest.raises(AdapterInvalid, match="rank_pattern"):
            parse_config(json.dumps(config).encode(), 8)
    else:
        assert parse_config(json.dumps(config).encode(), 8).rank_of("model.layers.9.q_proj") == 4
    assert time.thread_time() - begin < 2.0


def test_deep_configs_are_refused() -> None:
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(AdapterInvalid, match="nested too deeply"):
        parse_config(json.dumps({"peft_type": "LORA", "eva_config": deep}).encode(), 8)


# a corpus ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("good")
    make_adapter(folder, make(LoraConfig, r=2, target_modules=["q_proj"]))
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def memory() -> int:
    """Bytes that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_files() -> set[Path]:
    return {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def verdict(roots: AdapterRoots, path: str, table: TargetTable) -> str:
    """What is said of a folder that a client names: as the API opens it, and as the engine does."""
    try:
        with roots.open(path) as folder:
            source = AdapterSource(folder.path, root=folder.root, identity=folder.identity)
            for name in TOKENIZER_FILES:
                folder.read(name, 1 << 20)
        files = read_aside(lambda deadline: read_source(source, table, 16, deadline))
        examine(files, table, "float16", 16)
    except AdapterError as error:
        assert error.message.isprintable() and len(error.message) < 1500
        assert not re.search(r"/(?:root|tmp|proc/self/mem|etc)/", error.message), error.message
        return error.kind
    return "good"


def test_a_corpus_of_hostile_folders(tmp_path: Path, table: TargetTable, good: Files) -> None:
    """Each is refused with a typed error or is served; nothing crashes, hangs or is left behind."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").write_bytes(b"{}")
    roots, said = AdapterRoots([root]), Counter[str]()
    assert verdict(roots, lay(root / "good", good).name, table) == "good"
    before, files, threads = memory(), open_files(), threading.active_count()

    def judge(path: str) -> str:
        begin = time.process_time()
        kind = verdict(roots, path, table)
        assert time.process_time() - begin < 20, "it takes too long"
        said[kind] += 1
        return kind

    for number, (name, content) in enumerate(hostile_contents(good)):
        folder = lay(root / str(number), content)
        kind = judge(folder.name)
        assert kind != "good" or name.startswith(("config", "header: metadata", "values")), name
        shutil.rmtree(folder)
    for name in (CONFIG, WEIGHTS, *TOKENIZER_FILES):
        for what in PLACES:
            folder = lay(root / "odd", good)
            displace(folder / name, what)
            kind = judge("odd")
            harmless = name in TOKENIZER_FILES and what in HARMLESS
            assert harmless or kind != "good" or not (folder / name).exists(), (name, what)
            shutil.rmtree(folder)
    for path in HOSTILE_PATHS:
        assert judge(path) in ("adapter_path_refused", "adapter_not_found"), path
    assert said.total() >= 400 and said["good"] < said.total() / 4, said
    assert {"adapter_invalid", "adapter_not_found", "adapter_path_refused"} <= said.keys()
    assert memory() - before < 300 << 20
    wait_until(lambda: open_files() == files and threading.active_count() <= threads)
    assert not Path("/tmp/weft-was-here").exists()


HARMLESS = ("empty", "link to nothing", "unreadable")
HOSTILE_PATHS = [
    *("", "/", "..", "../outside", "good/..", "good/../../outside", "/etc", "/proc/self/cwd"),
    *("good/" + CONFIG, "//good\0", "good\n", "a" * 5000, "a/" * 3000, "\ud800", "/dev/stdin"),
    *("~", "~root", "$HOME", "%2e%2e/outside", "good\\..", "\u202egood", "/proc/self/fd/0"),
    *("good/./none", "."),
]


def test_some_of_them_by_a_real_server(tmp_path: Path) -> None:
    """An adapter beside them goes on answering, and there is no answer without a type."""
    shutil.copytree(ADAPTERS["upper"], tmp_path / "upper")
    content = {name: (tmp_path / "upper" / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    corpus = list(hostile_contents(content))[::40]
    for number, (_, files) in enumerate(corpus):
        lay(tmp_path / f"h{number}", files)
    for what in PLACES:
        displace(lay(tmp_path / what.replace("/", "."), content) / WEIGHTS, what)
    paths = [path.name for path in sorted(tmp_path.iterdir()) if path.name != "upper"]
    with (
        serving_here(tmp_path, BASE, kv_cache_memory=16 << 20) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):

        def load(name: str, path: str) -> httpx.Response:
            body = {"lora_name": name, "lora_path": path}
            return client.post("/v1/load_lora_adapter", json=body)

        assert load("upper", "upper").status_code == 200
        before = memory()
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(load, paths, paths))
        for path, answer in zip(paths, answers, strict=True):
            assert answer.status_code in (200, 400, 404), (path, answer.text)
            assert str(tmp_path) not in answer.text
        assert sum(answer.status_code != 200 for answer in answers) > len(paths) * 3 // 4
        assert memory() - before < 300 << 20
        prompt = {"model": "upper", "prompt": [5, 6, 7], "max_tokens": 2}
        assert client.post("/v1/completions", json=prompt).status_code == 200
