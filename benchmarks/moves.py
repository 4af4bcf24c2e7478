"""How long the client of a live request waits when it moves from one engine to another on the same
device, by the length of its context.

    python benchmarks/moves.py [--model qwen3-8b] [--contexts 1000,4000,16000] [--deterministic]

Two nodes (`weft serve --no-api`, random weights) share the device. A request with a random prompt
runs on one of them, which is drained when it has made some tokens; the gap is what its reader then
waits for the next token, which holds the computation of prompt and output on the other node. The
other node has never seen the prompt. `first token ms` is how long a new prompt takes, on an idle
node. `same`: how many moved streams have the tokens of an undisturbed one, which dummy weights in
16 bits don't promise without `--deterministic`.

In the end as many requests as a node has seats run beside each other, and one node is drained:
`emptied ms` is how long it takes until all that it had have left it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from fleet_nodes import free_port

from weft.bench.engine import preset_folder
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.fleet.curve import read_fleet_key
from weft.fleet.fleet_client import FleetClient
from weft.fleet.members import Members

BEFORE, AFTER = 32, 96
"""Tokens that a request makes before it moves and afterwards."""
SEATS = 16
BLOCK = 16
"""Tokens of a block of the KV cache."""
PATIENCE_S = 100.0


async def start_node(
    number: int, port: int, model: str, folder: Path, args: argparse.Namespace
) -> asyncio.subprocess.Process:
    """Start a node with a KV cache for the longest context in each seat, however full the device
    is."""
    longest = max(map(int, args.contexts.split(","))) + BEFORE + AFTER
    flags = ["--no-api", "--fleet", str(folder / "nodes"), "--fleet-key", str(folder / "key")]
    flags += ["--fleet-listen", f"127.0.0.1:{port}", "--node-name", f"n{number}"]
    flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", str(SEATS)]
    flags += ["--adapter-memory", "64M", "--max-num-batched-tokens", "8192"]
    flags += ["--num-gpu-blocks-override", str(SEATS * -(-longest // BLOCK))]
    if args.deterministic:
        flags.append("--deterministic")
    with (folder / f"n{number}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weft", "serve", model, *flags, stdout=log, stderr=log
        )


async def until_whole(client: FleetClient, nodes: list[asyncio.subprocess.Process]) -> None:
    """Wait until all nodes take requests. Raises TimeoutError, also if one of them ends."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(1 for _ in client._usable()) < len(nodes):
            if any(node.returncode is not None for node in nodes):
                raise TimeoutError("a node has ended")
            await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Streamed:
    """A request's output and times, in milliseconds."""

    tokens: list[int]
    first_ms: float
    """Until its first token."""
    gap_ms: float
    """The longest pause since it was told to move; 0 if it was not."""
    usual_ms: float
    """The median pause between two tokens."""


async def stream(
    client: FleetClient,
    nodes: list[asyncio.subprocess.Process],
    request: EngineRequest,
    moves: bool,
) -> Streamed:
    tokens: list[int] = []
    gaps: list[float] = []
    moved_at, last_s, first_ms = -1, time.perf_counter(), 0.0
    async for event in client.generate(request):
        assert event.error is None, event.error
        now = time.perf_counter()
        if tokens:
            gaps.append((now - last_s) * 1e3)
        else:
            first_ms = (now - last_s) * 1e3
        last_s = now
        tokens += event.token_ids
        if moves and moved_at < 0 and len(tokens) >= BEFORE:
            moved_at = len(gaps)
            node = client.explain(request.request_id)[-1]["node"]
            client.drain(str(node))
    if moves:
        assert len(client.explain(request.request_id)) >= 2
        client.drain(str(node), False)
        await until_whole(client, nodes)
    move_ms = max(gaps[moved_at:]) if moves else 0.0
    return Streamed(tokens, first_ms, move_ms, statistics.median(gaps))


async def measure(
    client: FleetClient, nodes: list[asyncio.subprocess.Process], context: int, repeats: int
) -> dict[str, object]:
    """Move `repeats` requests with prompts of `context` tokens, and print what they waited."""
    rng = random.Random(context)
    params = SamplingParams(temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True)
    found, same = [], 0
    for number in range(repeats + 1):
        prompt = [rng.randrange(client.info.vocab_size) for _ in range(context)]
        name = f"{context} {number}"
        moved = await stream(client, nodes, EngineRequest(name, prompt, params, seed=1), True)
        again = EngineRequest(f"{name} again", prompt, params, seed=1)
        whole = await stream(client, nodes, again, False)
        if number:  # the first one warms up
            found.append(moved)
            same += moved.tokens == whole.tokens
    said: dict[str, object] = {
        "context": context,
        "gap ms p50": round(statistics.median(each.gap_ms for each in found), 1),
        "gap ms max": round(max(each.gap_ms for each in found), 1),
        "first token ms": round(statistics.median(each.first_ms for each in found), 1),
        "token ms": round(statistics.median(each.usual_ms for each in found), 2),
        "same": f"{same} of {len(found)}",
    }
    print(said, flush=True)
    return said


async def empty(
    client: FleetClient, nodes: list[asyncio.subprocess.Process], context: int
) -> dict[str, object]:
    """Drain the node with the most of SEATS requests, and print how long it takes."""
    params = SamplingParams(temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True)
    rng = random.Random(1)

    async def read(number: int) -> None:
        prompt = [rng.randrange(client.info.vocab_size) for _ in range(context)]
        async for event in client.generate(EngineRequest(f"e{number}", prompt, params, seed=1)):
            assert event.error is None, event.error

    readers = [asyncio.create_task(read(number)) for number in range(SEATS)]
    while sum(len(live.output) >= BEFORE for live in client._live.values()) < SEATS:
        await asyncio.sleep(0.001)
    counts = Counter(live.node.name for live in client._live.values() if live.node)
    ((name, num_requests),) = counts.most_common(1)
    begun_s = time.perf_counter()
    client.drain(name)
    while any(live.node is client.nodes[name] for live in client._live.values()):
        await asyncio.sleep(0)
    emptied_ms = (time.perf_counter() - begun_s) * 1e3
    await asyncio.gather(*readers)
    client.drain(name, False)
    await until_whole(client, nodes)
    said: dict[str, object] = {"requests": num_requests, "emptied ms": round(emptied_ms, 1)}
    print(said, flush=True)
    return said


async def run(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    (folder / "key").write_text("benchmark " * 8)
    ports = [free_port(), free_port()]
    (folder / "nodes").write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    client = FleetClient()
    with preset_folder(args.model) as model:
        key = read_fleet_key(folder / "key")
        client.helpers.append(Members(str(folder / "nodes"), key, "", client))
        nodes: list[asyncio.subprocess.Process] = []
        try:
            for number, port in enumerate(ports):
                nodes.append(await start_node(number, port, model, folder, args))
            await until_whole(client, nodes)
            contexts = list(map(int, args.contexts.split(",")))
            found = [await measure(client, nodes, each, args.repeats) for each in contexts]
            return [*found, *[await empty(client, nodes, contexts[0]) for _ in range(3)]]
        except TimeoutError:
            for log in folder.glob("*.log"):
                print(log.name, log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            await client.close()
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    node.kill()
                await node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--contexts", default="1000,4000,16000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(args, Path(folder)))
    print(json.dumps({"deterministic": args.deterministic, "moves": found}))


if __name__ == "__main__":
    main()
