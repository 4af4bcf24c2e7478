"""What tokens of a node wait while other nodes fetch adapters from it, and how fast that is.

    python benchmarks/fetches.py [--streams 64] [--megabytes 84] [--seconds 3]

A node whose engine only pretends to compute gives each stream a token each 5 ms, over a real link
to a client in another process. Further processes fetch a content of so many megabytes from it,
again and again, none of them, one, or four at a time. Each writes to a folder of its own. The delay
of a token is from the engine to the client's reader. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from lossy_fleet import INFO

from weft.core.adapters import AdapterSource
from weft.core.errors import WeftError
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.core.load import EngineLoad
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.client import LinkClient
from weft.fleet.curve import read_fleet_key
from weft.fleet.node import OwnNode
from weft.fleet.patience import Patience
from weft.fleet.peers import PeerContents
from weft.fleet.reports import REPORT_S
from weft.fleet.tcp import TcpLink
from weft.registry.contents import Contents, Listing, listing_of, opened

STEP_S = 0.005
FETCHERS = (0, 1, 4)


class PacedEngine:
    """Stands in for a node's engine: in each step, each request gets a token, the current time."""

    def __init__(self) -> None:
        self.info, self.alive, self.restarts = INFO, True, 0
        self.troubles: list[str] = []
        self.death: WeftError | None = None
        self.load = EngineLoad(max_seats=256)
        self.on_pulse: Callable[[], None] = lambda: None
        self.open: dict[str, Callable[[TokenEvent | WeftError], None]] = {}

    def is_suspect(self, request: EngineRequest) -> bool:
        return False

    def follow(self, request: EngineRequest, put: Callable[[TokenEvent | WeftError], None]) -> None:
        self.open[request.request_id] = put

    def leave(self, request_id: str, error: WeftError) -> None:
        self.open.pop(request_id, None)

    async def close(self) -> None: ...

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        next_s, step = clock(), 0
        while True:
            next_s = max(next_s + STEP_S, clock())
            await asyncio.sleep(next_s - clock())
            step += 1
            if step % round(REPORT_S / STEP_S) == 0:
                self.on_pulse()
            now = [time.monotonic_ns() // 1000]
            for name, put in list(self.open.items()):
                put(TokenEvent(name, now))


async def located(source: AdapterSource) -> AdapterSource:
    return source


def serve(folder: Path, port: Any) -> None:
    async def run() -> None:
        engine: Any = PacedEngine()
        key = read_fleet_key(folder / "key")
        own = OwnNode("a", engine, "127.0.0.1:0", key, located, Contents(folder / "theirs"))
        port.value = own.listener.port
        await engine.run()

    asyncio.run(run())


def fetch(folder: Path, number: int, address: str, listing: Listing, num: Any, end: Any) -> None:
    peers, stage = PeerContents(read_fleet_key(folder / "key"), str(number)), folder / f"{number}"
    stage.mkdir(exist_ok=True)
    while not end.is_set():
        if peers.fetch(listing, stage, [address]):
            with num.get_lock():
                num.value += listing.num_bytes
        for file in stage.iterdir():
            file.unlink()


async def measure(
    folder: Path, address: str, listing: Listing, num_fetchers: int, args: argparse.Namespace
) -> dict[str, object]:
    context, client = zmq.asyncio.Context(), LinkClient()
    key = read_fleet_key(folder / "key")
    link = TcpLink(context, address, key, f"c{num_fetchers}", client, Patience())
    await client.start(link)
    delays_ms: list[float] = []

    async def read(number: int) -> None:
        request = EngineRequest(f"{num_fetchers} {number}", [1], SamplingParams(), seed=1)
        async for event in client.generate(request):
            now = time.monotonic_ns() // 1000
            delays_ms.extend((now - each) / 1e3 for each in event.token_ids)

    readers = [asyncio.create_task(read(number)) for number in range(args.streams)]
    start = multiprocessing.get_context("spawn")
    num, end = start.Value("q", 0), start.Event()
    fetchers = [
        start.Process(target=fetch, args=(folder, number, address, listing, num, end), daemon=True)
        for number in range(num_fetchers)
    ]
    for each in fetchers:
        each.start()
    while num_fetchers and not num.value:
        await asyncio.sleep(REPORT_S)
        link.tick()
    delays_ms.clear()
    begun_s, before = time.monotonic(), num.value
    while time.monotonic() < begun_s + args.seconds:
        await asyncio.sleep(REPORT_S)
        link.tick()
    rate = (num.value - before) / (time.monotonic() - begun_s)
    found = sorted(delays_ms)
    end.set()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for each in fetchers:
        await asyncio.to_thread(each.join)
    await client.close()
    context.destroy(0)
    said: dict[str, object] = {
        "fetchers": num_fetchers,
        "tokens": len(found),
        "delay ms p50": round(statistics.median(found), 3),
        "p99": round(found[int(0.99 * len(found))], 3),
        "max": round(found[-1], 3),
        "MB/s": round(rate / 1e6),
    }
    print(said, flush=True)
    return said


async def run(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    (folder / "key").write_text("benchmark " * 8)
    files = folder / "files"
    files.mkdir()
    (files / CONFIG_FILE).write_text("{}")
    with (files / WEIGHTS_FILE).open("wb") as file:
        file.truncate(args.megabytes * 10**6)
    with opened(files) as streams:
        listing = listing_of(streams)
    Contents(folder / "theirs").add(files, listing)
    start = multiprocessing.get_context("spawn")
    port = start.Value("i", 0)
    node = start.Process(target=serve, args=(folder, port), daemon=True)
    node.start()
    while not port.value:
        await asyncio.sleep(0.01)
    address = f"127.0.0.1:{port.value}"
    try:
        return [await measure(folder, address, listing, each, args) for each in FETCHERS]
    finally:
        node.kill()
        node.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=84)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(args, Path(folder)))
    print(json.dumps({"fetches": found}))


if __name__ == "__main__":
    main()
