"""A fused Triton kernel for attention to latents: it rotates queries and keys, and writes latents
and keys to the cache.

Shapes: T token rows, H query heads, L the latent, R the rotated part of a query or key.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.ops import Rope

HEADS = 8
"""How many heads' queries a program rotates."""


@triton.jit
def _rotated(at, cos, sin, r, ok, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What rope makes of the numbers that `at` and r point to, computed in fp32."""
    other = tl.where(r < R // 2, r + R // 2, r - R // 2)
    if INTERLEAVED:
        other = r ^ 1
    x = tl.load(at + r, mask=ok, other=0.0)
    y = tl.load(at + other, mask=ok, other=0.0)
    return (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _rope_and_write_latents(
    q_ptr,
    out_ptr,
    latent_ptr,
    key_ptr,
    cache_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_stride,
    head_stride,
    out_stride,
    out_head_stride,
    latent_stride,
    key_stride,
    table_stride,
    H,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The queries of row t are rotated from q (T, H, R) to out (T, H, R), both of any strides;
    latent (T, L) and the rotated key (T, R) go to the cache (slots, L + R). Programs (T, H / HEADS
    + 1), of which the last one of a row writes to the cache, if the row's slot is not negative."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)[None, :]
    in_r = r < R
    cos = tl.load(cos_ptr + t * table_stride + r, mask=in_r, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * table_stride + r, mask=in_r, other=0.0).to(tl.float32)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        ok = (h < H) & in_r
        q = _rotated(q_ptr + t * q_stride + h * head_stride, cos, sin, r, ok, R, INTERLEAVED)
        tl.store(out_ptr + t * out_stride + h * out_head_stride + r, q, mask=ok)
    else:
        slot = tl.load(slot_ptr + t)
        if slot >= 0:
            d = tl.arange(0, BLOCK_L)
            at = cache_ptr + slot * (L + R)
            latent = tl.load(latent_ptr + t * latent_stride + d, mask=d < L, other=0.0)
            tl.store(at + d, latent, mask=d < L)
            key = _rotated(key_ptr + t * key_stride, cos, sin, r, in_r, R, INTERLEAVED)
            tl.store(at + L + r, key, mask=in_r)


def rope_and_write_latents(
    q_THR: Tensor,
    out_THR: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    rope: Rope,
    cache: KVCache,
    batch: AttentionBatch,
    options: dict[str, bool],
) -> None:
    """Compute what `Ops.rope_and_write_latents` does, which explains the arguments. `options`: the
    `launch_options` of the kernel."""
    (T, H, R), L = q_THR.shape, latent_TL.shape[1]
    if not T:
        return
    cos_T1R, sin_T1R, interleaved, _ = rope
    assert cos_T1R.stride(0) == sin_T1R.stride(0)
    _rope_and_write_latents[T, cdiv(H, HEADS) + 1](
        *(q_THR, out_THR, latent_TL, key_TR, cache.k, cos_T1R, sin_T1R, batch.slot_mapping_T),
        *(*q_THR.stride()[:2], *out_THR.stride()[:2], latent_TL.stride(0), key_TR.stride(0)),
        cos_T1R.stride(0),
        H,
        L=L,
        R=R,
        BLOCK_L=next_power_of_2(L),
        BLOCK_R=next_power_of_2(R),
        HEADS=HEADS,
        INTERLEAVED=interleaved,
        num_warps=4,
        **options,
    )
