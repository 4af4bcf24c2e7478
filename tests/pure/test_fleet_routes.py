"""What an API with a fleet says of where requests went, and whose place in the queue they have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from http_api import COMPLETE, Web, World
from toy_tokenizers import byte_level

from weft.api.audit import AuditLog
from weft.api.callers import FAIRNESS
from weft.api.routes_fleet import EXPLAIN, MAX_SHOWN, ROUTED
from weft.core.errors import InvalidRequest
from weft.core.stats import FleetFigures

BODY = {"model": "base", "prompt": "ab"}


class Nodes:
    """A fleet that has placed request "mine" many times."""

    def pins(self) -> Sequence[dict[str, object]]:
        return [{"adapters": ["a"], "labels": "weft.nodes=n1", "on": ["n1"], "missing": 0}]

    def describe(self) -> Sequence[dict[str, object]]:
        return []

    def explain(self, request_id: str) -> Sequence[dict[str, Any]]:
        costs = [{"node": f"n{k}", "total": float(k)} for k in range(20)]
        return [{"node": "n0", "costs": costs}] * 9 if request_id == "mine" else []

    def drain(self, name: str, draining: bool = True) -> None:
        if name != "n0":
            raise InvalidRequest(f"there is no node named {name!r}", "node")

    def measure(self) -> FleetFigures:
        return FleetFigures()


def ask(world: World, headers: dict[str, str], stream: bool = False) -> httpx.Response:
    async def asked() -> httpx.Response:
        web = Web(world)
        try:
            return await web.http.post(COMPLETE, json={**BODY, "stream": stream}, headers=headers)
        finally:
            await web.http.aclose()

    return asyncio.run(asked())


def test_an_answer_says_on_demand_where_its_request_went(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), fleet=Nodes())
    for stream in (False, True):
        answer = ask(world, {EXPLAIN: "1", "x-request-id": "mine"}, stream)
        placed = json.loads(answer.headers[ROUTED])
        assert len(placed) == MAX_SHOWN and placed[0]["node"] == "n0"
        assert [each["node"] for each in placed[0]["costs"]] == ["n0", "n1", "n2", "n3"]
        assert ROUTED not in ask(world, {"x-request-id": "mine"}, stream).headers


def test_the_audit_log_says_who_drained_a_node(tmp_path: Path) -> None:
    keys = ("NAMED=secret",)
    log = tmp_path / "audit.jsonl"
    world = World(tmp_path, byte_level(), fleet=Nodes(), audit=AuditLog(log), api_keys=keys)

    async def ask_to_drain() -> list[int]:
        web, headers = Web(world), {"authorization": "Bearer secret"}
        try:
            return [
                (await web.post("/fleet/drain", body, headers=headers)).status_code
                for body in ({"node": "n0"}, {"node": "n0", "draining": False}, {"node": "n9"})
            ]
        finally:
            await web.http.aclose()

    assert asyncio.run(ask_to_drain()) == [200, 200, 400]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(line["tenant"], line["client"], line["time"][-1]) for line in lines} == {
        ("NAMED", "127.0.0.1", "Z")
    }
    assert [(line["action"], line["name"], line["outcome"]) for line in lines] == [
        ("drain", "n0", "done"),
        ("undrain", "n0", "done"),
        ("drain", "n9", "invalid_request_error"),
    ]


def test_a_gateway_says_with_whom_a_request_shares_its_place(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    ask(world, {FAIRNESS: "team-a"})
    ask(world, {})
    assert [request.tenant for request in world.engine.requests] == ["team-a", ""]
    refused = ask(world, {FAIRNESS: "x" * 200})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == FAIRNESS
