"""Servers as their users meet them: a `weft serve` process, which need not import anything at its
start, or the same application and engine in threads of this process."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from engine_thread import start_in_process
from openai import AsyncOpenAI, OpenAI
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from quick_start import Forked, engine_of, start_weft
from tiny import ADAPTERS, BASE

from weft.api import ApiSettings, create_app
from weft.cli.connections import http_config
from weft.core.config import engine_args
from weft.fleet.supervisor import start_supervised
from weft.registry import AdapterRegistry, AdapterRoots, Sources


@dataclass
class Server:
    """A running `weft serve`."""

    process: Forked
    url: str
    root: Path
    """Its --lora-root."""
    log: Path
    api_key: str = "none"

    @property
    def client(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=PATIENCE_S
        )

    def async_client(self) -> AsyncOpenAI:
        url = f"{self.url}/v1"
        return AsyncOpenAI(base_url=url, api_key=self.api_key, max_retries=0, timeout=PATIENCE_S)

    def post(self, path: str, **body: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.api_key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S)

    def metrics(self) -> dict[str, list[Any]]:
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        return {f.name: f.samples for f in text_string_to_metric_families(text)}

    def engine_pid(self) -> int:
        return engine_of(self.process.pid)


@contextmanager
def serving(
    root: Path,
    *flags: str,
    adapters: list[str] | Mapping[str, Path],
    model: Path = BASE,
    max_files: int | None = None,
    api_key: str | None = None,
) -> Iterator[Server]:
    """`adapters`: folders by name, or names of examples. `max_files`: that it may have open."""
    folders = adapters if isinstance(adapters, Mapping) else ADAPTERS
    modules = [f"{name}={folders[name]}" for name in adapters]
    args = ["serve", str(model)]
    args += ["--port", "0", "--served-model-name", "base", "--lora-root", str(root)]
    args += ["--num-threads", "1", "--kv-cache-memory", "64M", "--adapter-memory", "64M"]
    args += [*flags, *(["--lora-modules", *modules] if modules else [])]
    args += [] if api_key is None else ["--api-key", api_key]
    log = root / "server.log"
    with log.open("wb") as out:
        process = start_weft(args, out, max_files)
    try:
        yield Server(process, _wait_for_url(process, log), root, log, api_key or "none")
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait(PATIENCE_S)


@contextmanager
def serving_here(root: Path, model: Path, **options: object) -> Iterator[str]:
    """The URL of a server in this process. It has no tokenizer, and reads adapters below `root`."""
    server: uvicorn.Server | None = None

    async def serve() -> None:
        nonlocal server
        args = engine_args(str(model), num_threads=1, **options)
        engine = await start_supervised(args, start_in_process)
        try:
            registry = AdapterRegistry(["base"], str(model))
            settings = ApiSettings(served_model_names=("base",))
            app = create_app(engine, registry, None, Sources(AdapterRoots([root])), settings)
            config = http_config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on")
            server = uvicorn.Server(config)
            await server.serve()
            registry.check()
        finally:
            await engine.close()

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(asyncio.run, serve())
        try:
            until(lambda: served.done() or (server is not None and server.started), "no start")
            if served.done():
                served.result()
            assert server is not None
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            if server is not None:
                server.should_exit = True
        served.result()


def _wait_for_url(process: Forked, log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"(http://[0-9.]+:\d+)/v1", log.read_text())
        if found:
            assert httpx.get(f"{found[1]}/health", timeout=PATIENCE_S).status_code == 200
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
