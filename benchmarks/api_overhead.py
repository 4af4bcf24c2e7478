"""What streaming costs in the API process: tokens to text, chunks and sockets, without a model.

    python benchmarks/api_overhead.py

The real HTTP application in a process of its own, over an engine that makes up tokens: a step
gives one to each open request, and the next step comes when all have been taken. So the process
has always something to do, and its tokens per second are what one core can stream. A second run
has steps at fixed times, faster than that: an engine that is ahead. On a machine that has other
work, compare the CPU time of a token, which depends less on that work than seconds do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.table import Table

from weft.api import ApiSettings, create_app
from weft.cli.connections import http_config
from weft.cli.serve import new_event_loop
from weft.core.messages import Command, Started, Submit, Tokens
from weft.core.processes import leave_out_torch
from weft.core.requests import TokenEvent
from weft.core.stats import EngineInfo
from weft.fleet.client import LinkClient
from weft.fleet.wire import REPORTS
from weft.registry import AdapterRegistry, AdapterRoots
from weft.text import load_tokenizer

TINY = Path(__file__).parents[1] / "examples" / "tiny" / "base"
INFO = EngineInfo("tiny", "made up", "-", "-", 1 << 20, 262, 1, 16, 1, 1, 1, 1)
ROUTES = {
    "/v1/completions": {"prompt": "planet"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "planet"}]},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=2.0, help="of the engine that is ahead")
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    Console().print(table(rows))
    print(json.dumps({"benchmark": "api_overhead", "results": rows}))
    return 0


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for step_s in (0.0, args.step_ms / 1e3):
        async with server(step_s) as (port, cpu_s):
            for route, fields in ROUTES.items():
                body = {"model": "tiny", "max_tokens": args.tokens, "stream": True, **fields}
                await ask_all(port, route, body, 8)
                for num_streams in args.streams:
                    num_tokens = num_streams * args.tokens
                    found: list[tuple[float, int, float]] = []
                    for _ in range(args.rounds):
                        before_s = cpu_s()
                        seconds, chunks = await ask_all(port, route, body, num_streams)
                        found.append((seconds, chunks, cpu_s() - before_s))
                    rows.append(
                        {
                            "route": route,
                            "step_ms": 1e3 * step_s,
                            "streams": num_streams,
                            "tokens_per_s": round(
                                statistics.median(num_tokens / s for s, _, _ in found), 1
                            ),
                            "cpu_us_per_token": round(
                                statistics.median(1e6 * s / num_tokens for _, _, s in found), 2
                            ),
                            "tokens_per_chunk": round(
                                statistics.median(num_tokens / n for _, n, _ in found), 2
                            ),
                        }
                    )
    return rows


async def ask_all(
    port: int, route: str, body: dict[str, object], num_streams: int
) -> tuple[float, int]:
    """Seconds from the first request to the last byte, and chunks with text."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(ask(port, route, body) for _ in range(num_streams)))
    return time.perf_counter() - start, sum(counts)


async def ask(port: int, route: str, body: dict[str, object]) -> int:
    """A client that does as little as possible, as it shares the machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    count, last = 0, b""
    while chunk := await reader.read(1 << 20):
        count += chunk.count(b"data: {")
        last = (last + chunk)[-64:]
    writer.close()
    assert b"[DONE]" in last, last
    return count


@asynccontextmanager
async def server(step_s: float) -> AsyncIterator[tuple[int, Callable[[], float]]]:
    """The port of a server in a new process, and a function that returns its CPU time so far."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, step_s), daemon=True)
    process.start()

    def cpu_s() -> float:
        ours.send(None)
        seconds: float = ours.recv()
        return seconds

    try:
        yield await asyncio.to_thread(ours.recv), cpu_s
    finally:
        process.kill()
        process.join()


class MadeUpEngine:
    """The link to an engine that sends the same tokens over and over."""

    def __init__(self, client: LinkClient, step_s: float, says: list[int]) -> None:
        self._client = client
        self._step_s = step_s
        self._says = itertools.cycle(says)
        self._due_s = 0.0
        self._left: dict[str, int] = {}
        """How many tokens each open request has yet to get."""
        self._asked = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            assert command.request.params.max_tokens is not None
            self._left[command.request.request_id] = command.request.params.max_tokens
            self._asked.set()

    async def join(self, timeout_s: float) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        self._client.dispatch(Started(INFO))
        while True:
            self._asked.clear()
            if not self._left:
                await self._asked.wait()
                self._due_s = time.monotonic()
            while self._left and self._due_s <= time.monotonic():
                self._client.dispatch(REPORTS.decode(REPORTS.encode(Tokens(self._step()))))
                if not self._step_s:
                    break
                self._due_s += self._step_s
            for _ in range(3):  # all that wait for tokens have taken them by then
                await asyncio.sleep(0)
            if self._step_s:
                await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))

    def _step(self) -> list[TokenEvent]:
        token = next(self._says)
        events = []
        for request_id, left in list(self._left.items()):
            self._left[request_id] = left - 1
            if left == 1:
                del self._left[request_id]
            events.append(
                TokenEvent(request_id, [token], finish_reason=None if left > 1 else "length")
            )
        return events


def serve(up: Connection, step_s: float) -> None:
    leave_out_torch()  # as `weft serve` does
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run_server(up, step_s))


async def run_server(up: Connection, step_s: float) -> None:
    tokenizer = load_tokenizer(str(TINY))
    client = LinkClient()
    engine = MadeUpEngine(client, step_s, tokenizer.encode("planetary ", add_special_tokens=False))
    await client.start(engine)
    registry = AdapterRegistry(["tiny"], str(TINY))
    app = create_app(client, registry, tokenizer, AdapterRoots([]), ApiSettings(("tiny",), 1 << 20))
    gc.collect()
    gc.freeze()  # as `weft serve` does
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        up.send(listener.getsockname()[1])
        loop = asyncio.get_running_loop()
        loop.add_reader(up.fileno(), lambda: up.send((up.recv(), time.process_time())[1]))
        await uvicorn.Server(http_config(app, log_level="warning")).serve([listener])


def table(rows: list[dict[str, object]]) -> Table:
    shown = Table(title="Streaming by one API process, from a made-up engine", title_justify="left")
    for name in ("engine", "route", "streams", "tokens/s", "CPU us a token", "tokens a chunk"):
        shown.add_column(name, justify="left" if name in ("engine", "route") else "right")
    for row in rows:
        step_ms = row["step_ms"]
        shown.add_row(
            f"{step_ms:g} ms a step" if step_ms else "waits",
            str(row["route"]).removeprefix("/v1/"),
            str(row["streams"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['cpu_us_per_token']:.1f}",
            f"{row['tokens_per_chunk']:.2f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
