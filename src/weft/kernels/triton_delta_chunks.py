"""Chunks of prompts by the gated delta rule, as four Triton kernels:

    _prepare   convolution and norm of queries, keys and values         by some rows and head
    solve      what the changes of a chunk's tokens owe to each other   by chunk and head
    _scan      the state through a sequence, chunk by chunk             by sequence, head, part of E
    _read      what tokens read, and the gated norm                     by chunk and head

Sequences of few rows have one kernel in place of the last three: see `triton_delta_short`. Only
`_scan` goes from one chunk to the next, so it does no more than it must: it leaves the state ahead
of each chunk to `_read`.

Changes of a chunk's tokens depend on each other and on the state S ahead of it. With the matrix
M_ij = b_i exp(g_i - g_j) k_i^T k_j for j < i, where g is summed up from the chunk's begin:

    change = (I + M)^-1 (b v - b exp(g) k S) = u - w S

so that u and w need not wait for S. In Mamba 2, a change is b v: M and w are zero. A token reads
the state ahead of its chunk, and the changes that the tokens from the chunk's first one to itself
make.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.core.units import SHORT
from weft.kernels.delta import CHUNK, DeltaLayer, StateCache, StateWork
from weft.kernels.ops import Product
from weft.kernels.triton_base import INTERPRETED, dot, launch_options, starts_early, with_pending
from weft.kernels.triton_delta_short import gated_norm, keep_inputs, short_runs, silu
from weft.kernels.triton_delta_solve import solve

PART = 32
"""Columns of a state that one program of `_scan` has."""
ROWS = 16
"""Rows that one program of `_prepare` has."""
PREPARES, SCANS, SHORT_RUNS = 2048, 512, 256
"""How many programs `_prepare`, `_scan` and `short_runs` have at most, unless a chunk or run alone
takes more. A captured step has room for many, and a program for each would take longer than a
prompt. `solve` and `_read` have a program for each chunk, and those without rows come last."""
WIDE = 64
"""The fewest columns of a head for which products in 16 bits use Hopper's asynchronous matrix
units, which take programs of at least four warps. For narrower products, the assembler of CUDA
12.8, which comes with Triton 3.6 and 3.7, takes the addresses of operands from wrong registers."""
EXACT_WARPS = 16
"""Warps of `solve` in fp32, whose products are written out number by number: with four, it takes
half a minute to compile."""


@triton.jit
def channels_of(
    n,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """The channels of a key head's queries for n < G, of its keys for n < 2 G, and else of a value
    head: how many there are, the first one's column in the projection's output, and its number."""
    share: tl.constexpr = H // G
    size = tl.where(n < 2 * G, D, E)
    column = COLUMNS[0] + n * COLUMNS[1]
    channel = n * D
    if n >= G:
        column = COLUMNS[2] + (n - G) * COLUMNS[3]
    if n >= 2 * G:
        column = COLUMNS[4] + (n - 2 * G) // share * COLUMNS[5] + (n - 2 * G) % share * E
        channel = 2 * G * D + (n - 2 * G) * E
    return size, column, channel


@triton.jit(do_not_specialize=["num_chunks"])
def _prepare(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    kept_ptr,
    weight_ptr,
    bias_ptr,
    chunks_ptr,
    position_ptr,
    num_chunks,
    y_stride,
    C,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    MAMBA: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """qkv (T, C) = queries and keys of length 1 (queries divided by sqrt(D)) and values; in Mamba
    2, queries and keys stay as they are. A part is ROWS rows of a chunk. Programs (N, 2 G + H),
    each for every N-th part, and of that for a key head's queries, its keys, or a value head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = L // ROWS
    n = tl.program_id(1)
    t = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    size, column, channel = channels_of(n, COLUMNS, G, H, D, E)
    in_size = (c < size)[None, :]
    nth = tl.program_id(0)
    in_chunk = tl.load(chunks_ptr + 6 * (nth // parts) + 1)
    while in_chunk > 0:
        begin = nth % parts * ROWS
        count = in_chunk - begin
        if count > 0:
            chunk = chunks_ptr + 6 * (nth // parts)
            first = tl.load(chunk).to(tl.int64) + begin
            before = tl.load(chunk + 4) + begin
            ok = (t < count)[:, None] & in_size
            y_at = y_ptr + first * y_stride + column
            add_at = add_ptr + first * y_stride + column
            if PDL:
                tl.extra.cuda.gdc_wait()
            y = tl.zeros((ROWS, BLOCK), tl.float32)
            if BIAS:
                y += tl.load(bias_ptr + channel + c, mask=c < size, other=0.0).to(tl.float32)
            for back in tl.static_range(W):
                here = (t < count) & (before + t >= back)
                ok_here = here[:, None] & in_size
                at = (t - back)[:, None] * y_stride + c[None, :]
                x = tl.load(y_at + at, mask=ok_here, other=0.0)
                if PENDING:
                    slot = tl.load(add_slot_ptr + first + t - back, mask=here, other=-1)
                    x = with_pending(x, add_at + at, (slot >= 0)[:, None], ok_here, PENDING)
                if before < back:  # the first tokens of this step: those before them are kept
                    state = tl.load(chunk + 2).to(tl.int64)
                    position = tl.load(position_ptr + first).to(tl.int32) + t
                    kept = (before + t < back) & (position >= back)
                    past_at = (state * R + (position + R - back) % R)[:, None] * (C + 2 * H)
                    past_at += channel + c[None, :]
                    past = tl.load(kept_ptr + past_at, mask=ok & kept[:, None], other=0.0)
                    x = tl.where(here[:, None], x, past)
                w_at = weight_ptr + (W - 1 - back) * C + channel + c
                weight = tl.load(w_at, mask=c < size, other=0.0).to(tl.float32)
                y += x.to(tl.float32) * weight[None, :]
            y = silu(y)
            if not MAMBA and n < 2 * G:
                scale = 1 / tl.sqrt(tl.sum(y * y, 1) + 1e-6)
                if n < G:
                    scale *= 1 / tl.sqrt(D * 1.0)
                y *= scale[:, None]
            tl.store(qkv_ptr + first * C + channel + t[:, None] * C + c[None, :], y, mask=ok)
        nth += tl.num_programs(0)
        at_next = chunks_ptr + 6 * (nth // parts) + 1
        in_chunk = tl.load(at_next, mask=nth < num_chunks * parts, other=0)
    if PDL:  # whoever waits for this kernel waits for those ahead, if it had nothing to do, too
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_runs"])
def _scan(
    qkv_ptr,
    w_ptr,
    u_ptr,
    g_ptr,
    before_ptr,
    delta_ptr,
    runs_ptr,
    position_ptr,
    num_runs,
    C,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    MAMBA: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The changes that tokens make, over u, and the states before (chunks, H, D, E) each chunk; the
    state after the last one is kept. Programs (N, H, parts of E), each for every N-th run, of which
    those of more than SHORT rows are computed."""
    h = tl.program_id(1)
    group = h // (H // G)
    t = tl.arange(0, L)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * PART + tl.arange(0, PART)
    within = (d < D)[:, None] & (e < E)[None, :]
    of_head = d[:, None] * E + e[None, :]
    nth = tl.program_id(0)
    count = tl.load(runs_ptr + 6 * nth + 1)
    while count > 0:
        if count > SHORT:
            run = runs_ptr + 6 * nth
            first = tl.load(run).to(tl.int64)
            source = tl.load(run + 2).to(tl.int64)
            state = tl.load(run + 3).to(tl.int64)
            chunk = tl.load(run + 4).to(tl.int64)
            position = tl.load(position_ptr + first)
            held = (d < tl.where(position > 0, D, 0))[:, None] & (e < E)[None, :]
            S = tl.load(delta_ptr + (source * H + h) * D * E + of_head, mask=held, other=0.0)
            for begin in range(0, count, L):
                ok = begin + t < count
                row = first + begin + t
                ok_d = ok[:, None] & (d < D)[None, :]
                ok_e = ok[:, None] & (e < E)[None, :]
                k_at = qkv_ptr + row[:, None] * C + (G + group) * D + d[None, :]
                k = tl.load(k_at, mask=ok_d, other=0.0)
                w_at = w_ptr + (row * H + h)[:, None] * D + d[None, :]
                u_at = u_ptr + (row * H + h)[:, None] * E + e[None, :]
                u = tl.load(u_at, mask=ok_e, other=0.0)
                g = tl.load(g_ptr + row * H + h, mask=ok, other=0.0)
                last = tl.min(g)  # it only ever falls
                narrow = S.to(k.dtype)
                tl.store(before_ptr + (chunk * H + h) * D * E + of_head, narrow, mask=within)
                change = u.to(tl.float32)
                if not MAMBA:
                    w = tl.load(w_at, mask=ok_d, other=0.0)
                    change -= dot(w, narrow, tl.zeros((L, PART), tl.float32), EXACT)
                    tl.store(u_at, change, mask=ok_e)
                change *= tl.where(ok, tl.exp(last - g), 0.0)[:, None]
                S = dot(tl.trans(k), change.to(k.dtype), S * tl.exp(last), EXACT)
                chunk += 1
            tl.store(delta_ptr + (state * H + h) * D * E + of_head, S, mask=within)
        nth += tl.num_programs(0)
        count = tl.load(runs_ptr + 6 * nth + 1, mask=nth < num_runs, other=0)


@triton.jit
def _read(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    change_ptr,
    g_ptr,
    before_ptr,
    out_ptr,
    kept_ptr,
    norm_or_skip_ptr,
    chunks_ptr,
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
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MAMBA: tl.constexpr,
    PENDING: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out = norm(what tokens read of the state) * silu(z) of a value head, and the convolution's
    last inputs to where they are kept, for sequences that are not short. Programs (H, chunks)."""
    chunk = chunks_ptr + 6 * tl.program_id(1)
    h = tl.program_id(0)
    count = tl.load(chunk + 1)
    left = tl.load(chunk + 5)
    if left == 0:
        return
    first = tl.load(chunk).to(tl.int64)
    t = tl.arange(0, L)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    row = first + t
    ok = t < count
    ok_d = ok[:, None] & (d < D)[None, :]
    ok_e = ok[:, None] & (e < E)[None, :]
    at = (row * H + h)[:, None] * E + e[None, :]
    qk_at = qkv_ptr + row[:, None] * C + h // (H // G) * D + d[None, :]
    q = tl.load(qk_at, mask=ok_d, other=0.0)
    k = tl.load(qk_at + G * D, mask=ok_d, other=0.0)
    S_at = before_ptr + (tl.program_id(1).to(tl.int64) * H + h) * D * E
    within = (d < D)[:, None] & (e < E)[None, :]
    S = tl.load(S_at + d[:, None] * E + e[None, :], mask=within, other=0.0)
    change = tl.load(change_ptr + at, mask=ok_e, other=0.0)
    g = tl.load(g_ptr + row * H + h, mask=ok, other=0.0)
    seen = (t[:, None] >= t[None, :]) & ok[:, None]
    decays = tl.exp(tl.where(seen, g[:, None] - g[None, :], 0.0))
    scores = dot(q, tl.trans(k), tl.zeros((L, L), tl.float32), EXACT)
    scores = tl.where(seen, scores * decays, 0.0)
    x = dot(q, S, tl.zeros((L, BLOCK_E), tl.float32), EXACT) * tl.exp(g)[:, None]
    x = dot(scores.to(q.dtype), change, x, EXACT)
    if MAMBA:
        v_at = qkv_ptr + row[:, None] * C + 2 * G * D + h * E + e[None, :]
        v = tl.load(v_at, mask=ok_e, other=0.0).to(tl.float32)
        x += tl.load(norm_or_skip_ptr + h).to(tl.float32) * v
    has = ok
    if PENDING:
        has = tl.load(add_slot_ptr + row, mask=ok, other=-1) >= 0
    x = gated_norm(
        x, y_ptr, add_ptr, norm_or_skip_ptr, row, has[:, None], ok_e, h, y_stride, eps,
        COLUMNS, G, H, E, MAMBA, PENDING,
    )  # fmt: skip
    tl.store(out_ptr + at, x, mask=ok_e)
    if left - W < count:
        state = tl.load(chunk + 3).to(tl.int64)
        keep_inputs(
            y_ptr, add_ptr, kept_ptr, position_ptr, state, row, has[:, None], ok & (t >= left - W),
            h, y_stride, C, COLUMNS, G, H, D, E, R, BLOCK_D, BLOCK_E, PENDING,
        )  # fmt: skip


def run_chunks(
    y: Product,
    out_TO: Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    work: StateWork,
    positions_T: Tensor,
) -> None:
    y_TO = y.y_TO
    T, H, D, E = len(y_TO), layer.num_values, layer.key_dim, layer.value_dim
    W, C = layer.conv_WC.shape
    num_chunks, num_runs, sizes = len(work.chunks), len(work.runs), sizes_of(layer, y)
    stride = y_TO.stride(0)
    blocks = {"BLOCK_D": block_of(D), "BLOCK_E": block_of(E)}
    exact = INTERPRETED or y_TO.dtype == torch.float32
    narrow = not exact and min(blocks.values()) < WIDE
    widths = {"W": W, "R": cache.num_kept}
    options = launch_options(starts_early(y_TO.device))
    qkv_TC = y_TO.new_empty(T, C)
    read = y_TO, *y.pending_tensors()
    rows = min(ROWS, CHUNK)
    num_parts, num_heads = num_chunks * (CHUNK // rows), 2 * layer.num_keys + H
    _prepare[at_once(num_parts, num_heads, PREPARES), num_heads](
        *read, qkv_TC, cache.inputs, *convolution_of(layer), work.chunks, positions_T, num_chunks,
        stride, C, **sizes, **widths, L=CHUNK, ROWS=rows, BLOCK=max(blocks.values()),
        BIAS=layer.bias_C is not None, num_warps=4, **options,
    )  # fmt: skip
    if T > SHORT:
        w_THD, u_THE = y_TO.new_empty(T, H, D), y_TO.new_empty(T, H, E)
        g_TH = y_TO.new_empty((T, H), dtype=torch.float32)
        before_NHDE = y_TO.new_empty(num_chunks, H, D, E)
        tiles = {**blocks, "L": CHUNK, "EXACT": exact}
        solve[H, num_chunks](
            *read, qkv_TC, w_THD, u_THE, g_TH, layer.log_a_H, layer.dt_bias_H, work.chunks, stride,
            C, **sizes, **tiles, DOUBLED=layer.doubled,
            num_warps=EXACT_WARPS if exact else 2 if narrow else 4,
        )  # fmt: skip
        part = min(PART, blocks["BLOCK_E"])
        num_columns = cdiv(E, part)
        _scan[at_once(num_runs, H * num_columns, SCANS), H, num_columns](
            qkv_TC, w_THD, u_THE, g_TH, before_NHDE, cache.delta, work.runs, positions_T, num_runs,
            C, G=layer.num_keys, H=H, D=D, E=E, L=CHUNK, SHORT=SHORT, BLOCK_D=blocks["BLOCK_D"],
            PART=part, MAMBA=sizes["MAMBA"], EXACT=exact, num_warps=2 if narrow else 4,
            num_stages=1 if exact else 3,
        )  # fmt: skip
        _read[H, num_chunks](
            *read, qkv_TC, u_THE, g_TH, before_NHDE, out_TO, cache.inputs, norm_or_skip(layer),
            work.chunks, positions_T, stride, C, layer.eps, **sizes, **tiles, **widths,
            num_warps=2 if narrow else 8, maxnreg=128,
        )  # fmt: skip
        options = launch_options(False)  # what comes next may go on with a state of these kernels
    short_runs[at_once(num_runs, H, SHORT_RUNS), H](
        *read, qkv_TC, out_TO, cache.inputs, cache.delta, norm_or_skip(layer), layer.log_a_H,
        layer.dt_bias_H, work.runs, positions_T, num_runs, stride, C, layer.eps,
        **sizes, **blocks, **widths, DOUBLED=layer.doubled, L=SHORT, EXACT=exact, num_warps=8,
        **options,
    )  # fmt: skip


def at_once(num: int, programs_each: int, most: int) -> int:
    """How many runs, or parts of chunks, have programs of their own, where each takes so many; the
    others come after them."""
    return min(num, max(1, most // programs_each))


def sizes_of(layer: DeltaLayer, y: Product) -> dict[str, object]:
    return {
        "COLUMNS": tuple(number for at in layer.columns for number in at),
        "G": layer.num_keys,
        "H": layer.num_values,
        "D": layer.key_dim,
        "E": layer.value_dim,
        "MAMBA": layer.skip_H is not None,
        "PENDING": y.pending is not None,
    }


def convolution_of(layer: DeltaLayer) -> tuple[Tensor, Tensor]:
    """The weights of the convolution and its bias, as kernels take them."""
    return layer.conv_WC, layer.conv_WC if layer.bias_C is None else layer.bias_C


def norm_or_skip(layer: DeltaLayer) -> Tensor:
    """The weights of the heads' norm, or in Mamba 2 the heads' skips."""
    found = layer.norm_E if layer.skip_H is None else layer.skip_H
    assert found is not None
    return found


def block_of(size: int) -> int:
    """The width of blocks for so many columns; products need 16."""
    return max(next_power_of_2(size), 16)
