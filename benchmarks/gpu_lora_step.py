"""What LoRA adds to the matrix products of a decode step, on a GPU.

    PYTHONPATH=src python benchmarks/gpu_lora_step.py

A step is the linear layers of 32 decoder layers of the Llama-3-8B shape, bf16, without head,
attention and norms, replayed from a CUDA graph: first the base products alone, then with rank-16
adapters on all seven projections. One graph per batch size serves all patterns. The floor is the
time to read the distinct adapters' bytes at 4.3 TB/s. Times are medians of 25 replays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from weft.core.targets import Kind, TargetTable, build_table, layout_of
from weft.kernels.lora import AdapterPool, LoraBatch, LoraStep, Segment, make_backend

HIDDEN, INNER, KV = 4096, 14336, 1024
RANK, NUM_SLOTS = 16, 64
BYTES_PER_S = 4.3e12
BATCHES = (1, 8, 32, 64)
PATTERNS = ("none", "identical", "uniform", "distinct")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    bench = Bench(args.layers, args.backend)
    table = Table(title=f"ms per step of {args.layers} layers, {torch.cuda.get_device_name()}")
    for column in ("batch", "pattern", "base", "with LoRA", "added", "floor"):
        table.add_column(column, justify="right")
    rows = [row for batch in BATCHES for row in bench.measure(batch)]
    for batch, pattern, base, both, floor in rows:
        figures = (base, both, both - base, floor)
        table.add_row(str(batch), pattern, *(f"{ms:.2f}" for ms in figures))
    Console().print(table)
    added = {f"{pattern} {batch}": round(both - base, 3) for batch, pattern, base, both, _ in rows}
    print(json.dumps({"ok": True, "benchmark": "gpu_lora_step", "added_ms": added}))
    return 0


def make_table(layers: int) -> TargetTable:
    rows: list[tuple[Kind, int, list[tuple[str, int]]]] = []
    for i in range(layers):
        rows += [
            ("linear", HIDDEN, [(f"{i}.q", HIDDEN), (f"{i}.k", KV), (f"{i}.v", KV)]),
            ("linear", HIDDEN, [(f"{i}.o", HIDDEN)]),
            ("linear", HIDDEN, [(f"{i}.gate", INNER), (f"{i}.up", INNER)]),
            ("linear", INNER, [(f"{i}.down", HIDDEN)]),
        ]
    return build_table(rows)


class Bench:
    """Random weights and adapters; every slot holds one."""

    def __init__(self, layers: int, backend: str) -> None:
        self.device = torch.device("cuda")
        self.table = make_table(layers)
        layout = layout_of(self.table, (RANK,) * len(self.table.targets))
        size = layout.num_elements
        self.adapter_bytes = 2 * size
        dtype = torch.bfloat16
        self.pool = AdapterPool(self.table, NUM_SLOTS * size, NUM_SLOTS, dtype, self.device)
        self.pool.arena.normal_(0, 0.02)
        for slot in range(NUM_SLOTS):
            self.pool.install(slot, slot * size, layout)
        self.backend = make_backend(backend, self.pool)
        self.weights = [
            torch.randn(g.out_features, g.in_features, device=self.device, dtype=dtype) * 0.02
            for g in self.table.groups
        ]

    def measure(self, batch: int) -> list[tuple[int, str, float, float, float]]:
        """(batch, pattern, ms of the base products, ms with LoRA, floor of LoRA in ms)."""
        with torch.inference_mode():
            x = {k: torch.randn(batch, k, device=self.device).bfloat16() for k in (HIDDEN, INNER)}
            base = median_ms(capture(lambda: self.products(x, None)))
            step = self.backend.begin(self.batch("distinct", batch))
            graph = capture(lambda: self.products(x, step))
            rows = []
            for pattern in PATTERNS:
                self.backend.begin(self.batch(pattern, batch))
                floor = 1e3 * num_adapters(pattern, batch) * self.adapter_bytes / BYTES_PER_S
                rows.append((batch, pattern, base, median_ms(graph), floor))
            return rows

    def products(self, x: dict[int, torch.Tensor], step: LoraStep | None) -> None:
        for group, weight in zip(self.table.groups, self.weights, strict=True):
            y = F.linear(x[group.in_features], weight)
            if step is not None:
                step.linear(y, x[group.in_features], group.index)

    def batch(self, pattern: str, rows: int) -> LoraBatch:
        n = num_adapters(pattern, rows)
        slots = sorted(t % n for t in range(rows)) if n else [-1] * rows
        segments = tuple(
            Segment(s, slots.index(s), slots.index(s) + slots.count(s)) for s in range(n)
        )
        slot_T = torch.tensor(slots, dtype=torch.int32, device=self.device)
        return LoraBatch(slot_T, segments, slot_T, segments)


def num_adapters(pattern: str, rows: int) -> int:
    return {"none": 0, "identical": 1, "uniform": math.ceil(math.sqrt(rows)), "distinct": rows}[
        pattern
    ]


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def median_ms(graph: torch.cuda.CUDAGraph, replays: int = 25) -> float:
    for _ in range(5):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[replays // 2]


if __name__ == "__main__":
    sys.exit(main())
