"""Adapters that clients send."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from http_api import Web, World
from packed_adapters import CONFIG, adapter, tar
from safetensors.numpy import save
from toy_tokenizers import byte_level

from weft.api import desk as desk_module
from weft.api import reading
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.registry import AdapterRoots, Sources
from weft.registry.contents import Contents

FILES = adapter()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, byte_level())


async def models(web: Web) -> dict[str, str]:
    cards = (await web.http.get("/v1/models")).json()["data"]
    return {card["id"]: card["root"] for card in cards if card["parent"]}


async def test_a_tar_or_a_safetensors_file(web: Web, world: World) -> None:
    for mode in ("w", "w:gz"):
        content = tar(FILES, mode)

        async def pieces(content: bytes = content) -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        answer = await web.http.put("/v1/adapters/acme/a?pinned=true", content=pieces())
        assert answer.status_code == 200, answer.text
        assert answer.json()["lora_name"] == "acme/a" and len(answer.json()["digest"]) == 64
    whole = save({"x": np.ones((1, 1), np.float32)}, {"adapter_config": json.dumps(CONFIG)})
    assert (await web.http.put("/v1/adapters/b", content=whole)).status_code == 200
    roots = await models(web)
    assert roots.keys() == {"acme/a", "b"} and roots["b"].startswith("upload://sha256:")
    refused = await web.http.put("/v1/adapters/b?replace=false", content=tar(FILES))
    assert refused.status_code == 400 and "other content" in refused.text
    answer = await web.http.put("/v1/adapters/b?wait=here&chek=true", content=tar(FILES))
    assert (answer.status_code, answer.headers["x-weft-ignored"]) == (200, "chek")
    world.check()


async def test_a_check_loads_nothing(tmp_path: Path) -> None:
    sources = Sources(AdapterRoots([]), contents=Contents(tmp_path / "kept"))
    world = World(tmp_path, byte_level(), sources=sources)
    web = Web(world)
    answer = await web.http.put("/v1/adapters/a?check=true", content=tar(FILES))
    found = answer.json()
    assert (answer.status_code, found["status"]) == (200, "accepted"), answer.text
    assert found["lora_name"] == "a" and len(found["digest"]) == 64
    assert found["max_rank"] > 0 and found["targets"] and found["num_bytes"] > 0
    for content in (b"hello", tar({**FILES, CONFIG_FILE: b"{"})):
        checked = await web.http.put("/v1/adapters/a?check=true", content=content)
        loaded = await web.http.put("/v1/adapters/a", content=content)
        assert checked.status_code == 400 and checked.json() == loaded.json()
    assert not await models(web)
    assert not list((tmp_path / "kept" / "stage").iterdir())
    world.check()


async def test_what_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = Contents(tmp_path / "kept")
    sources = Sources(AdapterRoots([]), contents=contents, max_bytes=20_000)
    world = World(tmp_path, byte_level(), sources=sources)
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)

    web = Web(world)
    cases = [
        (b"", "", 400, "body"),
        (b"hello", "", 400, "body"),
        (tar({**FILES, CONFIG_FILE: b"{"}), "", 400, CONFIG_FILE),
        (tar({CONFIG_FILE: b"{}"}), "", 404, WEIGHTS_FILE),
        (tar(FILES), "?wait=never", 400, "wait"),
        (tar(FILES), "?pinned=maybe", 400, "pinned"),
        (tar({**FILES, "x": bytes(20_000)}, "w:gz"), "", 400, "body"),
        (bytes(20_001), "", 413, None),
        (endless(), "", 413, None),
    ]
    for content, query, status, param in cases:
        answer = await web.http.put("/v1/adapters/a" + query, content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert (await web.http.put("/v1/adapters/base", content=tar(FILES))).status_code == 400
    monkeypatch.setattr(desk_module, "MAX_UPLOADS", 0)
    answer = await web.http.put("/v1/adapters/a", content=tar(FILES))
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert not await models(web)
    assert not list((tmp_path / "kept" / "stage").iterdir())
    world.check()


async def test_an_upload_that_has_no_place_is_unavailable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    sources = Sources(AdapterRoots([tmp_path]), contents=Contents(tmp_path / "file" / "cache"))
    web = Web(World(tmp_path, byte_level(), sources=sources))
    for query in ("", "?check=true"):
        answer = await web.http.put("/v1/adapters/a" + query, content=tar(FILES))
        assert answer.status_code == 503 and "can't be kept" in answer.text
        assert str(tmp_path) not in answer.text
    assert f"'{tmp_path}/file/cache/" in caplog.text


async def test_a_body_that_does_not_come(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_TIMEOUT_S", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield tar(FILES)[:100]
        await asyncio.sleep(60)

    answer = await web.http.put("/v1/adapters/a", content=stalled())
    assert answer.status_code == 408


async def test_tensors_that_have_no_place(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    weights = base64.b64encode(FILES[WEIGHTS_FILE]).decode()
    body = {"lora_name": "a", "config_dict": CONFIG, "serialized_tensors": weights}
    monkeypatch.setattr(Path, "write_bytes", write)
    answer = await web.post("/load_lora_adapter_from_tensors", body)
    assert answer.status_code == 503 and "No space left" in answer.json()["error_message"]


async def test_sglangs_tensors(web: Web, world: World) -> None:
    weights = base64.b64encode(FILES[WEIGHTS_FILE]).decode()
    path = "/load_lora_adapter_from_tensors"
    body = {"lora_name": "a", "config_dict": CONFIG, "serialized_tensors": weights, "rid": "x"}
    sent = await web.post(path, body | {"lora_id": "1", "added": None})
    assert sent.headers["x-weft-ignored"] == "rid"
    answer = sent.json()
    assert answer["success"] and answer["loaded_adapters"]["a"].startswith("upload://")
    many = {"lora_name": "b", "config_dict": CONFIG, "serialized_named_tensors": [weights] * 2}
    assert (await web.post(path, many)).json()["success"]
    pickled = base64.b64encode(pickle.dumps({"x": 1})).decode()
    for change, part in [
        ({"serialized_tensors": pickled}, "pickle"),
        ({"serialized_tensors": "%"}, "serialized_tensors"),
        ({"serialized_tensors": None}, "serialized_tensors"),
        ({"load_format": "flattened_bucket"}, "load_format"),
        ({"added_tokens_config": {"a": 1}}, "added_tokens_config"),
        ({"config_dict": {}}, "peft_type"),
        ({"config_dict": 3}, "config_dict"),
    ]:
        answer = await web.post(path, {**body, "lora_name": "c", **change})
        assert answer.status_code == 400 and not answer.json()["success"]
        assert part in answer.json()["error_message"]
    start = b'{"lora_name": "c", "serialized_tensors": "AAAA", "config_dict": {"x": '
    for value, part in [
        (b'"\xff"', "utf-8"),
        (b"[" + b"[]," * 10_000 + b"[]]", "10002 lists"),
        (b"[" + b'"",' * 50_000 + b'""]', "strings"),
        (b"[" + b"1," * (1 << 19) + b"1]", "config_dict: larger than"),
    ]:
        answer = await web.http.post(path, content=start + value + b"}}")
        assert answer.status_code == 400 and part in answer.json()["error_message"]
    assert (await models(web)).keys() == {"a", "b"}
    names = [f"n{i}" for i in range(desk_module.MAX_UPLOADS)]
    answers = await asyncio.gather(*(web.post(path, {**body, "lora_name": n}) for n in names))
    assert {answer.status_code for answer in answers} == {200}, "each counts once"
    world.check()
