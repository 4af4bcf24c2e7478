"""The gated delta rule as Triton kernels; see `weft.kernels.delta` for what is computed.

Decodes take one kernel, from the output of the projection to the input of the next one; chunks of
prompts take those of `weft.kernels.triton_delta_chunks`. Programs find rows and states through the
tables of `StateWork`, so that a captured step serves every mix of sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.delta import DeltaLayer, StateCache, StateWork
from weft.kernels.ops import Pending, Product
from weft.kernels.triton_base import has_pending, launch_options, starts_early, with_pending
from weft.kernels.triton_delta_chunks import added, block_of, decay, run_chunks, silu, sizes_of


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
    out_ptr,
    conv_ptr,
    delta_ptr,
    weight_ptr,
    log_a_ptr,
    dt_bias_ptr,
    norm_ptr,
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
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token of a sequence, for one value head. Programs (decodes, H). The value heads of a key
    head all read its inputs, and the first of them keeps them: at a place that none reads now."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(decodes_ptr + 2 * n).to(tl.int64)
    state = tl.load(decodes_ptr + 2 * n + 1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    out_at = out_ptr + (row * H + h) * E + e
    if state < 0:
        tl.store(out_at, tl.zeros((BLOCK_E,), tl.float32), mask=e < tl.where(row < 0, 0, E))
        return
    share: tl.constexpr = H // G
    g = h // share
    nth = h % share
    has = has_pending(add_slot_ptr + row, PENDING)
    position = tl.load(position_ptr + row).to(tl.int32)
    log_a = tl.load(log_a_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    norm = tl.load(norm_ptr + e, mask=e < E, other=0.0).to(tl.float32)
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
    z_c = COLUMNS[6] + g * COLUMNS[7] + nth * E + e
    b_c = COLUMNS[8] + g * COLUMNS[9] + nth
    a_c = COLUMNS[10] + g * COLUMNS[11] + nth
    at = g * D + d
    q = _one_token(
        y_row + q_c, add_row + q_c, has, conv_row + at, weight_ptr + at,
        position, d, D, nth == 0, C, W, PENDING,
    )  # fmt: skip
    at = (G + g) * D + d
    k = _one_token(
        y_row + k_c, add_row + k_c, has, conv_row + at, weight_ptr + at,
        position, d, D, nth == 0, C, W, PENDING,
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
    out = tl.sum(q[:, None] * S, 0)
    out *= 1 / tl.sqrt(tl.sum(out * out) / E + eps) * norm
    z = tl.load(y_row + z_c, mask=e < E, other=0.0)
    z = with_pending(z, add_row + z_c, has, e < E, PENDING).to(tl.float32)
    tl.store(out_at, out * silu(z), mask=e < E)


def gated_delta(
    y: Product, layer: DeltaLayer, cache: StateCache, work: StateWork, positions_T: Tensor
) -> Tensor:
    """As `weft.kernels.delta.gated_delta`. The rows of a step that are in none of the tables are
    zero."""
    y_TO, pending = y
    make = y_TO.new_zeros if len(work.chunks) else y_TO.new_empty
    out_TO = make((len(y_TO), layer.num_values * layer.value_dim))
    if len(work.decodes):
        _run_decodes(y_TO, pending, out_TO, layer, cache, work.decodes, positions_T)
    if len(work.chunks):
        run_chunks(y_TO, pending, out_TO, layer, cache, work, positions_T)
    return out_TO


def _run_decodes(
    y_TO: Tensor,
    pending: Pending | None,
    out_TO: Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    decodes: Tensor,
    positions_T: Tensor,
) -> None:
    _decode[len(decodes), layer.num_values](
        y_TO,
        *added(pending, y_TO),
        out_TO,
        cache.conv,
        cache.delta,
        layer.conv_WC,
        layer.log_a_H,
        layer.dt_bias_H,
        layer.norm_E,
        decodes,
        positions_T,
        y_TO.stride(0),
        layer.conv_WC.shape[1],
        layer.eps,
        **sizes_of(layer, pending),
        W=len(layer.conv_WC),
        BLOCK_D=block_of(layer.key_dim),
        BLOCK_E=block_of(layer.value_dim),
        num_warps=8,
        **launch_options(starts_early(y_TO.device)),
    )
