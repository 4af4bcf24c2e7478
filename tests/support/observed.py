"""A server's application over an engine that is told what to answer, for tests of what it tells
of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from weft.api import ApiSettings, create_app
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.requests import EngineRequest
from weft.core.requests import TokenEvent as Event
from weft.core.stats import EngineInfo, EngineStats
from weft.registry import AdapterRegistry, AdapterRoots, Sources

DIGEST = "ab" * 32
INFO = EngineInfo(
    model="tiny",
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    max_model_len=64,
    vocab_size=100,
    num_blocks=10,
    block_size=16,
    max_loras=4,
    max_lora_rank=16,
    adapter_memory_bytes=1000,
    num_parameters=1,
)
PROMPT = [1, 2, 3]


class ScriptedEngine:
    """Every request gets the events of `script`, with its own id."""

    def __init__(self) -> None:
        self.info = INFO
        self.alive = True
        self.troubles: list[str] = []
        self.hangs = False
        """Whether requests hang for ever after the script."""
        self.hung = asyncio.Event()
        """Set when a request hangs."""
        self.script = [
            Event("", [5], num_cached_tokens=2, queue_s=0.0),
            Event("", [6, 7], finish_reason="length", num_cached_tokens=2),
        ]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        for event in self.script:
            yield event._replace(request_id=request.request_id)
        if self.hangs:
            self.hung.set()
            await asyncio.Event().wait()

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        return AdapterInfo(DIGEST, source.path, 4, 100, ("q_proj",))

    async def release(self, digest: str, holder: str) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(resident_adapters=(DIGEST,), finished={"length": 1})

    async def close(self) -> None:
        self.alive = False


def client_of(engine: ScriptedEngine, traces: Any = None) -> httpx.AsyncClient:
    """A client of a server for models `base` and `sql`."""
    registry = AdapterRegistry(["base"], "/models/tiny")
    info = AdapterInfo(DIGEST, "/adapters/sql", 4, 100, ("q_proj",))
    registry.publish("sql", info, "/adapters/sql")
    sources = Sources(AdapterRoots([Path("/adapters")]))
    app = create_app(engine, registry, None, sources, ApiSettings(("base",)), traces)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft")


async def complete(client: httpx.AsyncClient, model: str = "sql", **headers: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 3}
    return await client.post("/v1/completions", json=body, headers=headers)
