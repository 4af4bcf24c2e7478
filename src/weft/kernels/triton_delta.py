"""The gated delta rule and Mamba 2 as Triton kernels; see `weft.kernels.delta` for what is
computed.

Decodes take two kernels: one for the convolution and all that comes before the state, and one for
the state and the gated norm. Chunks of prompts take those of `weft.kernels.triton_delta_chunks`.
Programs find rows and states through the tables of `StateWork`, so that a captured step serves
every mix of sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.ops import Product
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    has_pending,
    launch_options,
    load_pending,
    plus_pending,
    starts_early,
)
from weft.kernels.triton_delta_chunks import (
    block_of,
    channels_of,
    convolution_of,
    norm_or_skip,
    run_chunks,
    sizes_of,
)
from weft.kernels.triton_delta_short import silu
from weft.kernels.triton_delta_solve import decay, strength

EACH_WARP = 4096
"""Numbers of a head's state that one warp holds, 128 in each thread."""


@triton.jit
def _slot_of(n, nth, lag, R: tl.constexpr):
    """Where the prepared inputs of decode n's token `nth` are: those of rows come first, and behind
    them those of the at most R tokens that each state lacks."""
    return tl.where(nth < 0, tl.num_programs(0) + n * R + nth + lag, n + nth).to(tl.int64)


@triton.jit
def _prepare_decodes(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    gates_ptr,
    kept_ptr,
    weight_ptr,
    bias_ptr,
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
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    MAMBA: tl.constexpr,
    DOUBLED: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """qkv, fp32 (slots, C) = queries, keys and values of the rows of decodes, and of the tokens
    that their states lack; gates, fp32 (slots, 2, H) = exp(decay) and strength of each head. The
    rows' inputs are kept. Programs (N, 2 G + H), for a key head's queries, its keys, or a value
    head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(decodes_ptr + 4 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 4 * n + 1).to(tl.int64)
    count = tl.load(decodes_ptr + 4 * n + 2)
    lag = tl.load(decodes_ptr + 4 * n + 3)
    if count <= 0:
        if PDL:  # whoever waits for this kernel waits for those ahead
            tl.extra.cuda.gdc_wait()
        return
    share: tl.constexpr = H // G
    h = tl.maximum(head - 2 * G, 0)
    g = h // share
    nth_head = h % share
    c = tl.arange(0, BLOCK)
    size, column, channel = channels_of(head, COLUMNS, G, H, D, E)
    first = tl.load(position_ptr + row).to(tl.int32)
    has = has_pending(add_slot_ptr + row, PENDING)
    log_a = tl.load(log_a_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    y_at = y_ptr + row * y_stride
    add_at = add_ptr + row * y_stride
    kept_at = kept_ptr + state * R * (C + 2 * H)
    b_c = COLUMNS[8] + g * COLUMNS[9] + nth_head
    a_c = COLUMNS[10] + g * COLUMNS[11] + nth_head
    if PDL:
        tl.extra.cuda.gdc_wait()
    for nth in tl.range(-lag, count, disable_licm=True):
        position = first + nth
        slot = _slot_of(n, nth, lag, R)
        place = kept_at + position % R * (C + 2 * H)
        is_row = nth >= 0
        if head >= 2 * G:
            at = nth * y_stride
            b = tl.load(y_at + at + b_c, mask=is_row, other=0.0)
            a = tl.load(y_at + at + a_c, mask=is_row, other=0.0)
            b_add = load_pending(add_at + at + b_c, is_row, PENDING)
            a_add = load_pending(add_at + at + a_c, is_row, PENDING)
            past_b = tl.load(place + C + h, mask=nth < 0, other=0.0)
            past_a = tl.load(place + C + H + h, mask=nth < 0, other=0.0)
            b = tl.where(is_row, plus_pending(b, b_add, has, PENDING), past_b)
            a = tl.where(is_row, plus_pending(a, a_add, has, PENDING), past_a)
            tl.store(place + C + h, b, mask=is_row)
            tl.store(place + C + H + h, a, mask=is_row)
            gate_at = gates_ptr + slot * 2 * H + h
            tl.store(gate_at, tl.exp(decay(a.to(tl.float32), log_a, dt_bias)))
            of_strength = a if MAMBA else b
            tl.store(gate_at + H, strength(of_strength.to(tl.float32), dt_bias, MAMBA, DOUBLED))
        y = tl.zeros((BLOCK,), tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + channel + c, mask=c < size, other=0.0).to(tl.float32)
        newest = tl.zeros((BLOCK,), y_ptr.dtype.element_ty)
        for back in tl.static_range(W):
            of_row = nth >= back
            ok = c < tl.where(of_row, size, 0)
            at = (nth - back) * y_stride + column + c
            x = tl.load(y_at + at, mask=ok, other=0.0)
            add = load_pending(add_at + at, ok, PENDING)
            kept = c < tl.where(of_row | (position < back), 0, size)
            past_at = kept_at + (position + R - back) % R * (C + 2 * H) + channel + c
            past = tl.load(past_at, mask=kept, other=0.0)
            weight_at = weight_ptr + (W - 1 - back) * C + channel + c
            weight = tl.load(weight_at, mask=c < size, other=0.0)
            x = tl.where(of_row, plus_pending(x, add, has, PENDING), past)
            if back == 0:
                newest = x
            y += x.to(tl.float32) * weight.to(tl.float32)
        y = silu(y)
        if not MAMBA and head < 2 * G:
            scale = 1 / tl.sqrt(tl.sum(y * y, 0) + 1e-6)
            if head < G:
                scale *= 1 / tl.sqrt(D * 1.0)
            y *= scale
        tl.store(qkv_ptr + slot * C + channel + c, y, mask=c < size)
        tl.debug_barrier()  # a place may hold what was just read
        tl.store(place + channel + c, newest, mask=c < tl.where(is_row, size, 0))


@triton.jit
def _decode(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    gates_ptr,
    out_ptr,
    delta_ptr,
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
    """out (T, H, E) = norm(read) * silu(z), for what the rows of decodes read of their states.
    These change by the tokens that they lack and by the first row. Programs (N, H)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    # The state has the form (4, parts of E, D / 4, 32), as threads share such a tensor out by its
    # last dimension, then its first, and then warps take the second: a warp has all of D for some
    # columns, and adds up what keys and queries read without the others.
    QUARTER: tl.constexpr = BLOCK_D // 4
    WIDTH: tl.constexpr = 32 if BLOCK_E > 32 else BLOCK_E
    d = tl.arange(0, 4)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    e = tl.arange(0, BLOCK_E // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = tl.load(decodes_ptr + 4 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 4 * n + 1).to(tl.int64)
    count = tl.load(decodes_ptr + 4 * n + 2)
    lag = tl.load(decodes_ptr + 4 * n + 3)
    if count <= 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        padding = e < tl.where((state < 0) & (row >= 0), E, 0)
        tl.store(out_ptr + (row * H + h) * E + e, tl.zeros(e.shape, tl.float32), mask=padding)
        return
    share: tl.constexpr = H // G
    g = h // share
    has = has_pending(add_slot_ptr + row, PENDING)
    first = tl.load(position_ptr + row).to(tl.int32)
    if MAMBA:
        norm_or_skip = tl.load(norm_or_skip_ptr + h).to(tl.float32)
    else:
        norm_or_skip = tl.load(norm_or_skip_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    # No kernel since the step before has written the state.
    state_at = delta_ptr + (state * H + h) * D * E
    of_head = d[:, None, :, None] * E + e[None, :, None, :]
    within = (d < D)[:, None, :, None] & (e < E)[None, :, None, :]
    S = tl.load(state_at + of_head, mask=within & (first > 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for nth in tl.range(-lag, count, disable_licm=True):
        slot = _slot_of(n, nth, lag, R)
        q_at = qkv_ptr + slot * C + g * D + d
        q = tl.load(q_at, mask=d < D, other=0.0)
        k = tl.load(q_at + G * D, mask=d < D, other=0.0)
        v = tl.load(qkv_ptr + slot * C + 2 * G * D + h * E + e, mask=e < E, other=0.0)
        decayed = tl.load(gates_ptr + slot * 2 * H + h)
        strong = tl.load(gates_ptr + slot * 2 * H + H + h)
        of_row = e < tl.where(nth < 0, 0, E)
        z_at = (row + nth) * y_stride + COLUMNS[6] + g * COLUMNS[7] + h % share * E + e
        z = tl.load(y_ptr + z_at, mask=of_row, other=0.0)
        z_add = load_pending(add_ptr + z_at, of_row, PENDING)
        # What the query reads of the new state follows from the old one, so that both sums are of
        # that, and the query's registers are free when the state changes.
        q_S = decayed * tl.sum(tl.sum(q[:, None, :, None] * S, 2), 0)
        k_S = decayed * tl.sum(tl.sum(k[:, None, :, None] * S, 2), 0)
        change = strong * (v if MAMBA else v - k_S)
        x = q_S + tl.sum(tl.sum(q * k, 0), 0) * change
        S = decayed * S + k[:, None, :, None] * change[None, :, None, :]
        if nth == 0:  # what comes after may be wrong
            tl.store(state_at + of_head, S, mask=within)
        if MAMBA:
            x += norm_or_skip * v
        else:
            scale = 1 / tl.sqrt(tl.sum(tl.sum(x * x, 0), 0) / E + eps)
            x *= scale * norm_or_skip
        x *= silu(plus_pending(z, z_add, has, PENDING).to(tl.float32))
        tl.store(out_ptr + ((row + nth) * H + h) * E + e, x, mask=of_row)


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
    N, H, y_TO = len(decodes), layer.num_values, y.y_TO
    options = launch_options(starts_early(y_TO.device))
    block_d, block_e = block_of(layer.key_dim), block_of(layer.value_dim)
    sizes = {**sizes_of(layer, y), "R": cache.num_kept}
    W, C = layer.conv_WC.shape
    slots = N * (1 + cache.num_kept)
    qkv = y_TO.new_empty((slots, C), dtype=torch.float32)
    gates = y_TO.new_empty((slots, 2, H), dtype=torch.float32)
    inputs = (y_TO, *y.pending_tensors())
    _prepare_decodes[N, 2 * layer.num_keys + H](
        *inputs, qkv, gates, cache.inputs, *convolution_of(layer), layer.log_a_H, layer.dt_bias_H,
        decodes, positions_T, y_TO.stride(0), C, **sizes, W=W, BLOCK=max(block_d, block_e),
        BIAS=layer.bias_C is not None, DOUBLED=layer.doubled, num_warps=1, **ALL_AT_ONCE, **options,
    )  # fmt: skip
    _decode[N, H](
        *inputs, qkv, gates, out_TO, cache.delta, norm_or_skip(layer), decodes, positions_T,
        y_TO.stride(0), C, layer.eps, **sizes, BLOCK_D=block_d, BLOCK_E=block_e,
        num_warps=max(1, block_d * block_e // EACH_WARP), **options,
    )  # fmt: skip
