"""The tiles that rows are cut into for the Triton kernels: the host lays out those of a step, the
device those of a mixture's experts.

A tile has consecutive rows of one slot, and of one expert: see `weft.kernels.lora.triton_tiles` for
its four words.

Shapes: T token rows, P pairs of a token and one of its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.lora.base import LoraBatch, Segment
from weft.kernels.lora.triton_tiles import EXPERT, TILE_ROWS
from weft.kernels.staging import Staging

_EXPERT = tl.constexpr(EXPERT)


class TileRows(NamedTuple):
    """The tiles of a step's rows, or of its sampled rows."""

    tiles: Tensor
    """The tiles, int32 (., 4), as many as there are rows."""
    slots: Tensor | None = None
    """The slot of each row, int32, -1 for base rows; None for sampled rows."""


class TileList:
    """The tiles of a step at a fixed place on the device: of its rows, then of its sampled rows.
    Where each begins follows from the numbers of rows."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(0, device)
        self._filled: tuple[tuple[object, ...], tuple[TileRows, TileRows]] | None = None
        """What the tiles that are on the device follow from, and the tiles."""

    def reserve(self, num_tiles: int) -> None:
        """Make room for so many tiles of rows, and as many of sampled rows."""
        self._staging.reserve(9 * num_tiles)
        self._filled = None

    def fill(self, batch: LoraBatch) -> tuple[TileRows, TileRows]:
        """Lay a step's tiles out, ahead of its kernels on the current stream. Those of the step
        before may be the same, and are there already."""
        num_rows = len(batch.slot_T), len(batch.slot_N)
        all_sample = batch.slot_N is batch.slot_T
        of = batch.segments, batch.sampled_segments, *num_rows, all_sample
        if self._filled is not None and self._filled[0] == of:
            return self._filled[1]
        parts = [(batch.segments, len(batch.slot_T))]
        if batch.slot_N is not batch.slot_T:
            parts.append((batch.sampled_segments, len(batch.slot_N)))
        bound = sum(num_rows for _, num_rows in parts)
        num_words = 4 * bound + len(batch.slot_T)
        self._staging.reserve(num_words)
        words = self._staging.begin()[:num_words]
        words[:] = 0
        slots = words[4 * bound :]
        slots[:] = -1
        for slot, start, stop in batch.segments:
            slots[start:stop] = slot
        first = 0
        rows: list[TileRows] = []
        for segments, num_rows in parts:
            place = slice(4 * first, 4 * (first + num_rows))
            rows.append(self._lay_out(segments, words[place], self._staging.device_words[place]))
            first += num_rows
        self._staging.send(len(words))
        tokens = rows[0]._replace(slots=self._staging.device_words[4 * bound : num_words])
        self._filled = of, (tokens, rows[-1])
        return tokens, rows[-1]

    def _lay_out(
        self, segments: tuple[Segment, ...], words: NDArray[np.int32], place: Tensor
    ) -> TileRows:
        """The tiles of as many rows as there is room for."""
        found = [
            (slot, first, stop - first, 0)
            for slot, start, stop in segments
            for first in range(start, stop, TILE_ROWS)
        ]
        if found:
            words[: 4 * len(found)] = np.array(found, np.int32).reshape(-1)
            words[3] = len(found)
        return TileRows(place.view(-1, 4))


@triton.jit
def _owner(token_ptr, expert_ptr, slot_ptr, p, P):
    """Slot and expert of pairs, as tiles have them; -1 for rows of the base, and of no expert."""
    there = (p >= 0) & (p < P)
    slot = tl.load(slot_ptr + tl.load(token_ptr + p, mask=there, other=0), mask=there, other=-1)
    return _owned_by(slot, tl.load(expert_ptr + p, mask=there, other=0).to(tl.int32))


@triton.jit
def _owned_by(slot, expert):
    """The first word of a tile of this slot and expert; -1 if one of them is negative."""
    return tl.where((slot < 0) | (expert < 0), -1, expert * _EXPERT + slot)


@triton.jit
def _mark_tiles(token_ptr, expert_ptr, slot_ptr, starts_ptr, rows_ptr, P, SIZE: tl.constexpr):
    """Cut a window of SIZE pairs where the owner changes: starts int32 (P,) gets 1 where a tile
    begins, and rows int32 (P,) how many pairs it would have."""
    first = tl.program_id(0) * SIZE
    i = tl.arange(0, SIZE)
    p = first + i
    owner = _owner(token_ptr, expert_ptr, slot_ptr, p, P)
    changes = (i == 0) | (owner != _owner(token_ptr, expert_ptr, slot_ptr, p - 1, P))
    later = (i[None, :] > i[:, None]) & changes[None, :]
    end = tl.min(tl.where(later, i[None, :], SIZE), axis=1)
    tl.store(starts_ptr + p, (changes & (owner >= 0)).to(tl.int32), mask=p < P)
    tl.store(rows_ptr + p, tl.minimum(end, P - first) - i, mask=p < P)


@triton.jit
def _lay_out_tiles(
    token_ptr, expert_ptr, slot_ptr, count_ptr, rows_ptr, tiles_ptr, P, SIZE: tl.constexpr
):
    """tiles (P, 4) as the kernels read them; those in excess have no rows. count int32 (P,): how
    many tiles have begun, up to a pair."""
    p = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    count = tl.load(count_ptr + p, mask=p < P, other=0)
    before = tl.load(count_ptr + p - 1, mask=(p < P) & (p > 0), other=0)
    total = tl.load(count_ptr + P - 1)
    begins = (count > before) & (p < P)
    owner = _owner(token_ptr, expert_ptr, slot_ptr, p, P)
    rows = tl.load(rows_ptr + p, mask=begins, other=0)
    _store_tiles(tiles_ptr, p, P, total, begins, before, owner, rows)


@triton.jit
def _store_tiles(tiles_ptr, p, P, total, begins, nth, owner, rows):
    """Store the tiles that begin at some of the pairs p, each as tile number `nth`."""
    zero = tl.zeros_like(p)
    tl.store(tiles_ptr + 4 * p + 2, zero, mask=(p < P) & (p >= total))
    tl.store(tiles_ptr + 4 * p + 3, zero + total, mask=p == 0)
    tile = tiles_ptr + 4 * nth
    tl.store(tile, owner, mask=begins)
    tl.store(tile + 1, p, mask=begins)
    tl.store(tile + 2, rows, mask=begins)


def tiles_of_experts(slot_T: Tensor, token_P: Tensor, expert_P: Tensor) -> Tensor:
    """Lay out the tiles of experts, int32 (P, 4), by kernels whose shapes follow from the number of
    rows only, so that they can be part of a CUDA graph.

    `slot_T` is int32, and the rows of a slot lie together in it. Pairs are in order of expert, and
    those of one expert as their tokens are."""
    num_pairs = len(token_P)
    pairs = (token_P, expert_P, slot_T)
    starts_P, rows_P = expert_P.new_empty((2, num_pairs), dtype=torch.int32)
    tiles_P4 = expert_P.new_empty((num_pairs, 4), dtype=torch.int32)
    grid = (cdiv(num_pairs, TILE_ROWS),)
    _mark_tiles[grid](*pairs, starts_P, rows_P, num_pairs, SIZE=TILE_ROWS)
    count_P = starts_P.cumsum(0, dtype=torch.int32)
    _lay_out_tiles[grid](*pairs, count_P, rows_P, tiles_P4, num_pairs, SIZE=TILE_ROWS)
    return tiles_P4


@triton.jit
def _lay_out_pairs(
    expert_ptr, slot_ptr, tiles_ptr, P, num_experts, TOP_K: tl.constexpr, SIZE: tl.constexpr
):
    """As `_lay_out_tiles`, with a tile for each pair that an adapter changes. One program."""
    p = tl.arange(0, SIZE)
    slot = tl.load(slot_ptr + p // TOP_K, mask=p < P, other=-1)
    expert = tl.load(expert_ptr + p, mask=p < P, other=-1).to(tl.int32)
    owner = _owned_by(slot, tl.where(expert < num_experts, expert, -1))
    begins = (owner >= 0).to(tl.int32)
    nth = tl.cumsum(begins, 0) - 1
    _store_tiles(tiles_ptr, p, P, tl.sum(begins, 0), begins > 0, nth, owner, begins)


def tiles_of_pairs(slot_T: Tensor, expert_TK: Tensor, num_experts: int) -> Tensor:
    """Lay out the tiles of few pairs, int32 (P, 4), in the order token * K + rank. Their shape
    follows from the number of rows only; `slot_T` is int32."""
    num_pairs, top_k = expert_TK.numel(), expert_TK.shape[1]
    tiles_P4 = expert_TK.new_empty((num_pairs, 4), dtype=torch.int32)
    _lay_out_pairs[1,](
        expert_TK, slot_T, tiles_P4, num_pairs, num_experts, top_k, next_power_of_2(num_pairs)
    )
    return tiles_P4
