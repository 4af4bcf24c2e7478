"""The gated delta rule and Mamba 2 as Triton kernels; see `weft.kernels.delta` for what is
computed.

Decodes take one kernel for all up to the gated norm, and one for that; chunks of prompts take
those of `weft.kernels.triton_delta_chunks`. Programs find rows and states through the
tables of `StateWork`, so that a captured step serves every mix of sequences.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv
from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.ops import Product
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    has_pending,
    launch_options,
    processors,
    starts_early,
    with_pending,
)
from weft.kernels.triton_delta_chunks import (
    block_of,
    convolution_of,
    norm_or_skip,
    run_chunks,
    sizes_of,
)
from weft.kernels.triton_delta_short import gated_norm, keep_inputs, silu
from weft.kernels.triton_delta_solve import decay, time_step

PART = 64
"""Columns of a state that one program of a decode has: what was fastest on an H200, 82 us for 64
rows of a Qwen3.5-9B layer with 2 warps, where parts of 32 with 4 warps take 111."""


@triton.jit
def _convolved(
    y_at, add_at, has, kept_at, weight_at, bias_at, position, first, c, size, y_stride, C,
    H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """The activated convolution of the channels c < size of a decode's token at `position`. Rows
    begin at the position `first`; of what is ahead of that, inputs are kept. The pointers are those
    of each channel: of the first row, of what is kept for the state, of the weights and the
    bias."""
    y = tl.zeros(c.shape, tl.float32)
    if BIAS:
        y += tl.load(bias_at, mask=c < size, other=0.0).to(tl.float32)
    for back in tl.static_range(W):
        is_row = position - back >= first
        ok = c < tl.where(is_row, size, 0)
        row_at = (position - back - first) * y_stride
        x = tl.load(y_at + row_at, mask=ok, other=0.0)
        x = with_pending(x, add_at + row_at, has, ok, PENDING)
        ok = c < tl.where(is_row | (position < back), 0, size)
        past_at = kept_at + (position + R - back) % R * (C + 2 * H)
        x = tl.where(is_row, x, tl.load(past_at, mask=ok, other=0.0))
        weight = tl.load(weight_at + (W - 1 - back) * C, mask=c < size, other=0.0)
        y += x.to(tl.float32) * weight.to(tl.float32)
    return silu(y)


@triton.jit
def _of_head(y_at, add_at, has, kept_at, position, first, y_stride, PENDING: tl.constexpr):
    """A head's input to its strength or decay; see `_convolved`."""
    is_row = position >= first
    row_at = (position - first) * y_stride
    x = tl.load(y_at + row_at, mask=is_row, other=0.0)
    x = with_pending(x, add_at + row_at, has, is_row, PENDING)
    return tl.where(is_row, x, tl.load(kept_at, mask=position < first, other=0.0)).to(tl.float32)


@triton.jit
def _decode(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    read_ptr,
    kept_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    skip_ptr,
    log_a_ptr,
    dt_bias_ptr,
    decodes_ptr,
    position_ptr,
    y_stride,
    C,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    BIAS: tl.constexpr,
    MAMBA: tl.constexpr,
    DOUBLED: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """read, fp32 (N, H, E) = what the rows of decodes read of their states. These change by the
    tokens that they lack and by the first row. Programs (decodes, H, parts of E)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(decodes_ptr + 4 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 4 * n + 1).to(tl.int64)
    count = tl.load(decodes_ptr + 4 * n + 2)
    lag = tl.load(decodes_ptr + 4 * n + 3)
    if count <= 0:
        if PDL:  # whoever waits for this kernel waits for those ahead
            tl.extra.cuda.gdc_wait()
        return
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * PART + tl.arange(0, PART)
    share: tl.constexpr = H // G
    g = h // share
    nth_head = h % share
    has = has_pending(add_slot_ptr + row, PENDING)
    first = tl.load(position_ptr + row).to(tl.int32)
    log_a = tl.load(log_a_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    if MAMBA:
        skip = tl.load(skip_ptr + h).to(tl.float32)
    # No kernel since the step before has written the state.
    state_at = delta_ptr + ((state * H + h) * D + d[:, None]) * E + e[None, :]
    within = (d < D)[:, None] & (e < E)[None, :]
    held = (d < tl.where(first > 0, D, 0))[:, None] & (e < E)[None, :]
    S = tl.load(state_at, mask=held, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y_row = y_ptr + row * y_stride
    add_row = add_ptr + row * y_stride
    kept = kept_ptr + state * R * (C + 2 * H)
    q_c = COLUMNS[0] + g * COLUMNS[1] + d
    k_c = COLUMNS[2] + g * COLUMNS[3] + d
    v_c = COLUMNS[4] + g * COLUMNS[5] + nth_head * E + e
    b_c = COLUMNS[8] + g * COLUMNS[9] + nth_head
    a_c = COLUMNS[10] + g * COLUMNS[11] + nth_head
    q_at = g * D + d
    k_at = (G + g) * D + d
    v_at = 2 * G * D + h * E + e
    for nth in tl.range(-lag, count, disable_licm=True):
        position = first + nth
        of_head = kept + position % R * (C + 2 * H) + C + h
        if not MAMBA:
            b = _of_head(
                y_row + b_c, add_row + b_c, has, of_head, position, first, y_stride, PENDING
            )
        a = _of_head(
            y_row + a_c, add_row + a_c, has, of_head + H, position, first, y_stride, PENDING
        )
        q = _convolved(
            y_row + q_c, add_row + q_c, has, kept + q_at, weight_ptr + q_at, bias_ptr + q_at,
            position, first, d, D, y_stride, C, H, W, R, BIAS, PENDING,
        )  # fmt: skip
        k = _convolved(
            y_row + k_c, add_row + k_c, has, kept + k_at, weight_ptr + k_at, bias_ptr + k_at,
            position, first, d, D, y_stride, C, H, W, R, BIAS, PENDING,
        )  # fmt: skip
        v = _convolved(
            y_row + v_c, add_row + v_c, has, kept + v_at, weight_ptr + v_at, bias_ptr + v_at,
            position, first, e, E, y_stride, C, H, W, R, BIAS, PENDING,
        )  # fmt: skip
        if not MAMBA:
            q *= 1 / tl.sqrt((tl.sum(q * q) + 1e-6) * D)
            k *= 1 / tl.sqrt(tl.sum(k * k) + 1e-6)
        S *= tl.exp(decay(a, log_a, dt_bias))
        if MAMBA:
            change = v * time_step(a, dt_bias)
        else:
            change = (v - tl.sum(k[:, None] * S, 0)) / (1 + tl.exp(-b))
            if DOUBLED:
                change *= 2
        S += k[:, None] * change[None, :]
        if nth == 0:  # what comes after may be wrong
            tl.store(state_at, S, mask=within)
        read_at = read_ptr + ((n + nth) * H + h) * E + e
        read = tl.sum(q[:, None] * S, 0)
        if MAMBA:
            read += skip * v
        tl.store(read_at, read, mask=e < tl.where(nth < 0, 0, E))


@triton.jit
def _give_out(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    read_ptr,
    out_ptr,
    kept_ptr,
    norm_or_skip_ptr,
    decodes_ptr,
    position_ptr,
    y_stride,
    C,
    eps,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MAMBA: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, H, E) = norm(read) * silu(z) of the rows of decodes, whose inputs are kept here, as
    nobody reads any now. Programs (decodes, H)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    only = tl.arange(0, 1)
    row = tl.load(decodes_ptr + 4 * n).to(tl.int64) + only
    state = tl.load(decodes_ptr + 4 * n + 1).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    known = only < tl.where(state < 0, 0, 1)
    ok = known[:, None] & (e < E)[None, :]
    has = known
    if PENDING:
        has = tl.load(add_slot_ptr + row, mask=known, other=-1) >= 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(read_ptr + (n * H + h) * E + e[None, :], mask=ok, other=0.0)
    x = gated_norm(
        x, y_ptr, add_ptr, norm_or_skip_ptr, row, has[:, None], ok, h, y_stride, eps,
        COLUMNS, G, H, E, MAMBA, PENDING,
    )  # fmt: skip
    keep_inputs(
        y_ptr, add_ptr, kept_ptr, position_ptr, state, row, has[:, None], known, h,
        y_stride, C, COLUMNS, G, H, D, E, R, BLOCK_D, BLOCK_E, PENDING,
    )  # fmt: skip
    out_at = out_ptr + (row * H + h)[:, None] * E + e[None, :]
    tl.store(out_at, x, mask=(row >= 0)[:, None] & (e < E)[None, :])


def gated_delta(
    y: Product, layer: DeltaLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """As `weft.kernels.delta.gated_delta`. What pads a captured step is zero."""
    y_TO, work = y.y_TO, rows.work_on(positions_T.device)
    make = y_TO.new_zeros if len(work.chunks) and not rows.states else y_TO.new_empty
    out_TO = make((len(y_TO), layer.num_values * layer.value_dim))
    if len(work.decodes):
        _run_decodes(y, out_TO, layer, cache, work.decodes, positions_T)
    if len(work.chunks):
        run_chunks(y, out_TO, layer, cache, work, positions_T)
    return out_TO


def _run_decodes(
    y: Product,
    out_TO: Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    decodes: Tensor,
    positions_T: Tensor,
) -> None:
    N, H, E, y_TO = len(decodes), layer.num_values, layer.value_dim, y.y_TO
    options = launch_options(starts_early(y_TO.device))
    block_d = block_of(layer.key_dim)
    sizes = {**sizes_of(layer, y), "R": cache.num_kept, "BLOCK_D": block_d}
    (W, C), own = layer.conv_WC.shape, norm_or_skip(layer)
    read_NHE = y_TO.new_empty((N, H, E), dtype=torch.float32)
    part, inputs = min(PART, block_of(E)), (y_TO, *y.pending_tensors())
    grid = (N, H, cdiv(E, part))
    # Few programs leave processors idle, so each may take more of one: with more warps, a wide part
    # of a state leaves threads registers to read all else at once.
    is_wide = block_d >= 64 and part == PART
    warps = 4 if is_wide and math.prod(grid) <= 2 * processors(y_TO.device) else 2
    _decode[grid](
        *inputs, read_NHE, cache.inputs, cache.delta, *convolution_of(layer), own,
        layer.log_a_H, layer.dt_bias_H, decodes, positions_T, y_TO.stride(0), C,
        **sizes, W=W, PART=part, BIAS=layer.bias_C is not None, DOUBLED=layer.doubled,
        num_warps=warps, **options,
    )  # fmt: skip
    _give_out[N, H](
        *inputs, read_NHE, out_TO, cache.inputs, own, decodes, positions_T,
        y_TO.stride(0), C, layer.eps, **sizes, BLOCK_E=block_of(E), num_warps=1,
        **ALL_AT_ONCE, **options,
    )  # fmt: skip
