"""Whatever a body holds, it is answered or refused with an error that has a type."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import gzip
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from handed_in import TEXTS, VALUES, nested
from http_api import Web, World, served
from patience import PATIENCE_S
from toy_tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "hi"}]
SHORT = {"model": "base", "max_tokens": 2}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": SHORT | {"prompt": "abc"},
    "/v1/chat/completions": SHORT | {"messages": MESSAGES},
    "/v1/responses": {"model": "base", "input": "hi", "max_output_tokens": 2},
    "/tokenize": {"model": "base", "prompt": "abc"},
    "/detokenize": {"model": "base", "tokens": [1, 2]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "none"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "none"},
    "/v1/loras": {"lora_name": "a", "source": {"uri": "file:///none"}},
}
MORE = {
    "/v1/completions": ["stop", "logit_bias", "n", "logprobs", "temperature", "stream_options"],
    "/v1/chat/completions": ["tools", "tool_choice", "response_format", "stop", "top_logprobs"],
    "/v1/responses": ["tools", "text", "instructions", "reasoning"],
}
"""Fields that the good bodies leave out."""
MESSAGE_PARTS: list[Any] = [
    *(None, 5, [], {}, [[]], {"role": "user"}, {"role": 5, "content": []}, {"content": "x"}),
    *({"role": "user", "content": part} for part in (None, 5, {}, [None], [{"type": "x"}], "\0")),
    {"role": "assistant", "tool_calls": [{"function": {"arguments": 5}}]},
    {"role": "tool", "content": "x", "tool_call_id": {}},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]},
]


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    for route, good in GOOD.items():
        for text in TEXTS:
            yield route, text
        whole = json.dumps(good)[:-1].encode()
        for field in [*good, *MORE.get(route, ())]:
            rest = {key: value for key, value in good.items() if key != field}
            start = json.dumps(rest)[:-1].encode() + (b", " if rest else b"")
            for value in VALUES[::2]:
                yield route, start + json.dumps(field).encode() + b": " + value + b"}"
        yield route, whole + b', "x": ' + nested(900) + b"}"
        yield route, whole + b"".join(b', "f%d": 1' % i for i in range(20_000)) + b"}"
    for part in MESSAGE_PARTS:
        yield "/v1/chat/completions", json.dumps(SHORT | {"messages": [part]}).encode()
        yield "/v1/responses", json.dumps({"model": "base", "input": [part]}).encode()


async def test_a_corpus_of_hostile_bodies(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    said: Counter[int] = Counter()
    bodies = list(hostile_bodies())
    assert len(bodies) >= 150
    headers = {"content-type": "application/json"}
    web = Web(world)

    async def send(route: str, body: bytes) -> None:
        answer = await web.http.post(route, content=body, headers=headers)
        said[answer.status_code] += 1
        assert answer.status_code < 500, (route, body[:200], answer.text)
        if answer.status_code >= 400:
            told = answer.json()
            error = told.get("error", told)
            assert error.get("type") or error.get("error_message"), answer.text
            assert str(tmp_path) not in answer.text

    pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in range(0, len(bodies), 8):
        await asyncio.gather(*(send(*body) for body in bodies[start : start + 8]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - pages
    assert grown << 10 < 300 << 20
    assert (await web.complete())["choices"][0]["text"] == "cba"
    assert said[400] > len(bodies) / 2, said
    world.check()


async def test_a_compressed_body_is_told_so(tmp_path: Path) -> None:
    web = Web(World(tmp_path, byte_level()))
    body = json.dumps(GOOD["/v1/completions"]).encode()
    for encoding, status in (("gzip", 415), ("br", 415), ("Identity", 200), ("", 200)):
        sent = gzip.compress(body) if status == 415 else body
        own = {"content-type": "application/json", "content-encoding": encoding}
        answer = await web.http.post("/v1/completions", content=sent, headers=own)
        assert answer.status_code == status, answer.text
        if status == 415:
            error = answer.json()["error"]
            assert error["code"] == "unsupported_media_type" and "compress" in error["message"]


async def test_a_byte_order_mark_before_the_body_is_passed_over(tmp_path: Path) -> None:
    """Editors on Windows write it, and `curl -d @file` sends it."""
    web = Web(World(tmp_path, byte_level()))
    body = codecs.BOM_UTF8 + json.dumps(GOOD["/v1/completions"]).encode()
    own = {"content-type": "application/json"}
    answer = await web.http.post("/v1/completions", content=body, headers=own)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("value", ['"\\ud83d"', "[" * 400 + "]" * 400, "[" * 9000])
async def test_arguments_that_no_prompt_can_hold(tmp_path: Path, value: str) -> None:
    """Half of a surrogate pair, and what is nested too deeply."""
    web = Web(World(tmp_path, byte_level()))
    call = {"name": "f", "arguments": f'{{"a": {value}}}'}
    said = {"role": "assistant", "tool_calls": [{"id": "c", "function": call}]}
    item = {"type": "function_call", "call_id": "c", **call}
    for path, field, history in (
        ("/v1/chat/completions", "messages", [*MESSAGES, said, *MESSAGES]),
        ("/tokenize", "messages", [*MESSAGES, said, *MESSAGES]),
        ("/v1/responses", "input", [*MESSAGES, item, *MESSAGES]),
    ):
        answer = await web.post(path, {"model": "base", field: history})
        assert answer.status_code == 400, answer.text
        param = answer.json()["error"]["param"]
        assert param.startswith(f"{field}[1].") and param.endswith("arguments")


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
async def test_a_number_with_as_many_digits_as_are_read(
    tmp_path: Path, route: str, field: str
) -> None:
    """A sum with it has more digits than Python writes."""
    web = Web(World(tmp_path, byte_level()))
    body = {key: value for key, value in GOOD[route].items() if not key.startswith("max_")}
    answer = await web.post(route, body | {field: int("9" * 4300)})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
RAW_REQUESTS = [
    *(b"\r\n\r\n", b"\0" * 99, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"),
    *(
        b"GET  /  HTTP/1.1\r\n\r\n",
        b"G\xffT / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /v1/loras/%00%ff%2e%2e HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"DELETE /v1/loras/%F0%90 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    *(
        POST + b"content-length: " + n + b"\r\n\r\n{}"
        for n in (b"-1", b"x", b"2, 3", b"9" * 40, b"")
    ),
    POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    *(
        POST + b"transfer-encoding: " + t + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        for t in (b"x", b"chunked, x")
    ),
    *(
        POST + b"transfer-encoding: chunked\r\n\r\n" + c
        for c in (b"x\r\n", b"-1\r\n", b"f" * 40 + b"\r\n")
    ),
]


def test_raw_requests(tmp_path: Path) -> None:
    """Each is answered, or its connection closed, and the server goes on."""
    world = World(tmp_path, byte_level(), page=False)
    with served(world) as url:
        address = (urlsplit(url).hostname, urlsplit(url).port)
        for request in RAW_REQUESTS:
            with socket.create_connection(address, timeout=PATIENCE_S) as connection:
                answer = b""
                try:
                    connection.sendall(request)
                    with contextlib.suppress(OSError):  # the server was first
                        connection.shutdown(socket.SHUT_WR)
                    while more := connection.recv(1 << 16):
                        answer += more
                except (BrokenPipeError, ConnectionResetError):
                    continue
            assert not answer or answer.split(b" ")[1][:1] == b"4", (request[:99], answer)
        with socket.create_connection(address, timeout=PATIENCE_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(99).startswith(b"HTTP/1.1 200")
