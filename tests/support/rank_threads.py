"""The ranks of a model as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from patience import PATIENCE_S

from weft.kernels.collective.base import Ranks

T = TypeVar("T")
WAIT_S = PATIENCE_S


class _Exchange:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadRanks:
    """`Ranks` of one thread."""

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._gather(x)
        return sum(others, first)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x), -1)

    def barrier(self) -> None:
        self._exchange.barrier.wait(WAIT_S)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._exchange.parts[self.rank] = x
        self.barrier()
        parts = [part.clone() for part in self._exchange.parts]
        self.barrier()
        return parts


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each of `size` ranks makes of the work, side by side."""
    exchange = _Exchange(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, size, exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [done.result() for done in [threads.submit(run, rank) for rank in range(size)]]
