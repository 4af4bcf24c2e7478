"""How long the client of a live request waits when it moves from one engine to another on the same
device, by the length of its context.

    python benchmarks/moves.py [--model qwen3-8b] [--contexts 1000,4000,16000] [--deterministic]

Two nodes (`weft serve --no-api`, random weights) share the device. A request with a random prompt
runs on one of them, which is drained when it has made some tokens; the gap is what its reader then
waits for the next token, which holds the computation of prompt and output on the other node. The
other node has never seen the prompt. `same`: how many moved streams have the tokens of an
undisturbed one, which dummy weights in 16 bits don't promise without `--deterministic`. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
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
PATIENCE_S = 100.0


async def start_node(
    number: int, port: int, model: str, folder: Path, args: argparse.Namespace
) -> asyncio.subprocess.Process:
    """`--gpu-memory-utilization` counts what other processes have: the second one needs more."""
    flags = ["--no-api", "--fleet", str(folder / "nodes"), "--fleet-key", str(folder / "key")]
    flags += ["--fleet-listen", f"127.0.0.1:{port}", "--node-name", f"n{number}"]
    flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "8"]
    flags += ["--gpu-memory-utilization", str(0.42 * (number + 1)), "--adapter-memory", "64M"]
    flags += ["--max-num-batched-tokens", "8192", "--kv-cache-memory", "256M"]
    if args.deterministic:
        flags.append("--deterministic")
    with (folder / f"n{number}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weft", "serve", model, *flags, stdout=log, stderr=log
        )


async def until_whole(client: FleetClient, num_nodes: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(1 for _ in client._usable()) < num_nodes:
            await asyncio.sleep(0.05)


async def stream(
    client: FleetClient, request: EngineRequest, moves: bool
) -> tuple[list[int], float, float]:
    """The tokens, the gap of the move, and the median of all other gaps, in milliseconds."""
    tokens: list[int] = []
    gaps: list[float] = []
    moved_at, last_s = -1, time.perf_counter()
    async for event in client.generate(request):
        assert event.error is None, event.error
        now = time.perf_counter()
        if tokens:
            gaps.append((now - last_s) * 1e3)
        last_s = now
        tokens += event.token_ids
        if moves and moved_at < 0 and len(tokens) >= BEFORE:
            moved_at = len(gaps)
            node = client.explain(request.request_id)[-1]["node"]
            client.drain(str(node))
    if moves:
        assert len(client.explain(request.request_id)) >= 2
        client.drain(str(node), False)
        await until_whole(client, 2)
    move_ms = max(gaps[moved_at:]) if moves else 0.0
    return tokens, move_ms, statistics.median(gaps)


async def run(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    (folder / "key").write_text("benchmark " * 8)
    ports = [free_port(), free_port()]
    (folder / "nodes").write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    client = FleetClient()
    with preset_folder(args.model) as model:
        key = read_fleet_key(folder / "key")
        client.members = Members(str(folder / "nodes"), key, "", client)
        nodes: list[asyncio.subprocess.Process] = []
        try:
            for number, port in enumerate(ports):
                nodes.append(await start_node(number, port, model, folder, args))
                await until_whole(client, len(nodes))
            rng = random.Random(1)
            found = []
            for context in map(int, args.contexts.split(",")):
                moves, others, same = [], [], 0
                for number in range(args.repeats + 1):
                    prompt = [rng.randrange(client.info.vocab_size) for _ in range(context)]
                    name = f"{context} {number}"
                    params = SamplingParams(
                        temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True
                    )
                    request = EngineRequest(name, prompt, params, seed=1)
                    moved, gap_ms, usual_ms = await stream(client, request, True)
                    again = EngineRequest(name + " again", prompt, params, seed=1)
                    whole, _, _ = await stream(client, again, False)
                    if number:  # the first one warms up
                        moves.append(gap_ms)
                        others.append(usual_ms)
                        same += moved == whole
                found.append(
                    {
                        "context": context,
                        "gap ms p50": round(statistics.median(moves), 1),
                        "gap ms max": round(max(moves), 1),
                        "token ms": round(statistics.median(others), 2),
                        "same": f"{same} of {len(moves)}",
                    }
                )
                print(found[-1], flush=True)
            return found
        except TimeoutError:
            for log in folder.glob("*.log"):
                print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            await client.close()
            for node in nodes:
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
