"""The adapters' part of a gated MLP of many rows, in one kernel: from the base product of gate and
up to the first half of the adapters' part of down.

    base product -> y ------|
    v of gate and up --> + v B^T --> activation(gate) * up --> x of down --> base product of down
                                                               |
                                                               x A^T = v of down

So y is read once and not written again, and x of down is multiplied by A where it is made. All of
it lies in registers, as columns are taken in the order in which a thread finds eight of them in
memory. Sums have another order than in the kernels of `weft.kernels.lora.triton_tiles`, so that a
pool which is deterministic does without this one.

Shapes: T token rows, F columns of gate, of up and of down's inputs, R ranks of an adapter's down, W
floats of workspace a row. Tiles, tables and workspaces are as in `weft.kernels.lora.triton_tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from weft.core.config import MAX_RANK
from weft.core.targets import Group
from weft.kernels import triton_base
from weft.kernels.gluon_base import barrier, order
from weft.kernels.lora import triton_many, triton_tiles
from weft.kernels.lora.base import AdapterPool
from weft.kernels.triton_base import INTERPRETED, launch_options, processors

_read_tile = gluon.jit(triton_tiles.read_tile.fn)
_parts_of = gluon.jit(triton_tiles.parts_of.fn)
_share_of = gluon.jit(triton_many.share_of.fn)
_activated = gluon.jit(triton_base.activated.fn)

_BLOCKS = gl.constexpr(MAX_RANK // 16)
"""Blocks of 16 ranks that a slice can have."""
_ALIGN = gl.constexpr(triton_tiles.ALIGN)
WARPS, PROGRAMS = 4, 2
"""The warps of a program, and how many programs a processor runs at once, by their registers."""


@gluon.constexpr_function
def _rows_layout(warps):
    """Where the numbers of 16 rows, or ranks, lie: each warp has 32 columns, and each of its
    threads eight columns of two rows."""
    register = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lane = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warp = [[0, 32 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(register, lane, warp, [], [16, 32 * warps])


@gluon.constexpr_function
def _pairs_layout(warps):
    """Where pairs of neighbouring columns of 16 rows lie: in the threads that `_rows_layout` gives
    these columns."""
    lane = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warp = [[0, 16 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lane, warp, [], [16, 16 * warps])


@gluon.constexpr_function
def _b_layout(warps):
    """Where the rows of B lie, as eight pairs of ranks each: each warp has 32 rows, and each of its
    threads two pairs of four rows."""
    lane = [[0, 2], [0, 4], [1, 0], [8, 0], [16, 0]]
    warp = [[32 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [2, 0], [4, 0]], lane, warp, [], [32 * warps, 8])


@gluon.constexpr_function
def _parts_layout(warps):
    """Where 16 parts of v lie, of 16 rows and 16 ranks each: every warp has parts of its own."""
    num = warps.bit_length() - 1
    register = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + [[1 << i, 0, 0] for i in range(num, 4)]
    lane = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp = [[1 << i, 0, 0] for i in range(num)]
    return gl.DistributedLinearLayout(register, lane, warp, [], [16, 16, 16])


@gluon.constexpr_function
def _v_layout(warps):
    """Where 16 rows and 16 ranks of v lie: every warp has all of them, and each thread four ranks
    of two rows."""
    lane = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warp = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lane, warp, [], [16, 16])


@gluon.jit
def _unpacked(pairs, like):
    """Pairs of 16-bit numbers, int32 (N, M), as numbers (N, 2 M). While they are on their way from
    memory, numbers would take a register each."""
    N: gl.constexpr = pairs.shape[0]
    M: gl.constexpr = pairs.shape[1]
    DTYPE: gl.constexpr = like.dtype.element_ty
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high).reshape(N, 2 * M)


@gluon.jit
def _in_order(y, WARPS: gl.constexpr, MMA: gl.constexpr):
    """Give a tile of rows, (16, 32 WARPS), which lies as it was loaded, the order of a product's
    result. Nothing moves: columns get other numbers."""
    y = y.reshape(16, WARPS, 4, 4, 2).permute(0, 3, 1, 2, 4).reshape(16, 32 * WARPS)
    return gl.convert_layout(y, MMA)


@gluon.jit
def _from_order(y, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """Give a tile, (16, 32 WARPS), in the order of a product's result the order of memory."""
    y = y.reshape(16, 4, WARPS, 4, 2).permute(0, 2, 3, 1, 4).reshape(16, 32 * WARPS)
    return gl.convert_layout(y, ROWS)


@gluon.jit
def _sum_parts(
    vs, index, work_ptr, row, rows, column, rank, most, ranks,
    K: gl.constexpr, W: gl.constexpr, PART: gl.constexpr, MAX_PARTS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Put a slice's v, summed over its parts, into blocks of 16 ranks from `index` on, and zeros
    behind it, up to `most` ranks."""
    p = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))[:, None, None]
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))[None, :, None]
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))[None, None, :]
    whole = ranks[0] + ranks[1]
    _, parts = _parts_of(gl.maximum(whole, 1), K, W, PART, MAX_PARTS)
    at = work_ptr + (row + m).to(gl.int64) * W + column + p * ((whole + 15) // 16 * 16) + r
    there = (m < rows) & (p < parts)
    for r0 in range(0, most, 16):
        v = gl.load(at + r0, mask=there & (r0 + r < rank), other=0.0)
        vs.index(index + r0 // 16).store(gl.sum(v, 0))


@gluon.jit
def _left(vs, index, MMA: gl.constexpr, DTYPE: gl.constexpr):
    """A block of v as left operands: two numbers of B's dtype whose sum it is."""
    v = vs.index(index).load(_v_layout(gl.num_warps()))
    v = v.reshape(16, 4, 2, 2).permute(0, 2, 1, 3).reshape(16, 16)
    v = gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2))
    high = v.to(DTYPE)
    return high, (v - high.to(gl.float32)).to(DTYPE)


@gluon.jit
def _load_b(b_at, first, o, r0, rank, F, B: gl.constexpr, MULTIPLE: gl.constexpr):
    """Ranks [r0, r0 + 16) of rows first + o of B in pairs, (32 WARPS, 8). MULTIPLE: the rank is one
    of 8, so that rows begin where pairs do."""
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, B))[None, :]
    there = first + o < F
    if MULTIPLE:
        num_pairs = rank // 8 * 4
        pair_at = b_at.to(gl.pointer_type(gl.int32), bitcast=True) + (o * num_pairs + r)
        there = there & (r0 // 2 + r < num_pairs)
        return gl.load(pair_at + (first * num_pairs + r0 // 2), mask=there, other=0)
    at = b_at + (o * rank + 2 * r) + (first * rank + r0)
    low = gl.load(at, mask=there & (r0 + 2 * r < rank), other=0.0)
    high = gl.load(at + 1, mask=there & (r0 + 2 * r + 1 < rank), other=0.0)
    low = low.to(gl.uint16, bitcast=True).to(gl.int32)
    return low | high.to(gl.uint16, bitcast=True).to(gl.int32) << 16


@gluon.jit
def _right(pairs, WARPS: gl.constexpr, MMA: gl.constexpr, like):
    """Make rows of B, which lie as they were loaded, the right operand of a product, (16, 32
    WARPS)."""
    b = _unpacked(pairs, like)
    b = b.reshape(WARPS, 4, 4, 2, 4, 2, 2).permute(5, 4, 6, 2, 0, 1, 3).reshape(16, 32 * WARPS)
    return gl.convert_layout(b, gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def _rounded(x, like):
    """x in 16 bits, by an instruction for two numbers: for one each, they would be slow."""
    if like.dtype.element_ty == gl.bfloat16:
        ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        ROUND, "=r,r,r", [x], dtype=like.dtype.element_ty, is_pure=True, pack=2
    )


@gluon.jit
def _times_a(x, a, v, WARPS: gl.constexpr, SHRINK: gl.constexpr):
    """v + A x^T, ranks by rows: x (16, 32 WARPS) in the order of a product, A (16, 32 WARPS) as it
    is loaded. Each warp adds up its own columns."""
    left = a.reshape(16, WARPS, 4, 4, 2).permute(1, 0, 3, 2, 4).reshape(WARPS, 16, 32)
    left = gl.convert_layout(left, gl.DotOperandLayout(0, SHRINK, 2))
    right = x.reshape(16, 4, WARPS, 8).permute(2, 1, 3, 0).reshape(WARPS, 32, 16)
    right = gl.convert_layout(right, gl.DotOperandLayout(1, SHRINK, 2))
    return mma_v2(left, right, v)


@gluon.jit
def _tile(
    vs, y_ptr, out_ptr, work_ptr, next_ptr, arena_ptr, row, rows, ranks, b_offsets, R, a_at,
    begin, end, F,
    K: gl.constexpr, W: gl.constexpr, PART: gl.constexpr, MAX_PARTS: gl.constexpr,
    MULTIPLE: gl.constexpr, GELU: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute units [begin, end) of a tile. F is cut into parts, as the shrink of down cuts it, and
    MAX_PARTS units share these; each part of x gives one part of down's v."""
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    STEP: gl.constexpr = 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    SHRINK: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    ROWS: gl.constexpr = _rows_layout(WARPS)
    B: gl.constexpr = _b_layout(WARPS)
    PARTS: gl.constexpr = _parts_layout(WARPS)
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, ROWS))[:, None]
    f = gl.arange(0, STEP, layout=gl.SliceLayout(0, ROWS))[None, :]
    o = gl.arange(0, STEP, layout=gl.SliceLayout(1, B))[:, None]
    t = (row + m).to(gl.int64)
    PAIRS: gl.constexpr = _pairs_layout(WARPS)
    INT: gl.constexpr = gl.pointer_type(gl.int32)
    pair_row = gl.arange(0, 16, layout=gl.SliceLayout(1, PAIRS))[:, None]
    pair = gl.arange(0, STEP // 2, layout=gl.SliceLayout(0, PAIRS))[None, :]
    half = F // 8 * 4
    y_at = y_ptr.to(INT, bitcast=True) + (row + pair_row).to(gl.int64) * (2 * half) + pair
    out_at = out_ptr + t * F + f
    a_at = a_at.to(INT, bitcast=True) + pair_row * half + pair
    gate_at = arena_ptr + b_offsets[0] // _ALIGN * _ALIGN
    up_at = arena_ptr + b_offsets[1] // _ALIGN * _ALIGN
    each, parts = _parts_of(gl.maximum(R, 1), F, W, PART, MAX_PARTS)
    stride = (R + 15) // 16 * 16
    num_steps = (F + PART - 1) // PART * (PART // STEP)
    each *= PART // STEP
    first = begin * parts // MAX_PARTS * each
    last = gl.minimum(end * parts // MAX_PARTS * each, num_steps)
    at = first * (STEP // 2)
    ok = (pair_row < rows) & (at + pair < half)
    gate = gl.load(y_at + at, mask=ok, other=0)
    up = gl.load(y_at + half + at, mask=ok, other=0)
    b_gate = _load_b(gate_at, 2 * at, o, 0, ranks[0], F, B, MULTIPLE)
    b_up = _load_b(up_at, 2 * at, o, 0, ranks[1], F, B, MULTIPLE)
    a = gl.load(a_at + at, mask=(pair_row < R) & (at + pair < half), other=0)
    most = gl.maximum(gl.maximum(ranks[0], ranks[1]), 1)
    _sum_parts(vs, 0, work_ptr, row, rows, 0, ranks[0], most, ranks, K, W, PART, MAX_PARTS, PARTS)
    _sum_parts(
        vs, _BLOCKS, work_ptr, row, rows, ranks[0], ranks[1], most, ranks, K, W, PART, MAX_PARTS,
        PARTS,
    )  # fmt: skip
    barrier()
    high_gate, low_gate = _left(vs, 0, MMA, DTYPE)
    high_up, low_up = _left(vs, _BLOCKS, MMA, DTYPE)
    V: gl.constexpr = gl.SliceLayout(0, SHRINK)
    r_v = gl.arange(0, 16, layout=gl.SliceLayout(1, V))[:, None]
    m_v = gl.arange(0, 16, layout=gl.SliceLayout(0, V))[None, :]
    v_at = next_ptr + (row + m_v).to(gl.int64) * W + r_v
    no_v = gl.full([WARPS, 16, 16], 0.0, gl.float32, layout=SHRINK)
    v = no_v
    part, left = first // each, each
    for step in range(first, last):
        sum_gate = _in_order(_unpacked(gate, y_ptr), WARPS, MMA).to(gl.float32)
        sum_up = _in_order(_unpacked(up, y_ptr), WARPS, MMA).to(gl.float32)
        b = _right(b_gate, WARPS, MMA, y_ptr)
        sum_gate = mma_v2(high_gate, b, mma_v2(low_gate, b, sum_gate))
        b = _right(b_up, WARPS, MMA, y_ptr)
        sum_up = mma_v2(high_up, b, mma_v2(low_up, b, sum_up))
        for r0 in range(16, most, 16):
            b = _load_b(gate_at, 2 * at, o, r0, ranks[0], F, B, MULTIPLE)
            c = _load_b(up_at, 2 * at, o, r0, ranks[1], F, B, MULTIPLE)
            b = _right(b, WARPS, MMA, y_ptr)
            c = _right(c, WARPS, MMA, y_ptr)
            high, low = _left(vs, r0 // 16, MMA, DTYPE)
            sum_gate = mma_v2(high, b, mma_v2(low, b, sum_gate))
            high, low = _left(vs, _BLOCKS + r0 // 16, MMA, DTYPE)
            sum_up = mma_v2(high, c, mma_v2(low, c, sum_up))
        a_now = a
        # What the next step reads is asked for before this one's values are computed.
        at = (step + 1) * (STEP // 2)
        until = gl.where(step + 1 < last, half, 0)
        ok = (pair_row < rows) & (at + pair < until)
        gate = gl.load(y_at + at, mask=ok, other=0)
        up = gl.load(y_at + half + at, mask=ok, other=0)
        b_gate = _load_b(gate_at, 2 * at, o, 0, ranks[0], 2 * until, B, MULTIPLE)
        b_up = _load_b(up_at, 2 * at, o, 0, ranks[1], 2 * until, B, MULTIPLE)
        a = gl.load(a_at + at, mask=(pair_row < R) & (at + pair < until), other=0)
        x = _rounded(_activated(sum_gate, sum_up, 0.0, 0.0, GELU, False), y_ptr)
        there = (m < rows) & (step * STEP + f < F)
        gl.store(out_at + step * STEP, _from_order(x, WARPS, ROWS), mask=there)
        v = _times_a(x, _unpacked(a_now, y_ptr), v, WARPS, SHRINK)
        left -= 1
        if (left == 0) | (step == num_steps - 1):
            gl.store(v_at + part * stride, gl.sum(v, 0), mask=(m_v < rows) & (r_v < R))
            v = no_v
            part += 1
            left = each
    for r0 in range(16, R, 16):  # of x that this thread has written
        for step in range(first, last):
            there = (m < rows) & (step * STEP + f < F)
            x = _in_order(gl.load(out_at + step * STEP, mask=there, other=0.0), WARPS, MMA)
            at = step * (STEP // 2)
            there = (r0 + pair_row < R) & (at + pair < half)
            a = gl.load(a_at + r0 * half + at, mask=there, other=0)
            v = _times_a(x, _unpacked(a, y_ptr), v, WARPS, SHRINK)
            if ((step + 1) % each == 0) | (step == num_steps - 1):
                place = v_at + step // each * stride + r0
                gl.store(place, gl.sum(v, 0), mask=(m_v < rows) & (r0 + r_v < R))
                v = no_v


_NUMBERS = ["T", "group", "first_slice", "down", "down_slice", "num_groups", "num_targets"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _activate(
    y_ptr,
    out_ptr,
    work_ptr,
    next_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    T,
    F,
    group,
    first_slice,
    down,
    down_slice,
    num_groups,
    num_targets,
    K: gl.constexpr,
    W: gl.constexpr,
    PART: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    GELU: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out (T, F) = activation(gate) * up of y (T, 2F), with delta of the rows of all tiles added;
    and v of down, in parts. Rows ahead of the first tile have no adapter, those behind the last one
    are nobody's."""
    if PDL:
        order("griddepcontrol.launch_dependents", WARPS)
    num_tiles = gl.load(tiles_ptr + 3)
    num_base = gl.where(num_tiles > 0, gl.load(tiles_ptr + 1), T)
    base_tiles = (num_base + 15) // 16
    vs = gl.allocate_shared_memory(
        gl.float32, [2 * _BLOCKS, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    if PDL:
        order("griddepcontrol.wait", WARPS)
    total = (base_tiles + num_tiles) * MAX_PARTS
    begin, end = _share_of(total)
    for i in range(begin // MAX_PARTS, (end + MAX_PARTS - 1) // MAX_PARTS):
        row = i * 16
        rows = gl.minimum(num_base - row, 16)
        tile_ptr = tiles_ptr + 4 * gl.maximum(i - base_tiles, 0)
        _, tile_row, tile_rows, _, ranks, b_offsets = _read_tile(
            tile_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, group, first_slice, num_groups,
            num_targets, 2,
        )  # fmt: skip
        _, _, _, a_offset, down_ranks, _ = _read_tile(
            tile_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, down, down_slice, num_groups,
            num_targets, 1,
        )  # fmt: skip
        R = down_ranks[0]
        if i >= base_tiles:
            row = tile_row
            rows = tile_rows
        else:
            R = 0
            ranks = (R, R)
        a_at = arena_ptr + a_offset // _ALIGN * _ALIGN
        first = gl.maximum(begin - i * MAX_PARTS, 0)
        last = gl.minimum(end - i * MAX_PARTS, MAX_PARTS)
        barrier()  # all warps are done with v of the tile before
        if (ranks[0] % 8 == 0) & (ranks[1] % 8 == 0):
            _tile(
                vs, y_ptr, out_ptr, work_ptr, next_ptr, arena_ptr, row, rows, ranks, b_offsets, R,
                a_at, first, last, F, K, W, PART, MAX_PARTS, True, GELU, WARPS,
            )  # fmt: skip
        else:
            _tile(
                vs, y_ptr, out_ptr, work_ptr, next_ptr, arena_ptr, row, rows, ranks, b_offsets, R,
                a_at, first, last, F, K, W, PART, MAX_PARTS, False, GELU, WARPS,
            )  # fmt: skip


def fits(pool: AdapterPool, group: Group, down: Group) -> bool:
    """Whether the kernel can compute the adapters' part of a gated MLP."""
    if INTERPRETED or not pool.arena.is_cuda or pool.arena.dtype == torch.float32:
        return False
    widths = [s.b_features for s in group.slices]
    inputs = down.a_features
    whole = not (group.sums_ranks or down.sums_ranks)
    return whole and widths == [inputs, inputs] and len(down.slices) == 1 and inputs % 8 == 0


def launch(
    y_T2F: Tensor,
    work: Tensor,
    next_work: Tensor,
    tiles: Tensor,
    pool: AdapterPool,
    group: Group,
    down: Group,
    *,
    gelu: bool,
    part: int,
    max_parts: int,
    early: bool,
) -> Tensor:
    """`activation(gate) * up`, (T, F), of the base product of `group`, whose v is in `work`; v of
    `down` is written to `next_work`. The groups are such that `fits` says yes."""
    num_rows, width = len(y_T2F), y_T2F.shape[1] // 2
    out_TF = y_T2F.new_empty(num_rows, width)
    programs = min(PROGRAMS * processors(y_T2F.device), num_rows * max_parts)
    _activate[programs,](
        y_T2F,
        out_TF,
        work,
        next_work,
        pool.arena,
        tiles,
        pool.a_offset_SG,
        pool.b_offset_SL,
        pool.rank_SL,
        num_rows,
        width,
        group.index,
        group.slices[0].slice,
        down.index,
        down.slices[0].slice,
        pool.a_offset_SG.shape[1],
        pool.rank_SL.shape[1],
        K=group.a_features,
        W=work.shape[1],
        PART=part,
        MAX_PARTS=max_parts,
        GELU=gelu,
        WARPS=WARPS,
        num_warps=WARPS,
        **launch_options(early),
    )
    return out_TF
