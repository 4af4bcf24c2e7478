"""Adapters over HTTP: the three dialects, `base:adapter`, pins, and the Hugging Face hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from http_api import COMPLETE, Web, World, digest_of
from huggingface_hub import DryRunFileInfo
from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError, RepositoryNotFoundError
from patience import PATIENCE_S
from toy_tokenizers import byte_level

from weft.core.adapters import AdapterInfo
from weft.core.errors import EngineDead
from weft.core.files import ADAPTER_FILES, WEIGHTS_FILE
from weft.serving.quotas import MAX_LOADS

OPENAI_ERROR = {"message", "type", "param", "code"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, byte_level())
    yield made
    made.check()


async def text_of(web: Web, model: str) -> str:
    return str((await web.complete(model=model))["choices"][0]["text"])


async def listed(web: Web) -> dict[str, Any]:
    return dict((await web.get("/v1/loras")).json()["loras"])


# SGLang's -----------------------------------------------------------------------------------------


async def test_sglang_load_and_unload(web: Web, world: World) -> None:
    path = world.adapter("a", "A")
    body = {"lora_name": "a", "lora_path": path, "pinned": True, "lora_id": None}
    answer = await web.post("/load_lora_adapter", body)
    assert answer.status_code == 200
    assert answer.json() == {
        "success": True,
        "error_message": None,
        "loaded_adapters": {"a": path},
    }
    assert await text_of(web, "a") == "cbaA"
    answer = await web.post("/unload_lora_adapter", {"lora_name": "a"})
    assert (answer.status_code, answer.json()["loaded_adapters"]) == (200, {})
    assert not world.engine.adapters


async def test_sglang_errors_have_its_own_shape(web: Web, world: World) -> None:
    path, bad = world.adapter("a", "A"), world.adapter("bad", "bad")
    await web.load("a", path)
    for what, body, status, message in (
        ("load", {"lora_name": "b", "lora_path": bad}, 400, "use_dora"),
        ("load", {"lora_name": "a", "lora_path": world.adapter("o", "O")}, 400, "already"),
        ("load", {"lora_name": "b", "lora_path": f"{path}x"}, 404, "no such folder"),
        ("load", {"lora_name": "b"}, 400, "lora_path is required"),
        ("unload", {"lora_name": "b"}, 404, "cannot be found"),
    ):
        answer = await web.post(f"/{what}_lora_adapter", body)
        assert answer.status_code == status, answer.text
        assert answer.json()["success"] is False
        assert message in answer.json()["error_message"]
        assert answer.json()["loaded_adapters"] == {"a": path}


async def test_the_log_tells_of_changes(
    web: Web, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "weft.api.audit"):
        await web.load("a", world.adapter("a", "A"))
        body = {"lora_name": "a", "lora_path": world.adapter("o", "O"), "load_inplace": True}
        await web.post("/v1/load_lora_adapter", body)
        await web.post("/v1/unload_lora_adapter", {"lora_name": "a"})
    told = [line.partition(", digest ") for line in caplog.messages]
    words = ["adapter 'a': loaded", "adapter 'a': replaced", "adapter 'a': unloaded"]
    assert [line[0] for line in told] == words
    assert told[0][2] != told[1][2] == told[2][2] and len(told[0][2]) == 16


async def test_unknown_fields_are_named(tmp_path: Path) -> None:
    world = World(tmp_path / "open", byte_level())
    web = Web(world)
    path, more = world.adapter("a", "A"), {"lora_int_id": 1, "pined": True}
    answer = await web.load("a", path, **more)
    assert (answer.status_code, answer.headers["x-weft-ignored"]) == (200, "pined")
    body = {"lora_name": "b", "source": {"uri": f"file://{path}"}, **more}
    assert (await web.post("/v1/loras", body)).headers["x-weft-ignored"] == "pined"
    body["source"] = {**body["source"], "sha": "x"}
    assert (await web.post("/v1/loras", body)).headers["x-weft-ignored"] == "pined,source.sha"
    answer = await web.http.delete("/v1/loras/b?wait=here&force=1")
    assert (answer.status_code, answer.headers["x-weft-ignored"]) == (200, "force")
    answer = await web.post("/unload_lora_adapter", {"lora_name": "a", "lora_id": "x"})
    assert answer.status_code == 200 and "x-weft-ignored" not in answer.headers
    world = World(tmp_path / "strict", byte_level(), strict_fields=True)
    web = Web(world)
    answer = await web.load("a", world.adapter("a", "A"), **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pined")
    answer = await web.http.delete("/v1/loras/a?force=1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "force")


# Dynamo's -----------------------------------------------------------------------------------------


async def test_dynamo_load_list_unload(web: Web, world: World) -> None:
    path = world.adapter("with space", "A")
    body = {"lora_name": "acme/a", "source": {"uri": f"file://{path}".replace(" ", "%20")}}
    answer = await web.post("/v1/loras", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "success" and answer.json()["lora_name"] == "acme/a"
    answer = await web.get("/v1/loras")
    assert answer.json()["count"] == 1
    assert answer.json()["loras"] == {
        "acme/a": {
            "name": "acme/a",
            "version": 1,
            "digest": digest_of("A"),
            "path": path,
            "rank": 4,
            "targets": ["q_proj"],
            "conversion_error": 0.0,
            "invocation_token_ids": [],
            "bytes": 100,
            "pinned": False,
            "tier": "device",
            "quarantined": False,
        }
    }
    assert (await web.http.delete("/v1/loras/acme/a")).status_code == 200
    assert (await web.http.delete("/v1/loras/acme/a")).status_code == 404
    assert await listed(web) == {}


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("s3://bucket/a", "s3://"),
        ("https://x/y", "https://"),
        ("file://elsewhere/a", "file://"),
        ("file://", "file://"),
        ("/plain/path", "without a scheme"),
        ("http://[", "http://"),
        ("file:///etc", "outside"),
        ("hf://x", "hf://org/name"),
    ],
)
async def test_dynamo_refuses_other_sources(web: Web, uri: str, word: str) -> None:
    answer = await web.post("/v1/loras", {"lora_name": "a", "source": {"uri": uri}})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and set(error) == OPENAI_ERROR
    assert error["param"] == "source.uri" and word in error["message"], error


async def test_the_list_tells_where_an_adapter_is(web: Web, world: World) -> None:
    await web.load("a", world.adapter("a", "A"))
    stats = await world.engine.stats()

    async def elsewhere(**tiers: tuple[str, ...]) -> str | None:
        changed = type(stats)(**tiers)

        async def fake() -> Any:
            return changed

        world.engine.stats = fake  # type: ignore[method-assign]
        return (await listed(web))["a"]["tier"]

    assert await elsewhere(host_adapters=stats.resident_adapters) == "host"
    assert await elsewhere() == "disk"

    async def dead() -> Any:
        raise EngineDead("gone")

    world.engine.stats = dead  # type: ignore[method-assign]
    assert (await listed(web))["a"]["tier"] is None


async def test_thousands_of_adapters_are_listed_at_once(web: Web, world: World) -> None:
    """All other requests wait for it."""
    for n in range(5000):
        world.registry.publish(f"a{n}", AdapterInfo(f"{n:064}", "/p", 4, 1, ()), "/srv")
    stats = await world.engine.stats()
    others = tuple(f"1{n:063}" for n in range(5000))

    async def fake() -> Any:
        return type(stats)(host_adapters=others, resident_adapters=others)

    world.engine.stats = fake  # type: ignore[method-assign]
    begin = time.thread_time()
    assert len(await listed(web)) == 5000
    assert time.thread_time() - begin < 0.5


# base:adapter -------------------------------------------------------------------------------------


async def test_base_colon_adapter_names_the_adapter(web: Web, world: World) -> None:
    await web.load("a", world.adapter("a", "A"))
    for model in ("a", "base:a", "alias:a"):
        assert await text_of(web, model) == "cbaA"
        assert (await web.get(f"/v1/models/{model}")).json()["id"] == "a"
    for shadow in ("base:a", "alias:a", "base:acme/a"):
        refused = await web.load(shadow, world.adapter("exact", "E"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert await text_of(web, "base:a") == "cbaA"
    for model in ("base:nobody", "base:", "base:base", "other:a", ":a", "base:alias:a"):
        answer = await web.post(COMPLETE, {"model": model, "prompt": "abc"})
        assert answer.status_code == 404, (model, answer.text)
        assert (await web.get(f"/v1/models/{model}")).status_code == 404
    assert (await web.unload("base:nobody")).status_code == 404


# pins ---------------------------------------------------------------------------------------------


async def test_pins_reach_the_engine_in_every_dialect(web: Web, world: World) -> None:
    for n, (path, body) in enumerate(
        (
            ("/v1/load_lora_adapter", lambda p: {"lora_path": p}),
            ("/load_lora_adapter", lambda p: {"lora_path": p}),
            ("/v1/loras", lambda p: {"source": {"uri": f"file://{p}"}}),
        )
    ):
        folder = world.adapter(f"a{n}", f"A{n}")
        answer = await web.post(path, {"lora_name": f"a{n}", "pinned": True, **body(folder)})
        assert answer.status_code == 200, answer.text
    held = world.engine.holders
    assert held == {digest_of(f"A{n}"): {f"a{n}": True} for n in range(3)}
    assert [a["pinned"] for a in (await listed(web)).values()] == [True] * 3


async def test_content_is_pinned_while_any_of_its_names_pins_it(web: Web, world: World) -> None:
    """A name changes its own pin by another load, and nobody else's."""
    path = world.adapter("a", "A")
    for pinned in (False, True, False):
        assert (await web.load("a", path, pinned=pinned)).status_code == 200
        assert (await listed(web))["a"]["pinned"] is pinned
        assert world.engine.holders == {digest_of("A"): {"a": pinned}}
    await web.load("b", path, pinned=True)
    assert [a["pinned"] for a in (await listed(web)).values()] == [True, True]
    await web.load("a", path)
    assert [a["pinned"] for a in (await listed(web)).values()] == [True, True]
    assert world.engine.holders == {digest_of("A"): {"a": False, "b": True}}
    world.registry.check()
    await web.unload("b")
    assert [a["pinned"] for a in (await listed(web)).values()] == [False]


async def test_a_refused_load_leaves_the_pin_alone(web: Web, world: World) -> None:
    path = world.adapter("a", "A")
    await web.load("a", path, pinned=True)
    await web.load("b", world.adapter("b", "B"))
    answer = await web.load("b", path)
    assert answer.status_code == 400 and "other content" in answer.text
    assert world.engine.holders == {digest_of("A"): {"a": True}, digest_of("B"): {"b": False}}


# the hub ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub that has acme/a, acme/large whose weights have 1 TB, and acme/gguf without files of an
    adapter; what is asked of it."""
    calls: list[Any] = []
    folder = tmp_path / "hub" / "snapshot"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_text("H")

    def download(
        name: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        dry_run: bool = False,
        local_files_only: bool = False,
    ) -> str | list[DryRunFileInfo]:
        calls.append((name, revision, sorted(allow_patterns)))
        if local_files_only:
            raise LocalEntryNotFoundError("it is not in the cache")
        if name == "acme/gone":
            asked = httpx.Request("GET", "https://hub/acme/gone")
            response = httpx.Response(404, request=asked)
            gone = RepositoryNotFoundError("404 Client Error", response=response)
            raise DryRunError("no access") from gone
        if name == "acme/gguf":
            return [] if dry_run else str(tmp_path / "hub" / "none")
        if name not in ("acme/a", "acme/large"):
            raise OSError("no route to host\nand much more")
        if not dry_run:
            return str(folder)
        size = 1 if name == "acme/a" else 10**12
        return [DryRunFileInfo(f"commit of {revision}", size, WEIGHTS_FILE, "", False, True)]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


async def test_adapters_from_the_hub(tmp_path: Path, hub: list[Any]) -> None:
    world = World(tmp_path / "root", byte_level(), allowed=["hf"])
    world.folder.mkdir()
    files = sorted(ADAPTER_FILES)
    web = Web(world)
    assert (await web.load("a", "acme/a")).status_code == 200
    assert (await web.load("a", "acme/a@v2")).status_code == 200
    body = {"lora_name": "b", "source": {"uri": "hf://acme/a"}}
    assert (await web.post("/v1/loras", body)).status_code == 200
    assert hub[::2] == [("acme/a", revision, files) for revision in (None, "v2", None)]
    assert hub[1::2] == [(name, f"commit of {each}", files) for name, each, _ in hub[::2]]
    assert await text_of(web, "b") == "cbaH"
    assert (await listed(web))["b"]["path"] == "hf://acme/a"
    answer = await web.load("c", "acme/other")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "lora_path")
    assert "no route to host" in error["message"] and "\n" not in error["message"]
    answer = await web.load("c", "acme/gone")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")
    hub.clear()
    answer = await web.load("c", "acme/large")
    told = "'acme/large': adapter_model.safetensors is larger than 4294967296 bytes"
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]
    answer = await web.load("c", "hf://acme/gguf")
    told = "'acme/gguf': it has no file adapter_config.json"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)
    assert hub == [(name, None, files) for name in ("acme/large", "acme/gguf")]
    for path in ("acme/../a", "/acme/a", "a/b/c", "acme/a@../x", "acme", "~/a"):
        assert (await web.load("c", path)).status_code in (400, 404)
    assert len(hub) == 2
    world.check()


async def test_a_folder_comes_before_the_hub(tmp_path: Path, hub: list[Any]) -> None:
    world = World(tmp_path, byte_level(), allowed=["hf"])
    (tmp_path / "acme").mkdir()
    web = Web(world)
    world.adapter("acme/a", "local")
    assert (await web.load("a", "acme/a")).status_code == 200
    assert await text_of(web, "a") == "cbalocal" and not hub
    world.check()


async def test_the_hub_is_off_unless_allowed(web: Web, hub: list[Any]) -> None:
    for path, status in (("acme/a", 404), ("hf://acme/a", 400)):
        answer = await web.load("a", path)
        assert answer.status_code == status
        assert "--allow-sources hf" in answer.json()["error"]["message"]
    assert not hub


async def test_the_hubs_cache_serves_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client over a cache in its own layout."""
    repo = tmp_path / "hub" / "models--acme--a"
    commit = "1" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    folder = repo / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text("C")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    world = World(tmp_path / "root", byte_level(), allowed=["hf"])
    world.folder.mkdir()
    web = Web(world)
    answer = await web.load("a", "acme/a")
    assert answer.status_code == 200, answer.text
    assert await text_of(web, "a") == "cbaC"
    answer = await web.load("b", "acme/missing")
    assert answer.status_code == 400 and "can't be fetched" in answer.text
    world.check()


async def test_slow_downloads_hold_up_nobody(
    tmp_path: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one tenant leave threads to others, however few the event loop has of its own."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # by which an event loop counts its threads
    world = World(tmp_path / "root", byte_level(), allowed=["hf"])
    world.folder.mkdir()
    web = Web(world)
    loop, go = asyncio.get_running_loop(), asyncio.Event()
    quick = huggingface_hub.snapshot_download

    def slow(*args: Any, **options: Any) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(PATIENCE_S)
        return quick(*args, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", slow)
    names = [f"a{i}" for i in range(MAX_LOADS * 3 // 4)]
    loads = [asyncio.create_task(web.load(name, "acme/a")) for name in names]
    async with asyncio.timeout(PATIENCE_S / 4):
        assert await text_of(web, "base") == "cba"
        assert (await web.load("b", world.adapter("b", "B"))).status_code == 200
        await asyncio.to_thread(lambda: None)
    assert not any(load.done() for load in loads)
    go.set()
    assert {answer.status_code for answer in await asyncio.gather(*loads)} == {200}
    world.check()


async def test_a_load_that_fails_leaves_the_pin_as_it_was(web: Web, world: World) -> None:
    path = world.adapter("a", "A")

    async def change() -> None:
        world.engine.on_hold = None
        (Path(path) / "tokenizer.json").write_text("{}")

    for pinned in (True, False):
        (Path(path) / "tokenizer.json").unlink(missing_ok=True)
        assert (await web.load("a", path, pinned=pinned)).status_code == 200
        world.engine.on_hold = change
        failed = await web.load("a", path, pinned=not pinned)
        assert failed.status_code == 503 and "files changed" in failed.text
        assert (await listed(web))["a"]["pinned"] == pinned
        assert world.engine.holders == {digest_of("A"): {"a": pinned}}
