"""Fused Triton kernels over heads: rope with the norms ahead of it and the KV write, and the gates
of what heads attend to.

Shapes: T token rows, H query heads, K key and value heads, N all of them, D head dimension.

Everything is computed in fp32 and rounded once. A row with a negative slot is not written to the
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.ops import Product, Rope
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    has_pending,
    load_pending,
    plus_pending,
    processors,
    with_pending,
)


@triton.jit
def _rope_and_write(
    qkv_ptr,
    q_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    add_ptr,
    add_slot_ptr,
    row_stride,
    q_stride,
    table_stride,
    norm_stride,
    eps,
    H,
    K,
    D: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Heads n of row t: q is rotated, k to the cache, v copied there. Programs (T, N / TURNS
    / HEADS), each in TURNS for HEADS of one kind.

    qkv (T, H Q + 2K D), with query heads Q columns apart; q (T, H, D), which may be where it comes
    from; cos and sin (T, R) as `Rope` has them, both of row stride `table_stride`; norm (H + K, D),
    and with NORM_V (H + 2K, D), for row t at `norm_stride` t; k and v (slots, K, D); slot int64
    (T,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    has = has_pending(add_slot_ptr + t, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    d = tl.arange(0, BLOCK)[None, :]
    ok = d < D
    slot = tl.load(slot_ptr + t)
    written = d < tl.where(slot < 0, 0, D)
    columns = H * Q + (tl.num_programs(1) * TURNS * HEADS - H) * D
    swapped_d = tl.where(d < R // 2, d + R // 2, d - R // 2)
    if INTERLEAVED:
        swapped_d = d ^ 1
    for turn in tl.static_range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * HEADS
        n = first + tl.arange(0, HEADS)[:, None]
        column = n * Q
        if first >= H:
            column = H * Q + (n - H) * D
        at = qkv_ptr + t * row_stride + column
        turns = d < tl.where(first < H + K, R, 0)
        x = tl.load(at + d, mask=ok, other=0.0)
        other = tl.load(at + swapped_d, mask=turns, other=0.0)
        add_at = add_ptr + t * columns + column
        add = load_pending(add_at + d, ok, PENDING)
        other_add = load_pending(add_at + swapped_d, turns, PENDING)
        cos = tl.load(cos_ptr + t * table_stride + d, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * table_stride + d, mask=turns, other=0.0).to(tl.float32)
        if NORM:
            norm_at = norm_ptr + t * norm_stride + n * D
            has_norm = d < tl.where(NORM_V or first < H + K, D, 0)
            weight = tl.load(norm_at + d, mask=has_norm, other=0.0).to(tl.float32)
            other_weight = tl.load(norm_at + swapped_d, mask=turns, other=0.0).to(tl.float32)
        x = plus_pending(x, add, has, PENDING)
        if first < H + K:
            swapped = plus_pending(other, other_add, has, PENDING).to(tl.float32)
            y = x.to(tl.float32)
            if NORM:
                scale = 1 / tl.sqrt(tl.sum(y * y, 1) / D + eps)[:, None]
                y = y * scale * weight
                swapped = swapped * scale * other_weight
            y = (y * cos + swapped * sin).to(x.dtype)
            if first < H:
                # One warp: if it is written where it comes from, both of each pair have been read.
                tl.store(q_ptr + t * q_stride + n * D + d, y, mask=ok)
            else:
                tl.store(k_ptr + (slot * K + n - H) * D + d, y, mask=written)
        else:
            if NORM_V:
                value = x.to(tl.float32)
                value = value / tl.sqrt(tl.sum(value * value, 1) / D + eps)[:, None]
                x = (value * weight).to(x.dtype)
            tl.store(v_ptr + (slot * K + n - H - K) * D + d, x, mask=written)


@triton.jit
def _apply_gates(
    x_ptr,
    qkv_ptr,
    add_ptr,
    add_slot_ptr,
    row_stride,
    columns,
    H,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """x (T, H, D) *= sigmoid of the gate of each head, which comes behind its q in a row of qkv
    (T, columns). Programs (T, HEADS of H each)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    ok = (h < H) & (d < D)
    column = (2 * h + 1) * D + d
    has = has_pending(add_slot_ptr + row, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(qkv_ptr + row * row_stride + column, mask=ok, other=0.0)
    gate = with_pending(gate, add_ptr + row * columns + column, has, ok, PENDING).to(tl.float32)
    x_at = x_ptr + (row * H + h) * D + d
    x = tl.load(x_at, mask=ok, other=0.0).to(tl.float32)
    tl.store(x_at, x / (1 + tl.exp(-gate)), mask=ok)


MANY_HEADS, MANY_TURNS = 8, 4
"""If programs of one head each don't all run at once, a program rotates so many heads at once, or
so many in turn if they have norms, which are summed in the same order as those of one head."""
PLACES = 32
"""The most programs that a processor runs at once."""


def rope_and_write(
    qkv: Product,
    rope: Rope,
    norm_ND: Tensor | None,
    eps: float,
    cache: KVCache,
    batch: AttentionBatch,
    gated_heads: int,
    options: dict[str, bool],
) -> Tensor:
    """Compute what `Ops.rope_and_write` does, with these options of a launch."""
    K, D = cache.k.shape[2:]
    qkv_TO = qkv.y_TO
    T, N = len(qkv_TO), qkv_TO.shape[1] // D - gated_heads
    H = N - 2 * K
    q_THD = qkv_TO[:, : H * D].view(T, H, D)
    if gated_heads:
        q_THD = qkv_TO.new_empty(T, H, D)
    cos_T1R, sin_T1R, interleaved, _ = rope
    assert cos_T1R.stride(0) == sin_T1R.stride(0)
    turns, heads, num_places = 1, 1, PLACES * processors(qkv_TO.device)
    if num_places < T * N:
        if norm_ND is None and H % MANY_HEADS == K % MANY_HEADS == 0:
            heads = MANY_HEADS
        elif N % MANY_TURNS == 0:
            turns = MANY_TURNS
    if T:
        _rope_and_write[T, N // (turns * heads)](
            qkv_TO,
            q_THD,
            cos_T1R,
            sin_T1R,
            cos_T1R if norm_ND is None else norm_ND,
            cache.k,
            cache.v,
            batch.slot_mapping_T,
            *qkv.pending_tensors(),
            qkv_TO.stride(0),
            q_THD.stride(0),
            cos_T1R.stride(0),
            norm_ND.stride(0) if norm_ND is not None and norm_ND.dim() == 3 else 0,
            eps,
            H,
            K,
            D=D,
            Q=2 * D if gated_heads else D,
            R=cos_T1R.shape[-1],
            BLOCK=next_power_of_2(D),
            TURNS=turns,
            HEADS=heads,
            NORM=norm_ND is not None,
            NORM_V=norm_ND is not None and norm_ND.shape[-2] == N > N - K,
            INTERLEAVED=interleaved,
            PENDING=qkv.pending is not None,
            num_warps=1,
            **ALL_AT_ONCE,
            **options,
        )
    return q_THD


def apply_gates(x_THD: Tensor, qkv: Product, options: dict[str, bool]) -> Tensor:
    """Compute what `Ops.apply_gates` does, with these options of a launch."""
    T, H, D = x_THD.shape
    qkv_TO = qkv.y_TO
    if T:
        heads = min(4, next_power_of_2(H))
        _apply_gates[T, cdiv(H, heads)](
            x_THD,
            qkv_TO,
            *qkv.pending_tensors(),
            qkv_TO.stride(0),
            qkv_TO.shape[1],
            H,
            D=D,
            HEADS=heads,
            BLOCK=next_power_of_2(D),
            PENDING=qkv.pending is not None,
            num_warps=4,
            **ALL_AT_ONCE,
            **options,
        )
    return x_THD
