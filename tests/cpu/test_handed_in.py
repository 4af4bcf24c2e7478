"""Adapters that strangers hand in: whatever they do, it ends as an error of that adapter."""

from __future__ import annotations

import itertools
import json
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from handed_in import becomes
from http_api import Web, World, run
from toy_tokenizers import byte_level

from weft.checkpoint import fields
from weft.checkpoint.kinds import parse_config
from weft.checkpoint.read import max_tensors, parse_stored, read_source
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterInvalid, AdapterNotFound, AdapterUnavailable
from weft.core.folders import Deadline
from weft.core.targets import TargetTable

SECRET = "what lies outside"
FILE = "chat_template.jinja"


def test_a_template_that_flips_into_a_link_or_a_fifo(tmp_path: Path) -> None:
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
            if over.is_set():
                return

    async def scenario(web: Web) -> None:
        flipping = threading.Thread(target=flip)
        flipping.start()
        try:
            for _ in range(40):
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

    run(world, scenario)
    world.check()


def test_the_halves_of_an_adapter_belong_together(tmp_path: Path, table: TargetTable) -> None:
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

    async def scenario(web: Web) -> None:
        answer = await web.load("x", "link")
        assert answer.status_code == 503 and "changed" in answer.text
        assert not world.engine.adapters, "nothing is left of it"

    run(world, scenario)
    world.check()
    (source,) = asked
    assert (source.path, source.root) == (str(a), str(tmp_path))
    a.rename(tmp_path / "c")
    b.rename(a)
    with pytest.raises(AdapterUnavailable, match="exchanged"):
        read_source(source, table, 8, Deadline())
    with pytest.raises(AdapterNotFound, match="has no file"):
        read_source(source.again(), table, 8, Deadline())


# what is parsed ---------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


HEADERS = {
    "tensors": json.dumps({f"base_model.model.{i}": ENTRY for i in range(200_000)}).encode(),
    "objects": b'{"a":[' + b"{}," * 300_000 + b"{}]}",
    "sizes": b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"0," * 400_000 + b"0]}}",
    "bytes": b'{"__metadata__":{"a":"' + b"a" * (9 << 20) + b'"}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_large_headers_are_refused_at_once(table: TargetTable, header: bytes) -> None:
    begin = time.thread_time()
    with pytest.raises(AdapterInvalid):
        parse_stored(with_header(header), table)
    assert time.thread_time() - begin < 0.5


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
