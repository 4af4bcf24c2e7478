"""Computes the adapters' part of products of many rows, with work shared by all tiles.

Shapes: as in `weft.kernels.lora.triton_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.lora.triton_ranks import sum_tile
from weft.kernels.lora.triton_tiles import (
    ALIGN,
    TILE_ROWS,
    expand_tile,
    num_blocks_of,
    parts_of,
    read_tile,
    shrink_tile,
    sum_of,
)
from weft.kernels.triton_base import dot

TOGETHER = 4
"""How many tiles of an adapter the shrink takes together, so that A is read once for all."""

SHARES = 48
"""How many shares the shrink of a tile is cut into, for programs to divide."""

_ALIGN = tl.constexpr(ALIGN)
_ROWS = tl.constexpr(TILE_ROWS)


@triton.jit
def share_of(total):
    """[begin, end) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    begin = pid * total // tl.num_programs(0)
    end = (pid + 1) * total // tl.num_programs(0)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _shrink_parts(
    x_at,
    a_at,
    work_at,
    rows,
    r0,
    R,
    each,
    first,
    last,
    x_stride,
    K: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
    RANKS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The same as in `weft.kernels.lora.triton_tiles`, to the bit, for RANKS ranks of TILES tiles.

    It computes A x^T, in which the rows of x are columns: with more than 16 as rows, the compiler
    would choose another matrix instruction.
    """
    STEP: tl.constexpr = PART if PART < 256 else PART // 2
    m = tl.arange(0, TILES * _ROWS)
    r = r0 + tl.arange(0, RANKS)
    acc = tl.full((RANKS, TILES * _ROWS), 0.0, tl.float32)
    part_stride = (R + 15) // 16 * 16
    num_steps: tl.constexpr = (K + PART - 1) // PART * (PART // STEP)
    each *= PART // STEP
    first *= PART // STEP
    last *= PART // STEP
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * STEP + tl.arange(0, STEP)
        a_mask = (r < R)[:, None]
        x_mask = (m < rows)[:, None]
        if K % PART != 0:
            a_mask = a_mask & (k < K)[None, :]
            x_mask = x_mask & (k < K)[None, :]
        a = tl.load(a_at + r[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        x = tl.load(x_at + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=x_mask, other=0.0)
        acc = dot(a, tl.trans(x), acc, EXACT)
        ends = ((step + 1) % each == 0) | (step == num_steps - 1)
        mask = (m < rows)[None, :] & (r < tl.where(ends, R, 0))[:, None]
        tl.store(work_at + step // each * part_stride + r[:, None], acc, mask=mask)
        acc = tl.where(ends, 0.0, acc)


@triton.jit
def _shrink_tiles(
    x_ptr,
    work_ptr,
    arena_ptr,
    tile,
    x_stride,
    begin,
    end,
    shares,
    K: tl.constexpr,
    W: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The same as `shrink_tile`, to the bit, for a tile of no expert and those behind it, TILES
    together. A is read once for all."""
    m = tl.arange(0, TILES * _ROWS)
    num_steps: tl.constexpr = (K + PART - 1) // PART
    _, row, rows, a_offset, ranks, _ = tile
    R = sum_of(ranks)
    each, parts = parts_of(tl.maximum(R, 1), K, W, PART, MAX_PARTS)
    a_at = arena_ptr + tl.multiple_of(a_offset, _ALIGN)
    x_at = x_ptr + row.to(tl.int64) * x_stride
    work_at = work_ptr + (row + m)[None, :].to(tl.int64) * W
    blocks = (R + 31) // 32
    begin = begin * blocks * MAX_PARTS // shares
    end = end * blocks * MAX_PARTS // shares
    for block in range(begin // MAX_PARTS, (end + MAX_PARTS - 1) // MAX_PARTS):
        first = tl.maximum(begin - block * MAX_PARTS, 0) * parts // MAX_PARTS * each
        last = tl.minimum(end - block * MAX_PARTS, MAX_PARTS) * parts // MAX_PARTS * each
        last = tl.minimum(last, num_steps)
        if R - block * 32 > 16:
            _shrink_parts(
                x_at, a_at, work_at, rows, block * 32, R, each, first, last, x_stride, K, PART,
                STAGES, TILES, 32, EXACT,
            )  # fmt: skip
        else:
            _shrink_parts(
                x_at, a_at, work_at, rows, block * 32, R, each, first, last, x_stride, K, PART,
                STAGES, TILES, 16, EXACT,
            )  # fmt: skip


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
    TILES: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """v = x @ A[slot]^T for the rows of all tiles, which are cut into SHARES each; see
    `shrink_tile`. Groups of TILES tiles are taken together if all are of one slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    begin, end = share_of(tl.load(tiles_ptr + 3) * SHARES)
    for i in range(begin // (TILES * SHARES), (end + TILES * SHARES - 1) // (TILES * SHARES)):
        tile = read_tile(
            tiles_ptr + 4 * TILES * i,
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
        first = tl.maximum(begin - TILES * SHARES * i, 0)
        last = tl.minimum(end - TILES * SHARES * i, TILES * SHARES)
        if tile[2] > (TILES - 1) * _ROWS:
            _shrink_tiles(
                x_ptr,
                work_ptr,
                arena_ptr,
                tile,
                x_stride,
                first,
                last,
                TILES * SHARES,
                K,
                W,
                PART,
                MAX_PARTS,
                STAGES,
                TILES,
                EXACT,
            )
            last *= 0  # nothing is left
        for j in range(first // SHARES, (last + SHARES - 1) // SHARES):
            tile = read_tile(
                tiles_ptr + 4 * (TILES * i + j),
                a_offset_ptr,
                b_offset_ptr,
                rank_ptr,
                group,
                first_slice,
                num_groups,
                num_targets,
                NUM_SLICES,
            )
            shrink_tile(
                x_ptr,
                work_ptr,
                arena_ptr,
                tile,
                x_stride,
                tl.maximum(first - j * SHARES, 0),
                tl.minimum(last - j * SHARES, SHARES),
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
