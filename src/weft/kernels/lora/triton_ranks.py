"""Sums v = x A^T over ranks, each of which has computed it from its share of x.

Shapes: as in `weft.kernels.lora.triton_tiles`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.collective.peers import Inboxes
from weft.kernels.collective.triton_sums import bits_of, inboxes_of, sum_taken
from weft.kernels.lora.triton_tiles import TILE_ROWS, parts_of, sum_of, sum_parts

_ROWS = tl.constexpr(TILE_ROWS)
_SUM_RANKS = tl.constexpr(64)


ALONE = {"ROWS": 1, "RANK": 0, "SIZE": 1}


class RankExchange(NamedTuple):
    """Where ranks sum v; see `sum_tile`."""

    inboxes: Inboxes
    """For rows as long as those of the workspace."""
    rank: int

    @property
    def num_rows(self) -> int:
        return len(self.inboxes.uses_R)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.inboxes.address_S, self.inboxes.uses_R

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.num_rows, "RANK": self.rank, "SIZE": len(self.inboxes.inbox_S)}


@triton.jit
def sum_tile(
    work_ptr,
    tile,
    inbox_ptrs,
    uses_ptr,
    first,
    K: tl.constexpr,
    W: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """v of those of a tile's rows that are among [first, first + ROWS) = its sum over ranks, in
    place of the first of its parts.

    Each rank has computed v of its share of x. Rows go through inboxes with places of W floats, as
    those of `weft.kernels.collective.triton_sums.sum_rows` do.
    """
    m = tl.arange(0, _ROWS)
    t = tile[1] + m
    rows = tile[2]
    there = (m < rows) & (t >= first) & (t < first + ROWS)
    R = sum_of(tile[4])
    if R > 0:
        inboxes = inboxes_of(inbox_ptrs, tl.int32, SIZE)
        _, parts = parts_of(R, K, W, PART, MAX_PARTS)
        v_at = work_ptr + t[:, None].to(tl.int64) * W
        uses = tl.load(uses_ptr + t - first, mask=there, other=0)
        place = ((uses & 1) * (SIZE * ROWS) + t - first) * W
        for r0 in range(0, R, _SUM_RANKS):
            r = r0 + tl.arange(0, _SUM_RANKS)
            mask = there[:, None] & (r < R)[None, :]
            stride = (R + 15) // 16 * 16
            v = sum_parts(v_at, rows, r0, R, parts, stride, _SUM_RANKS, False)
            own = bits_of(v, tl.int32)
            places = place[:, None] + r[None, :]
            for other in tl.static_range(SIZE):
                if other != RANK:
                    tl.store(inboxes[other] + places + RANK * ROWS * W, own, mask=mask)
            total = sum_taken(own, inboxes[RANK], places, ROWS * W, mask, RANK, SIZE, tl.float32)
            tl.store(v_at + r[None, :], total, mask=mask)
        tl.store(uses_ptr + t - first, uses + 1, mask=there)
