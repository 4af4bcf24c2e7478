"""Streams over a fleet of real nodes to which everything happens, one fault after another.

    python benchmarks/fleet_faults.py [--streams 10000] [--nodes 3] [--at-a-time 12]

Nodes are `weft serve --no-api` with the tiny model on the CPU; the client is this process. Each
stream must be what the same request gave when nothing happened. Counted are streams that failed,
and those that lost, repeated or changed tokens; the pause of those that had to go on elsewhere is
printed. A fault begins when all nodes are up again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from fleet_nodes import FAULTS, Outcome, RealFleet

from weft.core.requests import EngineRequest


async def campaign(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    fleet = RealFleet(args.nodes, folder)
    try:
        await fleet.start()
        requests = fleet.requests(args.distinct, args.length)
        print(f"{args.nodes} nodes are up; {len(requests)} requests run undisturbed", flush=True)
        gate = asyncio.Semaphore(args.at_a_time)

        async def run(request: EngineRequest) -> Outcome:
            async with gate:
                return await fleet.read(request)

        expected = await asyncio.gather(*map(run, requests))
        assert not any(outcome.failed for outcome in expected), expected
        faults: Counter[str] = Counter()
        tormentor = asyncio.create_task(torment(fleet, random.Random(args.seed), faults))
        started_s = time.monotonic()
        numbered = [
            (i % len(requests), replace(requests[i % len(requests)], request_id=f"stream {i}"))
            for i in range(args.streams)
        ]
        found = await asyncio.gather(*(run(request) for _, request in numbered))
        seconds = time.monotonic() - started_s
        tormentor.cancel()
        await asyncio.gather(tormentor, return_exceptions=True)
        pairs = [(expected[i], outcome) for (i, _), outcome in zip(numbered, found, strict=True)]
        await fleet.until_whole()
        return {**judged(pairs), "faults": dict(faults), "seconds": round(seconds)}
    finally:
        await fleet.close()


async def torment(fleet: RealFleet, rng: random.Random, faults: Counter[str]) -> None:
    """Go through all faults again and again, in random order."""
    for _ in itertools.count():
        for fault in rng.sample(FAULTS, len(FAULTS)):
            await fleet.until_whole()
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            await fleet.inflict(fault, rng.choice(fleet.nodes))
            faults[fault] += 1
            print(f"{fault}: {sum(faults.values())} faults", flush=True)


def judged(pairs: list[tuple[Outcome, Outcome]]) -> dict[str, object]:
    failed = [got.failed for _, got in pairs if got.failed]
    for message, count in Counter(failed).most_common(5):
        print(f"failed: {count} x {message}")
    whole = [(wanted, got) for wanted, got in pairs if not got.failed]
    gaps = [got.largest_gap_s * 1e3 for _, got in whole if got.attempts > 1 and got.largest_gap_s]
    usual = [wanted.largest_gap_s * 1e3 for wanted, _ in pairs]
    cuts = statistics.quantiles(gaps, n=100) if len(gaps) > 1 else []
    return {
        "streams": len(pairs),
        "went on elsewhere": sum(got.attempts > 1 for _, got in pairs),
        "failed": len(failed),
        "lost or repeated": sum(len(wanted.tokens) != len(got.tokens) for wanted, got in whole),
        "changed": sum(wanted.tokens != got.tokens for wanted, got in whole),
        "gap ms p50": round(cuts[49]) if cuts else None,
        "gap ms p99": round(cuts[98]) if cuts else None,
        "largest gap undisturbed ms p50": round(statistics.median(usual)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--at-a-time", type=int, default=12)
    parser.add_argument("--distinct", type=int, default=120)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(campaign(args, Path(folder)))))


if __name__ == "__main__":
    main()
