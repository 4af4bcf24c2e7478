"""Ranks over a process group of torch: gloo for CPUs and what the host exchanges, NCCL for GPUs.

NCCL connects when it is first used. It is never used where GPUs reach each other's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import ConfigError, EngineDead
from weft.kernels.collective.base import Ranks, sum_in_order

MEET_S = 60.0
"""How long ranks wait for each other when they join the group."""
SUM_S = 600.0
"""How long operations wait for other ranks, such as for one that still loads its weights."""


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
        dist.all_reduce(torch.zeros(1))  # `dist.barrier` may choose NCCL

    def abandon(self, is_over: Callable[[], bool]) -> None:
        """Operations over sockets fail by themselves, those of NCCL after some time."""

    def _gather(self, x_Tn: Tensor) -> list[Tensor]:
        x_Tn = x_Tn.contiguous()
        parts = [torch.empty_like(x_Tn) for _ in range(self.size)]
        dist.all_gather(parts, x_Tn)
        return parts


def join_group(rank: int, size: int, folder: str, device: torch.device) -> None:
    """Meet the other ranks in a folder that belongs to them alone, and make this process one of
    torch's default process group. Raises ConfigError if it belongs to another one, and EngineDead
    if they do not come."""
    if dist.is_initialized():
        message = "--tensor-parallel-size: this process belongs to a process group of torch already"
        raise ConfigError(message, "tensor_parallel_size")
    # All ranks are on this machine, which may not be able to resolve its own name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Memory that is mapped for multicast, even unused, can outlive a process that is killed.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    store.set(f"rank {rank}", "is here")
    try:
        store.wait([f"rank {other}" for other in range(size)], timedelta(seconds=MEET_S))
    except RuntimeError as error:
        raise EngineDead(f"the ranks have not met within {MEET_S:.0f} s") from error
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SUM_S),
    )


def leave_group() -> None:
    """Leave torch's default process group."""
    dist.destroy_process_group()


def least(ranks: Ranks, value: int) -> int:
    """The least `value` of all ranks of the group; with one rank, the value itself."""
    if ranks.size == 1:
        return value
    found = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
