"""What adapters add to the rows of one tile: functions of the kernels beside a product of few rows
(`weft.kernels.lora.triton_beside`) and of those for many (`weft.kernels.lora.triton`).

Shapes: T token rows, K inputs and O outputs of a group, S slots, G groups, L slices of the model,
R the summed ranks of a group's slices in one adapter, W floats of workspace a row.

A tile has consecutive rows of one slot, at most TILE_ROWS. It is four int32: its slot and expert
(see EXPERT), its first row, the number of rows from there on that belong to the slot, in this tile
and those behind it, and, in the first tile, how many tiles there are. `work` is fp32 (T, W), row t
holding v[t] as (parts, R rounded up to 16), `a_offset` int64 (S, G), `b_offset` int64 and `rank`
int32 (S, L).

How sums are cut is decided here alone, so that v and delta have the same bits whatever kernel
they come from and whatever else is in a batch (but for `weft.kernels.lora.gluon_activate`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.core.targets import ALIGN
from weft.kernels.triton_base import dot

EXPERT = 1 << 16
"""What an expert's number is multiplied by: a tile's first word is its slot, plus this times its
expert where a group has experts."""

TILE_ROWS = 16
"""The most rows of a tile. From 64 on, Hopper would use another matrix instruction."""

_ALIGN = tl.constexpr(ALIGN)
_ROWS = tl.constexpr(TILE_ROWS)
_EXPERT = tl.constexpr(EXPERT)


@triton.jit
def parts_of(R, K, W, PART: tl.constexpr, MAX_PARTS: tl.constexpr):
    """(steps of PART in a part of K, number of parts) for an adapter of R ranks."""
    steps = (K + PART - 1) // PART
    wanted = tl.minimum(tl.minimum(steps, MAX_PARTS), W // ((R + 15) // 16 * 16))
    each = (steps + wanted - 1) // wanted
    return each, (steps + each - 1) // each


@triton.jit
def sum_parts(v_at, rows, r0, rank, parts, part_stride, BLOCK_R: tl.constexpr, WHOLE: tl.constexpr):
    """Ranks [r0, r0 + BLOCK_R) of v: its parts in their order, fp32 (_ROWS, BLOCK_R)."""
    m = tl.arange(0, _ROWS)
    r = r0 + tl.arange(0, BLOCK_R)
    if WHOLE:
        mask = (m < rows)[:, None] & (r < rank)[None, :]
        return tl.load(v_at + r[None, :], mask=mask, other=0.0).to(tl.float32)
    v = tl.full((_ROWS, BLOCK_R), 0.0, tl.float32)
    for p0 in range(0, parts, 8):
        for j in tl.static_range(8):  # unrolled: eight loads in flight
            limit = tl.where(parts > p0 + j, rank, 0)
            v += tl.load(
                v_at + (p0 + j) * part_stride + r[None, :],
                mask=(m < rows)[:, None] & (r < limit)[None, :],
                other=0.0,
            )
    return v


@triton.jit
def _times_b(acc, v, b, EXACT: tl.constexpr):
    """acc + v @ b^T; v is fp32 and enters as the sum of two numbers of b's dtype."""
    if EXACT:
        acc = dot(v, tl.trans(b), acc, EXACT)
    else:
        high = v.to(b.dtype)
        low = (v - high.to(tl.float32)).to(b.dtype)
        acc = dot(low, tl.trans(b), acc, EXACT)
        acc = dot(high, tl.trans(b), acc, EXACT)
    return acc


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
    EXACT: tl.constexpr,
):
    """Ranks [r0, r0 + 16) of x (rows, K) @ A^T, over steps [first, last) of K, of which `each`
    are a part."""
    m = tl.arange(0, _ROWS)
    r = r0 + tl.arange(0, 16)
    acc = tl.full((_ROWS, 16), 0.0, tl.float32)
    part_stride = (R + 15) // 16 * 16
    num_steps: tl.constexpr = (K + PART - 1) // PART
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * PART + tl.arange(0, PART)
        a_mask = (r < R)[:, None]
        x_mask = (m < rows)[:, None]
        if K % PART != 0:
            a_mask = a_mask & (k < K)[None, :]
            x_mask = x_mask & (k < K)[None, :]
        a = tl.load(a_at + r[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        x = tl.load(x_at + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=x_mask, other=0.0)
        acc = dot(x, tl.trans(a), acc, EXACT)
        ends = ((step + 1) % each == 0) | (step == num_steps - 1)
        mask = (m < rows)[:, None] & (r < tl.where(ends, R, 0))[None, :]
        tl.store(work_at + step // each * part_stride + r[None, :], acc, mask=mask)
        acc = tl.where(ends, 0.0, acc)


@triton.jit
def read_tile(
    tile_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    group,
    first_slice,
    num_groups,
    num_targets,
    NUM_SLICES: tl.constexpr,
):
    """What the tables say of a tile, as the functions below take it: (expert, first row, number of
    rows in this tile and those behind it, offset of A, ranks by slice, offsets of B by slice)."""
    slot_and_expert = tl.load(tile_ptr)
    slot = slot_and_expert % _EXPERT
    a_offset = tl.load(a_offset_ptr + slot * num_groups + group)
    at = slot * num_targets + first_slice
    ranks = (tl.load(rank_ptr + at),)
    b_offsets = (tl.load(b_offset_ptr + at),)
    for j in tl.static_range(1, NUM_SLICES):
        ranks = ranks + (tl.load(rank_ptr + at + j),)  # noqa: RUF005 - for the compiler
        b_offsets = b_offsets + (tl.load(b_offset_ptr + at + j),)  # noqa: RUF005
    rows = tl.load(tile_ptr + 2)
    return slot_and_expert // _EXPERT, tl.load(tile_ptr + 1), rows, a_offset, ranks, b_offsets


@triton.jit
def sum_of(ranks):
    R = ranks[0]
    for j in tl.static_range(1, len(ranks)):
        R += ranks[j]
    return R


@triton.jit
def _aligned(n):
    return (n.to(tl.int64) + (_ALIGN - 1)) // _ALIGN * _ALIGN


@triton.jit
def num_blocks_of(WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of columns of all slices."""
    num = 0
    for j in tl.static_range(len(WIDTHS)):
        num += (WIDTHS[j] + BLOCK_N - 1) // BLOCK_N
    return num


@triton.jit
def shrink_tile(
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
    EXACT: tl.constexpr,
):
    """v = x A^T of a tile's rows: shares [begin, end) of its blocks of ranks and their parts.

    x (T, K) with unit stride along K. Who calls this has waited for x: not in the loops here, which
    are pipelined, so that they would ask for x before.
    """
    m = tl.arange(0, _ROWS)
    num_steps: tl.constexpr = (K + PART - 1) // PART
    expert, row, rows, a_offset, ranks, _ = tile
    R = sum_of(ranks)
    if R > 0:
        a_offset = tl.multiple_of(a_offset + expert * _aligned(R * K), _ALIGN)
        each, parts = parts_of(R, K, W, PART, MAX_PARTS)
        total = (R + 15) // 16 * MAX_PARTS
        begin = begin * total // shares
        end = end * total // shares
        for block in range(begin // MAX_PARTS, (end + MAX_PARTS - 1) // MAX_PARTS):
            first = tl.maximum(begin - block * MAX_PARTS, 0) * parts // MAX_PARTS * each
            last = tl.minimum(end - block * MAX_PARTS, MAX_PARTS) * parts // MAX_PARTS * each
            _shrink_parts(
                x_ptr + row.to(tl.int64) * x_stride,
                arena_ptr + a_offset,
                work_ptr + (row + m)[:, None].to(tl.int64) * W,
                rows,
                block * 16,
                R,
                each,
                first,
                tl.minimum(last, num_steps),
                x_stride,
                K,
                PART,
                STAGES,
                EXACT,
            )


@triton.jit
def _put(y_at, mask, delta, ADD: tl.constexpr):
    """Write delta, or with ADD its sum with what is there."""
    if ADD:
        y = tl.load(y_at, mask=mask, other=0.0)
        tl.store(y_at, (y.to(tl.float32) + delta).to(y.dtype), mask=mask)
    else:
        tl.store(y_at, delta.to(y_at.dtype.element_ty), mask=mask)


@triton.jit
def _expand_columns(
    y_at,
    v_at,
    b_at,
    rows,
    rank,
    first,
    last,
    parts,
    part_stride,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Columns [first, last) of y (rows, .) = (sum of the parts of v) (rows, rank) @ B^T; with ADD,
    += in place of =.

    `y_at` and `v_at` point to the first column of each of _ROWS rows.
    """
    m = tl.arange(0, _ROWS)
    n = tl.arange(0, BLOCK_N)
    r = tl.arange(0, 16)
    if rank <= 16:
        v = sum_parts(v_at, rows, 0, rank, parts, part_stride, 16, WHOLE)
        for n0 in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            there = n0 + n < last
            b = tl.load(
                b_at + (n0 + n)[:, None] * rank + r[None, :],
                mask=there[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            acc = tl.full((_ROWS, BLOCK_N), 0.0, tl.float32)
            acc = _times_b(acc, v, b, EXACT)
            _put(y_at + (n0 + n)[None, :], (m < rows)[:, None] & there[None, :], acc, ADD)
    else:
        for n0 in range(first, last, BLOCK_N):
            there = n0 + n < last
            acc = tl.full((_ROWS, BLOCK_N), 0.0, tl.float32)
            for r0 in range(0, rank, 16):
                b = tl.load(
                    b_at + (n0 + n)[:, None] * rank + (r0 + r)[None, :],
                    mask=there[:, None] & (r0 + r < rank)[None, :],
                    other=0.0,
                )
                v = sum_parts(v_at, rows, r0, rank, parts, part_stride, 16, WHOLE)
                acc = _times_b(acc, v, b, EXACT)
            _put(y_at + (n0 + n)[None, :], (m < rows)[:, None] & there[None, :], acc, ADD)


@triton.jit
def expand_tile(
    y_ptr,
    work_ptr,
    ids_ptr,
    arena_ptr,
    tile,
    y_stride,
    begin,
    end,
    WIDTHS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    GATHER: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """delta = v B^T of a tile's rows: blocks [begin, end) of the columns of all slices.

    y (T, O) with unit stride along O gets delta, or with ADD has it added. GATHER: v[t] is row
    ids[t] (int64) of A (K, R), not in the workspace. WHOLE: v is there as one part.
    """
    m = tl.arange(0, _ROWS)
    n = tl.arange(0, BLOCK_N)
    expert, row, rows, a_offset, ranks, b_offsets = tile
    R = sum_of(ranks)
    t = (row + m)[:, None].to(tl.int64)
    parts = 1
    if GATHER:
        ids = tl.load(ids_ptr + t, mask=(m < rows)[:, None], other=0)
        v_at = arena_ptr + a_offset + ids * R
    else:
        v_at = work_ptr + t * W
        if R > 0 and not WHOLE:
            _, parts = parts_of(R, K, W, PART, MAX_PARTS)
    part_stride = (R + 15) // 16 * 16
    y_at = y_ptr + t * y_stride
    for of in range(len(WIDTHS)):  # unrolled, it would take as many times as long to compile
        width = WIDTHS[0]
        rank = ranks[0]
        b_offset = b_offsets[0]
        for s in tl.static_range(1, len(WIDTHS)):
            width = tl.where(of == s, WIDTHS[s], width)
            rank = tl.where(of == s, ranks[s], rank)
            b_offset = tl.where(of == s, b_offsets[s], b_offset)
        blocks = (width + BLOCK_N - 1) // BLOCK_N
        first = tl.maximum(begin, 0) * BLOCK_N
        last = tl.minimum(tl.minimum(end, blocks) * BLOCK_N, width)
        if first < last:
            b_offset += expert * _aligned(rank * width)
            b_at = arena_ptr + tl.multiple_of(b_offset, _ALIGN)
            if rank == 0:
                if not ADD:
                    for n0 in range(first, last, BLOCK_N):  # -0 changes no bit of what it meets
                        mask = (m < rows)[:, None] & (n0 + n < last)[None, :]
                        nothing = tl.full((_ROWS, BLOCK_N), -0.0, tl.float32)
                        _put(y_at + (n0 + n)[None, :], mask, nothing, ADD)
            elif rank % 8 == 0:  # rows of B are wide loads when that is known
                _expand_columns(
                    y_at,
                    v_at,
                    b_at,
                    rows,
                    rank // 8 * 8,
                    first,
                    last,
                    parts,
                    part_stride,
                    BLOCK_N,
                    STAGES,
                    ADD,
                    GATHER or WHOLE,
                    EXACT,
                )
            else:
                _expand_columns(
                    y_at,
                    v_at,
                    b_at,
                    rows,
                    rank,
                    first,
                    last,
                    parts,
                    part_stride,
                    BLOCK_N,
                    STAGES,
                    ADD,
                    GATHER or WHOLE,
                    EXACT,
                )
        begin -= blocks
        end -= blocks
        v_at += rank
        y_at += width
