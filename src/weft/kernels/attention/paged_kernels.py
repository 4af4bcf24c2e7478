"""The Triton kernels of `weft.kernels.attention.paged`, which names the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.attention.online_softmax import accumulate, load_sinks, with_sinks
from weft.kernels.triton_base import ask_for


@triton.jit
def _ask_for_round(
    ptr, table_at, first, last, head, K, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Ask for the keys, or values, of the first tokens of a part."""
    n = first + tl.arange(0, BLOCK_N)
    block = tl.load(table_at + n // BLOCK_SIZE, mask=n < last, other=0).to(tl.int64)
    at = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * K + head) * D
    LINES: tl.constexpr = (BLOCK_D + 63) // 64  # a power of 2
    d = 64 * tl.arange(0, LINES)
    if LINES * 64 >= D + 64:
        d = tl.minimum(d, D - 1)
    ask_for(ptr + at[:, None] + d[None, :])


@triton.jit
def _load_part(
    acc_at, part, num_parts, H, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """What one part of a context gave for G heads, fp32 (HEADS, BLOCK_D)."""
    width = tl.where(part < num_parts, D, 0)
    there = (tl.arange(0, HEADS) < G)[:, None] & (tl.arange(0, BLOCK_D) < width)[None, :]
    return tl.load(acc_at + part * H * D, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_parts(
    acc_at, first, num_parts, H, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """What the four parts of a context from `first` on gave for G heads, each fp32 (HEADS,
    BLOCK_D). A context has `num_parts`; what would come behind them is 0."""
    return (
        _load_part(acc_at, first, num_parts, H, G, D, BLOCK_D, HEADS),
        _load_part(acc_at, first + 1, num_parts, H, G, D, BLOCK_D, HEADS),
        _load_part(acc_at, first + 2, num_parts, H, G, D, BLOCK_D, HEADS),
        _load_part(acc_at, first + 3, num_parts, H, G, D, BLOCK_D, HEADS),
    )


@triton.jit
def _put_together(
    out_at, acc_at, sums_at, sinks_at, num_parts, H, G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The output of a row's G heads from the parts of its context, which lie H heads apart."""
    g = tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, PARTS)
    at = g[:, None] * D + d[None, :]
    there = (g < G)[:, None] & (p < num_parts)[None, :]
    all_at = sums_at + (g[:, None] + p[None, :] * H) * 2
    totals = tl.load(all_at, mask=there, other=0.0, cache_modifier=".cg")
    mosts = tl.load(all_at + 1, mask=there, other=-1e30, cache_modifier=".cg")
    parts = _load_parts(acc_at + at, 0, num_parts, H, G, D, BLOCK_D, HEADS)
    most = tl.max(mosts, 1)
    shares = tl.exp2(mosts - most[:, None])
    total = tl.sum(totals * shares, 1)
    acc = tl.full((HEADS, BLOCK_D), 0.0, tl.float32)
    for first in range(0, num_parts, 4):
        for j in tl.static_range(4):
            share = tl.sum(tl.where(p[None, :] == first + j, shares, 0.0), 1)
            acc += parts[j] * share[:, None]
        parts = _load_parts(acc_at + at, first + 4, num_parts, H, G, D, BLOCK_D, HEADS)
    if SINKS:
        acc, total = with_sinks(acc, total, most, load_sinks(sinks_at, g, g < G))
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_at + at, acc.to(out_at.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def decode_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    table_ptr,
    lens_ptr,
    pairs_ptr,
    sinks_ptr,
    tickets_ptr,
    scale,
    window,
    q_stride,
    table_stride,
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query row of a sequence against one part of its context; programs (S, K, PARTS).

    q and out (T, H, D); table int32 (., B); lens int32; pairs int32 (S, 2) of sequence and row
    (-1: nothing to do), without PAIRS both are the program's number; sinks (H,), with SINKS; HEADS:
    G, rounded up to a power of 2; CAP: see `accumulate`.

    A context is cut into as many parts of at least LEAST tokens as it has, at most PARTS. If there
    are several, they meet in acc fp32 (S, PARTS, H, D) and sums fp32 (S, PARTS, H, 2) of (sum,
    maximum). The last one to get there, as tickets int32 (S * K,) of zeros say, puts them together
    in their order.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    # No kernel of a step writes pairs, lengths and tables.
    seq = i
    row = i
    if PAIRS:
        seq = tl.load(pairs_ptr + 2 * i)
        row = tl.load(pairs_ptr + 2 * i + 1)
        if seq < 0:
            if PDL:  # whoever waits for this kernel waits for those ahead
                tl.extra.cuda.gdc_wait()
            return
    length = tl.load(lens_ptr + seq)
    table_at = table_ptr + seq.to(tl.int64) * table_stride
    begin = 0
    if WINDOW and CHUNKED:
        begin = tl.maximum(length - 1, 0) // window * window
    elif WINDOW:
        begin = tl.maximum(length - window, 0)
    each = length - begin
    if PARTS > 1:
        each = tl.maximum((each + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N) * BLOCK_N, LEAST)
        if (part > 0) & (begin + part * each >= length):
            return
    first = begin + part * each
    last = tl.minimum(first + each, length)
    if PDL:
        _ask_for_round(k_ptr, table_at, first, last, head, K, D, BLOCK_D, BLOCK_N, BLOCK_SIZE)
        _ask_for_round(v_ptr, table_at, first, last, head, K, D, BLOCK_D, BLOCK_N, BLOCK_SIZE)
        tl.extra.cuda.gdc_wait()
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask = (g < G)[:, None] & (d < D)[None, :]
    at = (head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_stride + at, mask=mask, other=0.0)
    acc, total, most = accumulate(
        q,
        k_ptr,
        v_ptr,
        table_at,
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
        False,
        False,
        CAP,
    )
    H = K * G
    done = begin + each >= length
    if PARTS > 1:  # noqa: SIM102
        if not done:
            base = (i * PARTS + part).to(tl.int64) * H
            sums_at = sums_ptr + (base + head * G + g) * 2
            tl.store(acc_ptr + base * D + at, acc, mask=mask)
            tl.store(sums_at, total, mask=g < G)
            tl.store(sums_at + 1, most, mask=g < G)
            tl.debug_barrier()
            ticket_ptr = tickets_ptr + i * K + head
            num_parts = (length - begin + each - 1) // each
            if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == num_parts - 1:
                tl.store(ticket_ptr, 0)
                first_at = i.to(tl.int64) * PARTS * H + head * G
                _put_together(
                    out_ptr + (row.to(tl.int64) * H + head * G) * D, acc_ptr + first_at * D,
                    sums_ptr + first_at * 2, sinks_ptr + head * G, num_parts, H, G, D, BLOCK_D,
                    HEADS, PARTS, SINKS,
                )  # fmt: skip
    if done:
        if SINKS:
            sink = load_sinks(sinks_ptr, head * G + g, g < G)
            acc, total = with_sinks(acc, total, most, sink)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + row.to(tl.int64) * H * D + at
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_parts(
    out_ptr,
    acc_ptr,
    sums_ptr,
    sinks_ptr,
    pairs_ptr,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the parts of one head of one row; programs (rows, H). The result of the parts at i is
    row i of out, or with PAIRS the row that pair i names: see `decode_rows`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    head = tl.program_id(1)
    row = place
    if PAIRS:
        row = tl.load(pairs_ptr + 2 * place + 1)
        if row < 0:
            return
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    at = (place * PARTS + p).to(tl.int64) * H + head
    total = tl.load(sums_ptr + at * 2, mask=p < PARTS, other=0.0)
    most = tl.load(sums_ptr + at * 2 + 1, mask=p < PARTS, other=-1e30)
    most = tl.where(total > 0, most, -1e30)  # parts without context have left 0
    highest = tl.max(most)
    if SINKS:
        sink = load_sinks(sinks_ptr, head, True)
        highest = tl.maximum(highest, sink)
    share = tl.exp2(most - highest)
    acc = tl.load(
        acc_ptr + at[:, None] * D + d[None, :],
        mask=(total > 0)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share)
    if SINKS:
        whole += tl.exp2(sink - highest)
    out = tl.sum(acc * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    out_at = out_ptr + (row.to(tl.int64) * H + head) * D + d
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    table_ptr,
    lens_ptr,
    tiles_ptr,
    sinks_ptr,
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
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    ALIKE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """BLOCK_M of a tile's query rows of one sequence, G heads of each, against one part of their
    context; programs (K, tiles * SHARES, PARTS), of which each has a share of a tile's rows.

    tiles int32 (., 4): sequence, first row, number of rows, position of the first row; with ROWS
    "pairs", pairs as `decode_rows` has them, a tile each; with "all", the sequence of the program's
    number has one row, of the same number. ALIKE: a row has the same bits in every tile. acc and
    sums are by row, (T, PARTS, H, .); parts without context leave their sums, which are 0. The rest
    as `decode_rows` has it.
    """
    head = tl.program_id(0)
    i = tl.program_id(1) // SHARES
    if ROWS == "tiles":
        tile = tiles_ptr + 4 * i
        seq = tl.load(tile)
        row = tl.load(tile + 1)
        count = tl.load(tile + 2)
        position = tl.load(tile + 3)
        if count == 0:
            return
    else:
        seq = i
        row = seq
        if ROWS == "pairs":
            seq = tl.load(tiles_ptr + 2 * i)
            row = tl.load(tiles_ptr + 2 * i + 1)
            if seq < 0:
                return
        position = tl.load(lens_ptr + seq) - 1
        count = 1
    m = tl.arange(0, BLOCK_M)
    if SHARES > 1:
        m += tl.program_id(1) % SHARES * BLOCK_M
    d = tl.arange(0, BLOCK_D)
    mask = (m < count * G)[:, None] & (d < D)[None, :]
    rows = (row + m // G).to(tl.int64)
    heads = head * G + m % G
    q = tl.load(
        q_ptr + rows[:, None] * q_stride + heads[:, None] * D + d[None, :], mask=mask, other=0.0
    )
    first = 0
    if WINDOW:
        each: tl.constexpr = BLOCK_N if ALIKE else BLOCK_SIZE
        if CHUNKED:
            first = tl.maximum(position, 0) // window * window // each * each
        else:
            first = tl.maximum(position - window + 1, 0) // each * each
    last = position + count
    if PARTS > 1:
        share = (last - first + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N) * BLOCK_N
        first += tl.program_id(2) * share
        last = tl.minimum(first + share, last)
        if first >= last:
            return
    acc, total, most = accumulate(
        q,
        k_ptr,
        v_ptr,
        table_ptr + seq.to(tl.int64) * table_stride,
        head,
        first,
        last,
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
        CHUNKED,
        ALIKE,
        CAP,
    )
    if PARTS == 1:
        if SINKS:
            acc, total = with_sinks(acc, total, most, load_sinks(sinks_ptr, heads, heads < K * G))
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + rows[:, None] * (K * G * D) + heads[:, None] * D + d[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        base = (rows * PARTS + tl.program_id(2)) * (K * G) + heads
        tl.store(acc_ptr + base[:, None] * D + d[None, :], acc, mask=mask)
        tl.store(sums_ptr + 2 * base, total, mask=m < count * G)
        tl.store(sums_ptr + 2 * base + 1, most, mask=m < count * G)
