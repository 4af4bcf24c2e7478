"""The Triton kernel of `weft.kernels.attention.latent`, which names the shapes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _latents_of(n, last, table_at, W: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the latents of context tokens n begin in the cache."""
    block = tl.load(table_at + n // BLOCK_SIZE, mask=n < last, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + n % BLOCK_SIZE) * W


@triton.jit(do_not_specialize=["table_stride"])
def latent_tiles(
    q_ptr,
    cache_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    table_ptr,
    lens_ptr,
    tiles_ptr,
    scale,
    table_stride,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of up to BLOCK_M queries of a tile to one part of their context. A tile is one or
    more token rows of one sequence, with H queries each. Programs (tiles * SHARES, PARTS): each
    has a share of a tile.

    q (T, H, L + R); cache (., L + R); out (T, H, L); table int32 (., B); lens int32 (S,); `scale`
    is the factor of scores times log2 e. ROWS says what the tiles are:

        "tiles"  tiles int32 (., 4): sequence, first row, number of rows (0: nothing to do), and
                 position of the first row
        "pairs"  tiles int32 (., 2): sequence (-1: nothing to do) and its only row
        "all"    tile i is the only row of sequence i, and is row i

    A context is cut into at most PARTS parts of at least LEAST tokens. If PARTS is not 1, results
    go to acc fp32 (., PARTS, H, L) and sums fp32 (., PARTS, H, 2) of (sum, maximum): by row for
    "tiles", else by the tile's number. The sums of a part without context are 0; those of "tiles"
    have to be 0 before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) // SHARES
    if ROWS == "tiles":
        seq = tl.load(tiles_ptr + 4 * i)
        row = tl.load(tiles_ptr + 4 * i + 1)
        count = tl.load(tiles_ptr + 4 * i + 2)
        position = tl.load(tiles_ptr + 4 * i + 3)
        if count == 0:
            return
    else:
        seq = i
        row = i
        if ROWS == "pairs":
            seq = tl.load(tiles_ptr + 2 * i)
            row = tl.load(tiles_ptr + 2 * i + 1)
            if seq < 0:
                return
        position = tl.load(lens_ptr + seq) - 1
        count = 1
    m = tl.program_id(0) % SHARES * BLOCK_M + tl.arange(0, BLOCK_M)
    last = position + count
    first = 0
    if PARTS > 1:
        share = (last + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N) * BLOCK_N
        share = tl.maximum(share, LEAST)
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, last)
        if first >= last:
            if ROWS != "tiles":
                at = (i.to(tl.int64) * PARTS + tl.program_id(1)) * H + m
                tl.store(sums_ptr + 2 * at, tl.full((BLOCK_M,), 0.0, tl.float32), mask=m < H)
            return
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    W: tl.constexpr = L + R
    there = (m < count * H)[:, None]
    in_l = (d < L)[None, :]
    in_r = (r < R)[None, :]
    q_at = q_ptr + ((row * H).to(tl.int64) + m)[:, None] * W  # heads follow each other by row
    q = tl.load(q_at + d[None, :], mask=there & in_l, other=0.0)
    q_r = tl.load(q_at + L + r[None, :], mask=there & in_r, other=0.0)
    seen_to = position + m // H
    most = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, BLOCK_L), 0.0, tl.float32)
    table_at = table_ptr + seq.to(tl.int64) * table_stride
    at = _latents_of(n, last, table_at, W, BLOCK_SIZE)
    for _ in range(first, last, BLOCK_N):
        now = cache_ptr + at[:, None]
        known = (n < last)[:, None]
        seen = (n < last)[None, :] & (n[None, :] <= seen_to[:, None])
        n += BLOCK_N
        at = _latents_of(n, last, table_at, W, BLOCK_SIZE)  # one round ahead of its use
        c = tl.load(now + d[None, :], mask=known & in_l, other=0.0)
        k_r = tl.load(now + L + r[None, :], mask=known & in_r, other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_r, tl.trans(k_r), score, input_precision="ieee") * scale
        score = tl.where(seen, score, -1e30)
        most_now = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - most_now[:, None])
        shrink = tl.exp2(most - most_now)  # 0 at the first score seen
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        most = most_now
    if PARTS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + ((row * H).to(tl.int64) + m)[:, None] * L + d[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there & in_l)
    else:
        place = i + m * 0
        if ROWS == "tiles":
            place = row + m // H
        base = (place.to(tl.int64) * PARTS + tl.program_id(1)) * H + m % H
        tl.store(acc_ptr + base[:, None] * L + d[None, :], acc, mask=there & in_l)
        # The first rows of a tile may see nothing of a part; they then have no sum in it.
        total = tl.where(most > -1e29, total, 0.0)
        tl.store(sums_ptr + 2 * base, total, mask=m < count * H)
        tl.store(sums_ptr + 2 * base + 1, most, mask=m < count * H)
