"""Products of many rows with packed weights on Hopper GPUs: see `weft.kernels.quant.packed`.

The matrix units of these GPUs multiply what lies in shared memory, and the program goes on
meanwhile. So while they multiply the inputs of one step, the same warps make the values of the
next:

    words and scales   memory -> shared memory -> registers -> values in shared memory -> |
    x                  memory ------------------------------------> shared memory ------> | sums

The copy engine brings words, scales and x some steps ahead. Copies by the threads themselves would
not do: a thread that hands values to the matrix units waits until all that it copies is there.

Shapes: T token rows, O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.core.numbers import cdiv
from weft.kernels.gluon_base import barrier, order
from weft.kernels.quant.packed import COLUMNS, ROWS, PackedMatrix, step_of
from weft.kernels.quant.triton_values import code_of
from weft.kernels.triton_base import INTERPRETED, launch_options, processors, starts_early
from weft.kernels.triton_linear import meeting_place
from weft.kernels.tuned import MEETING_FLOATS

_copy = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)  # Triton 3.6: the latter


@gluon.constexpr_function
def _words_layout(columns, warps):
    """How threads hold a block of words: four neighbours of a row each. Half a warp has rows that
    are four apart, so that what it stores lies in different banks of shared memory."""
    rows = [2, 8, 16, 32, 64, 128]
    num = warps.bit_length() - 1
    warp = [[row, 0] for row in rows[:num]]
    registers = [[0, 1], [0, 2]] + [[row, 0] for row in rows[num:] if row < columns]
    lane = [[0, 4], [0, 8], [0, 16], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(registers, lane, warp, [], [columns, 32])


@gluon.constexpr_function
def _blocks_layout(columns, warps):
    """`_words_layout` for words that come in blocks of 64 rows."""
    flat = _words_layout(columns, warps)

    def in_blocks(bases):
        return [[row // 64, row % 64, column] for row, column in bases]

    return gl.DistributedLinearLayout(
        in_blocks(flat.reg_bases),
        in_blocks(flat.lane_bases),
        in_blocks(flat.warp_bases),
        [],
        [columns // 64, 64, 32],
    )


@gluon.constexpr_function
def _scales_layout(columns, warps):
    """`_words_layout` for one number of each row."""
    flat = _words_layout(columns, warps)

    def of_rows(bases):
        return [[row, 0] for row, _ in bases]

    return gl.DistributedLinearLayout(
        of_rows(flat.reg_bases),
        of_rows(flat.lane_bases),
        of_rows(flat.warp_bases),
        [],
        [columns, 1],
    )


@gluon.jit
def _scales_of(ss, at, W: gl.constexpr, BLOCK_O: gl.constexpr, WARPS: gl.constexpr):
    """The words of the scales of one group, (BLOCK_O, 1)."""
    s = ss.index(at).permute((1, 0)).load(_scales_layout(BLOCK_O, WARPS))
    return gl.convert_layout(s.reshape(BLOCK_O), gl.SliceLayout(1, W), assert_trivial=True)[:, None]


@gluon.jit
def _side_by_side(a, b, SIZE: gl.constexpr, BLOCK_O: gl.constexpr):
    """Two tensors (BLOCK_O, SIZE) as one of twice as many columns."""
    return gl.join(a, b).permute(0, 2, 1).reshape(BLOCK_O, 2 * SIZE)


@gluon.jit
def _two_chunks(w, s, r, like, CODE: gl.constexpr, i: gl.constexpr, BLOCK_O: gl.constexpr):
    """The values of chunks i and i + 1 of a block, (BLOCK_O, 64), with scales `s` and `r`."""
    a = gl.inline_asm_elementwise(
        CODE[i], "=r,r,r,r,r", [w, s], dtype=like.dtype.element_ty, is_pure=True, pack=2
    )
    b = gl.inline_asm_elementwise(
        CODE[i + 1], "=r,r,r,r,r", [w, r], dtype=like.dtype.element_ty, is_pure=True, pack=2
    )
    return _side_by_side(a, b, 32, BLOCK_O)


@gluon.jit
def _expect_block(w_there, s_there, at, there, GROUPS: gl.constexpr, BLOCK_O: gl.constexpr):
    """Say how many bytes of a block's words and scales will come, if there is such a block."""
    mbarrier.expect(w_there.index(at), BLOCK_O * 128, pred=there)
    mbarrier.expect(s_there.index(at), BLOCK_O * 4 * GROUPS, pred=there)


@gluon.jit
def _copy_block(
    w_desc, s_desc, ws, ss, w_there, s_there, at, block, o_tile, there,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Begin to copy a block's words and scales to place `at`, if there is such a block."""
    _copy(w_desc, [o_tile // 64, block * 64, 0], w_there.index(at), ws.index(at), pred=there)
    for g in gl.static_range(GROUPS):
        _copy(
            s_desc,
            [block * WHOLE // GROUP + g, o_tile],
            s_there.index(at),
            ss.index(at * GROUPS + g),
            pred=there,
        )


@gluon.jit(do_not_specialize=["T", "SPLIT"])
def _product(
    x_desc,
    w_desc,
    s_desc,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    T,
    O,  # noqa: E741
    K,
    SPLIT,
    GROUP: gl.constexpr,
    CODE: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_O: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr,
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A tile of y (T, O) = x @ w^T + bias, over one of SPLIT parts of K; the last program of a tile
    adds its parts in order. Programs: parts of one tile after another; tiles of rows of the same
    columns, which share their weights, follow each other."""
    if PDL:
        order("griddepcontrol.launch_dependents", WARPS)
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    NUM: gl.constexpr = len(CODE)
    WHOLE: gl.constexpr = 32 * NUM
    STEPS: gl.constexpr = WHOLE // BLOCK_K
    GROUPS: gl.constexpr = 1 if GROUP >= WHOLE else WHOLE // GROUP
    W: gl.constexpr = _words_layout(BLOCK_O, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = gl.allocate_shared_memory(DTYPE, [X_STAGES, BLOCK_T, BLOCK_K], OPERAND)
    vs = gl.allocate_shared_memory(DTYPE, [2, BLOCK_O, BLOCK_K], OPERAND)
    ws = gl.allocate_shared_memory(
        gl.int32, [W_STAGES, BLOCK_O // 64, 64, 32], gl.NVMMASharedLayout(0, 32, 3)
    )
    ss = gl.allocate_shared_memory(
        gl.int32, [W_STAGES * GROUPS, 1, BLOCK_O], gl.NVMMASharedLayout(0, 32, 2)
    )
    x_there = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_there = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    s_there = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for d in gl.static_range(X_STAGES):
        mbarrier.init(x_there.index(d), count=1)
    for d in gl.static_range(W_STAGES):
        mbarrier.init(w_there.index(d), count=1)
        mbarrier.init(s_there.index(d), count=1)
    fence_async_shared()
    barrier()

    num_blocks = K // WHOLE
    pid = gl.program_id(0)
    part = pid % SPLIT
    place = pid // SPLIT
    num_t = (T + BLOCK_T - 1) // BLOCK_T
    tile = place // num_t
    o_tile = tile * BLOCK_O
    t_tile = place % num_t * BLOCK_T
    first = part * num_blocks // SPLIT
    last = (part + 1) * num_blocks // SPLIT
    num_steps = (last - first) * STEPS
    for d in gl.static_range(W_STAGES - 1):
        block = first + d
        _expect_block(w_there, s_there, d, block < last, GROUPS, BLOCK_O)
        _copy_block(
            w_desc, s_desc, ws, ss, w_there, s_there, d, block, o_tile, block < last,
            GROUP, GROUPS, WHOLE,
        )  # fmt: skip
    if PDL:
        order("griddepcontrol.wait", WARPS)
    for d in gl.static_range(X_STAGES - 1):
        mbarrier.expect(x_there.index(d), BLOCK_T * BLOCK_K * 2, pred=d < num_steps)
        _copy(
            x_desc,
            [t_tile, first * WHOLE + d * BLOCK_K],
            x_there.index(d),
            xs.index(d),
            pred=d < num_steps,
        )
    acc = gl.full([BLOCK_O, BLOCK_T], 0.0, gl.float32, layout=MMA)
    for b in range(last - first):
        now = b % W_STAGES
        mbarrier.wait(w_there.index(now), b // W_STAGES & 1)
        mbarrier.wait(s_there.index(now), b // W_STAGES & 1)
        w = ws.index(now).load(_blocks_layout(BLOCK_O, WARPS)).reshape(BLOCK_O, 32)
        w = gl.convert_layout(w, W, assert_trivial=True)
        for i in gl.static_range(STEPS):
            step = b * STEPS + i
            for j in gl.static_range(0, BLOCK_K, 64):
                if (i * BLOCK_K + j) % GROUP == 0:
                    at = now * GROUPS + (i * BLOCK_K + j) // GROUP
                    s = _scales_of(ss, at, W, BLOCK_O, WARPS)
                    r = s
                if (i * BLOCK_K + j + 32) % GROUP == 0:
                    at = now * GROUPS + (i * BLOCK_K + j + 32) // GROUP
                    r = _scales_of(ss, at, W, BLOCK_O, WARPS)
                u = _two_chunks(w, s, r, y_ptr, CODE, (i * BLOCK_K + j) // 32, BLOCK_O)
                if j == 0:  # noqa: SIM108  (there is no `v` yet)
                    v = u
                else:
                    v = _side_by_side(v, u, 64, BLOCK_O)
            vs.index(step % 2).store(v)
            fence_async_shared()
            barrier()  # all values are there
            mbarrier.wait(x_there.index(step % X_STAGES), step // X_STAGES & 1)
            acc = warpgroup_mma(
                vs.index(step % 2), xs.index(step % X_STAGES).permute((1, 0)), acc, is_async=True
            )
            ahead = step + X_STAGES - 1
            x_at = ahead % X_STAGES
            mbarrier.expect(x_there.index(x_at), BLOCK_T * BLOCK_K * 2, pred=ahead < num_steps)
            if i == 0:
                block = first + b + W_STAGES - 1
                then = (b + W_STAGES - 1) % W_STAGES
                _expect_block(w_there, s_there, then, block < last, GROUPS, BLOCK_O)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()  # all warps are done with the step before, and with the block before
            _copy(
                x_desc,
                [t_tile, first * WHOLE + ahead * BLOCK_K],
                x_there.index(x_at),
                xs.index(x_at),
                pred=ahead < num_steps,
            )
            if i == 0:
                _copy_block(
                    w_desc, s_desc, ws, ss, w_there, s_there, then, block, o_tile, block < last,
                    GROUP, GROUPS, WHOLE,
                )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    done = True
    if SPLIT > 1:
        size: gl.constexpr = BLOCK_O * BLOCK_T
        o = gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, MMA))
        t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, MMA))
        part_at = parts_ptr + place * SPLIT * size + (o * BLOCK_T)[:, None] + t[None, :]
        gl.store(part_at + part * size, acc)
        barrier()
        done = gl.atomic_add(tickets_ptr + place, 1, sem="acq_rel") == SPLIT - 1
        if done:
            acc = gl.load(part_at, cache_modifier=".cg")
            for p in range(1, SPLIT):
                acc += gl.load(part_at + p * size, cache_modifier=".cg")
            gl.store(tickets_ptr + place, 0)
    if done:
        if BIAS:
            o_bias = o_tile + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, MMA))
            acc += gl.load(bias_ptr + o_bias).to(gl.float32)[:, None]
        Y: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
        y = gl.convert_layout(acc.to(DTYPE), Y)
        o_y = o_tile + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, Y))
        t_y = t_tile + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, Y))
        y_at = y_ptr + t_y.to(gl.int64)[None, :] * O + o_y[:, None]
        gl.store(y_at, y, mask=(t_y < T)[None, :])


TILE, WARPS = 128, 8
"""Columns of the result that a program computes, and its warps."""


@dataclass(frozen=True, slots=True)
class ManyRowsForm:
    """How a product is cut for the device."""

    rows: int
    """Rows of the result that a program computes."""
    inputs: int
    """Inputs of a step."""
    x_stages: int
    """How many steps of x there is room for, and `w_stages`, of how many blocks of words."""
    w_stages: int
    split: int = 1
    """The parts of K, each with a program of its own."""


def launch(x_TK: Tensor, weight: PackedMatrix, bias_O: Tensor | None, form: ManyRowsForm) -> Tensor:
    """`x W^T + b`, (T, O). x is contiguous."""
    T, (O, K) = len(x_TK), weight.shape  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    parts, tickets, _ = meeting_place(x_TK.device)
    plain = gl.NVMMASharedLayout(0, 32, 2)
    _product[cdiv(T, form.rows) * (O // TILE) * form.split,](
        TensorDescriptor(
            x_TK, [T, K], [K, 1], [form.rows, form.inputs], gl.NVMMASharedLayout(128, 16, 2)
        ),
        TensorDescriptor(
            weight.words,
            [O // ROWS, weight.words.shape[1] * ROWS, COLUMNS],
            [weight.words.stride(0), COLUMNS, 1],
            [TILE // ROWS, ROWS, COLUMNS],
            gl.NVMMASharedLayout(0, 32, 3),
        ),
        TensorDescriptor(weight.scales_GO, [len(weight.scales_GO), O], [O, 1], [1, TILE], plain),
        y_TO if bias_O is None else bias_O,
        y_TO,
        parts,
        tickets,
        T,
        O,
        K,
        form.split,
        GROUP=weight.group,
        CODE=code_of(weight),
        BLOCK_T=form.rows,
        BLOCK_O=TILE,
        BLOCK_K=form.inputs,
        WARPS=WARPS,
        X_STAGES=form.x_stages,
        W_STAGES=form.w_stages,
        BIAS=bias_O is not None,
        num_warps=WARPS,
        **launch_options(starts_early(x_TK.device)),
    )
    return y_TO


FEWEST_ROWS, MOST_ROWS = 65, 1024
"""With fewer rows, kernels beside which those of adapters can run are about as fast. With more, a
library's product is faster, although the values are written first."""


class Cost(NamedTuple):
    """What a form costs on an H200, in microseconds."""

    step_us: float
    """What a step takes a program that has a processor to itself."""
    part_us: float
    """What a part of K adds, where there are several."""


FORMS = {ManyRowsForm(256, 64, 4, 3): Cost(0.73, 5.3), ManyRowsForm(128, 128, 3, 3): Cost(1.0, 2.4)}
"""The forms to choose from."""


def cut(num_rows: int, weight: PackedMatrix, processors: int) -> ManyRowsForm | None:
    """The form that takes the least time by what was measured; None where another kernel does."""
    (outputs, inputs), step = weight.shape, step_of(weight.coding)
    best, least = None, _library_us(num_rows, outputs, inputs)
    for form, cost in FORMS.items():
        tiles = outputs // TILE * cdiv(num_rows, form.rows)
        for split in (1, 2, 3, 4):
            floats = tiles * split * TILE * form.rows
            if split > 1 and (floats > MEETING_FLOATS or split > inputs // step):
                break
            steps = cdiv(inputs // step, split) * step // form.inputs
            us = cdiv(tiles * split, processors) * steps * cost.step_us
            us += split * cost.part_us if split > 1 else 0.0
            if us < least:
                best, least = replace(form, split=split), us
    fits = outputs % TILE == 0 and FEWEST_ROWS <= num_rows <= MOST_ROWS
    return best if fits else None


def _library_us(num_rows: int, outputs: int, inputs: int) -> float:
    """Microseconds to write the values and multiply them; infinite up to 512 rows: always more."""
    if num_rows <= 512:
        return float("inf")
    return outputs * inputs * (0.75e-6 + num_rows * 2.6e-9)


def form_of(x_TK: Tensor, weight: PackedMatrix) -> ManyRowsForm | None:
    """How to cut a product on this device; None: not by this kernel."""
    device = x_TK.device
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return cut(len(x_TK), weight, processors(device))
