"""An application over a deterministic engine, and a client of it, for tests of the HTTP side."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from patience import PATIENCE_S, wait_until
from toy_tokenizers import byte_level

from weft.api import ApiSettings, create_app
from weft.api.audit import AuditLog
from weft.api.callers import Tenants
from weft.api.middleware import TraceSink
from weft.api.service import Fleet
from weft.cli.connections import http_config
from weft.core.adapters import AdapterInfo, AdapterRef, AdapterSource
from weft.core.errors import AdapterInvalid, AdapterNotFound, AdapterUnavailable, EngineDead
from weft.core.files import content_digest
from weft.core.requests import EngineRequest, FinishReason, TokenEvent, TokenLogprob
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Tenant
from weft.registry import AdapterRegistry, AdapterRoots, Sources
from weft.registry.allowed import Allowed
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.shared import SharedRegistry
from weft.serving.follower import Follower
from weft.text import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

EOS = byte_level().eos_ids[0]
INFO = EngineInfo(
    model="tiny",
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    max_model_len=64,
    vocab_size=byte_level().vocab_size,
    num_blocks=10,
    block_size=16,
    max_loras=4,
    max_lora_rank=16,
    adapter_memory_bytes=1 << 20,
    num_parameters=1,
)


class EchoEngine:
    """Answers the prompt reversed, then what the adapter's file says, then EOS.

    While there are `answers`, each request takes one of these instead.
    """

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.info = info
        self.alive = True
        self.troubles: list[str] = []
        self.adapters: dict[str, list[int]] = {}
        self.requests: list[EngineRequest] = []
        self.answers: list[list[int]] = []
        self.aborted: list[str] = []
        self.num_open = 0
        self.holders: dict[str, dict[str, bool]] = {}
        """By digest: who holds it, and whether it is pinned."""
        self.released: list[tuple[str, str]] = []
        self.gate: asyncio.Event | None = None
        """Events from `gate_from` on wait for it."""
        self.gate_from = 1
        self.on_hold: Callable[[], Awaitable[None]] | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.tokens_per_event = 1
        self.ending: FinishReason = "stop"
        """Why an answer ends that is not too long."""
        self.close_s = 0.0
        """How long an abort takes."""
        self.in_use: list[AdapterRef | None] = []
        self.tenants: list[Tenant] = []
        self.num_bytes = 100
        """The size of adapters that are held from now on."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        self.in_use.append(request.adapter)
        ended = False
        try:
            for n, event in enumerate(self._events(request)):
                if self.fail_after is not None and n == self.fail_after[0]:
                    ended = True
                    raise self.fail_after[1]
                await asyncio.sleep(0)
                if n >= self.gate_from and self.gate is not None:
                    await self.gate.wait()
                ended = event.finish_reason is not None
                yield event
        finally:
            try:
                await asyncio.sleep(self.close_s)
            finally:
                self.num_open -= 1
                self.in_use.remove(request.adapter)
                if not ended:
                    self.aborted.append(request.request_id)

    def _pooled(self, request: EngineRequest) -> TokenEvent:
        """The number of tokens, the first and the last; an adapter adds its own to the prompt."""
        ids = [*request.prompt_ids]
        if request.adapter is not None:
            ids += self.adapters[request.adapter.digest]
        vector = struct.pack("<4f", len(ids), ids[0], ids[-1], 0)
        return TokenEvent(request.request_id, [], finish_reason="stop", vector=vector)

    def _events(self, request: EngineRequest) -> Iterator[TokenEvent]:
        params = request.params
        if request.pooling is not None:
            yield self._pooled(request)
            return
        ids = self.answers.pop(0) if self.answers else request.prompt_ids[::-1]
        if request.adapter is not None:
            if request.adapter.digest not in self.adapters:
                wire = ("adapter_unavailable", "it is not here", None)
                yield TokenEvent(request.request_id, [], finish_reason="error", error=wire)
                return
            ids = ids + self.adapters[request.adapter.digest]
        assert params.max_tokens is not None
        finish, reason = self.ending, None
        for n, token in enumerate(ids):
            if token in params.stop_token_ids:
                ids, reason = ids[: n + 1], token
                break
        else:
            ids = [*ids, EOS] if not params.ignore_eos else ids * 64
        if len(ids) > params.max_tokens:
            ids, finish, reason = ids[: params.max_tokens], "length", None
        for start in range(0, len(ids), self.tokens_per_event):
            part = ids[start : start + self.tokens_per_event]
            last = start + len(part) == len(ids)
            yield TokenEvent(
                request.request_id,
                part,
                None if params.logprobs is None else [self._logprob(t, params) for t in part],
                finish if last else None,
                reason if last else None,
                num_cached_tokens=1,
                prompt_logprobs=self._prompt_logprobs(request) if not start else None,
            )

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprob | None] | None:
        if (num_top := request.params.prompt_logprobs) is None:
            return None
        top = [(0, -0.5), (1, -1.5)][:num_top]
        return [None, *(TokenLogprob(-3.0, 7, top) for _ in request.prompt_ids[1:])]

    def _logprob(self, token: int, params: Any) -> TokenLogprob:
        top = [(token, -0.25), (0, -1.5), (1, -2.5)]
        return TokenLogprob(-0.25, 1, top[: params.logprobs])

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        path = source.path
        file = Path(path) / "adapter_model.safetensors"
        if not file.exists():
            raise AdapterNotFound(f"{path} has no adapter_model.safetensors", "lora_path")
        content = file.read_bytes().decode(errors="replace")
        if content == "bad":
            raise AdapterInvalid("use_dora is not served", "use_dora")
        config, digest = file.with_name("adapter_config.json"), digest_of(content)
        if config.exists() and (fields := config.read_bytes()) != b"{}":
            digest = content_digest(fields, [file.read_bytes()], file.stat().st_size)
        if source.digest not in (None, digest):
            raise AdapterUnavailable("the adapter changed on disk since it was loaded", "lora_path")
        self.holders.setdefault(digest, {})[holder] = pinned
        self.adapters[digest] = byte_level().encode(content, add_special_tokens=False)
        if self.on_hold is not None:
            await self.on_hold()
        return AdapterInfo(digest, path, 4, self.num_bytes, ("q_proj",))

    async def release(self, digest: str, holder: str) -> None:
        used = [ref for ref in self.in_use if ref is not None]
        assert (digest, holder) not in [(ref.digest, ref.name) for ref in used], "still in use"
        del self.holders[digest][holder]  # it is never released twice
        self.released.append((digest, holder))
        if not self.holders[digest]:
            del self.holders[digest], self.adapters[digest]

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        self.tenants = list(tenants)

    async def stats(self) -> EngineStats:
        if not self.alive:
            raise EngineDead("the engine is gone")
        digests = tuple(self.adapters)
        return EngineStats(
            num_running=self.num_open,
            kv_usage=0.5,
            resident_adapters=digests,
            waiting_adapters=digests[:1],
            host_adapters=digests,
            generated_tokens=7,
            finished={"stop": 2},
        )

    async def close(self) -> None:
        self.alive = False


def digest_of(content: str) -> str:
    """What the engine calls an adapter of this content."""
    weights = content.encode()
    return content_digest(b"{}", [weights], len(weights))


class World:
    """One application and all that is behind it."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        info: EngineInfo = INFO,
        tenants_file: Tenants | None = None,
        audit: AuditLog | None = None,
        shared: tuple[SharedRegistry, Blobs] | None = None,
        allowed: Sequence[str] = (),
        sources: Sources | None = None,
        fleet: Fleet | None = None,
        traces: TraceSink | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.engine = EchoEngine(info)
        self.registry = AdapterRegistry(["base", "alias"], "/models/tiny")
        settings = {"served_model_names": ["base", "alias"], **settings}
        self.app = create_app(
            self.engine,
            self.registry,
            tokenizer,
            sources or Sources(AdapterRoots([folder]), Allowed(allowed), Contents(None)),
            ApiSettings(**settings),
            traces,
            tenants=tenants_file,
            audit=audit,
            shared=shared,
            fleet=fleet,
        )
        self.follower: Follower | None = self.app.state.follower

    def adapter(self, name: str, content: str) -> str:
        """An adapter's folder whose answers end in `content`."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(content)
        (folder / "adapter_config.json").write_text("{}")
        return str(folder)

    def check(self) -> None:
        """Nothing is leaked: no open request, no lease."""
        assert self.engine.num_open == 0
        self.registry.check()
        if self.follower is not None:
            self.follower.check()
        for ref in list(self.registry.adapters()):
            drained: list[AdapterRef] = []
            self.registry.retire(ref.name, drained.append)
            assert drained, f"a lease of {ref.name} is left"


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes worlds of `ApiSettings`, which are checked when the test has ended."""
    made: list[World] = []

    def make(**settings: Any) -> World:
        made.append(World(tmp_path, byte_level(), **settings))
        return made[-1]

    yield make
    for world in made:
        world.check()


class Web:
    """A client of one world's application, without sockets."""

    def __init__(self, world: World) -> None:
        transport = httpx.ASGITransport(app=world.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://weft")
        self.world = world

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def complete(self, **body: Any) -> Any:
        answer = await self.post("/v1/completions", {"model": "base", "prompt": "abc", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, **body: Any) -> Any:
        whole = {"model": "base", "messages": [{"role": "user", "content": "hi"}], **body}
        answer = await self.post("/v1/chat/completions", whole)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chunks(self, path: str, body: Any) -> list[Any]:
        answer = await self.post(path, {"model": "base", "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events.pop() == "" and all(e.startswith("data: ") for e in events)
        data = [e.removeprefix("data: ") for e in events]
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    async def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **more}
        return await self.post("/v1/load_lora_adapter", body)

    async def unload(self, name: str) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})


def run(world: World, scenario: Callable[[Web], Awaitable[None]]) -> None:
    """Run a coroutine with a client, for tests that make their world first."""

    async def main() -> None:
        web = Web(world)
        async with web.http:
            await asyncio.wait_for(scenario(web), PATIENCE_S)

    asyncio.run(main())


@contextmanager
def served(world: World, **options: Any) -> Iterator[str]:
    """The application on a loopback port, on a thread."""
    config = http_config(world.app, port=0, log_level="error", lifespan="on", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
