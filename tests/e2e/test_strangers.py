"""Tenants of a real server with room for one request: strangers' adapters, a file that changes, an
audit log that is moved, metrics on an address of their own, and its end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S
from quick_start import command_of
from serving import Server, serving, until
from tiny import ADAPTERS, LONG, long_base

ACME, GLOBEX = list(ADAPTERS)[:2]


def tenants(**may_use: list[str]) -> str:
    roles = {"acme": '["use", "publish"]', "globex": '["use", "publish"]', "ops": '["admin"]'}
    text = ""
    for name, its in roles.items():
        digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
        text += f"[tenants.{name}]\nmay_use = {json.dumps(may_use.get(name, []))}\n"
        text += f'keys = [{{id = "{name}-1", sha256 = "{digest}", roles = {its}}}]\n'
    return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("root")
    for tenant, name in (("acme", ACME), ("globex", GLOBEX)):
        shutil.copytree(ADAPTERS[name], root / tenant / "mine")
    (root / "tenants.toml").write_text(tenants())
    flags = ["--tenants", str(root / "tenants.toml"), "--audit-log", str(root / "audit.jsonl")]
    flags += ["--metrics-port", "0", "--max-num-seqs", "1"]
    flags += ["--max-queue", "0", "--shutdown-timeout", "0"]
    model = long_base(root / "model")
    with serving(root, *flags, adapters=[], model=model) as running:
        yield running
        ends_by_sigterm(running)


def ends_by_sigterm(server: Server) -> None:
    """With its engine; and its last stream ends as streams do."""
    engine = server.engine_pid()
    with long_stream(server) as stream:
        os.killpg(server.process.pid, signal.SIGTERM)  # to the engine too, as systemd does
        *_, last, done = [line for line in stream if line]
    assert done == "data: [DONE]"
    [choice] = json.loads(last.removeprefix("data: "))["choices"]
    assert choice["finish_reason"] == "abort"
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    until(lambda: not command_of(engine), "the engine is an orphan")


@contextmanager
def long_stream(server: Server) -> Iterator[Iterator[str]]:
    """The lines of a stream, which has begun, and goes on until it is left."""
    body = {"model": "base", "prompt": [5, 6], "max_tokens": LONG, "ignore_eos": True}
    headers = {"authorization": "Bearer acme-key"}
    url = f"{server.url}/v1/completions"
    with httpx.stream(
        "POST", url, headers=headers, json={**body, "stream": True}, timeout=PATIENCE_S
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def ask(server: Server, who: str, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {who}-key"}
    return httpx.request(
        method, server.url + path, headers=headers, json=body or None, timeout=PATIENCE_S
    )


def status(server: Server, who: str, model: str) -> int:
    body = {"model": model, "prompt": [5, 6], "max_tokens": 1}
    return ask(server, who, "POST", "/v1/completions", **body).status_code


def audited(path: Path) -> list[tuple[str | None, str, str | None, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(x["tenant"] or x["subject"], x["action"], x["name"], x["outcome"]) for x in lines]


def test_strangers_share_a_server(server: Server) -> None:
    """The attack: one tenant lists, uses, replaces and deletes another's adapter, or takes its
    name; then a grant comes with SIGHUP, and a broken file changes nothing."""
    file, log = server.root / "tenants.toml", server.root / "audit.jsonl"
    num_before = len(audited(log))
    for tenant in ("acme", "globex"):
        load = {"lora_name": "mine", "lora_path": "mine"}
        answer = ask(server, tenant, "POST", "/v1/load_lora_adapter", **load)
        assert answer.status_code == 200, answer.text
    theirs = {"lora_name": "globex/mine", "lora_path": "mine", "load_inplace": True}
    assert ask(server, "acme", "POST", "/v1/load_lora_adapter", **theirs).status_code == 403
    shadow = theirs | {"lora_name": "base:globex/mine"}
    assert ask(server, "acme", "POST", "/v1/load_lora_adapter", **shadow).status_code == 403
    assert ask(server, "acme", "DELETE", "/v1/loras/globex/mine").status_code == 404
    listed = ask(server, "acme", "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["base", "acme/mine"]
    assert status(server, "acme", "base:globex/mine") == 404
    assert status(server, "globex", "base:globex/mine") == status(server, "acme", "mine") == 200
    assert httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).status_code == 401

    log.rename(server.root / "audit.1")
    file.write_text(tenants(acme=["globex/*"]))
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: bool(audited(log)), "the file is not read again")
    assert status(server, "acme", "globex/mine") == 200
    assert ask(server, "acme", "DELETE", "/v1/loras/globex/mine").status_code == 403
    file.write_text(tenants() + "x = 1\n")
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: "the tenants stay as they were" in server.log.read_text(), "no complaint")
    assert status(server, "acme", "globex/mine") == 200
    assert audited(server.root / "audit.1")[num_before:] == [
        ("acme", "load", "acme/mine", "done"),
        ("globex", "load", "globex/mine", "done"),
        ("acme", "load", "globex/mine", "permission_denied"),
        ("acme", "load", "base:globex/mine", "permission_denied"),
        ("acme", "unload", "globex/mine", "adapter_not_found"),
        (None, "refuse", "/v1/models", "invalid_api_key"),
    ]
    assert audited(log) == [
        ("acme", "grant", "globex/*", "done"),
        ("acme", "unload", "globex/mine", "permission_denied"),
        (None, "reload", None, "config_error"),
    ]


def test_a_full_server_says_when_to_come_again(server: Server) -> None:
    refused = httpx.get(
        f"{server.url}/v1/models", headers={"x-request-id": "mine"}, timeout=PATIENCE_S
    )
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
    body = {"model": "base", "prompt": [5, 6], "max_tokens": 1}
    with long_stream(server):
        answer = ask(server, "acme", "POST", "/v1/completions", **body)
    assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 30
    until(lambda: status(server, "acme", "base") == 200, "the place stays taken")


def test_metrics_have_an_address_of_their_own(server: Server) -> None:
    found = re.search(r"(http://[0-9.]+:\d+)/metrics", server.log.read_text())
    assert found is not None
    assert "weft:engine_up 1" in httpx.get(f"{found[1]}/metrics", timeout=PATIENCE_S).text
    assert httpx.get(f"{found[1]}/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{found[1]}/v1/models", timeout=PATIENCE_S).status_code == 404
    assert ask(server, "ops", "GET", "/metrics").status_code == 404
    assert httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).status_code == 401
    assert httpx.get(f"{server.url}/version", timeout=PATIENCE_S).status_code == 401
    assert ask(server, "acme", "GET", "/version").status_code == 403
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
