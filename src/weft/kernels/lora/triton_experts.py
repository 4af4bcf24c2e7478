"""Adapters of experts through the kernels of the Triton backend.

The kernels find matrices by slot, in tables. Here every tile of rows of one expert and one adapter
is a slot of its own, in tables made for the tiles of a layer. All of it happens on the device and
with shapes that follow from the number of rows only, so that it can be part of a CUDA graph.

Shapes: T token rows, P pairs of a token and one of its experts, V tiles (at most P), L slices of a
group.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.targets import ALIGN, Group, TargetTable
from weft.kernels.lora.base import AdapterPool
from weft.kernels.lora.triton import SPARE_SHARERS, TritonBackend, TritonStep, _Rows


@dataclass(frozen=True, slots=True)
class _TileTables:
    """What the kernels read of an AdapterPool, by tile, for one group."""

    arena: Tensor
    table: TargetTable
    a_offset_SG: Tensor
    b_offset_SL: Tensor
    rank_SL: Tensor


class TritonExperts:
    """ExpertStep of the Triton backend."""

    def __init__(
        self, backend: TritonBackend, tiles_T4: Tensor, token_P: Tensor, expert_P: Tensor
    ) -> None:
        """`tiles_T4`: of the step's rows, as the kernels read them."""
        size, num_pairs = backend.tuning.blocks.rows, len(token_P)
        slot_P = _slots_of_rows(tiles_T4, size)[token_P]
        tiles_V4, first_V = _tiles(expert_P, slot_P, size)
        self._backend = backend
        self._slot_V, self._expert_V = slot_P[first_V], expert_P[first_V]
        counted = num_pairs > backend.tuning.few_rows
        sharers = min(num_pairs, num_pairs // size + SPARE_SHARERS) if counted else num_pairs
        self._rows = _Rows(tiles_V4, num_pairs, sharers, counted)
        shape = (num_pairs, backend.row_floats)
        self._work = torch.empty(shape, dtype=torch.float32, device=token_P.device)

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        backend = copy.copy(self._backend)
        tables = self._tables(backend.pool, backend.pool.table.groups[group])
        backend.pool = cast(Any, tables)
        step = TritonStep(backend, self._rows, self._rows, self._work)
        step.shrink(x_PI, 0, self._rows)
        step.expand(y_PO, 0, self._rows)

    def _tables(self, pool: AdapterPool, group: Group) -> _TileTables:
        slot_V, expert_V = self._slot_V.clamp(min=0), self._expert_V
        # The slices of a group of experts are all of one size.
        first, out = group.slices[0].slice, group.slices[0].out_features
        slices = slice(first, first + len(group.slices))
        rank_VL = torch.where(self._slot_V[:, None] < 0, 0, pool.rank_SL[slot_V, slices])
        a_size_V = _aligned(rank_VL.sum(1) * group.in_features)
        a_offset_V = pool.a_offset_SG[slot_V, group.index] + expert_V * a_size_V
        b_size_VL = _aligned(rank_VL.long() * out)
        b_offset_VL = pool.b_offset_SL[slot_V, slices] + expert_V[:, None] * b_size_VL
        return _TileTables(pool.arena, _alone(group), a_offset_V[:, None], b_offset_VL, rank_VL)


def _slots_of_rows(tiles_T4: Tensor, size: int) -> Tensor:
    """The slot of each row of a step, int64 (T,), -1 for base rows, from its tiles (slot, first
    row, number of rows, ...) of at most `size` rows."""
    num_rows = len(tiles_T4)
    slot_T1, first_T1, rows_T1 = (tiles_T4[:, i : i + 1].long() for i in range(3))
    nth = torch.arange(size, device=tiles_T4.device)
    row = torch.where(nth < rows_T1, first_T1 + nth, num_rows)
    found = tiles_T4.new_full((num_rows + 1,), -1, dtype=torch.int64)
    found.scatter_(0, row.flatten(), slot_T1.expand_as(row).flatten())
    return found[:num_rows]


def _tiles(expert_P: Tensor, slot_P: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The tiles of pairs that are in order of expert and slot, int32 (P, 4), each naming itself as
    slot; and the first row of each, or any row for those in excess. Rows of the base get tiles
    without rows."""
    place_P = torch.arange(len(expert_P), device=expert_P.device)
    is_new_P = torch.ones_like(expert_P, dtype=torch.bool)
    is_new_P[1:] = (expert_P[1:] != expert_P[:-1]) | (slot_P[1:] != slot_P[:-1])
    start_P = torch.where(is_new_P, place_P, 0).cummax(0).values
    tile_P = ((place_P - start_P) % size == 0).cumsum(0) - 1
    first_V = torch.searchsorted(tile_P, place_P)
    stop_V = torch.searchsorted(tile_P, place_P, right=True)
    row_V = first_V.clamp(max=len(place_P) - 1)
    rows_V = torch.where(slot_P[row_V] < 0, 0, stop_V - first_V)
    num_tiles_V = (tile_P[-1] + 1).expand_as(place_P)
    return torch.stack((place_P, row_V, rows_V, num_tiles_V), 1).int(), row_V


def _aligned(n: Tensor) -> Tensor:
    return (n + (ALIGN - 1)) // ALIGN * ALIGN


def _alone(group: Group) -> TargetTable:
    """A table of this group only."""
    slices = tuple(replace(s, group=0, slice=i) for i, s in enumerate(group.slices))
    return TargetTable((replace(group, index=0, slices=slices),))
