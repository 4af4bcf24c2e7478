"""Attention over the paged KV cache on a GPU: Weft's kernels and FlashInfer's.

    PYTHONPATH=src python benchmarks/attention.py

Heads of Llama-3-8B: 32 for queries, 8 for keys and values, of 128, in bf16; blocks of 16 tokens,
scattered over the cache. Weft's kernels run as the engine calls them, with the padding of its
graphs. FlashInfer runs if it is installed: for decodes with tensor cores and without, planned as
for a CUDA graph, and otherwise by its kernels fa2 and fa3.

A layer's time is that of a CUDA graph of several layers, each with a cache of its own, so that none
is left in the L2 cache from the replay before; the median of 25 replays. `plan` is the time on the
host of FlashInfer's plan(), due once per step. The deviation is the largest from `reference_attend`
in fp32.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weft.kernels.attention import (
    AttentionBatch,
    KVCache,
    RowWork,
    make_batch,
    reference_attend,
    row_work,
)
from weft.kernels.ops import make_ops
from weft.worker.graph_inputs import most_tiles
from weft.worker.sizes import token_sizes

try:
    import flashinfer
except ImportError:
    flashinfer = None

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
GROUPS = HEADS // KV_HEADS
SCALE = 1 / math.sqrt(HEAD_DIM)
MAX_SEQS, MAX_GRAPH_TOKENS = 256, 1024
BATCHES = (1, 8, 32, 64, 256)
CONTEXTS = (200, 1000, 4000)
CACHED_BYTES = 256 << 20
"""The least size of the layers' caches in a graph: several times the L2 cache."""
MAX_LAYERS = 256
WORKSPACE_BYTES = 512 << 20

Run = Callable[[Tensor, KVCache], Tensor]
"""Attention of one layer: queries, cache."""


class Case(NamedTuple):
    name: str
    query_lens: list[int]
    lengths: list[int]
    """Lengths of the contexts, including the queries."""

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == len(self.query_lens)

    @property
    def num_blocks(self) -> int:
        return sum(-(-n // BLOCK_SIZE) for n in self.lengths)

    @property
    def num_bytes(self) -> int:
        """How many bytes one layer has to read and write."""
        return 4 * HEAD_DIM * (KV_HEADS * sum(self.lengths) + HEADS * self.num_tokens)

    @property
    def num_flops(self) -> int:
        """How many operations one layer takes, for what the causal mask leaves."""
        pairs = zip(self.query_lens, self.lengths, strict=True)
        return 4 * HEADS * HEAD_DIM * sum(q * n - q * (q - 1) // 2 for q, n in pairs)


class Figures(NamedTuple):
    case: Case
    kernels: str
    us: float
    deviation: float
    plan_us: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    args = parser.parse_args()
    version = flashinfer.__version__ if flashinfer else "not installed"
    table = Table(title=f"us a layer, {torch.cuda.get_device_name()}, FlashInfer {version}")
    for column in ("case", "kernels", "us", "TB/s", "TFLOP/s", "deviation", "plan, us"):
        table.add_column(column, justify="right" if column != "case" else "left")
    rows = []
    with torch.inference_mode():
        cases = [case for case in all_cases() if args.cases in case.name]
        bench = Bench(cases)
        for figures in itertools.chain.from_iterable(map(bench.measure, cases)):
            rows.append(figures)
            case, kernels, us, deviation, plan_us = figures
            rates = (f"{case.num_bytes / us / 1e6:.2f}", f"{case.num_flops / us / 1e6:.0f}")
            plan = "" if plan_us is None else f"{plan_us:.0f}"
            table.add_row(case.name, kernels, f"{us:.1f}", *rates, f"{deviation:.4f}", plan)
    Console(width=110).print(table)
    us = {f"{row.case.name}: {row.kernels}": round(row.us, 1) for row in rows}
    print(json.dumps({"ok": True, "benchmark": "attention", "flashinfer": version, "us": us}))
    return 0


def all_cases() -> list[Case]:
    decodes = [
        Case(f"{batch} decodes, {context} tokens", [1] * batch, [context] * batch)
        for batch, context in itertools.product(BATCHES, CONTEXTS)
    ]
    return [
        *decodes,
        Case("prompt of 2048", [2048], [2048]),
        Case("chunk of 512 after 3500", [512], [4012]),
        Case("chunk of 256 after 744", [256], [1000]),
        Case("64 decodes, 1000 tokens, and that chunk", [1] * 64 + [256], [1000] * 65),
    ]


class Bench:
    """Keys and values for as many layers as the cases need."""

    def __init__(self, cases: list[Case]) -> None:
        self.device = torch.device("cuda")
        self.ops = make_ops("triton", self.device)
        size = max(num_layers(case) * case.num_blocks for case in cases)
        shape = (2, size, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.kv = torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_()
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def measure(self, case: Case) -> Iterator[Figures]:
        layers = num_layers(case)
        parts = self.kv[:, : layers * case.num_blocks].unflatten(1, (layers, case.num_blocks))
        caches = [KVCache(k, v) for k, v in zip(*parts, strict=True)]
        q = torch.randn(case.num_tokens, HEADS, HEAD_DIM, device=self.device).bfloat16()
        blocks = torch.randperm(case.num_blocks).tolist()
        counts = [-(-n // BLOCK_SIZE) for n in case.lengths]
        ends = list(itertools.accumulate(counts, initial=0))
        tables = [blocks[a:b] for a, b in itertools.pairwise(ends)]
        batch = make_batch(case.query_lens, case.lengths, tables, BLOCK_SIZE, self.device)
        exact = reference_attend(q.float(), caches[0], batch, scale=SCALE, window=None)
        for kernels, run, plan_us in self.candidates(case, batch, blocks, ends):
            deviation = (run(q, caches[0]).float() - exact).abs().max().item()
            us = 1e3 * median_ms([functools.partial(run, q, cache) for cache in caches]) / layers
            yield Figures(case, kernels, us, deviation, plan_us)

    def candidates(
        self, case: Case, batch: AttentionBatch, blocks: list[int], ends: list[int]
    ) -> Iterator[tuple[str, Run, float | None]]:
        """Name, function, and microseconds of its plan on the host."""
        batch = replace(batch, work=work_of(case, batch, self.device))
        attend = functools.partial(self.ops.attend, batch=batch, scale=SCALE, window=None)
        yield "weft", attend, None
        if flashinfer is None:
            return
        pages = (
            torch.tensor(ends, dtype=torch.int32),
            torch.tensor(blocks, dtype=torch.int32, device=self.device),
            torch.tensor([(n - 1) % BLOCK_SIZE + 1 for n in case.lengths], dtype=torch.int32),
        )
        heads = (HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        for name, wrapper, plan in self.wrappers(case, batch, pages):
            plan_us = median_us(functools.partial(plan, *pages, *heads, q_data_type=torch.bfloat16))
            yield f"flashinfer, {name}", functools.partial(run_wrapper, wrapper), plan_us

    def wrappers(
        self, case: Case, batch: AttentionBatch, pages: tuple[Tensor, Tensor, Tensor]
    ) -> Iterator[tuple[str, Any, Callable[..., None]]]:
        """Name, wrapper, and its plan as a function of pages and heads."""
        if case.is_decode:
            for name, tensor_cores in (("no tensor cores", False), ("tensor cores", True)):
                buffers = [torch.empty_like(part, device=self.device) for part in pages]
                decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self.workspace, "NHD", True, tensor_cores, *buffers
                )
                yield name, decode, decode.plan
            return
        starts = torch.tensor(batch.query_start, dtype=torch.int32)
        for name in ("fa2", "fa3"):
            prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend=name
            )
            yield name, prefill, functools.partial(prefill.plan, starts, causal=True)


def run_wrapper(wrapper: Any, q: Tensor, cache: KVCache) -> Tensor:
    return wrapper.run(q, (cache.k, cache.v), out=torch.empty_like(q))


def num_layers(case: Case) -> int:
    size = case.num_blocks * BLOCK_SIZE * 4 * KV_HEADS * HEAD_DIM
    return min(max(2, -(-CACHED_BYTES // size)), MAX_LAYERS)


def work_of(case: Case, batch: AttentionBatch, device: torch.device) -> RowWork | None:
    """The work as in the graph of a step of that size; None if there is none."""
    if case.is_decode:
        return RowWork(case.num_tokens, None, None)
    if case.num_tokens not in token_sizes(MAX_GRAPH_TOKENS):
        return None
    pairs, tiles = row_work(batch.query_start, case.lengths, GROUPS)
    num_pairs = min(case.num_tokens, MAX_SEQS)
    padded_pairs = np.full((num_pairs, 2), -1, np.int32)
    padded_pairs[: len(pairs)] = pairs
    padded_tiles = np.zeros((most_tiles(case.num_tokens, GROUPS), 4), np.int32)
    padded_tiles[: len(tiles)] = tiles
    on_device = [torch.from_numpy(part).to(device) for part in (padded_pairs, padded_tiles)]
    return RowWork(num_pairs, *on_device)


def median_ms(bodies: list[Callable[[], Tensor]], replays: int = 25) -> float:
    """The median time of a graph of all `bodies`, in milliseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bodies[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for body in bodies:
            body()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def median_us(call: Callable[[], None], repeats: int = 20) -> float:
    """The median time on the host, in microseconds, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
