"""Tenants over HTTP: on every route one uses, sees and changes only what one may, and changes are
written down."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from full_disk import room_for
from http_api import CHAT, COMPLETE, HI, Web, World, digest_of
from http_api import served as listening
from patience import PATIENCE_S, until
from test_uploads import FILES, tar
from toy_tokenizers import byte_level

from weft.api import audit as audit_module
from weft.api.audit import AuditEntry, AuditLog
from weft.api.callers import client_var
from weft.cli.access_control import AccessControl
from weft.core.tenants import Caps, Tenant
from weft.registry.tenants_file import TenantsFile


def key(name: str, *roles: str, expires: str = "") -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    more = f", expires = {expires}" if expires else ""
    return f'{{id = "{name}", sha256 = "{digest}", roles = {json.dumps(roles)}{more}}}'


TENANTS = f"""
[tenants.acme]
keys = [{key("acme-all", "use", "publish")}, {key("acme-app", "use")}, {key("acme-ci", "publish")},
        {key("acme-old", "use", expires="2020-01-01T00:00:00Z")}]
may_use = ["globex/lent"]
[tenants.globex]
keys = [{key("globex-all", "use", "publish")}]
[tenants.ops]
keys = [{key("root", "admin")}]
"""


class Served:
    """A world with tenants. globex has `secret` and lends `lent`; acme has `sql`, and so have
    globex and all."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "audit.jsonl"
        self.file = folder / "tenants.toml"
        self.file.write_text(TENANTS)
        self.tenants = TenantsFile(self.file, [folder])
        audit = AuditLog(self.log)
        self.world = World(folder, byte_level(), tenants_file=self.tenants, audit=audit)
        for tenant in ("acme", "globex"):
            (folder / tenant).mkdir()

    async def fill(self, web: Web) -> None:
        for who, name, path in (
            ("root", "sql", self.world.adapter("sql", "S")),
            ("acme-all", "sql", self.world.adapter("acme/sql", "A")),
            ("globex-all", "globex/secret", self.world.adapter("globex/secret", "X")),
            ("globex-all", "lent", self.world.adapter("globex/lent", "L")),
            ("globex-all", "sql", self.world.adapter("globex/sql", "G")),
        ):
            answer = await load(web, who, name, path)
            assert answer.status_code == 200, answer.text

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.world.check()


@pytest.fixture
def world(served: Served) -> World:
    """The one that the fixture `web` is a client of."""
    return served.world


def as_(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {who}"}


async def load(web: Web, who: str, name: str, path: str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await web.post("/v1/load_lora_adapter", body, headers=as_(who))


async def text_of(web: Web, who: str, **body: Any) -> str | int:
    """The end of a completion, or the status of the refusal."""
    ask = {"model": "base", "prompt": "abc", **body}
    answer = await web.post(COMPLETE, ask, headers=as_(who))
    if answer.status_code != 200:
        return answer.status_code
    assert answer.json()["model"] == ask["model"]
    return str(answer.json()["choices"][0]["text"]).removeprefix("cba")


async def test_an_adapter_that_is_tried_has_the_name_that_it_would_get(
    served: Served, web: Web
) -> None:
    for query, state in (("?check=true", "accepted"), ("", "success")):
        answer = await web.http.put(
            f"/v1/adapters/new{query}", content=tar(FILES), headers=as_("acme-all")
        )
        assert answer.json()["status"] == state, answer.text
        assert answer.json()["lora_name"] == "acme/new"


async def test_tensors_of_those_who_may_not_publish_are_not_read(served: Served, web: Web) -> None:
    path, content = "/load_lora_adapter_from_tensors", b"no JSON"
    answer = await web.http.post(path, content=content, headers=as_("acme-app"))
    assert answer.status_code == 403 and not answer.json()["success"]
    assert "'publish'" in answer.json()["error_message"]
    assert [line["outcome"] for line in served.audited()] == ["permission_denied"]


async def test_a_name_means_ones_own_then_a_shared_adapter(served: Served, web: Web) -> None:
    await served.fill(web)
    for who, texts in (
        ("acme-app", {"sql": "A", "acme/sql": "A", "base:sql": "A", "globex/lent": "L"}),
        ("globex-all", {"sql": "G", "globex/sql": "G", "alias:globex/secret": "X"}),
        ("root", {"sql": "S", "acme/sql": "A", "base:globex/secret": "X"}),
    ):
        for model, text in texts.items():
            assert await text_of(web, who, model=model) == text, (who, model)
    both = [{"name": "sql"}, {"name": "globex/lent"}]
    assert served.world.engine.requests[-1].tenant == "ops"
    with served.world.registry.resolve("acme/sql"):
        assert await text_of(web, "acme-app", adapters=[both[0]]) == "A"
    assert served.world.engine.requests[-1].tenant == "acme"
    with served.world.registry.resolve("acme/sql"):
        assert await text_of(web, "acme-app", adapters=[{"name": "base:sql"}]) == "A"
    both[1]["name"] = "globex/secret"
    assert await text_of(web, "acme-app", adapters=both) == 404
    assert await text_of(web, "acme-app", model="base") == ""


async def test_a_tenants_paths_begin_in_its_own_folders(served: Served, web: Web) -> None:
    path = served.world.adapter("sql", "S")
    for given, told in (
        ("sql", "no such folder below your tenant's folders, where relative paths begin"),
        (path, "is outside the folders that you may load from (your tenant's folders)"),
    ):
        answer = await load(web, "acme-all", "a", given)
        assert told in answer.json()["error"]["message"]


def asks(model: str) -> list[tuple[str, str, Any]]:
    """A request for `model` to every route that names one."""
    return [
        ("POST", COMPLETE, {"model": model, "prompt": "a"}),
        ("POST", COMPLETE, {"model": model, "prompt": "a", "stream": True}),
        ("POST", COMPLETE, {"model": "base", "prompt": "a", "adapters": [{"name": model}]}),
        ("POST", COMPLETE, {"model": "base", "prompt": "a", "lora_path": model}),
        ("POST", CHAT, {"model": model, "messages": HI}),
        ("POST", CHAT, {"model": "base", "messages": HI, "lora_path": model}),
        ("POST", CHAT, {"model": "base", "messages": HI, "adapters": [{"name": model}]}),
        ("POST", "/v1/responses", {"model": model, "input": "a"}),
        ("POST", "/tokenize", {"model": model, "prompt": "a"}),
        ("POST", "/tokenize", {"model": model, "messages": HI}),
        ("POST", "/detokenize", {"model": model, "tokens": [1]}),
        ("GET", f"/v1/models/{model}", None),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": model}),
        ("POST", "/unload_lora_adapter", {"lora_name": model}),
        ("DELETE", f"/v1/loras/{model}", None),
    ]


def without_hint(text: str) -> str:
    """The text of an answer about a name, whichever it is. A hint follows from what was asked and
    what the caller may see."""
    return re.sub('; (did you mean [^?]*[?]|models that do: [^"]*)', "", text).replace(
        "nosuch", "secret"
    )


async def test_what_one_may_not_see_is_as_if_it_did_not_exist(served: Served, web: Web) -> None:
    """On every route: the same status, message and headers."""
    await served.fill(web)
    for prefix in ("", "base:"):
        hidden, missing = asks(f"{prefix}globex/secret"), asks(f"{prefix}globex/nosuch")
        for (method, path, body), (_, other_path, other_body) in zip(hidden, missing, strict=True):
            answers = [
                await web.http.request(method, p, json=b, headers=as_("acme-all"))
                for p, b in ((path, body), (other_path, other_body))
            ]
            seen, unseen = (
                (a.status_code, without_hint(a.text), shown_headers(a)) for a in answers
            )
            assert seen == unseen and seen[0] == 404, (path, answers[0].text)
    for name in ("globex/secret", "globex/nosuch"):
        for query in (f"after={name}", f"after={name}&limit=1"):
            answer = await web.http.get(f"/v1/models?{query}", headers=as_("acme-all"))
            assert answer.status_code == 400
            message = f"after: there is no model {name!r}"
            assert answer.json()["error"]["message"] == message
    assert await text_of(web, "globex-all", model="secret") == "X"


def shown_headers(answer: httpx.Response) -> dict[str, str]:
    return {n: v for n, v in answer.headers.items() if n not in ("x-request-id", "content-length")}


async def test_lists_show_what_the_caller_may_use(served: Served, web: Web) -> None:
    await served.fill(web)
    shared = served.world.adapter("sql", "S")
    for who, names in (
        ("acme-app", {"acme/sql": "acme/sql", "globex/lent": None}),
        ("acme-ci", {"acme/sql": "acme/sql", "globex/lent": None}),
        ("globex-all", {f"globex/{n}": f"globex/{n}" for n in ("secret", "lent", "sql")}),
        ("root", {"sql": "sql", "acme/sql": "acme/sql"}
         | {f"globex/{n}": f"globex/{n}" for n in ("secret", "lent", "sql")}),
    ):  # fmt: skip
        roots = {
            name: name if path is None else str(served.world.folder / path)
            for name, path in names.items()
        }
        models = (await web.http.get("/v1/models", headers=as_(who))).json()["data"]
        found = {card["id"]: card["root"] for card in models if card["parent"] is not None}
        assert found == roots, who
        loras = (await web.http.get("/v1/loras", headers=as_(who))).json()
        assert {n: shown["path"] for n, shown in loras["loras"].items()} == roots
        assert loras["count"] == len(names)
        if who != "root":
            assert shared not in json.dumps([models, loras])
            body = {"lora_name": "nosuch", "lora_path": "/nowhere"}
            sglang = await web.post("/load_lora_adapter", body, headers=as_(who))
            assert sglang.json()["loaded_adapters"] == roots
    card = await web.http.get("/v1/models/sql", headers=as_("acme-app"))
    assert card.json()["id"] == "acme/sql"


async def test_a_pin_of_the_same_content_shows_to_those_who_see_its_name(
    served: Served, web: Web
) -> None:
    path = served.world.adapter("acme/mine", "P")
    assert (await load(web, "acme-all", "mine", path)).status_code == 200
    for whose, seen in (("globex/secret", False), ("globex/lent", True)):
        path = served.world.adapter(whose, "P")
        assert (await load(web, "globex-all", whose, path, pinned=True)).status_code == 200
        loras = (await web.http.get("/v1/loras", headers=as_("acme-all"))).json()["loras"]
        assert loras["acme/mine"]["pinned"] is seen
        every = (await web.http.get("/v1/loras", headers=as_("root"))).json()["loras"]
        assert every["acme/mine"]["pinned"] is True


async def test_nobody_changes_what_is_somebody_elses(served: Served, web: Web) -> None:
    """In each dialect: a foreign namespace is refused alike, whatever is in it."""
    await served.fill(web)
    path = served.world.adapter("acme/evil", "E")
    for name in ("globex/secret", "globex/nosuch", "nobody/x", "globex/lent", "base:globex/x"):
        loads = (
            ("/v1/load_lora_adapter", {"lora_path": path, "load_inplace": True}),
            ("/load_lora_adapter", {"lora_path": path, "load_inplace": True}),
            ("/v1/loras", {"source": {"uri": f"file://{path}"}}),
        )
        for route, body in loads:
            answer = await web.post(route, body | {"lora_name": name}, headers=as_("acme-all"))
            assert answer.status_code == 403, answer.text
            message = answer.json().get("error_message") or answer.json()["error"]["message"]
            assert "own namespace, 'acme'" in message and "globex" not in message
    for name in ("base:globex/secret", "base:sql", "alias:x"):
        for whole in (name, f"acme/{name}"):
            answer = await load(web, "acme-all", whole, path)
            assert answer.status_code in (400, 403), answer.text
    for shown in ("globex/lent",):
        for method, route, body in asks(shown)[-3:]:
            answer = await web.http.request(method, route, json=body, headers=as_("acme-all"))
            assert answer.status_code == 403, answer.text
            kind = answer.json().get("error", {}).get("code", "permission_denied")
            assert kind == "permission_denied"
    texts = {"secret": "X", "lent": "L", "sql": "G"}
    for model, text in texts.items():
        assert await text_of(web, "globex-all", model=model) == text
    assert await text_of(web, "root", model="sql") == "S"


async def test_ones_own_adapters_are_replaced_and_unloaded_by_either_name(
    served: Served, web: Web
) -> None:
    await served.fill(web)
    new = served.world.adapter("acme/new", "N")
    answer = await load(web, "acme-ci", "sql", new, load_inplace=True)
    assert answer.text == "Success: LoRA adapter 'acme/sql' added successfully."
    assert await text_of(web, "acme-app", model="sql") == "N"
    gone = await web.http.delete("/v1/loras/sql", headers=as_("acme-ci"))
    assert gone.json()["lora_name"] == "acme/sql"
    assert await text_of(web, "acme-app", model="sql") == "S", "the shared one"
    denied = await web.http.delete("/v1/loras/sql", headers=as_("acme-all"))
    assert denied.status_code == 403 and "not change it" in denied.text
    denied = await web.http.delete("/v1/loras/base:sql", headers=as_("acme-all"))
    assert denied.status_code == 403 and "not change it" in denied.text
    assert (await load(web, "acme-all", "based", new)).status_code == 200
    answer = await web.http.delete("/v1/loras/base:based", headers=as_("acme-all"))
    assert answer.status_code == 200 and answer.json()["lora_name"] == "acme/based"
    body = {"lora_name": "alias:globex/sql"}
    answer = await web.post("/v1/unload_lora_adapter", body, headers=as_("root"))
    assert answer.status_code == 200
    assert await text_of(web, "globex-all", model="sql") == "S"


async def test_a_tenant_loads_from_its_own_folders_only(served: Served, web: Web) -> None:
    await served.fill(web)
    for path in ("globex/secret", str(served.world.folder / "globex" / "secret"), "../globex"):
        answer = await load(web, "acme-all", "stolen", path)
        assert answer.json()["error"]["code"].startswith("adapter_"), answer.text
    for path in ("sql", str(served.world.folder / "acme" / "sql")):
        assert (await load(web, "acme-all", "again", path)).status_code == 200


async def test_keys_have_roles_and_expire(served: Served, web: Web) -> None:
    await served.fill(web)
    path = served.world.adapter("acme/other", "O")
    for method, route, body in asks("globex/secret")[:11]:
        answer = await web.http.request(method, route, json=body, headers=as_("acme-ci"))
        assert answer.status_code == 403, route
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
    tokenize = await web.post("/tokenize", {"prompt": "a"}, headers=as_("acme-ci"))
    assert tokenize.status_code == 403
    assert (await load(web, "acme-app", "other", path)).status_code == 403
    for method, route, body in asks("sql")[-3:]:
        answer = await web.http.request(method, route, json=body, headers=as_("acme-app"))
        assert answer.status_code == 403
    asked = {"model": "base", "input": "a"}
    stored = (await web.post("/v1/responses", asked, headers=as_("acme-app"))).json()["id"]
    kept = f"/v1/responses/{stored}"
    for who, status in (("acme-ci", 403), ("globex-all", 404), ("acme-all", 200)):
        for method in ("GET", "DELETE"):
            answer = await web.http.request(method, kept, headers=as_(who))
            assert answer.status_code == status, who
    for route in ("/metrics", "/version"):
        statuses = [
            (await web.http.get(route, headers=as_(who))).status_code
            for who in ("acme-all", "acme-old", "root")
        ]
        assert [*statuses, (await web.get(route)).status_code] == [403, 401, 200, 401]
    assert (await web.get("/health")).status_code == 200
    old = await web.http.get("/v1/models", headers=as_("acme-old"))
    assert old.status_code == 401 and "Expired" in old.text
    assert (await web.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("keys", "address", "has_tenants", "warns"),
    [
        ([], "0.0.0.0", False, True),
        ([], "::", False, True),
        ([], "10.0.0.7", False, True),
        ([], "fe80::1%eth0", False, True),
        ([], "127.0.0.1", False, False),
        ([], "::1", False, False),
        (["k"], "0.0.0.0", False, False),
        ([], "0.0.0.0", True, False),
    ],
)
def test_an_open_server_that_others_reach_is_warned_of(
    keys: list[str],
    address: str,
    has_tenants: bool,
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    tenants = TenantsFile(tmp_path / "tenants.toml") if has_tenants else None
    AccessControl(tenants, None).warn_if_open(keys, address)
    assert ("requests need no key" in caplog.text) == warns


async def test_a_new_file_holds_from_the_next_request_on(served: Served, web: Web) -> None:
    await served.fill(web)
    grant = 'may_use = ["globex/lent"]'
    served.file.write_text(TENANTS.replace(grant, 'may_use = ["globex/*"]'))
    served.tenants.reload()
    assert await text_of(web, "acme-app", model="globex/secret") == "X"
    served.file.write_text(
        TENANTS.replace(grant, "").replace(key("acme-app", "use"), key("acme-web", "use"))
    )
    served.tenants.reload()
    assert await text_of(web, "acme-all", model="globex/lent") == 404
    assert await text_of(web, "acme-app", model="base") == 401
    assert await text_of(web, "acme-web", model="sql") == "A"


async def test_more_choices_than_a_tenant_may_have_open_are_refused_by_its_cap(
    served: Served,
) -> None:
    web = Web(served.world)
    cap = "[tenants.acme]\ncaps = { max_open_requests = 2 }"
    served.file.write_text(TENANTS.replace("[tenants.acme]", cap))
    served.tenants.reload()
    for who, n, told in (
        ("acme-app", 3, "asks for 3 sequences, and you may have 2 open at a time"),
        ("acme-app", 128, "asks for 128 sequences, and you may have 2 open at a time"),
        ("globex-all", 1, None),
    ):
        ask = {"model": "base", "prompt": "abc", "n": n}
        answer = await web.post(COMPLETE, ask, headers=as_(who))
        assert answer.status_code == (200 if told is None else 400)
        assert told is None or told in answer.json()["error"]["message"]


async def test_tokens_of_vectors_are_counted_as_their_tenants(served: Served, web: Web) -> None:
    body = {"model": "base", "input": [[5, 6, 7], [8, 9]]}
    answer = await web.post("/v1/embeddings", body, headers=as_("acme-app"))
    assert answer.json()["usage"]["prompt_tokens"] == 5
    shown = (await web.http.get("/metrics", headers=as_("root"))).text
    assert 'weft:tenant_tokens_total{tenant="acme",kind="prompt"} 5' in shown
    assert 'weft:tenant_tokens_total{tenant="acme",kind="output"} 0' in shown


async def test_metrics_may_have_an_address_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), metrics_apart=True)
    web = Web(world)
    assert (await web.get("/metrics")).status_code == 404
    transport = httpx.ASGITransport(app=world.app.state.metrics_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as apart:
        assert "weft:engine_up 1" in (await apart.get("/metrics")).text
        assert (await apart.get("/health")).status_code == 200
        assert (await apart.get("/v1/models")).status_code == 404
        world.engine.alive = False
        assert (await apart.get("/health")).status_code == 503
        world.engine.alive = True


async def test_the_engine_is_told_of_the_tenants_now_and_when_they_change(tmp_path: Path) -> None:
    """Also of those that were read again while it started."""
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.a]\nweight = 2")
    world = World(tmp_path, byte_level())
    access = AccessControl(TenantsFile(file), None)
    file.write_text("[tenants.a]\nweight = 3")
    access.renew()
    await access.tell(world.engine)
    assert world.engine.tenants == [Tenant("a", 3.0)]
    file.write_text("[tenants.a]\n[tenants.b.caps]\nmax_seats = 2")
    access.renew()
    await until(lambda: len(world.engine.tenants) == 2)
    assert world.engine.tenants[1] == Tenant("b", caps=Caps(max_seats=2))
    file.write_text("[tenants.c]\nx = 1")
    access.renew()
    await asyncio.sleep(0)
    assert [tenant.name for tenant in world.engine.tenants] == ["a", "b"]


# the audit log ----------------------------------------------------------------------------------


async def test_changes_are_written_down_with_who_made_them(served: Served, web: Web) -> None:
    path = served.world.adapter("acme/a", "A")
    new = served.world.adapter("acme/b", "B")
    ids = {**as_("acme-all"), "x-request-id": "r1"}
    body = {"lora_name": "a", "lora_path": path}
    await web.post("/v1/load_lora_adapter", body, headers=ids)
    await load(web, "acme-ci", "a", new, load_inplace=True)
    await load(web, "acme-all", "globex/x", "https://me:hunter2@host/x?token=t0ken#t0ken")
    await web.http.delete("/v1/loras/a", headers=as_("root"))
    await web.http.delete("/v1/loras/acme/a", headers=as_("root"))
    await web.http.delete("/v1/loras/" + "x" * 5000, headers=as_("acme-app"))
    lines = served.audited()
    first = lines[0]
    assert first.pop("time").endswith("Z")
    assert first == {
        "tenant": "acme", "key": "acme-all", "client": "127.0.0.1", "request_id": "r1",
        "action": "load", "name": "acme/a", "source": str(served.world.folder / "acme/a"),
        "digest": digest_of("A"), "subject": None, "outcome": "done", "times": 1,
    }  # fmt: skip
    told = [(x["tenant"], x["key"], x["action"], x["name"], x["outcome"]) for x in lines[1:]]
    assert told == [
        ("acme", "acme-ci", "replace", "acme/a", "done"),
        ("acme", "acme-all", "load", "globex/x", "permission_denied"),
        ("ops", "root", "unload", "a", "adapter_not_found"),
        ("ops", "root", "unload", "acme/a", "done"),
        ("acme", "acme-app", "unload", "x" * 256, "permission_denied"),
    ]
    assert lines[1]["digest"] == lines[4]["digest"] == digest_of("B")
    assert lines[2]["source"] == "https://host/x"
    text = served.log.read_text()
    for secret in ("hunter2", "t0ken", "Bearer"):
        assert secret not in text


async def test_who_is_refused_is_written_down_in_bounds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal once, however it is found out; a flood of them is a few lines and a number."""
    web = Web(served.world)
    await web.get("/v1/models")
    await web.http.get("/v1/models", headers={"authorization": "Bearer made-up"})
    await web.http.get("/v1/models", headers=as_("acme-old"))
    await web.http.get("/metrics", headers=as_("acme-app"))
    await web.http.delete("/v1/loras/x", headers=as_("acme-app"))
    for _ in range(50):
        await web.get("/v1/models")
    monkeypatch.setattr(audit_module, "REFUSALS_S", 0.0)
    await web.get("/v1/models")
    lines = served.audited()
    told = [(x["key"], x["action"], x["name"], x["outcome"], x["times"]) for x in lines]
    assert told[:5] == [
        (None, "refuse", "/v1/models", "invalid_api_key", 1),
        (None, "refuse", "/v1/models", "invalid_api_key", 1),
        ("acme-old", "refuse", "/v1/models", "invalid_api_key", 1),
        ("acme-app", "refuse", "/metrics", "permission_denied", 1),
        ("acme-app", "unload", "x", "permission_denied", 1),
    ]
    first = told[0]
    most = audit_module.MAX_REFUSALS
    assert told[5:] == [first] * (most - 5) + [(None, "refuse", None, "repeated", 55 - most), first]
    assert all(line["client"] == "127.0.0.1" for line in lines)


async def test_the_number_of_refusals_is_written_though_no_further_one_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after its time, and at the end of the server."""

    def counts() -> list[int]:
        return [line["times"] for line in served.audited() if line["outcome"] == "repeated"]

    with listening(served.world) as url:
        for _ in range(audit_module.MAX_REFUSALS + 3):
            assert httpx.get(f"{url}/v1/models").status_code == 401
        assert not counts()
    assert counts() == [3]
    log = AuditLog(served.log)
    async with log.counting():
        for _ in range(audit_module.MAX_REFUSALS + 2):
            log.refuse(AuditEntry("refuse", "/v1/models"))
        monkeypatch.setattr(audit_module, "REFUSALS_S", 0.01)
        await asyncio.wait_for(until(lambda: counts() == [3, 2]), PATIENCE_S)


async def test_releases_without_a_registry_change_nothing_and_fill_no_disk(
    served: Served, web: Web
) -> None:
    for route in ("releases", "rollbacks"):
        body = {"name": "sql"}
        answer = await web.post(f"/v1/registry/{route}", body, headers=as_("acme-app"))
        assert answer.status_code == 400 and "--registry" in answer.text
    assert not served.log.read_text()


def test_many_addresses_fill_no_disk(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    for n in range(5000):
        token = client_var.set(f"10.0.{n // 250}.{n % 250}")
        log.refuse(AuditEntry("refuse", "/v1/models"))
        client_var.reset(token)
    num_lines = (tmp_path / "audit.jsonl").read_text().count("\n")
    assert num_lines == audit_module.MAX_CLIENTS + audit_module.MAX_REFUSALS


def test_the_audit_log_goes_on_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    with log.entry("load", "a"):
        pass
    path.rename(tmp_path / "audit.1")
    log.reopen()
    with pytest.raises(ValueError, match="x"), log.entry("load", "b"):
        raise ValueError("x")
    assert '"a"' in (tmp_path / "audit.1").read_text()
    [line] = map(json.loads, path.read_text().splitlines())
    assert (line["name"], line["outcome"], line["tenant"]) == ("b", "ValueError", None)
    assert path.stat().st_mode & 0o077 == 0


def test_the_audit_log_goes_on_when_the_disk_was_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each line that is not whole is in the server's log, and stands by itself."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.write(AuditEntry("load", "a"))
    with room_for(path.stat().st_size + 50):
        for name in "bc":
            log.write(AuditEntry("load", name))
    log.write(AuditEntry("load", "d"))
    first, cut, last = path.read_text().splitlines()
    assert (json.loads(first)["name"], len(cut), json.loads(last)["name"]) == ("a", 50, "d")
    assert [re.findall("'name': '(.)'", line.message) for line in caplog.records] == [["b"], ["c"]]


def test_an_audit_log_on_stderr_that_nobody_reads_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "w") as written:
        monkeypatch.setattr("sys.stderr", written)
        log = AuditLog(Path("-"))
        while not caplog.records:
            log.write(AuditEntry("load", "a"))
    assert "nobody reads it" in caplog.text


async def test_a_tenants_folder_that_hangs_holds_up_no_other_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks at no folder that a tenant may load from."""
    resolve, looking = Path.resolve, list[threading.Thread]()

    def resolved(path: Path, strict: bool = False) -> Path:
        if path.name == "acme":
            looking.append(threading.current_thread())
        return resolve(path, strict)

    web = Web(served.world)
    monkeypatch.setattr(Path, "resolve", resolved)
    path = served.world.adapter("acme/sql", "A")
    assert (await load(web, "acme-all", "sql", path)).status_code == 200
    assert looking and threading.main_thread() not in looking
