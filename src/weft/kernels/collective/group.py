"""Ranks over a process group of torch: gloo for CPUs, NCCL for GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels.collective.base import sum_in_order


class GroupRanks:
    """`Ranks` over the default process group, in which this process is one rank."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x_Tn: Tensor) -> Tensor:
        """On a CPU, ranks are added in their order."""
        if x_Tn.is_cuda:
            dist.all_reduce(x_Tn)
            return x_Tn
        return sum_in_order(self._gather(x_Tn))

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        return torch.cat(self._gather(x_Tn), -1)

    def barrier(self) -> None:
        dist.barrier()

    def _gather(self, x_Tn: Tensor) -> list[Tensor]:
        x_Tn = x_Tn.contiguous()
        parts = [torch.empty_like(x_Tn) for _ in range(self.size)]
        dist.all_gather(parts, x_Tn)
        return parts
