"""The protocol of exchanges between ranks: sums and gathers.

A model may be spread over several devices, each of which is a *rank* and computes a share of
every layer. A rank's share of a layer's output is a partial sum, or some of the columns. The
operations here make the whole output on every rank, with the same bits.

Shapes: T rows, n columns of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """One rank's view of all of them. Every rank calls the same operations in the same order, with
    tensors of the same shape. Operations are queued on the current stream, and can be captured in
    CUDA graphs."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 on."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def sum(self, x_Tn: Tensor) -> Tensor:
        """The sum of `x` over all ranks, with the same bits on each of them. Ranks are added in a
        fixed order, so that a row's bits do not depend on how many rows there are. `x` may be
        overwritten, and the result may be `x`."""

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        """The columns of all ranks side by side, in the order of the ranks: (T, n * size)."""

    def barrier(self) -> None:
        """Wait on the host until all ranks have come here."""

    def abandon(self, is_over: Callable[[], bool]) -> None:
        """Call it, on another thread, when the other ranks are gone: until `is_over`, operations
        that wait for them end. Their results mean nothing."""


class Alone:
    """The only rank, with all of the model: its operations return what they are given."""

    rank = 0
    size = 1

    def sum(self, x_Tn: Tensor) -> Tensor:
        return x_Tn

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        return x_Tn

    def barrier(self) -> None:
        return

    def abandon(self, is_over: Callable[[], bool]) -> None:
        return


ALONE = Alone()


class Solo:
    """One of several ranks, computing by itself without waiting for the others. Its sums have only
    its own part, and its columns are repeated for the others': results have the right shape, but
    wrong values. This does for the check of adapters, which compares single layers."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size

    def sum(self, x_Tn: Tensor) -> Tensor:
        return x_Tn

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        return torch.cat([x_Tn] * self.size, -1)

    def barrier(self) -> None:
        return

    def abandon(self, is_over: Callable[[], bool]) -> None:
        return


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The result that `Ranks.sum` must have: the sum of all ranks' tensors in fp32, in the order of
    the ranks, rounded once."""
    first, *others = parts
    total = first.float()
    for other in others:
        total = total + other.float()
    return total.to(first.dtype)
