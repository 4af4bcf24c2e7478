"""Finds the tiles of a mixture's experts, each of which belongs to one expert and one adapter.

All of it happens on the device and with shapes that follow from the number of rows only, so that it
can be part of a CUDA graph.

Shapes: T token rows, P pairs of a token and one of its experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.lora.triton_tiles import EXPERT, TILE_ROWS

_EXPERT = tl.constexpr(EXPERT)


@triton.jit
def _owner(token_ptr, expert_ptr, slot_ptr, p, P):
    """Slot and expert of pairs, as tiles have them; -1 for rows of the base."""
    there = (p >= 0) & (p < P)
    slot = tl.load(slot_ptr + tl.load(token_ptr + p, mask=there, other=0), mask=there, other=-1)
    expert = tl.load(expert_ptr + p, mask=there, other=0).to(tl.int32)
    return tl.where(slot < 0, -1, expert * _EXPERT + slot)


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
    zero = tl.zeros_like(count)
    tl.store(tiles_ptr + 4 * p + 2, zero, mask=(p < P) & (p >= total))
    tl.store(tiles_ptr + 4 * p + 3, zero + total, mask=p == 0)
    begins = (count > before) & (p < P)
    tile = tiles_ptr + 4 * before
    tl.store(tile, _owner(token_ptr, expert_ptr, slot_ptr, p, P), mask=begins)
    tl.store(tile + 1, p, mask=begins)
    tl.store(tile + 2, tl.load(rows_ptr + p, mask=begins, other=0), mask=begins)


def tiles_of_experts(slot_T: Tensor, token_P: Tensor, expert_P: Tensor) -> Tensor:
    """Lay out the tiles, int32 (P, 4), as `triton_tiles` has them. `slot_T` is int32, and the rows
    of a slot lie together in it. Pairs are in order of expert, and those of one expert as their
    tokens are."""
    num_pairs = len(token_P)
    pairs = (token_P, expert_P, slot_T)
    starts_P, rows_P = expert_P.new_empty((2, num_pairs), dtype=torch.int32)
    tiles_P4 = expert_P.new_empty((num_pairs, 4), dtype=torch.int32)
    grid = (triton.cdiv(num_pairs, TILE_ROWS),)
    _mark_tiles[grid](*pairs, starts_P, rows_P, num_pairs, SIZE=TILE_ROWS)
    count_P = starts_P.cumsum(0, dtype=torch.int32)
    _lay_out_tiles[grid](*pairs, count_P, rows_P, tiles_P4, num_pairs, SIZE=TILE_ROWS)
    return tiles_P4
