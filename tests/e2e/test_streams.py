"""Many streams at a time: clients that leave or dawdle, broken adapters, a dying engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import torch
from patience import PATIENCE_S
from safetensors.torch import load_file, save_file
from serving import Server, serving, until
from tiny import ADAPTERS

MODELS = ["base", *ADAPTERS]
WORDS = tiny.tasks.words(seed=1, n=300)
"""All adapters answer all of them right."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


MAX_FILES = 750
"""That the server may have open."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for a few of its adapters, on the device as on the host. It ends in good
    order although its engine hangs."""
    root = tmp_path_factory.mktemp("root")
    room = ("--adapter-memory", "2M", "--adapter-host-memory", "1M")
    model = tiny.long_base(root / "model")
    with serving(root, *room, adapters=[*ADAPTERS], model=model, max_files=MAX_FILES) as running:
        yield running
        os.kill(running.engine_pid(), signal.SIGSTOP)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE_S) == 0
        told = running.log.read_text()
        assert (
            "stopping: open requests have 20 s to finish" in told
            and "INFO weft.cli.serve: stopped" in told
        )
        assert {line.split()[1:3] == ["Page", running.url] for line in told.splitlines()} == {
            True,
            False,
        }


@dataclass
class Stream:
    """What a client got of one stream."""

    model: str
    word: str
    status: int = 0
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_chunks: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    after_the_end: int = 0
    """Events that came after [DONE] or an error."""

    @property
    def expected(self) -> str:
        return tiny.answer(None if self.model == "base" else self.model, self.word)

    @property
    def whole(self) -> bool:
        """Whether it ended as a stream that went well ends."""
        return (self.status, len(self.finish_reasons), self.errors, self.num_done) == (
            200, 1, [], 1,
        ) and not self.after_the_end  # fmt: skip

    def take(self, data: str) -> None:
        self.after_the_end += bool(self.num_done or self.errors)
        if data == "[DONE]":
            self.num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.num_chunks += 1
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])


@asynccontextmanager
async def connected(server: Server, buffer_bytes: int | None = None) -> Any:
    """A client without limits of its own; `buffer_bytes`: of what is sent and not yet read."""
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)] if buffer_bytes else None
    limits = httpx.Limits(max_connections=None)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=small)
    async with httpx.AsyncClient(
        base_url=server.url, transport=transport, timeout=PATIENCE_S
    ) as client:
        yield client


async def read(
    client: httpx.AsyncClient,
    stream: Stream,
    num_tokens: int | None = None,
    pause_s: float = 0.0,
    leave_after: int | None = None,
) -> Stream:
    """Ask, and read to the end or until `leave_after` chunks came; pausing before each event.

    num_tokens: how many there are to be; None: until the answer ends.
    """
    body: dict[str, Any] = {"model": stream.model, "messages": tiny.ask(stream.word)}
    body |= {"stream": True, "temperature": 0, "max_tokens": num_tokens or 32}
    body["ignore_eos"] = num_tokens is not None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        stream.status = response.status_code
        if stream.status != httpx.codes.OK:
            stream.errors.append(json.loads(await response.aread())["error"])
            return stream
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                await asyncio.sleep(pause_s)
                stream.take(line.removeprefix("data: "))
                if stream.num_chunks == leave_after:
                    break
    return stream


def is_idle(server: Server) -> bool:
    metrics = server.metrics()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(metrics[name][0].value == 0 for name in names)


def num_finished(server: Server, *reasons: str) -> float:
    samples = server.metrics().get("weft:requests_finished", [])
    return sum(s.value for s in samples if s.labels["finish_reason"] in reasons)


def test_a_hundred_streams_some_slow_some_given_up(server: Server) -> None:
    before = {reason: num_finished(server, reason) for reason in ("abort", "length")}
    streams = [Stream(MODELS[i % len(MODELS)], WORDS[i % len(WORDS)]) for i in range(100)]
    slow, left, rest = streams[:10], streams[10:25], streams[25:]

    async def run() -> None:
        async with connected(server) as client, connected(server, 4096) as narrow:
            await asyncio.gather(
                *(read(narrow, s, num_tokens=48, pause_s=0.02) for s in slow),
                *(read(client, s, num_tokens=tiny.LONG, leave_after=3) for s in left),
                *(read(client, s) for s in rest),
            )

    asyncio.run(run())
    assert [s for s in rest if not s.whole or s.finish_reasons != ["stop"]] == []
    assert [s for s in rest if s.text != s.expected] == []
    assert [s for s in slow if not s.whole or s.finish_reasons != ["length"]] == []
    assert [s for s in slow if not s.text.startswith(s.expected)] == []
    assert [s for s in left if s.status != 200 or s.finish_reasons or s.errors] == []
    until(lambda: is_idle(server), "something is left of the streams")
    assert num_finished(server, "abort") == before["abort"] + len(left)
    assert num_finished(server, "length") == before["length"] + len(slow)


# -- broken adapters -------------------------------------------------------------------------------


Break = Callable[[Path], object]
"""Done to a folder with a copy of a good adapter."""


def config(**fields: object) -> Break:
    def apply(folder: Path) -> object:
        path = folder / CONFIG
        return path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def text(content: str) -> Break:
    return lambda folder: (folder / CONFIG).write_text(content)


def cut(num_bytes: int) -> Break:
    """What is left of the weights; negative: without so many."""

    def apply(folder: Path) -> None:
        weights = folder / WEIGHTS
        os.truncate(weights, num_bytes % weights.stat().st_size)

    return apply


def tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Changes the first tensor."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {FIRST: change(tensors[FIRST]).contiguous()}, folder / WEIGHTS)

    return apply


FIRST = min(load_file(ADAPTERS["upper"] / WEIGHTS))
BREAKS: list[tuple[Break, str]] = [
    (shutil.rmtree, "lora_path"),
    (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    *((cut(num_bytes), WEIGHTS) for num_bytes in (0, 4, 8, 500, 50_000, -1)),
    *((text(content), CONFIG) for content in ("", "{", "[]", "null", '{"r": NaN', "\0")),
    (config(peft_type="PREFIX_TUNING"), "peft_type"),
    (config(use_dora=True), "use_dora"),
    (config(r=10_000), "r"),
    (config(lora_alpha="much"), "lora_alpha"),
    (config(target_modules=["nothing"]), "target_modules"),
    (config(a_field_of_tomorrow=1), "a_field_of_tomorrow"),
    (tensor(lambda t: torch.cat([t, t], 1)), FIRST),
    (tensor(torch.flatten), FIRST),
    (tensor(lambda t: t.to(torch.int32)), FIRST),
    (tensor(lambda t: t.fill_(float("nan"))), FIRST),
]
"""Ways to be broken, and the field that the refusal names."""


async def load_broken(client: httpx.AsyncClient, root: Path, i: int) -> tuple[int, str, str]:
    """Status, field and expected field of a load of the i-th way, into a served or a new name."""
    spoil, field_name = BREAKS[i]
    folder = shutil.copytree(ADAPTERS["upper"], root / f"broken-{i}")
    spoil(folder)
    body = {"lora_name": ("upper", "new")[i % 2], "lora_path": folder.name, "load_inplace": True}
    answer = await client.post("/v1/load_lora_adapter", json=body)
    got = answer.json()["error"]["param"] if answer.is_error else answer.text
    return answer.status_code, got, field_name


def test_broken_adapters_harm_no_traffic(server: Server) -> None:
    streams: list[Stream] = []

    async def keep_asking(client: httpx.AsyncClient, model: str, stop: asyncio.Event) -> None:
        words = itertools.cycle(WORDS)
        while not stop.is_set():
            streams.append(await read(client, Stream(model, next(words))))

    async def run() -> list[tuple[int, str, str]]:
        stop = asyncio.Event()
        async with connected(server) as client, asyncio.TaskGroup() as group:
            for model in MODELS:
                group.create_task(keep_asking(client, model, stop))
            loads = [await load_broken(client, server.root, i) for i in range(len(BREAKS))]
            stop.set()
        return loads

    loads = asyncio.run(run())
    assert [got for got in loads if got[0] not in (400, 404) or got[1] != got[2]] == []
    assert len(streams) >= len(MODELS)
    assert [s for s in streams if not s.whole or s.text != s.expected] == []
    with server.client as client:
        listed = [model.id for model in client.models.list()]
    assert sorted(listed) == sorted(MODELS)


# -- the engine dies -------------------------------------------------------------------------------


@pytest.fixture
def silent(server: Server) -> Iterator[None]:
    """More clients connect and are silent than the server may have open files."""
    host, port = server.url.removeprefix("http://").split(":")
    clients = [
        socket.create_connection(
            (host, int(port)), PATIENCE_S, source_address=(f"127.0.0.{2 + i % 8}", 0)
        )
        for i in range(MAX_FILES + 100)
    ]
    yield
    for client in clients:
        client.close()


@pytest.mark.usefixtures("silent")
def test_a_killed_engine_ends_every_stream_once(server: Server) -> None:
    """A new engine is started, for which files are left, and all is as before."""
    streams = [Stream(MODELS[i % len(MODELS)], WORDS[i % len(WORDS)]) for i in range(60)]

    async def run() -> None:
        async with connected(server) as client, asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(read(client, stream, num_tokens=tiny.LONG))
            async with asyncio.timeout(PATIENCE_S):
                while sum(s.num_chunks > 1 for s in streams) < 20:
                    await asyncio.sleep(0.01)
                os.kill(server.engine_pid(), signal.SIGKILL)
                while (health := await client.get("/health")).status_code != 503:
                    await asyncio.sleep(0.01)
                assert health.json()["error"]["code"] == "engine_dead"
                body = {"model": "base", "prompt": "x"}
                assert (await client.post("/v1/completions", json=body)).status_code == 503

    def is_healthy() -> bool:
        return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200

    asyncio.run(run())
    assert [s for s in streams if len(s.errors) != 1 or s.after_the_end or s.num_done] == []
    assert {(s.status, s.errors[0]["code"]) for s in streams} <= {
        (200, "engine_dead"), (503, "engine_dead")
    }  # fmt: skip
    assert sum(s.status == 200 for s in streams) >= 20
    assert all("engine" in s.errors[0]["message"] for s in streams)
    until(is_healthy, "the engine stays down")
    assert "ended with exit code" in server.log.read_text()
    again = [Stream(model, word) for model in MODELS for word in WORDS[:2]]

    async def ask_again() -> None:
        async with connected(server) as client:
            await asyncio.gather(*(read(client, stream) for stream in again))

    asyncio.run(ask_again())
    assert [s for s in again if not s.whole or s.text != s.expected] == []
    until(lambda: is_idle(server), "something is left of the streams")


# -- the end ---------------------------------------------------------------------------------------


def test_a_second_ctrl_c_ends_what_is_open(tmp_path: Path) -> None:
    flags = ("--shutdown-timeout", str(PATIENCE_S))
    model = tiny.long_base(tmp_path / "model")
    stream = Stream("base", WORDS[0])

    async def run(server: Server) -> None:
        async with connected(server) as client, asyncio.TaskGroup() as group:
            group.create_task(read(client, stream, num_tokens=tiny.LONG))
            for what in (lambda: stream.num_chunks > 1, lambda: "stopping" in log_of(server)):
                while not what():
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGINT)

    with serving(tmp_path, *flags, adapters=[], model=model) as server:
        asyncio.run(run(server))
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in log_of(server)
    assert stream.whole and stream.finish_reasons == ["abort"]


def log_of(server: Server) -> str:
    return server.log.read_text()
