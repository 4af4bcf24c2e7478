"""Adapters that strangers hand in: whatever they do, it ends as an error of that adapter."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from handed_in import becomes
from http_api import Web, World, run
from toy_tokenizers import byte_level

from weft.checkpoint.read import read_source
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterNotFound, AdapterUnavailable
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
