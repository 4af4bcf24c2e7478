"""Ranks over a process group of torch: gloo for CPUs, NCCL for GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.collective.base import Ranks, sum_in_order

MEET_S = 600.0
"""How long ranks wait for each other at the start, and in a sum."""


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


def join_group(rank: int, size: int, folder: str, device: torch.device) -> None:
    """Meet the other ranks in a folder that belongs to them alone, and make this process one of
    torch's default process group. Raises ConfigError if it belongs to another one."""
    if dist.is_initialized():
        message = "--tensor-parallel-size: this process belongs to a process group of torch already"
        raise ConfigError(message, "tensor_parallel_size")
    # All ranks are on this machine, whose name may mean nothing to it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Memory that is mapped for multicast, even unused, can outlive a process that is killed.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=MEET_S),
        device_id=device if on_gpu else None,
    )


def leave_group() -> None:
    """Let go of the other ranks."""
    dist.destroy_process_group()


def least(ranks: Ranks, value: int, device: torch.device) -> int:
    """The least of what the ranks of the group have; the value itself if there is one only."""
    if ranks.size == 1:
        return value
    found = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
