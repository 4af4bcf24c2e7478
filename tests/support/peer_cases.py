"""What each of several GPUs does in the tests of sums over ranks; processes start here."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels.collective import make_ranks
from weft.kernels.collective.base import sum_in_order
from weft.kernels.collective.group import join_group, leave_group
from weft.kernels.collective.peers import PeerRanks
from weft.kernels.ops import Pending, Product, reference_rms_norm
from weft.kernels.triton_ops import TritonOps

WIDTH, EPS = 4096, 1e-5
ROWS = (1, 2, 3, 8, 33, 64, 200, 1024, 1500)
SKEW = 2_000_000
"""Cycles by which a rank may be late."""


def run_rank(rank: int, size: int, folder: str) -> None:
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    join_group(rank, size, folder, device)
    with torch.inference_mode():
        ranks = make_ranks(device, 2 * WIDTH)
        assert isinstance(ranks, PeerRanks)
        case = Case(ranks, device)
        case.any_order()
        case.two_shots()
        case.replays()
        case.rows_alone()
        ranks.barrier()
    leave_group()


class Case:
    """Sums of random rows. Every rank knows those of all."""

    def __init__(self, ranks: PeerRanks, device: torch.device) -> None:
        self.ranks, self.device, self.ops = ranks, device, TritonOps(device)
        self.weight = self.random(1, WIDTH).float().add(1).bfloat16()

    def random(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def parts(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        return [self.random(seed + r, *shape, dtype=dtype) for r in range(self.ranks.size)]

    def pending(self, seed: int, rows: int) -> list[Pending]:
        slot = torch.arange(rows, dtype=torch.int32, device=self.device) % 3 - 1
        adds = self.parts(seed, rows, WIDTH, dtype=torch.float32)
        return [Pending(add.masked_fill(slot[:, None] < 0, torch.nan), slot) for add in adds]

    def same_everywhere(self, x: Tensor) -> None:
        first = x.clone()
        dist.broadcast(first, 0)
        assert torch.equal(x.view(torch.int8), first.view(torch.int8))

    def any_order(self) -> None:
        """Sums, sums with norms and gathers of all sizes in a random order, one rank late."""
        choice = random.Random(0)
        for turn in range(300):
            rows, kind, late = choice.choice(ROWS), choice.randrange(4), choice.randrange(4)
            if late == self.ranks.rank:
                torch.cuda._sleep(choice.randrange(SKEW))
            else:
                choice.randrange(SKEW)
            self.one(10_000 + 100 * turn, rows, kind)

    def one(self, seed: int, rows: int, kind: int) -> None:
        rank = self.ranks.rank
        if kind == 0:
            width = (64, 1000, 12_000)[seed // 100 % 3]
            parts = self.parts(seed, rows, width)
            assert torch.equal(self.ranks.gather_columns(parts[rank]), torch.cat(parts, 1))
            return
        dtype = torch.float32 if kind == 1 and seed % 200 else torch.bfloat16
        parts = self.parts(seed, rows, 2 if dtype is torch.float32 else WIDTH, dtype=dtype)
        if kind == 1:
            want, got = sum_in_order(parts), self.ranks.sum(parts[rank].clone())
            assert torch.equal(got, want)
            return
        more = self.pending(seed + 50, rows) if kind == 3 else [None] * len(parts)
        whole = [Product(y, p).whole() for y, p in zip(parts, more, strict=True)]
        x = self.random(seed + 99, rows, WIDTH)
        want = (x.float() + sum_in_order(whole).float()).bfloat16()
        product = Product(parts[rank].clone(), more[rank])
        got = self.ops.sum_and_norm(x, self.weight, EPS, product, self.ranks)
        assert torch.equal(x, want)
        normed = reference_rms_norm(want, self.weight, EPS)
        torch.testing.assert_close(got, normed, rtol=2.0**-6, atol=2.0**-8)
        self.same_everywhere(got)

    def two_shots(self) -> None:
        """In turns with one shot, on the same places."""
        chosen = PeerRanks._two_shot
        try:
            for turn in range(60):
                PeerRanks._two_shot = lambda *_, turn=turn: turn % 3 != 0
                self.one(100_000 + 100 * turn, ROWS[turn % len(ROWS)], 1 + turn % 3)
        finally:
            PeerRanks._two_shot = chosen

    def replays(self) -> None:
        """A graph of a chain of sums gives the same bits again and again, between others."""
        rows = 17
        y, x = self.parts(7, 32, rows, WIDTH)[self.ranks.rank], self.random(8, rows, WIDTH)
        begin = x.clone()

        def chain() -> Tensor:
            x.copy_(begin)
            for i in range(32):
                out = self.ops.sum_and_norm(x, self.weight, EPS, Product(y[i]), self.ranks)
            return out

        want = chain().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        for turn in range(200):
            if turn % 10 == 0:
                self.one(200_000 + 100 * turn, ROWS[turn // 10 % len(ROWS)], 2)
            graph.replay()
            assert torch.equal(got, want)
        self.same_everywhere(got)

    def rows_alone(self) -> None:
        """A row's bits are the same alone and among others."""
        y, x = self.parts(9, 100, WIDTH)[self.ranks.rank], self.random(10, 100, WIDTH)
        together = self.ops.sum_and_norm(x.clone(), self.weight, EPS, Product(y), self.ranks)
        for t in (0, 1, 50, 99):
            alone = slice(t, t + 1)
            got = self.ops.sum_and_norm(
                x[alone].clone(), self.weight, EPS, Product(y[alone]), self.ranks
            )
            assert torch.equal(got, together[alone])
