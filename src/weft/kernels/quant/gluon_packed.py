"""Products of few rows with packed weights on NVIDIA GPUs: see `weft.kernels.quant.packed`.

The kernel is in Gluon. Words come from memory straight into the registers in which the matrix units
want the values that are made of them, and never lie in shared memory. Each warp takes blocks of K
of its own, so that no warp has a long way, and reads its first one before the kernel ahead has
ended. The columns of a chunk are taken in the order in which a thread finds them in 32 bytes of
words, so that it also reads x 16 bytes at a time.

Shapes: T token rows, O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from weft.kernels.gluon_base import barrier, order
from weft.kernels.quant.packed import PackedMatrix, step_of
from weft.kernels.quant.triton_values import code_of
from weft.kernels.triton_base import (
    INTERPRETED,
    TURNS,
    launch_options,
    meeting_place,
    processors,
    starts_early,
)
from weft.kernels.triton_linear import Launched, next_turn


@gluon.jit(do_not_specialize=["T", "turn", "SPLIT"])
def _product(
    x_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    flags_ptr,
    T,
    x_stride,
    turn,
    O,  # noqa: E741
    K,
    SPLIT,
    GROUP: gl.constexpr,
    CODE: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_O: gl.constexpr,
    LANES: gl.constexpr,
    BIAS: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A tile of y (T, O) = x @ w^T + bias, over one of SPLIT parts of K, for at most BLOCK_T rows.
    Each of LANES warps takes every LANES-th block of K; the last program of a tile adds its parts
    in order."""
    if PDL:
        order("griddepcontrol.launch_dependents", LANES)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [LANES, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    NUM: gl.constexpr = len(CODE)
    num_blocks = K // (32 * NUM)
    pid = gl.program_id(0)
    part = pid % SPLIT
    tile = pid // SPLIT
    first = part * num_blocks // SPLIT
    last = (part + 1) * num_blocks // SPLIT
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None]
    o = gl.arange(0, BLOCK_O, layout=gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :, None]
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    w_row = o * 32 + j
    w_ptr += (tile * BLOCK_O // 64).to(gl.int64) * (num_blocks * 2048) + tile * BLOCK_O % 64 * 32
    w_at = w_ptr + (gl.minimum(first + lane, last - 1) * 2048 + w_row)
    w = gl.load(w_at, eviction_policy="evict_first")
    s_ptr += tile * BLOCK_O
    s = gl.load(s_ptr + (o + lane * 0))
    lane_x = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_row = t * x_stride + j
    if PDL:
        order("griddepcontrol.wait", LANES)
    if pid == 0:  # x is there: see `weft.kernels.triton_linear.launch`
        barrier()
        gl.atomic_xchg(flags_ptr + turn % TURNS, turn, sem="relaxed")
    acc = gl.full([LANES, BLOCK_O, BLOCK_T], 0.0, gl.float32, layout=MMA)
    for step in range(first, last, LANES):
        block = gl.minimum(step + lane, last - 1)
        w_at = w_ptr + (gl.minimum(step + LANES + lane, last - 1) * 2048 + w_row)
        after = gl.load(w_at, eviction_policy="evict_first")
        there = (t < T) & (step + lane_x < last)
        x_at = x_ptr + (gl.minimum(step + lane_x, last - 1) * (32 * NUM) + x_row)
        xs = ()  # of all chunks, which are asked for at once
        for i in gl.static_range(NUM):
            xs += (gl.load(x_at + i * 32, mask=there, other=0.0),)
        for i in gl.static_range(NUM):
            if GROUP > 0 and i * 32 % GROUP == 0:
                s = gl.load(s_ptr + ((block * (32 * NUM) + i * 32) // GROUP * O + o))
            v = gl.inline_asm_elementwise(
                CODE[i], "=r,r,r,r,r", [w, s], dtype=xs[i].dtype, is_pure=True, pack=2
            )
            acc = mma_v2(v, xs[i], acc)
        w = after
    Y: gl.constexpr = gl.SliceLayout(0, MMA)
    o = tile * BLOCK_O + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, Y))
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, Y))
    y = gl.sum(acc, 0)
    done = True
    if SPLIT > 1:
        size: gl.constexpr = BLOCK_O * BLOCK_T
        at = parts_ptr + tile * SPLIT * size + (o % BLOCK_O * BLOCK_T)[:, None] + t[None, :]
        gl.store(at + part * size, y)
        barrier()
        done = gl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            y = gl.load(at, cache_modifier=".cg")
            for p in range(1, SPLIT):
                y += gl.load(at + p * size, cache_modifier=".cg")
            gl.store(tickets_ptr + tile, 0)
    if done:
        if BIAS:
            y += gl.load(bias_ptr + o).to(gl.float32)[:, None]
        y_at = y_ptr + t[None, :] * O + o[:, None]
        gl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(t < T)[None, :])


ROWS, COLUMNS, LANES = 8, 32, 4
"""Rows and columns of the result that a program computes, and its warps, which share K."""
REGISTERS, ROOM = 104, 96
"""The most registers of a thread of such a program, and of one for adapters beside it. A processor
then holds four programs and one for adapters. It never holds five, which would leave another one
with less to do. With fewer registers, the next words are asked for later."""


def cut(num_rows: int, weight: PackedMatrix, processors: int) -> int | None:
    """Into how many parts, each with a program of its own, to cut K, from what was best on an H200;
    None where another kernel was: for many rows, or so many outputs that their programs fill the
    device."""
    outputs, inputs = weight.shape
    tiles, most = outputs // COLUMNS, 4 * processors
    if num_rows > ROWS or tiles > most:
        return None
    split, blocks = 1, inputs // step_of(weight.coding)
    while 2 * split * tiles <= most and 2 * split * LANES <= blocks:
        split *= 2
    return split


def split_of(x_TK: Tensor, weight: PackedMatrix) -> int | None:
    """Into how many parts to cut K on this device; None: not by this kernel."""
    if INTERPRETED or not starts_early(x_TK.device):
        return None
    return cut(len(x_TK), weight, processors(x_TK.device))


def launch(
    x_TK: Tensor,
    weight: PackedMatrix,
    bias_O: Tensor | None,
    split: int,
    flags: Tensor | None,
) -> Launched:
    """Start a product, and tell when x is there, as `weft.kernels.triton_linear.launch` does."""
    T, (O, K) = len(x_TK), weight.shape  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    parts, tickets, nobody = meeting_place(x_TK.device)
    turn = next_turn()
    num_programs = O // COLUMNS * split
    kernel = _product[num_programs,](
        x_TK,
        weight.words,
        weight.scales_GO,
        y_TO if bias_O is None else bias_O,
        y_TO,
        parts,
        tickets,
        nobody if flags is None else flags,
        T,
        x_TK.stride(0),
        turn,
        O,
        K,
        split,
        GROUP=weight.group if len(weight.scales_GO) > 1 else 0,
        CODE=code_of(weight),
        BLOCK_T=ROWS,
        BLOCK_O=COLUMNS,
        LANES=LANES,
        BIAS=bias_O is not None,
        TURNS=TURNS,
        num_warps=LANES,
        maxnreg=REGISTERS,
        **launch_options(starts_early(x_TK.device)),
    )
    return Launched(y_TO, turn, kernel, num_programs, ROOM)
