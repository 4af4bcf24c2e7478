"""Fused Triton kernels for attention to latents: norms and rope, with what adapters have pending,
and the write to the cache.

Shapes: T token rows, H query heads, O columns of a product's rows, Q the latent of queries, N the
part of a query without position, R the rotated part of a query or key, L the latent.

Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.ops import Product, Rope
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    INTERPRETED,
    dot,
    has_pending,
    with_pending,
)

HEADS = 8
"""How many heads' queries a program rotates."""
MOST_ROWS = 64
"""The most rows that `absorb` takes. It reads the matrices early; with more rows, a library is as
fast."""
OUTPUTS_AT_ONCE = 128
"""How many outputs of a head a program of `absorb` has, if it has 128 inputs; else a share of
them."""


@triton.jit
def _read(at, add_at, has, ok, PENDING: tl.constexpr):
    """Columns of a product with what is pending."""
    return with_pending(tl.load(at, mask=ok, other=0.0), add_at, has, ok, PENDING)


@triton.jit
def _rotated(x, y, cos_at, sin_at, ok):
    """What rope makes of x, whose pair is y."""
    cos = tl.load(cos_at, mask=ok, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=ok, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _paired(r, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other one of r's pair."""
    other = tl.where(r < R // 2, r + R // 2, r - R // 2)
    if INTERLEAVED:
        other = r ^ 1
    return other


@triton.jit
def _normed(x, weight_at, ok, eps, SIZE: tl.constexpr):
    wide = x.to(tl.float32)
    weight = tl.load(weight_at, mask=ok, other=0.0).to(tl.float32)
    return (wide / tl.sqrt(tl.sum(wide * wide) / SIZE + eps) * weight).to(x.dtype)


@triton.jit
def _write_latents(
    a_ptr,
    query_ptr,
    cache_ptr,
    query_norm_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    add_ptr,
    add_slot_ptr,
    query_norm_stride,
    norm_stride,
    table_stride,
    eps,
    columns,
    Q: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of a (T, O) begins with the latent of queries, and ends with the latent and the key.
    Programs (T, 2): the first of a row writes the norm of the latent and the rotated key to the
    cache (slots, L + R), if the row's slot is not negative. The second writes the norm of the
    latent of queries to query (T, Q); there is none if Q is 0. Weights of norms are those of row t
    at their stride times t."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    has = has_pending(add_slot_ptr + t, PENDING)
    slot = tl.load(slot_ptr + t)  # no kernel of a step writes it
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) == 0:
        if slot >= 0:
            at = t * columns + columns - L - R
            d = tl.arange(0, BLOCK_L)
            latent = _read(a_ptr + at + d, add_ptr + at + d, has, d < L, PENDING)
            r = tl.arange(0, BLOCK_R)
            at += L
            other = at + _paired(r, R, INTERLEAVED)
            x = _read(a_ptr + at + r, add_ptr + at + r, has, r < R, PENDING)
            y = _read(a_ptr + other, add_ptr + other, has, r < R, PENDING)
            in_table = t * table_stride + r
            key = _rotated(x, y, cos_ptr + in_table, sin_ptr + in_table, r < R)
            latent = _normed(latent, norm_ptr + t * norm_stride + d, d < L, eps, L)
            tl.store(cache_ptr + slot * (L + R) + d, latent, mask=d < L)
            tl.store(cache_ptr + slot * (L + R) + L + r, key, mask=r < R)
    else:
        d = tl.arange(0, BLOCK_Q)
        at = t * columns + d
        x = _read(a_ptr + at, add_ptr + at, has, d < Q, PENDING)
        query = _normed(x, query_norm_ptr + t * query_norm_stride + d, d < Q, eps, Q)
        tl.store(query_ptr + t * Q + d, query, mask=d < Q)


@triton.jit
def _rotate_queries(
    q_ptr,
    rest_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    add_ptr,
    add_slot_ptr,
    out_stride,
    out_head_stride,
    table_stride,
    H,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ends of queries q (T, H, N + R) are rotated to out (T, H, R), of any strides, and the
    rest is copied to rest (T, H, N). SCALED: both are multiplied by the row's factor (T,). Programs
    (T, H / HEADS)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    has = has_pending(add_slot_ptr + t, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = (t * H + h) * (N + R)
    n = tl.arange(0, BLOCK_N)[None, :]
    ok = (h < H) & (n < N)
    rest = _read(q_ptr + at + n, add_ptr + at + n, has, ok, PENDING)
    r = tl.arange(0, BLOCK_R)[None, :]
    ok_r = (h < H) & (r < R)
    at += N
    other = at + _paired(r, R, INTERLEAVED)
    x = _read(q_ptr + at + r, add_ptr + at + r, has, ok_r, PENDING)
    y = _read(q_ptr + other, add_ptr + other, has, ok_r, PENDING)
    if SCALED:
        factor = tl.load(factor_ptr + t).to(tl.float32)
        rest = (rest.to(tl.float32) * factor).to(rest.dtype)
        x = (x.to(tl.float32) * factor).to(x.dtype)
        y = (y.to(tl.float32) * factor).to(y.dtype)
    in_table = t * table_stride + r
    turned = _rotated(x, y, cos_ptr + in_table, sin_ptr + in_table, ok_r)
    tl.store(rest_ptr + (t * H + h) * N + n, rest, mask=ok)
    tl.store(out_ptr + t * out_stride + h * out_head_stride + r, turned, mask=ok_r)


@triton.jit
def _absorb(
    x_ptr,
    weight_ptr,
    y_ptr,
    T,
    x_stride,
    x_head_stride,
    y_stride,
    y_head_stride,
    weight_head_stride,
    weight_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y (T, H, O) = x (T, H, I) W (H, I, O); programs (O / BLOCK_O, H). TRANSPOSED: the unit stride
    of W is along I and `weight_stride` along O, in place of the reverse."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_at = weight_ptr + h * weight_head_stride
    x_at = x_ptr + t[:, None].to(tl.int64) * x_stride + h * x_head_stride
    weights = ()
    for i0 in tl.static_range(0, INPUTS, BLOCK_I):  # no kernel of a step writes them
        if TRANSPOSED:
            at = weight_at + o[:, None] * weight_stride + (i0 + i)[None, :]
            mask = (o < OUTPUTS)[:, None] & (i0 + i < INPUTS)[None, :]
            weights += (tl.trans(tl.load(at, mask=mask, other=0.0)),)
        else:
            at = weight_at + (i0 + i)[:, None] * weight_stride + o[None, :]
            mask = (i0 + i < INPUTS)[:, None] & (o < OUTPUTS)[None, :]
            weights += (tl.load(at, mask=mask, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.full((BLOCK_T, BLOCK_O), 0.0, tl.float32)
    for j in tl.static_range(len(weights)):
        d = j * BLOCK_I + i
        x = tl.load(x_at + d[None, :], mask=(t < T)[:, None] & (d < INPUTS)[None, :], other=0.0)
        acc = dot(x, weights[j], acc, EXACT)
    y_at = y_ptr + t[:, None].to(tl.int64) * y_stride + h * y_head_stride + o[None, :]
    mask = (t < T)[:, None] & (o < OUTPUTS)[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)


def write_latents(
    a: Product,
    query_norm_Q: Tensor | None,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache: KVCache,
    batch: AttentionBatch,
    options: dict[str, bool],
) -> Tensor | None:
    """Compute what `Ops.write_latents` does, which explains the arguments. `options`: the
    `launch_options` of the kernel."""
    T, columns = a.y_TO.shape
    L, W = norm_L.shape[-1], cache.k.shape[-1]
    query_TQ = None
    if query_norm_Q is not None:
        query_TQ = a.y_TO.new_empty(T, query_norm_Q.shape[-1])
    Q = 0 if query_TQ is None else query_TQ.shape[1]
    if T:
        _write_latents[T, 1 if query_TQ is None else 2](
            a.y_TO,
            a.y_TO if query_TQ is None else query_TQ,
            cache.k,
            norm_L if query_norm_Q is None else query_norm_Q,
            norm_L,
            *_tables(rope),
            batch.slot_mapping_T,
            *a.pending_tensors(),
            0 if query_norm_Q is None else _row_stride(query_norm_Q),
            _row_stride(norm_L),
            rope.cos_T1R.stride(0),
            eps,
            columns,
            Q=Q,
            L=L,
            R=W - L,
            BLOCK_Q=next_power_of_2(max(Q, 1)),
            BLOCK_L=next_power_of_2(L),
            BLOCK_R=next_power_of_2(W - L),
            INTERLEAVED=rope.interleaved,
            PENDING=a.pending is not None,
            num_warps=4,
            **ALL_AT_ONCE,
            **options,
        )
    return query_TQ


def rotate_queries(q: Product, out_THR: Tensor, rope: Rope, options: dict[str, bool]) -> Tensor:
    """Compute what `Ops.rotate_queries` does, which explains the arguments. `options`: the
    `launch_options` of the kernel."""
    T, H, R = out_THR.shape
    N, factor_T11 = q.y_TO.shape[1] // H - R, rope.query_T11
    rest_THN = q.y_TO.new_empty(T, H, N)
    if T:
        _rotate_queries[T, cdiv(H, HEADS)](
            q.y_TO,
            rest_THN,
            out_THR,
            *_tables(rope),
            q.y_TO if factor_T11 is None else factor_T11,
            *q.pending_tensors(),
            *out_THR.stride()[:2],
            rope.cos_T1R.stride(0),
            H,
            N=N,
            R=R,
            BLOCK_N=next_power_of_2(N),
            BLOCK_R=next_power_of_2(R),
            HEADS=HEADS,
            INTERLEAVED=rope.interleaved,
            SCALED=factor_T11 is not None,
            PENDING=q.pending is not None,
            num_warps=4,
            **ALL_AT_ONCE,
            **options,
        )
    return rest_THN


def absorb(x_THI: Tensor, weight_HIO: Tensor, y_THO: Tensor, options: dict[str, bool]) -> None:
    """Compute what `Ops.absorb` does, which explains the arguments, for up to MOST_ROWS rows.
    `options`: the `launch_options` of the kernel."""
    (T, H, outputs), inputs = y_THO.shape, x_THI.shape[2]
    head_stride, *strides = weight_HIO.stride()
    transposed = strides[0] == 1
    block_i = min(128, max(16, next_power_of_2(inputs)))
    block_o = max(16, min(OUTPUTS_AT_ONCE // cdiv(inputs, block_i), next_power_of_2(outputs)))
    if T:
        _absorb[cdiv(outputs, block_o), H](
            *(x_THI, weight_HIO, y_THO, T),
            *(*x_THI.stride()[:2], *y_THO.stride()[:2]),
            head_stride,
            max(strides),
            INPUTS=inputs,
            OUTPUTS=outputs,
            BLOCK_T=max(16, next_power_of_2(T)),
            BLOCK_I=block_i,
            BLOCK_O=block_o,
            TRANSPOSED=transposed,
            EXACT=INTERPRETED or x_THI.dtype == torch.float32,
            num_warps=4,
            **options,
        )


def _tables(rope: Rope) -> tuple[Tensor, Tensor]:
    assert rope.cos_T1R.stride(0) == rope.sin_T1R.stride(0)
    return rope.cos_T1R, rope.sin_T1R


def _row_stride(weight: Tensor) -> int:
    """How far the weights of rows are apart: 0, if all rows have the same."""
    return weight.stride(0) if weight.dim() == 2 else 0
