"""Fused Triton kernels between the matrix products: norms, rope with the KV write, attention.

Shapes: T token rows, S sequences, I hidden size, F intermediate width, H query heads, K key and
value heads, G = H / K query heads of one key head, D head dimension, B blocks of a sequence,
P parts that a decode's context is cut into.

Everything is computed in fp32 and rounded once. A decode's launches follow from the number of
sequences alone, so that a CUDA graph of them serves any lengths; a sequence of length 0 (padding
of a graph) reads no cache and gives zeros, and a row with a negative slot is not written.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.attention import AttentionBatch, KVCache, RowWork, row_work, tile_rows
from weft.kernels.pending import Pending
from weft.kernels.triton_linear import starts_early

MAX_PARTS = 16
"""Of a decode's context."""

ENOUGH_PROGRAMS = 2
"""For each processor: a decode that has more is not cut into parts."""


class Rounds(NamedTuple):
    """Of a program's loop over a context."""

    tokens: int
    warps: int
    stages: int
    """Rounds that overlap, if there is room for their keys and values."""

    def stages_within(self, shared_bytes: int, num_rows: int, row_bytes: int) -> int:
        """Those that fit into shared memory beside the rows of queries; two at least."""
        room = shared_bytes - num_rows * row_bytes - 4096
        return max(2, min(self.stages, room // (2 * self.tokens * row_bytes)))


FEW_DECODES = Rounds(64, 4, 3)
"""Of decodes in ENOUGH_PROGRAMS or fewer, which have a processor's memory almost for themselves."""

MANY_DECODES = Rounds(32, 4, 4)
"""Of decodes in more programs, of which a processor runs four."""

CHUNKS = Rounds(64, 4, 3)
"""Of chunks of prompts."""

LOG2E = math.log2(math.e)


@triton.jit
def _has_pending(slot_at, PENDING: tl.constexpr):
    """Whether adapters add to a row. No kernel of a step writes its slot, so that it can be read
    before the kernel ahead has ended."""
    has = False
    if PENDING:
        has = tl.load(slot_at) >= 0
    return has


@triton.jit
def _with_pending(y, add_at, has, mask, PENDING: tl.constexpr):
    """y and what adapters add to it; see `weft.kernels.pending`."""
    if PENDING:
        add = tl.load(add_at, mask=mask, other=0.0)
        y = tl.where(has, (y.to(tl.float32) + add).to(y.dtype), y)
    return y


@triton.jit
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = rms_norm(x) or, with ADD, x += delta first; one program per row of `width`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    at = row * width + i
    weight = tl.load(weight_ptr + i, mask=i < width, other=0.0).to(tl.float32)
    has = _has_pending(add_slot_ptr + row, PENDING)
    if PDL:  # what the kernel ahead writes is read from here on
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=i < width, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + at, mask=i < width, other=0.0)
        delta = _with_pending(delta, add_ptr + at, has, i < width, PENDING)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + at, x, mask=i < width)
    wide = x.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out_ptr + at, (wide * scale * weight).to(x.dtype), mask=i < width)


@triton.jit
def _silu_and_mul(
    gate_up_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    F,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, F) = silu(gate) * up of rows (gate, up); programs: row, block of columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * 2 * F + f
    has = _has_pending(add_slot_ptr + row, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + at, mask=f < F, other=0.0)
    up = tl.load(gate_up_ptr + at + F, mask=f < F, other=0.0)
    gate = _with_pending(gate, add_ptr + at, has, f < F, PENDING)
    up = _with_pending(up, add_ptr + at + F, has, f < F, PENDING).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * F + f, (wide / (1 + tl.exp(-wide)) * up).to(gate.dtype), mask=f < F)


@triton.jit
def _rope_and_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    add_ptr,
    add_slot_ptr,
    row_stride,
    table_stride,
    norm_stride,
    eps,
    H,
    K,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Head n of row t: q is rotated in place, k to the cache, v copied there. Programs (T, N).

    qkv (T, H + 2K, D) with contiguous heads; cos and sin (T, D) as `apply_rope` has them, both of
    row stride `table_stride`; norm (H + K, D), for row t at `norm_stride` t; k and v
    (slots, K, D); slot int64 (T,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    has = _has_pending(add_slot_ptr + t, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    d = tl.arange(0, BLOCK)
    ok = d < D
    at = qkv_ptr + t * row_stride + n * D
    x = tl.load(at + d, mask=ok, other=0.0)
    add_at = add_ptr + (t * tl.num_programs(1) + n) * D
    x = _with_pending(x, add_at + d, has, ok, PENDING)
    slot = tl.load(slot_ptr + t)
    written = d < tl.where(slot < 0, 0, D)
    if n < H + K:
        swapped_d = tl.where(d < D // 2, d + D // 2, d - D // 2)
        swapped = tl.load(at + swapped_d, mask=ok, other=0.0)
        swapped = _with_pending(swapped, add_at + swapped_d, has, ok, PENDING)
        swapped = swapped.to(tl.float32)
        y = x.to(tl.float32)
        if NORM:
            scale = 1 / tl.sqrt(tl.sum(y * y) / D + eps)
            norm_at = norm_ptr + t * norm_stride + n * D
            y = y * scale * tl.load(norm_at + d, mask=ok, other=0.0).to(tl.float32)
            swapped = (
                swapped * scale * tl.load(norm_at + swapped_d, mask=ok, other=0.0).to(tl.float32)
            )
        cos = tl.load(cos_ptr + t * table_stride + d, mask=ok, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * table_stride + d, mask=ok, other=0.0).to(tl.float32)
        y = (y * cos + swapped * sin).to(x.dtype)
        if n < H:
            tl.store(at + d, y, mask=ok)  # one warp: both halves have been read
        else:
            tl.store(k_ptr + (slot * K + n - H) * D + d, y, mask=written)
    else:
        tl.store(v_ptr + (slot * K + n - H - K) * D + d, x, mask=written)


@triton.jit
def _blocks_of(n, last, table_at, BLOCK_SIZE: tl.constexpr):
    """The cache blocks of context tokens n."""
    return tl.load(table_at + n // BLOCK_SIZE, mask=n < last, other=0).to(tl.int64)


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
):
    """`_accumulate` over context tokens n in the given blocks; without MASKED, every row sees
    all of them."""
    d = tl.arange(0, acc.shape[1])
    at = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * K + head) * D
    mask = (d < D)[None, :]
    if MASKED:
        mask = mask & (n < last)[:, None]
    k = tl.load(k_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = (n < last)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        if WINDOW:
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
def _accumulate(
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
):
    """Online softmax of rows q (M, D) over context tokens [first, last): (acc, sum, maximum). It
    takes powers of 2: `scale` has LOG2E in it.

    CAUSAL: row m sees up to position[m]; WINDOW: and only after position[m] - window. Rounds that
    every row sees all of go without masks. Blocks are looked up one round ahead, as the
    compiler overlaps fewer rounds of loads whose addresses are loaded in the same round.
    """
    i = tl.arange(0, BLOCK_N)
    most = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    block = _blocks_of(first + i, last, table_at, BLOCK_SIZE)
    masked = first
    if CAUSAL and not WINDOW:
        masked = tl.maximum(tl.min(position) + 1, 0) // BLOCK_N * BLOCK_N
        for start in range(0, masked, BLOCK_N):
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
        )
    return acc, total, most


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    table_ptr,
    lens_ptr,
    pairs_ptr,
    scale,
    window,
    q_stride,
    table_stride,
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query row of a sequence against one part of its context; programs (S, K, PARTS).

    q and out (T, H, D); acc fp32 (S, PARTS, H, D) and sums fp32 (S, PARTS, H, 2) of (sum,
    maximum), which `_combine` puts together when PARTS > 1; table int32 (., B); lens int32;
    pairs int32 (S, 2) of sequence and row (-1: nothing to do), without PAIRS both are the
    program's number.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    seq = i
    row = i
    if PAIRS:
        seq = tl.load(pairs_ptr + 2 * i)
        row = tl.load(pairs_ptr + 2 * i + 1)
        if seq < 0:
            return
    length = tl.load(lens_ptr + seq)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
    each = (length - begin + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N) * BLOCK_N
    first = begin + part * each
    last = tl.minimum(first + each, length)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask = (g < G)[:, None] & (d < D)[None, :]
    at = (head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_stride + at, mask=mask, other=0.0)
    acc, total, most = _accumulate(
        q,
        k_ptr,
        v_ptr,
        table_ptr + seq.to(tl.int64) * table_stride,
        head,
        first,
        last,
        g,
        window,
        K,
        scale,
        D,
        BLOCK_D,
        BLOCK_G,
        BLOCK_N,
        BLOCK_SIZE,
        False,
        False,
    )
    H = K * G
    if PARTS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + row.to(tl.int64) * H * D + at
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        base = (i * PARTS + part).to(tl.int64) * H
        tl.store(acc_ptr + base * D + at, acc, mask=mask)
        sums_at = sums_ptr + (base + head * G + g) * 2
        tl.store(sums_at, total, mask=g < G)
        tl.store(sums_at + 1, most, mask=g < G)


@triton.jit
def _combine(
    out_ptr,
    acc_ptr,
    sums_ptr,
    pairs_ptr,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of one head of one row of `_decode`; programs (S, H)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    head = tl.program_id(1)
    row = i
    if PAIRS:
        row = tl.load(pairs_ptr + 2 * i + 1)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    at = (i * PARTS + p).to(tl.int64) * H + head
    total = tl.load(sums_ptr + at * 2, mask=p < PARTS, other=0.0)
    most = tl.load(sums_ptr + at * 2 + 1, mask=p < PARTS, other=-1e30)
    share = tl.exp2(most - tl.max(most))
    acc = tl.load(
        acc_ptr + at[:, None] * D + d[None, :],
        mask=(p < PARTS)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share)
    out = tl.sum(acc * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    out_at = out_ptr + (row.to(tl.int64) * H + head) * D + d
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=d < tl.where(row < 0, 0, D))


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    tiles_ptr,
    scale,
    window,
    q_stride,
    table_stride,
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A tile of query rows of one sequence, G heads of each; programs (K, tiles).

    tiles int32 (., 4): sequence, first row, number of rows, position of the first row. The rest
    as `_decode` has it.
    """
    head = tl.program_id(0)
    tile = tiles_ptr + 4 * tl.program_id(1)
    seq = tl.load(tile)
    row = tl.load(tile + 1)
    count = tl.load(tile + 2)
    position = tl.load(tile + 3)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m < count * G)[:, None] & (d < D)[None, :]
    rows = (row + m // G).to(tl.int64)
    heads = head * G + m % G
    q = tl.load(
        q_ptr + rows[:, None] * q_stride + heads[:, None] * D + d[None, :], mask=mask, other=0.0
    )
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    acc, total, _ = _accumulate(
        q,
        k_ptr,
        v_ptr,
        table_ptr + seq.to(tl.int64) * table_stride,
        head,
        first,
        position + count,
        position + m // G,
        window,
        K,
        scale,
        D,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        BLOCK_SIZE,
        True,
        WINDOW,
    )
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + rows[:, None] * (K * G * D) + heads[:, None] * D + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


INTERPRETED = not isinstance(_decode, triton.runtime.JITFunction)
"""Whether this process runs kernels in Triton's interpreter."""


class TritonOps:
    """Ops for CUDA devices (and, in Triton's interpreter, for the CPU)."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu" and not INTERPRETED:
            raise ConfigError("the triton ops need a GPU", "ops")
        self._programs, self._shared_bytes = (1, 0) if device.type == "cpu" else _sizes(device)
        self._dependent = starts_early(device)
        """A kernel starts before the one ahead has ended, and waits for what that one writes."""
        self._launch = {"launch_pdl": True} if self._dependent else {}

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return self._norm(x_TI, None, weight_I, eps, None)

    def add_rms_norm(
        self,
        x_TI: Tensor,
        delta_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        pending: Pending | None = None,
    ) -> Tensor:
        return self._norm(x_TI, delta_TI, weight_I, eps, pending)

    def silu_and_mul(self, gate_up_T2F: Tensor, pending: Pending | None = None) -> Tensor:
        num_rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out_TF = gate_up_T2F.new_empty(num_rows, width)
        if num_rows:
            grid = (num_rows, triton.cdiv(width, 1024))
            _silu_and_mul[grid](
                gate_up_T2F,
                out_TF,
                *_pending(pending, gate_up_T2F),
                width,
                BLOCK=1024,
                PENDING=pending is not None,
                PDL=self._dependent,
                num_warps=4,
                **self._launch,
            )
        return out_TF

    def rope_and_write(
        self,
        qkv_TND: Tensor,
        rope: tuple[Tensor, Tensor],
        norm_ND: Tensor | None,
        eps: float,
        cache: KVCache,
        batch: AttentionBatch,
        pending: Pending | None = None,
    ) -> Tensor:
        T, N, D = qkv_TND.shape
        K = cache.k.shape[2]
        H = N - 2 * K
        cos_T1D, sin_T1D = rope
        assert cos_T1D.stride(0) == sin_T1D.stride(0)
        if T:
            _rope_and_write[T, N](
                qkv_TND,
                cos_T1D,
                sin_T1D,
                cos_T1D if norm_ND is None else norm_ND,
                cache.k,
                cache.v,
                batch.slot_mapping_T,
                *_pending(pending, qkv_TND),
                qkv_TND.stride(0),
                cos_T1D.stride(0),
                norm_ND.stride(0) if norm_ND is not None and norm_ND.dim() == 3 else 0,
                eps,
                H,
                K,
                D=D,
                BLOCK=triton.next_power_of_2(D),
                NORM=norm_ND is not None,
                PENDING=pending is not None,
                PDL=self._dependent,
                num_warps=1,
                **self._launch,
            )
        return qkv_TND[:, :H]

    def attend(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out_THD = q_THD.new_empty(q_THD.shape)
        work = self._work_of(batch, q_THD.shape[1] // cache.k.shape[2])
        if work.num_decodes:
            self._decode(q_THD, cache, batch, work, scale, window, out_THD)
        if work.tiles is not None:
            self._prefill(q_THD, cache, batch, work.tiles, scale, window, out_THD)
        return out_THD

    def _decode(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        work: RowWork,
        scale: float,
        window: int | None,
        out_THD: Tensor,
    ) -> None:
        S, (H, D), K = work.num_decodes, q_THD.shape[1:], cache.k.shape[2]
        wanted = max(1, min(MAX_PARTS, ENOUGH_PROGRAMS * self._programs // (S * K)))
        parts = 1 << (wanted.bit_length() - 1)  # each number is compiled for
        few = S * K * parts <= ENOUGH_PROGRAMS * self._programs
        rounds = FEW_DECODES if few else MANY_DECODES
        acc = sums = out_THD
        if parts > 1:
            acc = q_THD.new_empty((S, parts, H, D), dtype=torch.float32)
            sums = q_THD.new_empty((S, parts, H, 2), dtype=torch.float32)
        pairs = batch.seq_lens_S if work.pairs is None else work.pairs
        block_d = max(16, triton.next_power_of_2(D))
        block_g = max(16, triton.next_power_of_2(H // K))
        row_bytes = block_d * q_THD.element_size()
        _decode[S, K, parts](
            q_THD,
            cache.k,
            cache.v,
            out_THD,
            acc,
            sums,
            batch.block_table_SB,
            batch.seq_lens_S,
            pairs,
            scale * LOG2E,
            window or 0,
            q_THD.stride(0),
            batch.block_table_SB.stride(0),
            K,
            G=H // K,
            D=D,
            BLOCK_D=block_d,
            BLOCK_G=block_g,
            BLOCK_N=rounds.tokens,
            BLOCK_SIZE=cache.block_size,
            PARTS=parts,
            PAIRS=work.pairs is not None,
            WINDOW=window is not None,
            PDL=self._dependent,
            num_warps=rounds.warps,
            num_stages=rounds.stages_within(self._shared_bytes, block_g, row_bytes),
            **self._launch,
        )
        if parts > 1:
            _combine[S, H](
                out_THD,
                acc,
                sums,
                pairs,
                H,
                D=D,
                BLOCK_D=block_d,
                PARTS=parts,
                BLOCK_P=triton.next_power_of_2(parts),
                PAIRS=work.pairs is not None,
                PDL=self._dependent,
                num_warps=4,
                **self._launch,
            )

    def _prefill(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        tiles: Tensor,
        scale: float,
        window: int | None,
        out_THD: Tensor,
    ) -> None:
        (H, D), K = q_THD.shape[1:], cache.k.shape[2]
        block_d, block_m = max(16, triton.next_power_of_2(D)), tile_rows(H // K)
        row_bytes = block_d * q_THD.element_size()
        _prefill[K, len(tiles)](
            q_THD,
            cache.k,
            cache.v,
            out_THD,
            batch.block_table_SB,
            tiles,
            scale * LOG2E,
            window or 0,
            q_THD.stride(0),
            batch.block_table_SB.stride(0),
            K,
            G=H // K,
            D=D,
            BLOCK_D=block_d,
            BLOCK_M=block_m,
            BLOCK_N=CHUNKS.tokens,
            BLOCK_SIZE=cache.block_size,
            WINDOW=window is not None,
            num_warps=CHUNKS.warps,
            num_stages=CHUNKS.stages_within(self._shared_bytes, block_m, row_bytes),
        )

    def _norm(
        self,
        x_TI: Tensor,
        delta_TI: Tensor | None,
        weight_I: Tensor,
        eps: float,
        pending: Pending | None,
    ) -> Tensor:
        num_rows, width = x_TI.shape
        out_TI = torch.empty_like(x_TI)
        if num_rows:
            block = triton.next_power_of_2(width)
            _add_rms_norm[(num_rows,)](
                x_TI,
                x_TI if delta_TI is None else delta_TI,
                weight_I,
                out_TI,
                *_pending(pending, x_TI),
                width,
                eps,
                ADD=delta_TI is not None,
                BLOCK=block,
                PENDING=pending is not None,
                PDL=self._dependent,
                num_warps=min(max(block // 512, 1), 16),
                **self._launch,
            )
        return out_TI

    def _work_of(self, batch: AttentionBatch, num_groups: int) -> RowWork:
        if batch.work is not None:
            return batch.work
        key = ("triton", num_groups)
        work = batch.prepared.get(key)
        if work is None:
            work = batch.prepared[key] = _plan(batch, num_groups)
        assert isinstance(work, RowWork)
        return work


def _pending(pending: Pending | None, none: Tensor) -> tuple[Tensor, Tensor]:
    return (none, none) if pending is None else (pending.add_TO, pending.slot_T)


def _plan(batch: AttentionBatch, num_groups: int) -> RowWork:
    num_seqs = len(batch.query_start) - 1
    if all(b - a == 1 for a, b in pairwise(batch.query_start)):
        return RowWork(num_seqs, None, None)
    pairs, tiles = row_work(batch.query_start, batch.seq_lens, num_groups)
    device = batch.block_table_SB.device
    return RowWork(len(pairs), _upload(pairs, device), _upload(tiles, device))


def _upload(rows: NDArray[np.int32], device: torch.device) -> Tensor | None:
    if not len(rows):
        return None
    host = torch.from_numpy(rows)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _sizes(device: torch.device) -> tuple[int, int]:
    """Processors, and bytes of shared memory that a program may have."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
