"""Online softmax over a paged context: the loop that the Triton attention kernels share.

Shapes: M query rows, D head dimension, K key and value heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _blocks_of(n, last, table_at, BLOCK_SIZE: tl.constexpr):
    """The cache blocks of context tokens n."""
    return tl.load(table_at + n // BLOCK_SIZE, mask=n < last, other=0).to(tl.int64)


@triton.jit
def _capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), where tanh(z) = (1 - exp(-2 z)) / (1 + exp(-2 z))."""
    DOUBLE: tl.constexpr = 2.8853900817779268 / CAP  # 2 LOG2E
    shrunk = tl.exp2(-tl.abs(score) * DOUBLE)
    return tl.where(score < 0, -CAP, CAP) * ((1 - shrunk) / (1 + shrunk))


@triton.jit
def _round(
    q,
    k_ptr,
    v_ptr,
    block,
    n,
    head,
    last,
    position,
    window,
    K,
    scale,
    acc,
    total,
    most,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
):
    """`accumulate` over context tokens n in the given blocks; without MASKED, every row sees
    all of them."""
    d = tl.arange(0, acc.shape[1])
    at = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * K + head) * D
    mask = (d < D)[None, :]
    if MASKED:
        mask = mask & (n < last)[:, None]
    k = tl.load(k_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP > 0:
        score = _capped(score, CAP)
    if MASKED:
        seen = (n < last)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        if WINDOW and CHUNKED:
            seen = seen & (n[None, :] >= (position // window * window)[:, None])
        elif WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        score = tl.where(seen, score, -1e30)
    most_now = tl.maximum(most, tl.max(score, 1))
    weight = tl.exp2(score - most_now[:, None])
    shrink = tl.exp2(most - most_now)  # 0 at the first score seen: what came before is forgotten
    total = total * shrink + tl.sum(weight, 1)
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, most_now


@triton.jit
def load_sinks(sinks_ptr, heads, mask):
    """The sinks of some heads, as scores in powers of 2."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def with_sinks(acc, total, most, sink):
    """What `accumulate` gives with one more score for each row, `sink` (M,), that no value belongs
    to: (acc, sum)."""
    most_now = tl.maximum(most, sink)
    shrink = tl.exp2(most - most_now)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - most_now)


@triton.jit
def accumulate(
    q,
    k_ptr,
    v_ptr,
    table_at,
    head,
    first,
    last,
    position,
    window,
    K,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIKE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Online softmax of rows q (M, D) over context tokens [first, last): (acc, sum, maximum). It
    takes powers of 2: `scale` has LOG2E in it.

    CAUSAL: row m sees up to position[m]; WINDOW: and only after position[m] - window, or with
    CHUNKED from the last multiple of `window` on. CAP: that of an `Attend`, with LOG2E in it; 0:
    none. Rounds that every row sees all of go without masks (`first` is then a multiple of a
    round), but if all rounds are to be ALIKE: with a mask, the compiler rounds otherwise. Blocks
    are looked up one round ahead, as the compiler overlaps fewer rounds of loads whose addresses
    are loaded in the same round.
    """
    i = tl.arange(0, BLOCK_N)
    most = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    block = _blocks_of(first + i, last, table_at, BLOCK_SIZE)
    masked = first
    if CAUSAL and not WINDOW and not ALIKE:
        masked = tl.maximum(tl.min(position) + 1, 0) // BLOCK_N * BLOCK_N
        masked = tl.maximum(tl.minimum(masked, last), first)
        for start in range(first, masked, BLOCK_N):
            n = start + i
            now = block
            block = _blocks_of(n + BLOCK_N, last, table_at, BLOCK_SIZE)
            acc, total, most = _round(
                q,
                k_ptr,
                v_ptr,
                now,
                n,
                head,
                last,
                position,
                window,
                K,
                scale,
                acc,
                total,
                most,
                D,
                BLOCK_SIZE,
                False,
                False,
                False,
                False,
                CAP,
            )
    for start in range(masked, last, BLOCK_N):
        n = start + i
        now = block
        block = _blocks_of(n + BLOCK_N, last, table_at, BLOCK_SIZE)
        acc, total, most = _round(
            q,
            k_ptr,
            v_ptr,
            now,
            n,
            head,
            last,
            position,
            window,
            K,
            scale,
            acc,
            total,
            most,
            D,
            BLOCK_SIZE,
            True,
            CAUSAL,
            WINDOW,
            CHUNKED,
            CAP,
        )
    return acc, total, most
