"""Ranks on GPUs that write to each other's memory.

Shapes: T token rows, n columns of one rank, I hidden size, S ranks, R rows of an inbox.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import ConfigError
from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.collective.base import Ranks
from weft.kernels.collective.triton_sums import gather_pieces, sum_rows
from weft.kernels.triton_base import launch_options, processors, starts_early

INBOX_BYTES = 64 << 20
"""The most bytes of a rank's inbox. Sums with more rows than fit into it take several launches."""
MAX_ROWS = 1024
"""The most rows of one launch."""
PIECE = 4096
"""The most columns of a piece of a row that is gathered."""
REFILL_S = 1e-3
"""How long to wait between two fillings of the inbox when the other ranks are gone."""
WORTH_A_SHOT = 512 << 10
"""How many bytes a second shot must save each rank from sending, as it takes as long as these."""


_meetings = itertools.count()
"""Torch matches ranks by how often each process has exchanged memory. So a process that has done it
before would wait for ever for ranks that have just started."""


@dataclass(frozen=True, slots=True)
class Inboxes:
    """All ranks' inboxes, as mapped by one of them; see `weft.kernels.collective.triton_sums`."""

    inbox_S: tuple[Tensor, ...]
    """The memory of each inbox, 1-D, int8."""
    address_S: Tensor
    """The addresses of the inboxes, int64, on this rank's device."""
    uses_R: Tensor
    """int32, how often each row was used."""
    row_bytes: int
    """The most bytes of a row."""
    mapping: object
    """An object that keeps the other ranks' memory mapped."""

    @classmethod
    def over(
        cls,
        inbox_S: tuple[Tensor, ...],
        row_bytes: int,
        device: torch.device,
        mapping: object = None,
    ) -> Inboxes:
        """Inboxes over empty memory of `bytes_of` bytes each."""
        addresses = [inbox.data_ptr() for inbox in inbox_S]
        address_S = torch.tensor(addresses, dtype=torch.int64, device=device)
        num_rows = _num_rows(len(inbox_S), row_bytes)
        uses_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(inbox_S, address_S, uses_R, row_bytes, mapping)

    @staticmethod
    def bytes_of(size: int, row_bytes: int) -> int:
        """How many bytes one of `size` inboxes has."""
        return 2 * size * _num_rows(size, row_bytes) * row_bytes


def _num_rows(size: int, row_bytes: int) -> int:
    return max(1, min(MAX_ROWS, INBOX_BYTES // (2 * size * row_bytes)))


def can_connect(size: int) -> bool:
    """Whether the first `size` GPUs of this machine can write to each other's memory."""
    return all(
        torch.cuda.can_device_access_peer(a, b) for a in range(size) for b in range(size) if a != b
    )


def connect(group: Ranks, row_bytes: int, device: torch.device) -> PeerRanks:
    """The ranks of torch's default process group, for sums with rows of at most `row_bytes`. All
    ranks must call it, each with its own device. Raises ConfigError the second time."""
    # Memory that is mapped for multicast, even unused, can outlive a process that is killed.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if next(_meetings):
        message = "a process can spread a model over GPUs only once: start another process"
        raise ConfigError(f"--tensor-parallel-size: {message}", "tensor_parallel_size")
    return PeerRanks(group, open_inboxes(group, row_bytes, device))


def open_inboxes(group: Ranks, row_bytes: int, device: torch.device) -> Inboxes:
    """Make the inboxes of all ranks of torch's default process group, for rows of at most
    `row_bytes`. All ranks must call it, each with its own device."""
    from torch.distributed import _symmetric_memory as symmetric

    size = Inboxes.bytes_of(group.size, row_bytes)
    # `symmetric.empty` would first import sympy, for a second or more.
    own = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.int8, device).fill_(-1)
    handle = symmetric.rendezvous(own, dist.group.WORLD)
    inboxes = [handle.get_buffer(i, own.shape, own.dtype) for i in range(group.size)]
    inboxes[group.rank] = own  # the others do not own their memory
    torch.cuda.synchronize(device)
    group.barrier()  # nobody writes to an inbox that is not empty yet
    return Inboxes.over(tuple(inboxes), row_bytes, device, handle)


class PeerRanks:
    """`Ranks` whose sums and gathers of floating-point numbers go through inboxes. Sums of rows
    that are too long for these, and all of other numbers, go through `group`."""

    def __init__(self, group: Ranks, inboxes: Inboxes) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._inboxes = inboxes
        self._more: list[Inboxes] = []
        device = inboxes.address_S.device
        self._programs = processors(device)
        self._options = launch_options(starts_early(device))

    def sum(self, x_Tn: Tensor) -> Tensor:
        too_wide = x_Tn.shape[1] * x_Tn.itemsize > self._inboxes.row_bytes
        if too_wide or not x_Tn.is_floating_point():
            return self._group.sum(x_Tn)
        x_Tn = x_Tn.contiguous()
        self._sum(x_Tn, None, x_Tn, None, x_Tn)
        return x_Tn

    def sum_and_norm(
        self,
        x_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        y_TI: Tensor,
        pending: tuple[Tensor, Tensor] | None,
        y_scale: float = 1.0,
    ) -> Tensor:
        """Add to x, in place, the sum of y over ranks times `y_scale`, and norm x. `pending` holds
        the fields of the `weft.kernels.ops.Pending` of this rank's y, which is added before the
        sum."""
        out_TI = torch.empty_like(x_TI)
        self._sum(y_TI, pending, x_TI, weight_I, out_TI, eps, y_scale)
        return out_TI

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        if not x_Tn.is_floating_point():
            return self._group.gather_columns(x_Tn)
        num_rows, width = x_Tn.shape
        out_Tn = x_Tn.new_empty(num_rows, self.size * width)
        room = self._inboxes.row_bytes // x_Tn.itemsize
        piece = min(1 << (room.bit_length() - 1), PIECE, next_power_of_2(width))
        total = num_rows * cdiv(width, piece)
        for first in range(0, total, self._num_rows):
            num_pieces = min(self._num_rows, total - first)
            gather_pieces[min(num_pieces, self._programs),](
                x_Tn.contiguous(),
                out_Tn,
                self._inboxes.address_S,
                self._inboxes.uses_R,
                first,
                num_pieces,
                width,
                BLOCK=piece,
                ROW=room,
                ROWS=self._num_rows,
                RANK=self.rank,
                SIZE=self.size,
                num_warps=min(max(piece // 256, 1), 8),
                **self._options,
            )
        return out_Tn

    def barrier(self) -> None:
        self._group.barrier()

    def abandon(self, is_over: Callable[[], bool]) -> None:
        """Fill this rank's inboxes with zeros, again and again, as kernels empty them."""
        stream = torch.cuda.Stream(self._inboxes.address_S.device)  # type: ignore[no-untyped-call]
        while not is_over():
            # A CUDA graph that is being captured meanwhile forbids this, and fails.
            with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
                for inboxes in (self._inboxes, *self._more):
                    inboxes.inbox_S[self.rank].zero_()
                stream.synchronize()
            time.sleep(REFILL_S)

    def more_inboxes(self, row_bytes: int) -> Inboxes:
        """Inboxes for kernels that sum on their own. All ranks call it."""
        made = open_inboxes(self._group, row_bytes, self._inboxes.address_S.device)
        self._more.append(made)
        return made

    @property
    def _num_rows(self) -> int:
        return len(self._inboxes.uses_R)

    def _sum(
        self,
        y_TI: Tensor,
        pending: tuple[Tensor, Tensor] | None,
        x_TI: Tensor,
        weight_I: Tensor | None,
        out_TI: Tensor,
        eps: float = 0.0,
        y_scale: float = 1.0,
    ) -> None:
        """Launch `sum_rows`, for as many rows at a time as fit into the inboxes."""
        add_TI, slot_T = (y_TI, y_TI) if pending is None else pending
        width = y_TI.shape[1]
        block = next_power_of_2(width)
        for start in range(0, len(y_TI), self._num_rows):
            rows = slice(start, start + self._num_rows)
            y_RI = y_TI[rows]
            sum_rows[min(len(y_RI), self._programs),](
                y_RI,
                x_TI[rows],
                y_RI if weight_I is None else weight_I,
                out_TI[rows],
                add_TI[rows],
                slot_T[rows],
                self._inboxes.address_S,
                self._inboxes.uses_R,
                len(y_RI),
                eps,
                y_scale,
                WIDTH=width,
                BLOCK=block,
                ROW=self._inboxes.row_bytes // y_TI.itemsize,
                ROWS=self._num_rows,
                RANK=self.rank,
                SIZE=self.size,
                TWO_SHOT=self._two_shot(y_RI.nbytes),
                NORM=weight_I is not None,
                PENDING=pending is not None,
                num_warps=min(max(block // 256, 1), 16),
                **self._options,
            )

    def _two_shot(self, num_bytes: int) -> bool:
        """Whether two shots are faster for `num_bytes` of each rank. In one shot, a rank sends all
        bytes to every other rank; in two, it twice sends a share of them to every other rank."""
        saved = num_bytes * (self.size - 1) * (self.size - 2) // self.size
        return saved > WORTH_A_SHOT
