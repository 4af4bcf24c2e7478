"""Host work of a decode step: plan, build and commit, without the device.

    python benchmarks/host_overhead.py

Runs the real scheduler, cache, adapter slots and input builder over decode steps of 32 to
512 requests on 16 adapters, with a device that answers at once. Prints the median time per step
of each part, and per request, which shows how the cost grows.
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
from weft.worker.inputs import RowState

SIZES = (32, 64, 128, 256, 512)
NUM_ADAPTERS = 16
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
VOCAB_SIZE = 128_256


class Bench:
    """A scheduler with `size` requests in decode."""

    def __init__(self, size: int) -> None:
        cache = Cache(size * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
        slots = AdapterSlots(NUM_ADAPTERS, NUM_ADAPTERS)
        limits = SchedulerLimits(
            max_num_seqs=size,
            max_num_batched_tokens=size * PROMPT_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_loras=NUM_ADAPTERS,
            max_adapter_wait=2.0,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({2}),
        )
        self.scheduler = Scheduler(limits, cache, slots)
        self.rows = RowState(size, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
        self.seconds: dict[str, list[float]] = {"plan": [], "build": [], "commit": []}
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
        self.rows.build(plan)
        marks.append(time.perf_counter())
        result = StepResult([[5] for n in plan.num_samples if n])
        launched = marks[-1] - time.perf_counter()
        self.scheduler.commit(plan, result)
        marks.append(time.perf_counter() + launched)
        for part, start, stop in zip(self.seconds.values(), marks, marks[1:], strict=False):
            part.append(stop - start)


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
    for column in ("requests", "plan", "build", "commit", "all", "all per request"):
        table.add_column(column, justify="right")
    totals: dict[int, float] = {}
    for size in SIZES:
        bench = Bench(size)
        bench.step()
        for part in bench.seconds.values():
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
        )
    Console().print(table)
    ok = totals[256] < 1000
    us = {str(size): round(total) for size, total in totals.items()}
    print(json.dumps({"ok": ok, "benchmark": "host_overhead", "us_per_step": us}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
