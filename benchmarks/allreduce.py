"""Sums over the GPUs of one machine: Weft's kernels, NCCL, and torch's symmetric memory.

    PYTHONPATH=src python benchmarks/allreduce.py

`sum` is the sum of bf16 rows over all ranks. `fused` is what a decoder layer does with it: a rank
adds what adapters have pending (or not), the ranks sum, and the sum is added to the residual stream
and normed. NCCL and torch's operations have Weft's kernel for addition and norm behind them there.

A time is that of a CUDA graph of 20 calls one after the other, over as many different inputs, the
median of 25 replays of the slowest rank. Before, each way's result is compared with the sum in fp32
in the order of the ranks; the number of elements that differ from it is shown where there are any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weft.kernels.collective.base import Ranks, sum_in_order
from weft.kernels.collective.group import GroupRanks, join_group, leave_group
from weft.kernels.collective.peers import PeerRanks, can_connect, open_inboxes
from weft.kernels.ops import Ops, Pending, Product, make_ops
from weft.terminal.environment import collect

ROWS = (1, 8, 32, 64, 256, 1024, 2048)
WIDTHS = (4096, 8192)
CALLS, REPLAYS = 20, 25
EPS = 1e-5
Sum = Callable[[Tensor], Tensor]


class Figures(NamedTuple):
    rows: int
    width: int
    what: str
    way: str
    us: float
    num_wrong: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    ranks = parser.parse_args().ranks
    if ranks < 2 or not can_connect(ranks):
        print("needs two GPUs or more that can write to each other's memory", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (ranks, folder), ranks)
        found = [Figures(*row) for row in json.loads(Path(folder, "figures").read_text())]
    show(found, ranks)
    sections = collect()
    line = {
        "ok": True,
        "benchmark": "allreduce",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "environment": {name: sections[name] for name in ("weft", "machine", "gpu")},
        "config": {"ranks": ranks, "dtype": "bfloat16", "calls": CALLS, "replays": REPLAYS},
        "results": [row._asdict() for row in found],
    }
    print(json.dumps(line))
    return 0


def run_rank(rank: int, size: int, folder: str) -> None:
    # Neither may use NVLink's multicast, which can outlive a process that is killed.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    join_group(rank, size, folder, device)
    found: list[Figures] = []
    with torch.inference_mode():
        for width in WIDTHS:
            bench = Bench(device, width, size)
            for rows in ROWS:
                found += bench.measure(rows)
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps(found))
    GroupRanks().barrier()
    leave_group()


class Bench:
    """The ways to sum rows of one width."""

    def __init__(self, device: torch.device, width: int, size: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.device, self.width, self.size = device, width, size
        self.ops = make_ops("triton", device)
        self.group = GroupRanks()
        self.peers = PeerRanks(self.group, open_inboxes(self.group, 2 * width, device))
        shape = (max(ROWS), width)
        self.shared = symmetric.empty(shape, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(self.shared, dist.group.WORLD)
        self.weight = torch.rand(width, device=device).bfloat16() + 0.5

    def random(self, rank: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(rank)
        return torch.randn(shape, generator=generator, device=self.device).bfloat16()

    def measure(self, rows: int) -> list[Figures]:
        parts = [self.random(rank, CALLS, rows, self.width) for rank in range(self.size)]
        want = sum_in_order(parts)
        y = parts[self.group.rank]
        x = self.random(100, rows, self.width)
        add = torch.randn(rows, self.width, device=self.device)
        slot = torch.zeros(rows, dtype=torch.int32, device=self.device)
        found: list[Figures] = []
        for name, add_up in self.sums(rows).items():
            num_wrong = int((add_up(y[0].clone()) != want[0]).sum())
            held = y.clone()  # some of them overwrite it
            us = self.time(lambda i, add_up=add_up, held=held: add_up(held[i]))
            found.append(Figures(rows, self.width, "sum", name, us, num_wrong))
        for name, (ops, ranks) in self.fused(rows).items():
            for pending in (None, Pending(add, slot)):
                if pending is not None and name != "weft":
                    continue
                got = x.clone()
                ops.sum_and_norm(got, self.weight, EPS, Product(y[0].clone()), ranks)
                wrong = int((got != (x.float() + want[0].float()).bfloat16()).sum())
                held, stream = y.clone(), x.clone()

                def call(i: int, ops=ops, ranks=ranks, held=held, stream=stream, more=pending):
                    ops.sum_and_norm(stream, self.weight, EPS, Product(held[i], more), ranks)

                what = "fused" if pending is None else "fused, pending"
                found.append(Figures(rows, self.width, what, name, self.time(call), wrong))
        return found

    def sums(self, rows: int) -> dict[str, Sum]:
        """The sums by name. Torch's operations sum rows in shared memory, to which a product would
        write them; copying them there is not timed."""
        torch_ops, group = torch.ops.symm_mem, dist.group.WORLD.group_name
        shared = self.shared[:rows]

        def one_shot(y: Tensor) -> Tensor:
            self.put(shared, y)
            return torch_ops.one_shot_all_reduce(shared, "sum", group)

        def two_shot(y: Tensor) -> Tensor:
            self.put(shared, y)
            return torch_ops.two_shot_all_reduce_(shared, "sum", group)

        return {
            "NCCL": self.group.sum,
            "torch, one shot": one_shot,
            "torch, two shots": two_shot,
            "weft": self.peers.sum,
        }

    def put(self, shared: Tensor, y: Tensor) -> None:
        if not torch.cuda.is_current_stream_capturing():
            shared.copy_(y)

    def fused(self, rows: int) -> dict[str, tuple[Ops, Ranks]]:
        sums = self.sums(rows)
        ways: dict[str, tuple[Ops, Ranks]] = {"NCCL": (self.ops, self.group)}
        for name in ("torch, one shot", "torch, two shots"):
            ways[name] = (self.ops, Summing(self.group, sums[name]))
        return ways | {"weft": (self.ops, self.peers)}

    def time(self, call: Callable[[int], Any]) -> float:
        """Microseconds a call."""
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(i)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(REPLAYS):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end) / CALLS)
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(statistics.median(slowest.tolist()), 2)


class Summing(GroupRanks):
    """A group whose sums are computed by a function."""

    def __init__(self, group: GroupRanks, add_up: Sum) -> None:
        super().__init__()
        self._add_up = add_up

    def sum(self, x_Tn: Tensor) -> Tensor:
        return self._add_up(x_Tn)


def show(found: list[Figures], ranks: int) -> None:
    ways = list(dict.fromkeys((row.what, row.way) for row in found))
    table = Table(title=f"us, bf16, {ranks} x {torch.cuda.get_device_name()}")
    for column in ("rows x width", *(f"{what}: {way}" for what, way in ways)):
        table.add_column(column, justify="right")
    by_size = {(row.width, row.rows, row.what, row.way): row for row in found}
    for width, rows in itertools.product(WIDTHS, ROWS):
        cells = [by_size[width, rows, *way] for way in ways]
        wrong = [f" ({cell.num_wrong} differ)" if cell.num_wrong else "" for cell in cells]
        shown = (f"{cell.us:.1f}{more}" for cell, more in zip(cells, wrong, strict=True))
        table.add_row(f"{rows} x {width}", *shown)
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
