"""The gated delta rule as Triton kernels; see `weft.kernels.delta` for what is computed.

Decodes take one kernel for all up to the gated norm, and one for that; chunks of prompts take
those of `weft.kernels.triton_delta_chunks`. Programs find rows and states through the
tables of `StateWork`, so that a captured step serves every mix of sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.ops import Product
from weft.kernels.triton_base import has_pending, launch_options, starts_early, with_pending
from weft.kernels.triton_delta_chunks import block_of, run_chunks, sizes_of
from weft.kernels.triton_delta_short import silu
from weft.kernels.triton_delta_solve import decay

PART, WARPS = 64, 2
"""Columns of a state that one program of a decode has, and its warps: what was fastest on an H200,
82 us for 64 rows of a Qwen3.5-9B layer, where parts of 32 with 4 warps take 111."""


@triton.jit
def _one_token(
    y_at, add_at, has, conv_at, weight_at, position, c, size, keeps, C,
    W: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """The activated convolution of a decode's channels c < size, whose input is kept if `keeps`.
    The pointers are those of each channel: of the row, of the state and of the weights."""
    ok = c < size
    x = tl.load(y_at, mask=ok, other=0.0)
    x = with_pending(x, add_at, has, ok, PENDING)
    y = x.to(tl.float32) * tl.load(weight_at + (W - 1) * C, mask=ok, other=0.0).to(tl.float32)
    for back in tl.static_range(1, W):
        seen = c < tl.where(position >= back, size, 0)
        past = tl.load(conv_at + (position + W - back) % W * C, mask=seen, other=0.0).to(tl.float32)
        y += past * tl.load(weight_at + (W - 1 - back) * C, mask=ok, other=0.0).to(tl.float32)
    tl.store(conv_at + position % W * C, x, mask=c < tl.where(keeps, size, 0))
    return silu(y)


@triton.jit
def _decode(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    read_ptr,
    conv_ptr,
    delta_ptr,
    weight_ptr,
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
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """read, fp32 (N, H, E) = what a decode reads of its state, which it changes first. Programs
    (decodes, H, parts of E). All programs of a key head read its inputs, and one of them keeps
    these for later: at a place that none reads now."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(decodes_ptr + 2 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 2 * n + 1).to(tl.int64)
    if state < 0:
        if PDL:  # whoever waits for this kernel waits for those ahead
            tl.extra.cuda.gdc_wait()
        return
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * PART + tl.arange(0, PART)
    share: tl.constexpr = H // G
    g = h // share
    nth = h % share
    has = has_pending(add_slot_ptr + row, PENDING)
    position = tl.load(position_ptr + row).to(tl.int32)
    log_a = tl.load(log_a_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    # No kernel since the step before has written the state.
    state_at = delta_ptr + ((state * H + h) * D + d[:, None]) * E + e[None, :]
    within = (d < D)[:, None] & (e < E)[None, :]
    held = (d < tl.where(position > 0, D, 0))[:, None] & (e < E)[None, :]
    S = tl.load(state_at, mask=held, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y_row = y_ptr + row * y_stride
    add_row = add_ptr + row * y_stride
    conv_row = conv_ptr + state * W * C
    q_c = COLUMNS[0] + g * COLUMNS[1] + d
    k_c = COLUMNS[2] + g * COLUMNS[3] + d
    v_c = COLUMNS[4] + g * COLUMNS[5] + nth * E + e
    b_c = COLUMNS[8] + g * COLUMNS[9] + nth
    a_c = COLUMNS[10] + g * COLUMNS[11] + nth
    keeps = nth + tl.program_id(2) == 0
    at = g * D + d
    q = _one_token(
        y_row + q_c, add_row + q_c, has, conv_row + at, weight_ptr + at,
        position, d, D, keeps, C, W, PENDING,
    )  # fmt: skip
    at = (G + g) * D + d
    k = _one_token(
        y_row + k_c, add_row + k_c, has, conv_row + at, weight_ptr + at,
        position, d, D, keeps, C, W, PENDING,
    )  # fmt: skip
    at = 2 * G * D + h * E + e
    v = _one_token(
        y_row + v_c, add_row + v_c, has, conv_row + at, weight_ptr + at,
        position, e, E, nth >= 0, C, W, PENDING,
    )  # fmt: skip
    q *= 1 / tl.sqrt((tl.sum(q * q) + 1e-6) * D)
    k *= 1 / tl.sqrt(tl.sum(k * k) + 1e-6)
    a = with_pending(tl.load(y_row + a_c), add_row + a_c, has, state >= 0, PENDING).to(tl.float32)
    b = with_pending(tl.load(y_row + b_c), add_row + b_c, has, state >= 0, PENDING).to(tl.float32)
    S *= tl.exp(decay(a, log_a, dt_bias))
    told = tl.sum(k[:, None] * S, 0)
    S += k[:, None] * ((v - told) / (1 + tl.exp(-b)))[None, :]
    tl.store(state_at, S, mask=within)
    tl.store(read_ptr + (n * H + h) * E + e, tl.sum(q[:, None] * S, 0), mask=e < E)


@triton.jit
def _gated_norm(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    read_ptr,
    out_ptr,
    norm_ptr,
    decodes_ptr,
    y_stride,
    eps,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, H, E) = norm(read) * silu(z) of decodes. Programs (decodes, H)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(decodes_ptr + 2 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 2 * n + 1)
    e = tl.arange(0, BLOCK_E)
    share: tl.constexpr = H // G
    norm = tl.load(norm_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    known = e < tl.where(state < 0, 0, E)
    has = has_pending(add_slot_ptr + tl.where(state < 0, 0, row), PENDING)
    z_c = row * y_stride + COLUMNS[6] + h // share * COLUMNS[7] + h % share * E + e
    z = with_pending(
        tl.load(y_ptr + z_c, mask=known, other=0.0), add_ptr + z_c, has, known, PENDING
    ).to(tl.float32)
    x = tl.load(read_ptr + (n * H + h) * E + e, mask=known, other=0.0)
    x *= 1 / tl.sqrt(tl.sum(x * x) / E + eps) * norm
    out_at = out_ptr + (row * H + h) * E + e
    tl.store(out_at, x * silu(z), mask=e < tl.where(row < 0, 0, E))


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
    options, sizes = launch_options(starts_early(y_TO.device)), sizes_of(layer, y)
    read_NHE = y_TO.new_empty((N, H, E), dtype=torch.float32)
    part, inputs = min(PART, block_of(E)), (y_TO, *y.pending_tensors())
    _decode[N, H, triton.cdiv(E, part)](
        *inputs, read_NHE, cache.conv, cache.delta, layer.conv_WC, layer.log_a_H, layer.dt_bias_H,
        decodes, positions_T, y_TO.stride(0), layer.conv_WC.shape[1],
        **sizes, W=len(layer.conv_WC), BLOCK_D=block_of(layer.key_dim), PART=part,
        num_warps=WARPS, **options,
    )  # fmt: skip
    _gated_norm[N, H](
        *inputs, read_NHE, out_TO, layer.norm_E, decodes, y_TO.stride(0), layer.eps,
        **sizes, BLOCK_E=block_of(E), num_warps=1, **options,
    )  # fmt: skip
