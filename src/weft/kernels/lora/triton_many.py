"""Computes the adapters' part of products of many rows, with work shared by all tiles.

Shapes: as in `weft.kernels.lora.triton_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.lora.triton_ranks import sum_tile
from weft.kernels.lora.triton_tiles import expand_tile, num_blocks_of, read_tile, shrink_tile

SHARES = 48
"""How many shares the shrink of a tile is cut into, for programs to divide."""


@triton.jit
def share_of(total):
    """[begin, end) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    begin = pid * total // tl.num_programs(0)
    end = (pid + 1) * total // tl.num_programs(0)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit(do_not_specialize=["group", "first_slice", "num_groups", "num_targets"])
def shrink_rows(
    x_ptr,
    work_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    group,
    first_slice,
    x_stride,
    num_groups,
    num_targets,
    K: tl.constexpr,
    W: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SHARES: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """v = x @ A[slot]^T for the rows of all tiles, which are cut into SHARES each; see
    `shrink_tile`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(tiles_ptr + 3) * SHARES
    begin, end = share_of(total)
    for i in range(begin // SHARES, (end + SHARES - 1) // SHARES):
        tile = read_tile(
            tiles_ptr + 4 * i,
            a_offset_ptr,
            b_offset_ptr,
            rank_ptr,
            group,
            first_slice,
            num_groups,
            num_targets,
            NUM_SLICES,
        )
        if PDL:  # tables are read before
            tl.extra.cuda.gdc_wait()
        shrink_tile(
            x_ptr,
            work_ptr,
            arena_ptr,
            tile,
            x_stride,
            tl.maximum(begin - i * SHARES, 0),
            tl.minimum(end - i * SHARES, SHARES),
            SHARES,
            K,
            W,
            PART,
            MAX_PARTS,
            STAGES,
            EXACT,
        )
    if PDL:  # those without a share too: whoever waits for this kernel waits for those ahead
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["group", "first_slice", "num_groups", "num_targets"])
def expand_rows(
    y_ptr,
    work_ptr,
    ids_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    group,
    first_slice,
    y_stride,
    num_groups,
    num_targets,
    WIDTHS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, slice] += v[t, ranks of slice] @ B[slot, slice]^T for the rows of all tiles; see
    `expand_tile`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = num_blocks_of(WIDTHS, BLOCK_N)
    total = tl.load(tiles_ptr + 3) * num_blocks
    begin, end = share_of(total)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(begin // num_blocks, (end + num_blocks - 1) // num_blocks):
        tile = read_tile(
            tiles_ptr + 4 * i,
            a_offset_ptr,
            b_offset_ptr,
            rank_ptr,
            group,
            first_slice,
            num_groups,
            num_targets,
            len(WIDTHS),
        )
        expand_tile(
            y_ptr,
            work_ptr,
            ids_ptr,
            arena_ptr,
            tile,
            y_stride,
            begin - i * num_blocks,
            end - i * num_blocks,
            WIDTHS,
            K,
            W,
            BLOCK_N,
            PART,
            MAX_PARTS,
            STAGES,
            True,
            GATHER,
            WHOLE,
            EXACT,
        )


@triton.jit(do_not_specialize=["group", "first_slice", "num_groups", "num_targets", "first"])
def sum_v(
    work_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    inbox_ptrs,
    uses_ptr,
    group,
    first_slice,
    num_groups,
    num_targets,
    first,
    K: tl.constexpr,
    W: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """v = its sum over ranks, for the rows [first, first + ROWS) of all tiles; see `sum_tile`. All
    programs run at once, and go through tiles in rising order, so that ranks can't wait for each
    other for ever."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in range(tl.program_id(0), tl.load(tiles_ptr + 3), tl.num_programs(0)):
        tile = read_tile(
            tiles_ptr + 4 * i,
            a_offset_ptr,
            b_offset_ptr,
            rank_ptr,
            group,
            first_slice,
            num_groups,
            num_targets,
            NUM_SLICES,
        )
        sum_tile(
            work_ptr, tile, inbox_ptrs, uses_ptr, first, K, W, PART, MAX_PARTS, ROWS, RANK, SIZE
        )
