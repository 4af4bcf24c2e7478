"""Nodes that follow one registry: what is changed on one holds on all; versions and releases."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_api import CHAT, COMPLETE, Web, World, digest_of
from packed_adapters import adapter, tar
from toy_tokenizers import byte_level

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterConflict, AdapterUnavailable, RegistryUnavailable
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.records import Label, RemoveTenant, SetTenant
from weft.registry.shared import SharedRegistry
from weft.registry.shared_tenants import SharedTenants
from weft.registry.stores import DirectoryStore, Store
from weft.registry.tenants_file import tenants_as_json
from weft.serving import reports
from weft.serving.follower import LOOK_EVERY_S
from weft.serving.quotas import MAX_LOADS


class Fickle:
    """A store that can be made not to answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise RegistryUnavailable("the store is away")
        return getattr(self._store, name)

    def reopen(self) -> Fickle:
        return self


class Node:
    """One server of a fleet, with an engine of its own."""

    def __init__(self, root: Path, tenants: bool = False, **settings: Any) -> None:
        self.store = Fickle(DirectoryStore(root / "registry"))
        self.shared = SharedRegistry(self.store, poll_s=0.02)
        self.tenants = SharedTenants(self.shared, lora_roots=[root / "sources"])
        if tenants:
            settings["tenants_file"] = self.tenants
        sources = root / "sources"
        sources.mkdir(exist_ok=True)
        blobs = Blobs(self.store)
        self.world = World(sources, byte_level(), shared=(self.shared, blobs), **settings)
        self.web = Web(self.world)
        assert self.world.follower is not None
        self.follower = self.world.follower

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.web.post(path, body)

    async def load(self, name: str, content: str, **more: Any) -> httpx.Response:
        return await self.web.load(name, self.world.adapter(f"{name}-{content}", content), **more)

    async def ask(self, model: str, **body: Any) -> httpx.Response:
        return await self.post(COMPLETE, model=model, prompt="abc", **body)

    async def text(self, model: str) -> str:
        answer = await self.ask(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def models(self, query: str = "") -> list[str]:
        answer = await self.web.get(f"/v1/models{query}")
        return [model["id"] for model in answer.json()["data"]]


@asynccontextmanager
async def fleet(
    root: Path, count: int = 2, eager: bool = False, tenants: bool = False
) -> AsyncIterator[list[Node]]:
    """So many nodes of one registry."""
    nodes = [Node(root, tenants) for _ in range(count)]
    try:
        for node in nodes:
            await node.follower.start(eager)
        yield nodes
        for node in nodes:
            node.store.away = False
            node.shared.poll()
            await settled(node)
    finally:
        for node in nodes:
            await node.follower.close()
    for node in nodes:
        node.world.check()


async def settled(node: Node) -> None:
    """Let a node do what it knows by now."""
    await asyncio.sleep(0)
    while node.follower._loading or node.follower._leaving:
        await asyncio.sleep(0.002)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.005)


async def test_what_one_node_loads_all_serve_also_after_a_restart(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (one, other):
        assert (await one.load("sql", "A")).status_code == 200
        assert (await one.load("acme/bot", "B", wait="commit", pinned=True)).status_code == 200
        assert await one.text("sql") == "cbaA"
        assert await other.text("sql") == "cbaA"  # unknown there until now, so it looks it up
        assert await other.text("base:acme/bot") == "cbaB"
        assert await one.models() == await other.models() == ["base", "alias", "acme/bot", "sql"]
        assert (await other.web.unload("sql")).status_code == 200
        assert (await other.ask("sql")).status_code == 404

        async def gone() -> bool:
            return (await one.ask("sql")).status_code == 404 and len(one.world.engine.adapters) == 1

        await until(gone)
        assert (await one.web.unload("sql")).status_code == 404
    async with fleet(tmp_path, count=1) as [node]:
        assert list(node.world.engine.holders.values()) == [{"acme/bot@v1": True}]
        assert await node.text("acme/bot") == "cbaB"
        assert (await node.ask("sql")).status_code == 404


async def test_many_loads_side_by_side_all_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        names = [f"n{i}" for i in range(MAX_LOADS + 4)]
        answers = await asyncio.gather(*(node.load(name, name) for name in names))
        assert [answer.status_code for answer in answers] == [200] * len(names)
        assert await node.text("n0") == "cban0"


async def test_a_tenant_that_may_load_one_at_a_time_loads(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1, tenants=True) as [node]:
        capped = TENANTS.replace("max_adapters = 1", "max_loads = 1")
        for name, settings in tenants_as_json(capped).items():
            await node.follower.submit(SetTenant(name, settings), "me")
        node.tenants.update()
        key = {"authorization": "Bearer acme-key"}
        for name, content in ("xA", "yB", "xC", "xD", "yE"):
            path = node.world.adapter(f"acme/{name}", content)
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            answer = await node.web.post("/v1/load_lora_adapter", body, headers=key)
            assert answer.status_code == 200, answer.text
            # The next one comes while this server loads the version that it follows.
            answer = await node.web.post(COMPLETE, {"model": name, "prompt": "a"}, headers=key)
            assert answer.json()["choices"][0]["text"][-1] == content


async def test_loads_that_follow_the_registry_wait_for_their_turn(tmp_path: Path) -> None:
    """However few loads a tenant may have, no request is refused for a version that is not loaded
    yet, and no publication after it was made."""
    async with fleet(tmp_path, count=2, tenants=True) as (first, second):
        capped = TENANTS.replace("max_adapters = 1", "max_loads = 1")
        for name, settings in tenants_as_json(capped).items():
            await first.follower.submit(SetTenant(name, settings), "me")
        key = {"authorization": "Bearer acme-key"}

        def load(node: Node, name: str) -> Awaitable[httpx.Response]:
            path = node.world.adapter(f"acme/{name}", name)
            body = {"lora_name": name, "lora_path": path}
            return node.web.post("/v1/load_lora_adapter", body, headers=key)

        first.tenants.update()
        for name in "xyz":
            assert (await load(first, name)).status_code == 200
        second.shared.poll()
        second.tenants.update()
        ask = [{"model": name, "prompt": "a"} for name in "xyz"]
        answers = await asyncio.gather(
            load(second, "w"), *(second.web.post(COMPLETE, body, headers=key) for body in ask)
        )
        assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text


async def test_versions_are_named_in_requests_and_answers(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        for content in "AB":
            assert (await node.load("sql", content, load_inplace=True)).status_code == 200
        refused = await node.load("sql", "C")
        assert refused.status_code == 400 and "other content" in refused.text
        assert not node.follower.blobs.exists(digest_of("C")), "it was stored for nothing"
        for model, text, version in (
            ("sql", "cbaB", 2),
            ("sql@v1", "cbaA", 1),
            (f"sql@sha256:{digest_of('A')}", "cbaA", 1),
            ("base:sql@v2", "cbaB", 2),
        ):
            answer = await node.ask(model)
            assert answer.json()["choices"][0]["text"] == text
            assert answer.headers["x-weft-adapter"] == f"sql@v{version}"
            assert answer.headers["x-weft-digest"] == f"sha256:{digest_of(text[-1])}"
            assert answer.json()["system_fingerprint"].endswith(f"_v{version}")
        chunks = await node.web.chunks(COMPLETE, {"model": "sql@v1", "prompt": "abc"})
        assert {chunk["system_fingerprint"][-3:] for chunk in chunks[:-1]} == {"_v1"}
        chat = await node.post(CHAT, model="sql", messages=[{"role": "user", "content": "x"}])
        assert chat.headers["x-weft-adapter"] == "sql@v2"
        assert "x-weft-adapter" not in (await node.ask("base")).headers
        for model in ("sql@v3", "sql@v0", f"sql@sha256:{'0' * 64}", "nobody@v1"):
            missing = await node.ask(model)
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        named = await node.load("sql@v9", "C")
        assert named.status_code == 400 and "like a version" in named.text
        for name in ("./sql", "acme//sql", "acme/", "base:sql", "alias:new"):
            odd = await node.web.load(name, node.world.adapter("odd", "D"))
            assert (odd.status_code, odd.json()["error"]["param"]) == (400, "lora_name")
        assert not node.follower.blobs.exists(digest_of("D")), "it was stored for nothing"
        alone = await node.web.unload("sql@v1")
        assert alone.status_code == 400 and "can't be unloaded alone" in alone.text
        summed = [{"name": "sql@v1", "scale": 0.5}, {"name": "sql@v2"}]
        await node.ask("base", adapters=summed)
        parts = node.world.engine.requests[-1].parts
        assert {part.ref.name for part in parts} == {"sql@v1", "sql@v2"}


async def test_a_release_moves_requests_at_once_and_none_mixes(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (one, other):
        for content in "AB":
            await one.load("sql", content, load_inplace=True)
        stop = asyncio.Event()
        seen: dict[str, set[str]] = {}
        num_answers = 0

        async def client(node: Node) -> None:
            nonlocal num_answers
            while not stop.is_set():
                answer = await node.ask("sql")
                num_answers += 1
                assert answer.status_code == 200, answer.text
                version = answer.headers["x-weft-adapter"]
                seen.setdefault(version, set()).add(answer.json()["choices"][0]["text"])
                await asyncio.sleep(0)

        clients = [asyncio.create_task(client(node)) for node in (one, other) for _ in range(4)]
        for to in ("v1", "v2", "1", f"sha256:{digest_of('B')}", "v1"):
            answer = await one.post("/v1/registry/releases", name="sql", to=to)
            assert answer.status_code == 200, answer.text
            assert (await one.ask("sql")).headers["x-weft-adapter"] == (
                "sql@v1" if "1" in to[:2] else "sql@v2"
            )
            enough = num_answers + 3 * len(clients)
            while num_answers < enough:
                await asyncio.sleep(0.002)
        stop.set()
        await asyncio.gather(*clients)
        assert seen == {"sql@v1": {"cbaA"}, "sql@v2": {"cbaB"}}


async def test_a_request_keeps_its_version_to_its_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        for content in "AB":
            await node.load("sql", content, load_inplace=True)
        engine = node.world.engine
        engine.gate = asyncio.Event()
        running = asyncio.create_task(node.ask("sql"))
        while not engine.num_open:
            await asyncio.sleep(0.002)
        released = await node.post("/v1/registry/releases", name="sql", to="v1")
        assert released.json()["route"] == [{"version": 1, "weight": 1.0}]
        assert digest_of("B") in engine.adapters
        removed = asyncio.create_task(node.web.unload("sql"))
        await asyncio.sleep(0.05)
        assert not removed.done(), "a request is still running"
        engine.gate.set()
        assert (await running).json()["choices"][0]["text"] == "cbaB"
        assert (await removed).status_code == 200 and not engine.adapters


async def test_a_change_can_wait_for_all_servers(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (one, other):
        await one.load("sql", "A")
        assert await other.text("sql") == "cbaA"
        assert (await one.load("sql", "B", load_inplace=True, wait="all")).status_code == 200
        assert other.world.registry.has("sql@v2") and not other.world.registry.has("sql@v1")
        assert (await other.web.http.delete("/v1/loras/sql?wait=all")).status_code == 200
        assert not one.world.registry.has("sql@v2")
        odd = await other.web.http.delete("/v1/loras/sql?wait=never")
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "wait")
        odd = await other.load("sql", "B", wait="never")
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "wait")
        other.store.away = True
        reports.ALL_S, patience = 0.5, reports.ALL_S
        try:
            late = await one.load("sql", "B", wait="all")
        finally:
            reports.ALL_S = patience
        assert late.status_code == 504 and other.follower.reports.name in late.text


async def test_canary_rollback_and_history(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (one, other):
        for content in "AB":
            await one.load("sql", content, load_inplace=True)
        await one.post("/v1/registry/releases", name="sql", to="v1")
        canary = await one.post("/v1/registry/releases", name="sql", to="v2", canary=30)
        assert canary.json()["route"] == [
            {"version": 1, "weight": 70.0},
            {"version": 2, "weight": 30.0},
        ]
        generation = canary.json()["generation"]

        async def version(node: Node, **more: Any) -> str:
            return (await node.ask("sql", **more)).headers["x-weft-adapter"]

        other.shared.poll()
        for user in map(str, range(20)):
            same = {await version(node, user=user) for node in (one, other) for _ in range(2)}
            same.add(await version(one, safety_identifier=user, user="another"))
            headers = {"x-weft-sticky": user}
            body = {"model": "sql", "prompt": "abc", "user": "another"}
            answer = await other.web.post(COMPLETE, body, headers=headers)
            same.add(answer.headers["x-weft-adapter"])
            assert len(same) == 1, "a user gets the same version everywhere"
        assert {await version(one) for _ in range(100)} == {"sql@v1", "sql@v2"}

        late = await other.post("/v1/registry/releases", name="sql", to="v2", expect=generation - 1)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "generation_conflict")
        back = await other.post("/v1/registry/rollbacks", name="sql")
        assert back.json()["route"] == [{"version": 1, "weight": 1.0}]
        one.shared.poll()
        shown = (await one.web.get("/v1/registry/names/sql")).json()
        assert shown == back.json() and shown["generation"] == generation + 1
        assert [change["change"].split()[0] for change in shown["history"]] == [
            "release", "release", "release", "publish", "publish",
        ]  # fmt: skip
        for body, field in (
            ({"to": "v7"}, "to"),
            ({"to": "v1", "canary": 5}, "canary"),
            ({"to": "v2", "canary": 100}, "canary"),
            ({"canary": 5}, "to"),
            ({"shadow": "v1"}, "shadow"),
        ):
            answer = await one.post("/v1/registry/releases", name="sql", **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body
        assert (await one.post("/v1/registry/rollbacks", name="nobody")).status_code == 404


async def test_a_node_without_the_store_serves_what_it_knows_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.registry.shared.PATIENCE_S", 0.3)
    async with fleet(tmp_path) as (one, other):
        await one.load("sql", "A")
        assert await other.text("sql") == "cbaA"
        other.store.away = True
        for _ in range(3):
            assert await other.text("sql") == "cbaA"
        refused = await other.load("bot", "B")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "registry_unavailable",
        )
        assert (await other.web.unload("sql")).status_code == 503
        assert (await other.ask("bot")).status_code == 503, "nobody knows whether it is there"
        assert await other.models() == ["base", "alias", "sql"]
        await one.load("bot", "C")
        ready = await other.web.get("/ready")
        assert (ready.status_code, ready.text) == (200, "")
        other.follower.shared.stale_s = lambda: 12.0  # type: ignore[method-assign]
        ready = await other.web.get("/ready")
        assert ready.status_code == 200 and "has not answered for 12 s" in ready.text
        assert "weft:registry_stale_seconds 12.0" in (await other.web.get("/metrics")).text
        other.store.away = False
        assert await other.text("bot") == "cbaC"
        metrics = (await other.web.get("/metrics")).text
        assert f"weft:registry_seq {float(one.shared.state.seq)}" in metrics
        assert 'weft:adapter_requests_total{adapter="bot",' in metrics, "under its bare name"


async def test_unknown_names_do_not_flood_the_store(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        polls = 0
        poll = node.shared.poll

        def counted() -> None:
            nonlocal polls
            polls += threading.current_thread().name != "registry"  # which polls anyway
            poll()

        node.shared.poll = counted  # type: ignore[method-assign]
        begin_s = time.monotonic()
        answers = await asyncio.gather(*(node.ask(f"nobody-{i}") for i in range(200)))
        assert {answer.status_code for answer in answers} == {404}
        assert polls <= 2 + (time.monotonic() - begin_s) / LOOK_EVERY_S


async def test_models_come_in_pages(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        for name in ("c", "a", "acme/b"):
            await node.load(name, name, wait="commit")
        assert await node.models("?limit=3") == ["base", "alias", "a"]
        assert await node.models("?limit=3&after=a") == ["acme/b", "c"]
        assert await node.models("?limit=1&after=base") == ["alias"]
        assert await node.models("?after=alias") == ["a", "acme/b", "c"]
        first = (await node.web.get("/v1/models?limit=3")).json()
        assert first["has_more"] and not (await node.web.get("/v1/models")).json()["has_more"]
        card = (await node.web.get("/v1/models/acme/b")).json()
        assert (card["id"], card["parent"]) == ("acme/b", "base")
        for limit in ("0", "x", "10001", "9" * 30, "0" * 9 + "10001", "1".zfill(9) + "9" * 5000):
            answer = await node.web.get(f"/v1/models?limit={limit}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_a_version_that_no_node_can_load_harms_only_its_own_requests(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (one, other):
        await one.load("sql", "A")
        bad = await one.load("bad", "bad")
        assert bad.status_code == 400 and await one.models() == ["base", "alias", "sql"]
        blob = tmp_path / "registry/blobs/sha256" / digest_of("A") / "adapter_model.safetensors"
        blob.write_text("AA")
        answer = await other.ask("sql")
        assert answer.status_code == 503 and "sql@v1 can't be loaded" in answer.text
        blob.write_text("A")
        other.follower._failed.clear()
        assert await other.text("sql") == "cbaA"


async def test_a_download_that_the_disk_damages_is_fetched_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        node.store.folder = lambda _: None  # as a bucket
        node.follower.blobs._contents = Contents(tmp_path / "cache")
        await node.load("sql", "A")
        await node.load("sql", "B", load_inplace=True)
        await settled(node)
        (file,) = tmp_path.glob(f"cache/contents/{digest_of('A')}-*/adapter_model.safetensors")
        file.write_text("X")
        answer = await node.ask("sql@v1")
        assert answer.status_code == 503 and "changed on disk" in answer.text
        node.follower._failed.clear()  # as after some seconds
        assert await node.text("sql@v1") == "cbaA"


async def test_a_download_that_is_whole_is_not_read_again_after_each_failed_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        node.store.folder = lambda _: None  # as a bucket
        contents = node.follower.blobs._contents = Contents(tmp_path / "cache")
        checks: list[str] = []
        await node.load("sql", "A")
        await node.load("sql", "B", load_inplace=True)
        await settled(node)

        async def full(*_: object) -> None:
            raise AdapterUnavailable("there is no memory", "model")

        def counted(digest: str, sha256: str) -> bool:
            checks.append(digest)
            return Contents.is_whole(contents, digest, sha256)

        monkeypatch.setattr(contents, "is_whole", counted)
        with monkeypatch.context() as patch:
            patch.setattr(node.world.engine, "hold", full)
            for _ in range(3):
                answer = await node.ask("sql@v1")
                assert answer.status_code == 503 and "no memory" in answer.text
                for key, failure in node.follower._failed.items():  # as after some seconds
                    node.follower._failed[key] = failure._replace(until_s=0.0)
        assert checks == [digest_of("A")]
        assert await node.text("sql@v1") == "cbaA"


TENANTS = f"""
[tenants.acme]
caps = {{ max_adapters = 1 }}
keys = [{{ id = "a", sha256 = "{sha256(b"acme-key").hexdigest()}", roles = ["use", "publish"] }}]
[tenants.globex]
may_use = ["acme/bot"]
keys = [{{ id = "g", sha256 = "{sha256(b"globex-key").hexdigest()}", roles = ["use", "publish"] }}]
[tenants.ops]
keys = [{{ id = "o", sha256 = "{sha256(b"ops-key").hexdigest()}", roles = ["admin"] }}]
"""


async def test_a_shadow_runs_unseen_and_is_compared(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        engine = node.world.engine
        for content in ("xyA", "xyB"):
            await node.load("sql", content, load_inplace=True)
        body = {"name": "sql", "to": "v1", "shadow": "v2"}
        released = await node.web.post("/v1/registry/releases", body)
        assert released.json()["shadow"] == 2
        for _ in range(2):
            answer = await node.ask("sql", temperature=0)
            assert answer.headers["x-weft-adapter"] == "sql@v1"
            assert answer.json()["choices"][0]["text"] == "cbaxyA"
        await node.ask("sql@v2", temperature=0)  # the shadow itself has none

        async def done() -> bool:
            return 'outcome="done"} 2.0' in (await node.web.get("/metrics")).text

        await until(done)
        assert [r.adapter.name for r in engine.requests if r.adapter].count("sql@v2") == 3
        metrics = (await node.web.get("/metrics")).text
        for line in (
            'weft:shadow_output_tokens_total{adapter="sql",version="shadow"} 14.0',
            'weft:shadow_greedy_tokens_total{adapter="sql",agrees="true"} 10.0',
            'weft:shadow_greedy_tokens_total{adapter="sql",agrees="false"} 4.0',
            'weft:adapter_requests_total{adapter="sql",finished_reason="stop"} 3.0',
        ):
            assert line in metrics, line
        shadows = node.world.app.state.shadows
        shadows._max_open = 0  # any request is too much now
        await node.ask("sql")
        assert 'outcome="dropped"} 1.0' in (await node.web.get("/metrics")).text


async def test_tenants_of_the_registry_are_followed_and_see_what_is_theirs(tmp_path: Path) -> None:
    async with fleet(tmp_path, tenants=True) as (one, other):
        assert (await one.ask("base")).status_code == 200, "there are no tenants, so no keys"
        for name, settings in tenants_as_json(TENANTS).items():
            await one.follower.submit(SetTenant(name, settings), "me")
        other.shared.poll()
        for node in (one, other):
            node.tenants.update()
            assert (await node.ask("base")).status_code == 401

        def key(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}-key"}

        async def post(node: Node, who: str, path: str, **body: Any) -> httpx.Response:
            return await node.web.post(path, body, headers=key(who))

        async def models(node: Node, who: str, query: str = "") -> list[str]:
            answer = await node.web.http.get(f"/v1/models{query}", headers=key(who))
            return [model["id"] for model in answer.json()["data"] if model["parent"]]

        def load(name: str, folder: str) -> dict[str, str]:
            return {"lora_name": name, "lora_path": one.world.adapter(folder, folder[-1])}

        path = "/v1/load_lora_adapter"
        assert (await post(one, "acme", path, **load("bot", "acme/A"))).status_code == 200
        second = await post(one, "acme", path, **load("two", "acme/B"))
        assert (second.status_code, second.json()["error"]["code"]) == (429, "quota_exceeded")
        assert not one.follower.blobs.exists(digest_of("B")), "it was stored for nothing"
        foreign = await post(one, "globex", path, **load("acme/x", "globex/C"))
        assert foreign.status_code == 403
        assert (await post(one, "ops", path, **load("common", "D"))).status_code == 200
        other.shared.poll()
        for model, who, status in (
            ("bot", "acme", 200),
            ("acme/bot@v1", "globex", 200),
            ("bot", "globex", 404),
            ("common", "globex", 200),
            ("acme/bot", "ops", 200),
        ):
            body = {"model": model, "prompt": "abc"}
            assert (await post(other, who, COMPLETE, **body)).status_code == status, (model, who)
        await asyncio.sleep(0)
        for who in ("globex", "acme"):
            assert await models(other, who) == ["acme/bot", "common"]
        assert await models(other, "ops", "?after=acme/bot&limit=5") == ["common"]
        release = {"name": "acme/bot", "to": "v1"}
        for who, status in (("acme", 200), ("globex", 403), ("ops", 200)):
            answer = await post(other, who, "/v1/registry/releases", **release)
            assert answer.status_code == status, who
        shown = await other.web.http.get("/v1/registry/names/bot", headers=key("acme"))
        assert [change["actor"] for change in shown.json()["history"]][::2] == ["ops/o", "acme/a"]
        for name in ("acme", "globex", "ops"):
            await one.follower.submit(RemoveTenant(name), "me")
        one.tenants.update()
        assert (await one.ask("base")).status_code == 401, "it does not become open again"


async def test_an_eager_node_loads_all_when_it_starts(tmp_path: Path) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        for name in ("a", "b"):
            await node.load(name, name, wait="commit")
    async with fleet(tmp_path, count=1, eager=True) as [node]:
        assert set(node.world.engine.adapters) == {digest_of("a"), digest_of("b")}


async def test_names_that_look_the_same_come_and_go_alone(tmp_path: Path) -> None:
    """Two servers may each take one of them before either knows of the other's."""
    async with fleet(tmp_path) as (one, other):
        alike = "b\u043et"  # with a Cyrillic letter
        loads = await asyncio.gather(one.load("bot", "A"), other.load(alike, "B"))
        assert [answer.status_code for answer in loads] == [200, 200]
        for name, text in (("bot", "cbaA"), (alike, "cbaB")):
            assert await one.text(name) == await other.text(name) == text
        for name in ("bot", alike):
            assert (await one.web.unload(name)).status_code == 200
            assert (await one.ask(name)).status_code == 404
        assert not one.world.engine.holders, "the engine holds what nobody can name"


async def test_what_a_name_says_of_nodes_outlives_another_name_with_its_content(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, count=1) as [node]:
        pins = node.follower.pins.by_digest
        for name in ("a", "b"):
            assert (await node.load(name, "A")).status_code == 200
            await node.follower.submit(Label(name, {"weft.nodes": f"n{name}"}), "me")
        await node.follower.settled("b")
        assert pins[digest_of("A")].nodes == ("nb",)
        assert (await node.web.unload("b")).status_code == 200
        assert pins[digest_of("A")].nodes == ("na",)
        assert (await node.web.unload("a")).status_code == 200
        assert not pins


@pytest.mark.parametrize("field", ["adapters", "lora_path"])
async def test_a_release_while_another_adapter_of_a_request_is_loaded(
    field: str, tmp_path: Path
) -> None:
    """A request that names several waits for all of them, and the first may have gone by then."""
    async with fleet(tmp_path, count=1) as [node]:
        for content in "AB":
            assert (await node.load("a", content, load_inplace=True)).status_code == 200
        await node.post("/v1/registry/releases", name="a", to="v1")
        assert (await node.load("b", "A", wait="commit")).status_code == 200
        engine, gone = node.world.engine, node.world.registry

        async def release() -> None:
            engine.on_hold = None
            answer = await node.post("/v1/registry/releases", name="a", to="v2")
            assert answer.status_code == 200 and not gone.has("a@v1")

        engine.on_hold = release
        assert await node.text("a") == "cbaA" and gone.has("a@v1") and not gone.has("b@v1")
        if field == "adapters":
            answer = await node.ask("base", adapters=[{"name": "a"}, {"name": "b", "scale": 0.5}])
            parts = engine.requests[-1].parts
            assert {part.ref.name for part in parts} == {"a@v2", "b@v1"}
        else:
            answer = await node.ask("a", lora_path="b")
            assert answer.status_code == 400 and "another one" in answer.text
        assert engine.on_hold is None


async def test_what_can_not_be_pinned_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers would go over to a version that none of them can load."""
    async with fleet(tmp_path, count=1) as [node]:
        hold = node.world.engine.hold

        async def full(source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
            if pinned:
                raise AdapterConflict("the adapter can't be pinned", "pinned")
            return await hold(source, holder)

        monkeypatch.setattr(node.world.engine, "hold", full)
        assert (await node.load("sql", "A")).status_code == 200
        refused = await node.load("sql", "B", load_inplace=True, pinned=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pinned")
        assert await node.text("sql") == "cbaA"
        for pinned, status in (("true", 400), ("false", 200)):
            path = f"/v1/adapters/sql?check=true&pinned={pinned}"
            assert (await node.web.http.put(path, content=tar(adapter()))).status_code == status
