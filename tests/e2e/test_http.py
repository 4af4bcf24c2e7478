"""What the server does around a request: queue bound, keys, ids, time-outs, CORS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import httpx
import pytest
from http_api import CHAT, COMPLETE, HI, MakeWorld, Web, run, served, wait_until
from patience import PATIENCE_S, until

from weft.api import ApiSettings
from weft.api.admission import Admission
from weft.core.errors import ConfigError, InvalidRequest, Overloaded
from weft.metrics.logs import request_id_var
from weft.text import OutputStream

ASK = {"model": "base", "prompt": "abc"}


# the queue ----------------------------------------------------------------------------------------


def test_requests_beyond_the_queue_are_refused(make_world: MakeWorld) -> None:
    world = make_world(max_open=2)
    world.engine.gate = asyncio.Event()

    async def scenario(web: Web) -> None:
        first = asyncio.create_task(web.complete(prompt=["abc", "de"]))
        await until(lambda: world.engine.num_open == 2)
        for path, body in ((COMPLETE, ASK), (CHAT, {"model": "base", "messages": HI})):
            for stream in (False, True):
                answer = await web.post(path, {**body, "stream": stream})
                assert answer.status_code == 429, answer.text
                assert 1 <= int(answer.headers["retry-after"]) <= 30
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert (await web.get("/v1/models")).status_code == 200
        world.engine.gate.set()
        assert len((await first)["choices"]) == 2
        await web.complete()

    run(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETE, ASK), (CHAT, {"model": "base", "messages": HI})]
)
def test_every_route_takes_a_place(
    make_world: MakeWorld, path: str, body: dict[str, Any], stream: bool
) -> None:
    world = make_world(max_open=1)
    world.engine.gate = asyncio.Event()

    async def scenario(web: Web) -> None:
        first = asyncio.create_task(web.post(path, {**body, "stream": stream}))
        await until(lambda: world.engine.num_open == 1)
        too_long = {"model": "base", "prompt": "x" * 100}
        answer = await web.post(COMPLETE, too_long)
        assert answer.status_code == 429, "refused before any work is put into it"
        world.engine.gate.set()
        assert (await first).status_code == 200
        assert (await web.post(COMPLETE, too_long)).status_code == 400

    run(world, scenario)


def test_places_are_all_or_none(make_world: MakeWorld) -> None:
    world = make_world(max_open=3)
    world.engine.gate = asyncio.Event()

    async def scenario(web: Web) -> None:
        first = asyncio.create_task(web.complete(prompt=["abc", "de"]))
        await until(lambda: world.engine.num_open == 2)
        answer = await web.post(COMPLETE, {"model": "base", "prompt": ["a", "b"]})
        assert answer.status_code == 429 and world.engine.num_open == 2
        answer = await web.post(COMPLETE, {"model": "base", "prompt": ["a"] * 4})
        assert answer.status_code == 400, "trying again would never help"
        third = asyncio.create_task(web.complete(prompt="x"))
        await until(lambda: world.engine.num_open == 3)
        world.engine.gate.set()
        await asyncio.gather(first, third)

    run(world, scenario)


@pytest.mark.parametrize("seed", range(4))
def test_every_place_is_given_back_once(make_world: MakeWorld, seed: int) -> None:
    """Whatever becomes of the requests: answers, errors, refusals, clients that leave."""
    world = make_world(max_open=6)
    chance = random.Random(seed)

    async def one(web: Web) -> None:
        body: dict[str, Any] = {
            "model": chance.choice(["base", "base", "nobody"]),
            "prompt": chance.choice(["abc", ["ab", "c", "d"], "x" * 100, [[1], []]]),
            "stream": chance.random() < 0.5,
            "stop": chance.choice([None, "b"]),
        }
        task = asyncio.create_task(web.post(COMPLETE, body))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.005)
            task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if isinstance(done[0], httpx.Response):
            assert done[0].status_code in (200, 400, 404, 429, 500, 503), done[0].text

    async def scenario(web: Web) -> None:
        for _ in range(6):
            error = chance.choice([RuntimeError("boom"), ConfigError("boom")])
            world.engine.fail_after = chance.choice([None, (chance.randrange(3), error)])
            world.engine.close_s = chance.choice([0.0, 0.002])
            await asyncio.gather(*(one(web) for _ in range(12)))
            await until(lambda: world.engine.num_open == 0)
        world.engine.fail_after = None
        await web.complete(prompt=["x"] * 6)  # all six places are there, and no more
        answer = await web.post(COMPLETE, {"model": "base", "prompt": ["x"] * 7})
        assert answer.status_code == 400

    run(world, scenario)


def test_admission_counts() -> None:
    admission = Admission(3)
    with admission.enter(2):
        admission.check_early()
        with pytest.raises(Overloaded), admission.enter(2):
            raise AssertionError("entered")
        with pytest.raises(ZeroDivisionError), admission.enter(1):
            with pytest.raises(Overloaded):
                admission.check_early()
            1 / 0  # noqa: B018
        assert admission.num_open == 2
    with pytest.raises(InvalidRequest), admission.enter(4):
        pass
    assert admission.num_open == 0


def test_retry_after_follows_the_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    admission = Admission(10)

    def hint() -> int:
        with admission.enter(10), pytest.raises(Overloaded) as refused, admission.enter(4):
            pass
        admission._open[""].ended_s.clear()
        return int(refused.value.headers["retry-after"])

    assert hint() == 5, "nothing is known yet"
    for seconds_each, expected in ((0.01, 1), (2.0, 8), (9.0, 30)):
        for _ in range(3):
            with admission.enter(1):
                pass
            now[0] += seconds_each
        assert hint() == expected
        now[0] += 1000


# keys ---------------------------------------------------------------------------------------------


def test_keys(make_world: MakeWorld) -> None:
    world = make_world(api_keys=["one", "two"], page=False)

    async def scenario(web: Web) -> None:
        guarded = (
            ("POST", COMPLETE), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/loras"),
            ("POST", "/v1/load_lora_adapter"), ("POST", "/load_lora_adapter"),
            ("DELETE", "/v1/loras/a"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
            ("GET", "/health/"), ("GET", "//health"),
        )  # fmt: skip
        for method, path in guarded:
            for given in (None, "", "Bearer", "Bearer three", "one", "Basic one", "Bearer onetwo"):
                headers = {} if given is None else {"authorization": given}
                answer = await web.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, given)
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert "three" not in answer.text
        for key in ("Bearer one", "bearer two", "Bearer  one "):
            answer = await web.http.get("/v1/models", headers={"authorization": key})
            assert answer.status_code == 200, key
        odd = [(b"authorization", "Bearer ünicode".encode("latin-1"))]
        assert (await web.http.get("/v1/models", headers=odd)).status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert (await web.get(path)).status_code == 200

    run(world, scenario)


def test_keys_name_tenants(make_world: MakeWorld) -> None:
    """Where any key has a name, requests whose key has none are one tenant."""
    world = make_world(api_keys=["plain", "acme=secret", "=a=b", "c2VjcmV0=="])

    async def scenario(web: Web) -> None:
        load = {"lora_name": "a/b", "lora_path": world.adapter("a", "x")}
        headers = {"authorization": "Bearer secret"}
        answer = await web.http.post("/v1/load_lora_adapter", headers=headers, json=load)
        assert answer.status_code == 200, answer.text
        for key, model, tenant in (
            ("plain", "base", ""),
            ("plain", "a/b", ""),
            ("a=b", "a/b", ""),
            ("c2VjcmV0==", "base", ""),
            ("secret", "a/b", "acme"),
            ("secret", "base", "acme"),
        ):
            headers = {"authorization": f"Bearer {key}"}
            answer = await web.http.post(COMPLETE, headers=headers, json=ASK | {"model": model})
            assert answer.status_code == 200, answer.text
            assert world.engine.requests[-1].tenant == tenant, key
        for key in ("acme=secret", "acme", "=a=b", "b", "c2VjcmV0"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await web.http.get("/v1/models", headers=headers)).status_code == 401
        shown = (await web.get("/metrics")).text
        assert 'weft:tenant_tokens_total{tenant="acme",kind="prompt"} 4' in shown
        assert 'weft:tenant_tokens_total{tenant="other",kind="output"} 0' in shown

    run(world, scenario)


def test_an_adapter_name_begins_with_its_tenant() -> None:
    tenant_of = ApiSettings(("base",)).tenant_of
    assert tenant_of(None) == ""
    assert tenant_of("sql") == "sql"
    assert tenant_of("acme/sql/v2") == "acme"
    assert tenant_of("/sql") == ""


def test_settings_are_checked() -> None:
    for wrong in (
        {"api_keys": [""]},
        {"api_keys": ["acme=schlüssel"]},
        {"api_keys": ["schlüssel"]},
        {"request_timeout_s": 0.0},
        {"request_timeout_s": float("nan")},
        {"max_open": 0},
        *(
            {"allowed_origins": [o]}
            for o in ("foo", "https://page.example/", "//x", "https://", "")
        ),
    ):
        with pytest.raises(ConfigError):
            ApiSettings(("base",), **wrong)  # type: ignore[arg-type]
    for origin in ("*", "null", "http://localhost:3000", "chrome-extension://abc"):
        ApiSettings(("base",), allowed_origins=(origin,))


# ids ----------------------------------------------------------------------------------------------


def test_request_ids(make_world: MakeWorld) -> None:
    world = make_world()
    seen: list[str | None] = []
    echo = world.engine.generate

    async def spy(request: Any) -> AsyncIterator[Any]:
        seen.append(request_id_var.get())
        async for event in echo(request):
            yield event

    world.engine.generate = spy

    async def scenario(web: Web) -> None:
        for path, status in (("/nowhere", 404), ("/health", 200), ("/v1/models", 200)):
            answer = await web.http.get(path, headers={"X-Request-Id": "mine 1"})
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine 1")
        for own in ("", "x" * 129, "tab\there", "ünicode".encode("latin-1")):
            answer = await web.http.get("/health", headers={"x-request-id": own})
            given = answer.headers["x-request-id"]
            assert given != own and len(given) == 32
        fresh = {(await web.get("/health")).headers["x-request-id"] for _ in range(3)}
        assert len(fresh) == 3
        assert request_id_var.get() is None
        same = {"x-request-id": "same"}
        answers = await asyncio.gather(
            *(web.post(COMPLETE, {**ASK, "stream": s}, headers=same) for s in (False, True) * 2)
        )
        assert [a.status_code for a in answers] == [200] * 4
        assert [a.headers["x-request-id"] for a in answers] == ["same"] * 4
        assert seen == ["same"] * 4
        assert len({r.request_id for r in world.engine.requests}) == 4
        world.engine.fail_after = (0, RuntimeError("boom"))
        answer = await web.post(COMPLETE, ASK, headers=same)
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "same")

    run(world, scenario)


# time-outs ----------------------------------------------------------------------------------------


class LateGate(asyncio.Event):
    """A gate that stays closed. Once `count` requests have come to it, the event loop's clock goes
    forward by `seconds`."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__()
        self._count, self._seconds = count, seconds
        self._num_here = 0

    async def wait(self) -> Literal[True]:
        self._num_here += 1
        if self._num_here == self._count:
            self._num_here = 0
            self._going = asyncio.create_task(self._go_forward())
        return await super().wait()

    async def _go_forward(self) -> None:
        for _ in range(50):  # what has come before is passed on
            await asyncio.sleep(0)
        loop, seconds = asyncio.get_running_loop(), self._seconds
        clock = loop.time
        loop.time = lambda: clock() + seconds  # type: ignore[method-assign]


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de"]])
def test_an_answer_that_takes_too_long(make_world: MakeWorld, prompt: Any) -> None:
    world = make_world(request_timeout_s=30.0)
    engine = world.engine

    async def scenario(web: Web) -> None:
        body = {"model": "base", "prompt": prompt}
        await web.complete()
        engine.gate = LateGate(1 if isinstance(prompt, str) else 2, 30.0)
        answer = await web.post(COMPLETE, body)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
        assert "30 s" in answer.json()["error"]["message"]
        chunks = await web.chunks(COMPLETE, body)
        assert chunks[0]["choices"][0]["text"], "it had begun"
        assert chunks[-1]["error"]["code"] == "request_timeout" and "[DONE]" not in chunks
        engine.gate_from = 0
        answer = await web.post(COMPLETE, {**body, "stream": True})
        assert answer.status_code == 504, "nothing was sent yet"
        assert engine.num_open == 0
        assert len(engine.aborted) == (3 if isinstance(prompt, str) else 6)

    run(world, scenario)


def test_a_body_that_never_ends(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.reading.BODY_TIMEOUT_S", 0.05)
    with served(make_world()) as url, raw(url) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "body_timeout"


@pytest.mark.parametrize("piece", [b"x: " + b"y" * 997, b"x" * 1000, b"x: y\r\n" * 200])
def test_a_head_that_never_ends(make_world: MakeWorld, piece: bytes) -> None:
    with served(make_world()) as url, raw(url) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100_000):
                client.sendall(piece)
            pytest.fail("all of it was taken")
        assert (
            httpx.get(f"{url}/v1/models", headers={"x": "y" * 4000}, timeout=PATIENCE_S).status_code
            == 200
        )


def test_a_request_that_offers_http_2_keeps_its_body(make_world: MakeWorld) -> None:
    """As Java's client sends it."""
    body = json.dumps(ASK).encode()
    lines = (
        f"POST {COMPLETE} HTTP/1.1",
        "host: x",
        f"content-length: {len(body)}",
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    with served(make_world()) as url, raw(url) as client:
        client.sendall("\r\n".join((*lines, "", "")).encode() + body)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def raw(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_a_client_that_does_not_read_is_cut(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends, and others are served meanwhile."""
    monkeypatch.setattr("weft.api.http.READER_TIMEOUT_S", 0.3)
    feed = OutputStream.feed
    monkeypatch.setattr(
        OutputStream, "feed", lambda self, event: replace(feed(self, event), text="x" * 100_000)
    )
    world = make_world()
    engine = world.engine
    ask = {**ASK, "prompt": [[7] * 4] * 40, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with served(world) as url, raw(url) as client:
        body = json.dumps(ask).encode()
        head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: len(engine.requests) == 40)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 200
        wait_until(lambda: engine.num_open == 0)
        count = 'route="/v1/completions",status="200"'
        wait_until(lambda: count in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)
        assert httpx.post(url + COMPLETE, json=ASK, timeout=PATIENCE_S).status_code == 200


# CORS ---------------------------------------------------------------------------------------------


def test_no_origin_is_allowed_unless_named(make_world: MakeWorld) -> None:
    page = {"origin": "https://page.example"}
    preflight = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def closed(web: Web) -> None:
        answer = await web.http.options(COMPLETE, headers=preflight)
        assert answer.status_code == 405
        answer = await web.http.get("/health", headers=page)
        assert "access-control-allow-origin" not in answer.headers

    async def opened(web: Web) -> None:
        answer = await web.http.options(COMPLETE, headers=preflight)
        assert answer.status_code == 200, "browsers send no key with a preflight request"
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        answer = await web.http.get("/v1/models", headers=page)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        answer = await web.http.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers

    run(make_world(), closed)
    run(make_world(allowed_origins=["https://page.example"], api_keys=["k"]), opened)
