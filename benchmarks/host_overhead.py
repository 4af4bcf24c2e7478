"""Host work of a decode step, and of a prompt that is cached, without the device.

    python benchmarks/host_overhead.py

Runs the real scheduler, cache, adapter slots and input builder over decode steps of 32 to
512 requests on 16 adapters, with a device that answers at once, and packs what other ranks are sent
of each step, which is not in the sums. Prints the median time per step of each part, and per
request, which shows how the cost grows. Then the same for requests with a prompt of 4,096 tokens
of which all blocks but the last are cached, up to where the device has its work, with the fastest
of them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from weft.core.adapters import AdapterRef
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots
from weft.worker.inputs import RowState, StepInputs
from weft.worker.records import StepOrder, packed

SIZES = (32, 64, 128, 256, 512)
NUM_ADAPTERS = 16
PROMPT_TOKENS = 128
HIT_TOKENS = 4096
BLOCK_SIZE = 16
MAX_MODEL_LEN = HIT_TOKENS + BLOCK_SIZE
VOCAB_SIZE = 128_256


def _scheduler(size: int, num_batched_tokens: int, slots: AdapterSlots) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=size,
        max_num_batched_tokens=num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_loras=NUM_ADAPTERS,
        max_adapter_wait=2.0,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
    )
    return Scheduler(limits, Cache(size * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE), slots)


class Bench:
    """A scheduler with `size` requests in decode."""

    def __init__(self, size: int) -> None:
        slots = AdapterSlots(NUM_ADAPTERS, NUM_ADAPTERS)
        self.scheduler = _scheduler(size, size * PROMPT_TOKENS, slots)
        self.rows = RowState(size, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
        self.seconds: dict[str, list[float]] = {"plan": [], "build": [], "commit": []}
        self.order_s: list[float] = []
        """How long it took to pack each step's inputs for other ranks."""
        self._newest: StepInputs | None = None
        refs = [_resident(slots, i) for i in range(NUM_ADAPTERS)]
        for i in range(size):
            prompt = [3 + (i * 31 + j) % 1000 for j in range(PROMPT_TOKENS)]
            request = EngineRequest(
                str(i), prompt, SamplingParams(3000), refs[i % NUM_ADAPTERS], seed=i
            )
            self.scheduler.add(request)

    def step(self) -> None:
        marks = [time.perf_counter()]
        plan = self.scheduler.plan(marks[0])
        marks.append(time.perf_counter())
        inputs = self.rows.build(plan)
        marks.append(time.perf_counter())
        packed(StepOrder.after(self._newest, inputs))
        self._newest = inputs
        self.order_s.append(time.perf_counter() - marks[-1])
        result = StepResult([5 for n in plan.num_samples if n])
        launched = marks[-1] - time.perf_counter()
        self.scheduler.commit(plan, result)
        marks.append(time.perf_counter() + launched)
        for part, start, stop in zip(self.seconds.values(), marks, marks[1:], strict=False):
            part.append(stop - start)


class Hit:
    """A scheduler whose cache has a prompt but for its last block."""

    def __init__(self) -> None:
        self._scheduler = _scheduler(2, MAX_MODEL_LEN, AdapterSlots(1, 1))
        self._rows = RowState(2, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
        self._prompt = [3 + i * 31 % 1000 for i in range(HIT_TOKENS)]
        self.seconds: dict[str, list[float]] = {"submit": [], "plan": [], "build": []}

    def run(self, name: str) -> int:
        """Have the prompt answered with one token. Returns how many of its tokens were cached."""
        request = EngineRequest(name, list(self._prompt), SamplingParams(1), seed=0)
        marks = [time.perf_counter()]
        self._scheduler.add(request)
        marks.append(time.perf_counter())
        plan = self._scheduler.plan(marks[0])
        marks.append(time.perf_counter())
        self._rows.build(plan)
        marks.append(time.perf_counter())
        [event] = self._scheduler.commit(plan, StepResult([5]))
        for part, start, stop in zip(self.seconds.values(), marks, marks[1:], strict=False):
            part.append(stop - start)
        return event.num_cached_tokens


def _measure_hits(number: int) -> dict[str, list[float]]:
    """Microseconds of each part and of all: the median, and the fastest."""
    hit = Hit()
    for i in range(number + 1):
        cached = hit.run(str(i))
        assert cached == (HIT_TOKENS - BLOCK_SIZE if i else 0)
    parts = {name: seconds[1:] for name, seconds in hit.seconds.items()}
    parts["all"] = [sum(each) for each in zip(*parts.values(), strict=True)]
    return {name: [1e6 * statistics.median(s), 1e6 * min(s)] for name, s in parts.items()}


def _resident(slots: AdapterSlots, i: int) -> AdapterRef:
    digest = hashlib.sha256(str(i).encode()).hexdigest()
    slots.add(digest, 1)
    slots.start_load(digest, now=float(i))
    slots.loaded(digest)
    return AdapterRef(str(i), 1, digest)


def main() -> int:
    """Exit status 1 if a step of 256 requests takes 1 ms or more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    table = Table(title=f"Host time of a decode step, microseconds, median of {args.steps}")
    for column in ("requests", "plan", "build", "commit", "all", "all per request", "order"):
        table.add_column(column, justify="right")
    totals: dict[int, float] = {}
    for size in SIZES:
        bench = Bench(size)
        bench.step()
        for part in (*bench.seconds.values(), bench.order_s):
            part.clear()
        gc.collect()
        gc.freeze()
        for _ in range(args.steps):
            bench.step()
        parts = {name: 1e6 * statistics.median(s) for name, s in bench.seconds.items()}
        steps = zip(*bench.seconds.values(), strict=True)
        totals[size] = 1e6 * statistics.median(sum(step) for step in steps)
        table.add_row(
            str(size),
            *(f"{us:.0f}" for us in parts.values()),
            f"{totals[size]:.0f}",
            f"{totals[size] / size:.2f}",
            f"{1e6 * statistics.median(bench.order_s):.0f}",
        )
    hits = _measure_hits(args.steps)
    of_hits = Table(title=f"Host time of a prefix hit of {HIT_TOKENS:,} tokens, microseconds")
    for column in ("", *hits):
        of_hits.add_column(column, justify="right")
    for i, kind in enumerate(("median", "fastest")):
        of_hits.add_row(kind, *(f"{us[i]:.0f}" for us in hits.values()))
    Console().print(table, of_hits)
    ok = totals[256] < 1000
    us = {str(size): round(total) for size, total in totals.items()}
    us_per_hit = round(hits["all"][0])
    told = {"ok": ok, "benchmark": "host_overhead", "us_per_step": us, "us_per_hit": us_per_hit}
    print(json.dumps(told))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
