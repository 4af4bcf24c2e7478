r"""Streams over a fleet of real nodes to which everything happens, one fault after another.

    python benchmarks/fleet_faults.py [--streams 10000] [--seconds 300] [--nodes 3] [--load 0.7] \
        [--held-up 0.1]

Nodes are `weft serve --no-api` with the tiny model on the CPU; the client is this process, which
keeps so many streams open that `--load` of all seats are taken. Faults come at random times,
`--pause` seconds apart on average, and befall any node, as long as another one is whole. Each
stream must be what the same request gave when nothing happened. With `--held-up 0.1`, the client is
kept from reading for about 0.1 s after each 0.1 s, as on a loaded machine: what happens to a stream
then meets tokens that it has not read yet.

Counted are streams that failed, and those that lost, repeated or changed tokens. The longest pause
of each stream that had to go on elsewhere is printed by cause, beside that of the others, and what
it had more than their median. After `--seconds` no stream begins; how many did not is said. The
last line is JSON.
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
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from fleet_nodes import FAULTS, SEATS, Outcome, RealFleet, RealNode

from weft.core.requests import EngineRequest

PATIENCE_S = 60.0
"""How long a stream may take; one that takes longer has failed."""


class Campaign:
    """Concurrent streams, and their results."""

    def __init__(self, fleet: RealFleet, requests: list[EngineRequest], expected: list[Outcome]):
        self.fleet = fleet
        self.requests = requests
        self.expected = expected
        self.found: list[tuple[Outcome, Outcome]] = []
        """For each stream, the expected outcome and the actual one."""
        self.faults: Counter[str] = Counter()
        self._suffering: set[str] = set()
        """The names of the nodes that have a fault now."""

    async def run(self, args: argparse.Namespace) -> float:
        """Run the streams, and return how many seconds that took."""
        started_s = time.monotonic()
        numbers = itertools.count()
        at_a_time = max(1, round(args.load * SEATS * args.nodes))

        async def reader() -> None:
            while time.monotonic() < started_s + args.seconds:
                if (number := next(numbers)) >= args.streams:
                    return
                await self._read(number)

        works = (self._torment(args), self._tell(args), self._hold_up(args))
        beside = [asyncio.create_task(work) for work in works]
        await asyncio.gather(*(reader() for _ in range(at_a_time)))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        return time.monotonic() - started_s

    async def _read(self, number: int) -> None:
        which = number % len(self.requests)
        request = replace(self.requests[which], request_id=f"stream {number}")
        try:
            outcome = await asyncio.wait_for(self.fleet.read(request), PATIENCE_S)
        except TimeoutError:
            placed = self.fleet.client.explain(request.request_id)
            whys = [f"{each['why']}, after {each['output_tokens']} tokens" for each in placed]
            outcome = Outcome(f"not complete after {PATIENCE_S:g} s", whys=tuple(whys))
        wanted = self.expected[which]
        if outcome.failed or outcome.tokens != wanted.tokens:
            print(f"{request}\nwanted {wanted}\ngot    {outcome}", flush=True)
        self.found.append((wanted, outcome))

    async def _torment(self, args: argparse.Namespace) -> None:
        """Go through all faults again and again, in random order."""
        rng = random.Random(args.seed)
        async with asyncio.TaskGroup() as under_way:
            while True:
                for fault in rng.sample(FAULTS, len(FAULTS)):
                    await asyncio.sleep(rng.uniform(0.5, 1.5) * args.pause)
                    while len(whole := self._unharmed()) < 2:
                        await asyncio.sleep(0.05)
                    node = rng.choice(whole)
                    self._suffering.add(node.name)
                    under_way.create_task(self._inflict(fault, node))

    async def _inflict(self, fault: str, node: RealNode) -> None:
        try:
            await self.fleet.inflict(fault, node)
            self.faults[fault] += 1
        except (ProcessLookupError, FileNotFoundError):  # it has just ended
            pass
        finally:
            self._suffering.discard(node.name)

    def _unharmed(self) -> list[RealNode]:
        return [node for node in self.fleet.whole() if node.name not in self._suffering]

    async def _hold_up(self, args: argparse.Namespace) -> None:
        """Keep this process from reading, again and again, so that its streams are behind."""
        rng = random.Random(args.seed)
        while args.held_up:
            await asyncio.sleep(rng.uniform(0.2, 1.2) * args.held_up)
            time.sleep(rng.uniform(0.1, 1.2) * args.held_up)

    async def _tell(self, args: argparse.Namespace) -> None:
        while True:
            await asyncio.sleep(10)
            whole = len(self.fleet.whole())
            print(
                f"{len(self.found)} of {args.streams} streams, {self.faults.total()} faults,"
                f" {whole} nodes are whole",
                flush=True,
            )


def judged(pairs: list[tuple[Outcome, Outcome]]) -> dict[str, object]:
    failed = [got.failed for _, got in pairs if got.failed]
    for message, count in Counter(failed).most_common(5):
        print(f"failed: {count} x {message}")
    whole = [(wanted, got) for wanted, got in pairs if not got.failed]
    stayed = [got.largest_gap_s * 1e3 for _, got in whole if len(got.whys) == 1]
    usual = statistics.median(stayed) if stayed else 0.0
    by_cause = defaultdict(list)
    added = []
    for _, got in whole:
        if len(got.whys) > 1:
            gap = got.largest_gap_s * 1e3
            added.append(max(gap - usual, 0.0))
            by_cause[kind(got.whys[1:])].append(gap)
    for cause, gaps in sorted(by_cause.items()):
        print(f"{cause}: {len(gaps)} streams, longest pause {shown(gaps)}")
    print(f"streams that stayed: {len(stayed)}, longest pause {shown(stayed)}")
    return {
        "streams": len(pairs),
        "went on elsewhere": len(added),
        "at most times": max((len(got.whys) - 1 for _, got in whole), default=0),
        "failed": len(failed),
        "lost or repeated": sum(
            len(wanted.tokens) != len(got.tokens) or wanted.num_logprobs != got.num_logprobs
            for wanted, got in whole
        ),
        "changed": sum(wanted.tokens != got.tokens for wanted, got in whole),
        "added gap ms p50": quantile(added, 50),
        "added gap ms p99": quantile(added, 99),
        "longest pause of others ms p50": round(usual),
    }


def kind(whys: Iterable[str]) -> str:
    """The causes without the names of nodes."""
    for why in whys:
        for words, name in (
            ("drained", "drained"),
            ("exit code", "engine killed"),
            ("was closed", "node killed or link cut"),
            ("takes no messages", "node killed or link cut"),
            ("are missing", "tokens missing or twice"),
            ("sign of life", "hung"),
        ):
            if words in why:
                return name
    return "other"


def shown(gaps: list[float]) -> str:
    return f"p50 {quantile(gaps, 50)} ms, p99 {quantile(gaps, 99)} ms"


def quantile(values: list[float], percent: int) -> int | None:
    if len(values) < 2:
        return round(values[0]) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1])


async def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    fleet = RealFleet(args.nodes, folder)
    try:
        await fleet.start()
        requests = fleet.requests(args.distinct, args.length)
        gate = asyncio.Semaphore(SEATS * args.nodes // 2)

        async def undisturbed(request: EngineRequest) -> Outcome:
            async with gate:
                return await fleet.read(request)

        expected = await asyncio.gather(*map(undisturbed, requests))
        assert not any(outcome.failed for outcome in expected), expected
        print(f"{args.nodes} nodes; {len(requests)} requests ran undisturbed", flush=True)
        campaign = Campaign(fleet, requests, expected)
        seconds = await campaign.run(args)
        fleet.client.check()
        return {
            **judged(campaign.found),
            "not begun": args.streams - len(campaign.found),
            "faults": dict(campaign.faults),
            "seconds": round(seconds),
        }
    finally:
        await fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--pause", type=float, default=2.0)
    parser.add_argument("--held-up", type=float, default=0.0)
    parser.add_argument("--distinct", type=int, default=140)
    parser.add_argument("--length", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(args, Path(folder)))))


if __name__ == "__main__":
    main()
