"""Computes the adapters' part of absorbed projections, head by head: see
`weft.models.latent_attention`.

Shapes: T token rows, H heads, N the keys and V the values of a head, L the latent, R ranks; I
inputs and O outputs of a head, which are N and L for keys, and L and V for values.

A program has a tile of rows (see `weft.kernels.lora.triton_tiles`), a head and some of its outputs
at a time. It computes v = x P, then adds v Q to y, where P and Q are A and the head's part
of B: for keys P is B_K and Q is A, and for values P is A^T and Q is B_V^T. A row's result depends
on its input and its adapter alone, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv
from weft.core.targets import ALIGN
from weft.kernels.lora.base import AdapterPool
from weft.kernels.lora.triton_tiles import TILE_ROWS, read_tile
from weft.kernels.triton_base import INTERPRETED, dot, processors

BLOCK = 128
"""How many outputs of a head a program computes at a time, and how many inputs it reads."""

PROGRAMS = 8
"""How many programs a processor has at most."""

FEW_ROWS = 8
"""Up to so many rows, the blocks of a head's outputs have a program each. With more rows, one
program has all of them, and computes v once."""

_ALIGN = tl.constexpr(ALIGN)
_ROWS = tl.constexpr(TILE_ROWS)


@triton.jit
def _times(v, q, acc, EXACT: tl.constexpr):
    """acc + v @ q; v is fp32 and enters as the sum of two numbers of q's dtype."""
    if EXACT:
        acc = dot(v, q, acc, EXACT)
    else:
        high = v.to(q.dtype)
        acc = dot((v - high.to(tl.float32)).to(q.dtype), q, acc, EXACT)
        acc = dot(high, q, acc, EXACT)
    return acc


@triton.jit
def _read(at, rows, columns, row_stride, column_stride, NUM_ROWS, NUM_COLUMNS):
    """The rows and columns of a matrix of any strides, with 0 where there are none."""
    mask = (rows < NUM_ROWS)[:, None] & (columns < NUM_COLUMNS)[None, :]
    at += rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _add_block(y_at, acc, there, o, OUTPUTS: tl.constexpr):
    """y += acc, for the outputs o of the rows that are there."""
    mask = there[:, None] & (o < OUTPUTS)[None, :]
    y = tl.load(y_at + o[None, :], mask=mask, other=0.0)
    tl.store(y_at + o[None, :], (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


@triton.jit
def _add_tile(
    y_at,
    x_at,
    p_at,
    q_at,
    rows,
    first,
    R,
    p_stride,
    p_rank_stride,
    q_stride,
    q_rank_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += (x P) Q for a tile's rows, and TURNS blocks of outputs from `first` on. `y_at` and
    `x_at` point to the head's first column of each of _ROWS rows, and P (I, R) and Q (R, O) have
    any strides. EARLY: there is room for all of P at once."""
    there = tl.arange(0, _ROWS) < rows
    i = tl.arange(0, BLOCK)
    r = tl.arange(0, 16)
    if EARLY and R <= 16:
        # P and Q are on their way while the kernel ahead still runs.
        q = _read(q_at, r, first + i, q_rank_stride, q_stride, R, OUTPUTS)
        parts = ()
        for i0 in tl.static_range(0, INPUTS, BLOCK):
            parts += (_read(p_at, i0 + i, r, p_stride, p_rank_stride, INPUTS, R),)
        if PDL:
            tl.extra.cuda.gdc_wait()
        v = tl.full((_ROWS, 16), 0.0, tl.float32)
        for j in tl.static_range(len(parts)):
            d = j * BLOCK + i
            x = tl.load(x_at + d[None, :], mask=there[:, None] & (d < INPUTS)[None, :], other=0.0)
            v = dot(x, parts[j], v, EXACT)
        for turn in tl.static_range(TURNS):
            o = first + turn * BLOCK + i
            if turn > 0:
                q = _read(q_at, r, o, q_rank_stride, q_stride, R, OUTPUTS)
            acc = _times(v, q, tl.full((_ROWS, BLOCK), 0.0, tl.float32), EXACT)
            _add_block(y_at, acc, there, o, OUTPUTS)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for turn in range(TURNS):
            o = first + turn * BLOCK + i
            acc = tl.full((_ROWS, BLOCK), 0.0, tl.float32)
            for r0 in range(0, R, 16):
                v = tl.full((_ROWS, 16), 0.0, tl.float32)
                for i0 in tl.static_range(0, INPUTS, BLOCK):
                    d = i0 + i
                    mask = there[:, None] & (d < INPUTS)[None, :]
                    x = tl.load(x_at + d[None, :], mask=mask, other=0.0)
                    p = _read(p_at, d, r0 + r, p_stride, p_rank_stride, INPUTS, R)
                    v = dot(x, p, v, EXACT)
                q = _read(q_at, r0 + r, o, q_rank_stride, q_stride, R, OUTPUTS)
                acc = _times(v, q, acc, EXACT)
            _add_block(y_at, acc, there, o, OUTPUTS)


@triton.jit(do_not_specialize=["group", "first_slice", "num_groups", "num_targets"])
def _add_absorbed(
    y_ptr,
    x_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    group,
    first_slice,
    num_groups,
    num_targets,
    y_stride,
    y_head_stride,
    x_stride,
    x_head_stride,
    H,
    N: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y (T, H, O) += (x (T, H, I) P) Q for the rows of all tiles; x and y have unit stride along
    their last dimension. VALUES: the projection is that to values, else to keys."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    OUTPUTS: tl.constexpr = V if VALUES else L
    blocks: tl.constexpr = (OUTPUTS + BLOCK * TURNS - 1) // (BLOCK * TURNS)
    total = tl.load(tiles_ptr + 3) * H * blocks
    m = tl.arange(0, _ROWS)[:, None].to(tl.int64)
    for i in range(tl.program_id(0), total, tl.num_programs(0)):
        tile_ptr = tiles_ptr + 4 * (i // (H * blocks))
        head = i // blocks % H
        first = i % blocks * BLOCK * TURNS
        _, row, rows, a_offset, ranks, b_offsets = read_tile(
            tile_ptr,
            a_offset_ptr,
            b_offset_ptr,
            rank_ptr,
            group,
            first_slice,
            num_groups,
            num_targets,
            1,
        )
        R = ranks[0]
        y_at = y_ptr + (row + m) * y_stride + head * y_head_stride
        x_at = x_ptr + (row + m) * x_stride + head * x_head_stride
        a_at = arena_ptr + tl.multiple_of(a_offset, _ALIGN)
        b_at = arena_ptr + tl.multiple_of(b_offsets[0], _ALIGN) + head * (N + V) * R
        if R > 0:
            if VALUES:
                b_at += N * R
                _add_tile(
                    y_at,
                    x_at,
                    a_at,
                    b_at,
                    rows,
                    first,
                    R,
                    1,
                    L,
                    R,
                    1,
                    L,
                    V,
                    BLOCK,
                    TURNS,
                    EARLY,
                    EXACT,
                    PDL,
                )
            else:
                _add_tile(
                    y_at,
                    x_at,
                    b_at,
                    a_at,
                    rows,
                    first,
                    R,
                    R,
                    1,
                    1,
                    L,
                    N,
                    L,
                    BLOCK,
                    TURNS,
                    EARLY,
                    EXACT,
                    PDL,
                )
    if PDL:  # those without work too: whoever waits for this kernel waits for those ahead
        tl.extra.cuda.gdc_wait()


def add_absorbed(
    y_THO: Tensor,
    x_THI: Tensor,
    pool: AdapterPool,
    tiles: Tensor,
    group: int,
    *,
    values: bool,
    exact: bool,
    options: dict[str, bool],
) -> None:
    """Compute what `LoraStep.absorbed_keys` does, or if `values` what `absorbed_values` does, for
    the rows of `tiles`, int32 (., 4). `exact`: see `dot`. `options`: `launch_options`."""
    (T, H, outputs), inputs = y_THO.shape, x_THI.shape[2]
    if not T:
        return
    (target,) = pool.table.groups[group].slices
    size = target.b_features // H
    N, V, L = (size - outputs, outputs, inputs) if values else (inputs, size - inputs, outputs)
    assert y_THO.stride(2) == x_THI.stride(2) == 1
    turns = 1 if T <= FEW_ROWS else cdiv(outputs, BLOCK)
    work = T * H * cdiv(outputs, BLOCK * turns)
    _add_absorbed[min(PROGRAMS * processors(y_THO.device), work),](
        *(y_THO, x_THI, pool.arena, tiles),
        *(pool.a_offset_SG, pool.b_offset_SL, pool.rank_SL),
        *(group, target.slice, pool.a_offset_SG.shape[1], pool.rank_SL.shape[1]),
        *(*y_THO.stride()[:2], *x_THI.stride()[:2], H),
        N=N,
        V=V,
        L=L,
        VALUES=values,
        BLOCK=BLOCK,
        TURNS=turns,
        EARLY=pool.element_bytes == 2 or INTERPRETED,
        EXACT=exact,
        num_warps=4,
        num_stages=3 if pool.element_bytes == 2 else 1,
        **options,
    )
