"""The gated short convolution as Triton kernels; `weft.kernels.short_conv` says what is computed.

Decodes and chunks of prompts share one kernel. Decodes keep their inputs in it: one program has all
rows of a decode, and reads what is kept before it overwrites that. The inputs of longer runs are
kept by a second kernel, when all programs of the first one have read. Programs find rows and states
through the tables of `StateWork`, so that a captured step serves every mix of sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.delta import CHUNK, StateCache, StateRows
from weft.kernels.ops import Product
from weft.kernels.short_conv import ShortConvLayer
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    has_pending,
    launch_options,
    starts_early,
    with_pending,
)

ROWS = 16
"""How many rows of a chunk one program computes at a time."""
CHANNELS = 128
"""The most channels that one program computes."""
PARTS, RUNS = 1024, 256
"""How many programs there are at most for parts of chunks and for runs, for each block of channels.
A captured step has room for many, which it seldom needs."""


@triton.jit
def _input(y_at, add_at, has, ok, C, PENDING: tl.constexpr):
    """b * x, in the model's dtype, as it is kept. The pointers are those of b."""
    b = with_pending(tl.load(y_at, mask=ok, other=0.0), add_at, has, ok, PENDING)
    x_at = y_at + 2 * C
    x = with_pending(tl.load(x_at, mask=ok, other=0.0), add_at + 2 * C, has, ok, PENDING)
    return (b.to(tl.float32) * x.to(tl.float32)).to(y_at.dtype.element_ty)


@triton.jit
def _decode(
    y_ptr, add_ptr, add_slot_ptr, out_ptr, kept_ptr, weight_ptr, bias_ptr, decode, position_ptr,
    c, y_stride, C, W: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, PENDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute all rows of a decode for the channels c. Rows that pad a step become zero."""
    row = tl.load(decode).to(tl.int64)
    state = tl.load(decode + 1).to(tl.int64)
    count = tl.load(decode + 2)
    there = tl.maximum(row, 0)
    first = tl.load(position_ptr + there).to(tl.int32)
    has = has_pending(add_slot_ptr + there, PENDING)
    if PDL:  # what the kernel ahead writes is read from here on
        tl.extra.cuda.gdc_wait()
    in_c = c < C
    if state < 0:
        zero = tl.zeros(c.shape, tl.float32)
        tl.store(out_ptr + row * C + c, zero, mask=c < tl.where(row < 0, 0, C))
    elif count > 0:
        y_row = y_ptr + row * y_stride + c
        add_row = add_ptr + row * y_stride + c
        kept = kept_ptr + state * R * C + c
        for nth in tl.range(count):
            position = first + nth
            conv = tl.zeros(c.shape, tl.float32)
            if BIAS:
                conv += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)
            for back in tl.static_range(W):
                is_row = nth >= back
                ok = c < tl.where(is_row, C, 0)
                at = (nth - back) * y_stride
                x = _input(y_row + at, add_row + at, has, ok, C, PENDING)
                ok = c < tl.where(is_row | (position < back), 0, C)
                past = tl.load(kept + (position + R - back) % R * C, mask=ok, other=0.0)
                x = tl.where(is_row, x, past)
                if back == 0:
                    own = x
                weight = tl.load(weight_ptr + (W - 1 - back) * C + c, mask=in_c, other=0.0)
                conv += x.to(tl.float32) * weight.to(tl.float32)
            at = nth * y_stride
            gate_at = at + C
            gate = tl.load(y_row + gate_at, mask=in_c, other=0.0)
            gate = with_pending(gate, add_row + gate_at, has, in_c, PENDING).to(tl.float32)
            tl.store(out_ptr + (row + nth) * C + c, gate * conv, mask=in_c)
            tl.store(kept + position % R * C, own, mask=in_c)


@triton.jit
def _part(
    y_ptr, add_ptr, add_slot_ptr, out_ptr, kept_ptr, weight_ptr, bias_ptr, chunk, begin, count,
    position_ptr, c, y_stride, C, W: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """Compute `count` rows of a chunk, from its row `begin` on, for the channels c."""
    t = tl.arange(0, ROWS)
    in_c = (c < C)[None, :]
    ok = (t < count)[:, None] & in_c
    first = tl.load(chunk).to(tl.int64) + begin
    source = tl.load(chunk + 2).to(tl.int64)
    before = tl.load(chunk + 4) + begin
    position = tl.load(position_ptr + first).to(tl.int32) + t
    y_at = y_ptr + first * y_stride + c[None, :]
    add_at = add_ptr + first * y_stride + c[None, :]
    conv = tl.zeros((ROWS, c.shape[0]), tl.float32)
    if BIAS:
        conv += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    for back in tl.static_range(W):
        here = (t < count) & (before + t >= back)
        has = here
        if PENDING:
            has = tl.load(add_slot_ptr + first + t - back, mask=here, other=-1) >= 0
        at = (t - back)[:, None] * y_stride
        x = _input(y_at + at, add_at + at, has[:, None], here[:, None] & in_c, C, PENDING)
        if before < back:  # the first tokens of this step: those before them are kept
            kept = (before + t < back) & (position >= back)
            past_at = (source * R + (position + R - back) % R)[:, None] * C + c[None, :]
            past = tl.load(kept_ptr + past_at, mask=ok & kept[:, None], other=0.0)
            x = tl.where(here[:, None], x, past)
        weight = tl.load(weight_ptr + (W - 1 - back) * C + c, mask=c < C, other=0.0)
        conv += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    has = t < count
    if PENDING:
        has = tl.load(add_slot_ptr + first + t, mask=t < count, other=-1) >= 0
    at = t[:, None] * y_stride + C
    gate = tl.load(y_at + at, mask=ok, other=0.0)
    gate = with_pending(gate, add_at + at, has[:, None], ok, PENDING).to(tl.float32)
    tl.store(out_ptr + (first + t)[:, None] * C + c[None, :], gate * conv, mask=ok)


@triton.jit(do_not_specialize=["num_decodes", "num_chunks"])
def _short_conv(
    y_ptr, add_ptr, add_slot_ptr, out_ptr, kept_ptr, weight_ptr, bias_ptr, decodes_ptr, chunks_ptr,
    position_ptr, num_decodes, num_chunks, y_stride, C, W: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    PENDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T, C) = c * conv(b * x), and the inputs of decodes are kept. Programs (decodes + N,
    blocks of channels); each of the N is for every N-th part of ROWS rows of a chunk."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0)
    if n < num_decodes:
        _decode(
            y_ptr, add_ptr, add_slot_ptr, out_ptr, kept_ptr, weight_ptr, bias_ptr,
            decodes_ptr + 4 * n, position_ptr, c, y_stride, C, W, R, BIAS, PENDING, PDL,
        )  # fmt: skip
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        parts: tl.constexpr = L // ROWS
        nth = n - num_decodes
        in_chunk = tl.load(chunks_ptr + 6 * (nth // parts) + 1)
        while in_chunk > 0:
            begin = nth % parts * ROWS
            if in_chunk > begin:
                _part(
                    y_ptr, add_ptr, add_slot_ptr, out_ptr, kept_ptr, weight_ptr, bias_ptr,
                    chunks_ptr + 6 * (nth // parts), begin, in_chunk - begin, position_ptr, c,
                    y_stride, C, W, R, ROWS, BIAS, PENDING,
                )  # fmt: skip
            nth += tl.num_programs(0) - num_decodes
            chunk = nth // parts
            in_chunk = tl.load(chunks_ptr + 6 * chunk + 1, mask=chunk < num_chunks, other=0)


@triton.jit(do_not_specialize=["num_runs"])
def _keep_runs(
    y_ptr, add_ptr, add_slot_ptr, kept_ptr, runs_ptr, position_ptr, num_runs, y_stride, C,
    W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PENDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Keep the last W inputs of each run. Programs (N, blocks of channels), each for every N-th
    run."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nth = tl.program_id(0)
    count = tl.load(runs_ptr + 6 * nth + 1)
    while count > 0:
        run = runs_ptr + 6 * nth
        first = tl.load(run).to(tl.int64)
        state = tl.load(run + 3).to(tl.int64)
        # Of the last W rows, some may be of the part that the sequence goes on with.
        for back in tl.range(1, tl.minimum(count + tl.load(run + 5), W) + 1):
            row = first + count - back
            has = has_pending(add_slot_ptr + row, PENDING)
            at = row * y_stride + c
            x = _input(y_ptr + at, add_ptr + at, has, c < C, C, PENDING)
            place = tl.load(position_ptr + row) % R
            tl.store(kept_ptr + (state * R + place) * C + c, x, mask=c < C)
        nth += tl.num_programs(0)
        count = tl.load(runs_ptr + 6 * nth + 1, mask=nth < num_runs, other=0)


def short_conv(
    y: Product, layer: ShortConvLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """Compute what `weft.kernels.short_conv.short_conv` does. Rows that pad a captured step become
    zero."""
    y_TO, work, (W, C) = y.y_TO, rows.work_on(positions_T.device), layer.conv_WC.shape
    num_decodes, num_chunks, num_runs = map(len, work)
    make = y_TO.new_zeros if num_chunks and not rows.states else y_TO.new_empty
    out_TC = make((len(y_TO), C))
    inputs, stride = (y_TO, *y.pending_tensors()), y_TO.stride(0)
    block = min(next_power_of_2(C), CHANNELS)
    sizes = {"W": W, "R": cache.num_kept, "BLOCK": block, "PENDING": y.pending is not None}
    sizes |= ALL_AT_ONCE | launch_options(starts_early(y_TO.device))
    bias_C = layer.conv_WC if layer.bias_C is None else layer.bias_C
    num_parts = min(num_chunks * (CHUNK // ROWS), PARTS)
    _short_conv[num_decodes + num_parts, cdiv(C, block)](
        *inputs, out_TC, cache.inputs, layer.conv_WC, bias_C, work.decodes, work.chunks,
        positions_T, num_decodes, num_chunks, stride, C, **sizes,
        L=CHUNK, ROWS=ROWS, BIAS=layer.bias_C is not None, num_warps=4 if num_parts else 1,
    )  # fmt: skip
    if num_runs:
        _keep_runs[min(num_runs, RUNS), cdiv(C, block)](
            *inputs, cache.inputs, work.runs, positions_T, num_runs, stride, C, **sizes,
            num_warps=1,
        )  # fmt: skip
    return out_TC
