"""Products with packed weights: see `weft.kernels.quant.packed`.

As in `weft.kernels.triton_linear`, a product of few rows keeps many bytes in flight. Its programs
read words, and make of them the 16-bit values that the matrix units multiply, in registers: both
columns of a word's halves at once, chunk by chunk.

Shapes: T token rows, O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.quant import gluon_packed, gluon_packed_many
from weft.kernels.quant.packed import COLUMNS, PackedMatrix, step_of
from weft.kernels.quant.triton_values import constants_of, expand, values_of, words_before
from weft.kernels.triton_base import (
    TURNS,
    ask_for,
    dot,
    launch_options,
    meeting_place,
    processors,
    starts_early,
)
from weft.kernels.triton_linear import Launched, next_turn
from weft.kernels.tuned import MEETING_FLOATS


@triton.jit
def _sums(
    x_ptr,
    x_row,
    there,
    w_ptr,
    s_ptr,
    tile,
    first,
    last,
    O,  # noqa: E741
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Rows [tile * BLOCK_O, ...) of w, blocks [first, last) of K, times x^T: fp32 (BLOCK_O,
    BLOCK_T). `x_row` are the places of rows behind `x_ptr`, and `there` says which of them exist.
    COLUMNS of a block are taken at a time.

    An address is the sum of one that all threads share and a constant of each thread, which takes
    the fewest instructions and registers."""
    NUM: tl.constexpr = len(CODE)
    STEP: tl.constexpr = 32 * NUM
    PIECES: tl.constexpr = 32 // COLUMNS
    row = tl.arange(0, BLOCK_O)
    j = tl.arange(0, COLUMNS)
    w_ptr += words_before((tile * BLOCK_O).to(tl.int64), K // STEP)
    w_row = words_before(row, K // STEP)[:, None] + j[None, :]
    s_ptr += tile * BLOCK_O
    acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
    s = tl.load(s_ptr + row)[:, None]
    for step in tl.range(first * PIECES, last * PIECES, num_stages=STAGES):
        block = step // PIECES
        column = step % PIECES * COLUMNS
        w_at = w_ptr + (block * 2048 + column) + w_row
        w = tl.load(w_at, eviction_policy=EVICT)
        for i in tl.static_range(NUM):
            k = block * STEP + i * 32
            if GROUP < K and i * 32 % GROUP == 0:
                s = tl.load(s_ptr + k // GROUP * O + row)[:, None]
            x = tl.load(x_ptr + (k + column) + (x_row + j[None, :]), mask=there, other=0.0)
            v = values_of(w, w_at, s, CODE, PLAIN, i, COLUMNS, x_ptr)
            acc = dot(v, tl.trans(x), acc, len(PLAIN) > 0)
    return acc


@triton.jit(do_not_specialize=["T", "turn"])
def _product(
    x_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    flags_ptr,
    T,
    x_stride,
    turn,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICT: tl.constexpr,
    BIAS: tl.constexpr,
    TURNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of y (T, O) = x @ w^T + bias, over one of SPLIT parts of K; the program that is the
    last of its tile adds the parts in order. Programs: parts of one tile after another; tiles of
    rows of the same columns, which share their weights, follow each other."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    part = pid % SPLIT
    place = pid // SPLIT
    num_t = tl.cdiv(T, BLOCK_T)
    tile = place // num_t
    BLOCKS: tl.constexpr = K // (32 * len(CODE))
    row = tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_T)
    o = tile * BLOCK_O + row
    t = place % num_t * BLOCK_T + column
    if PDL:
        if AHEAD > 0:
            ahead = tl.minimum(part * BLOCKS // SPLIT + tl.arange(0, AHEAD), BLOCKS - 1)
            ask_for(w_ptr + words_before(o.to(tl.int64), BLOCKS)[:, None] + ahead[None, :] * 2048)
        tl.extra.cuda.gdc_wait()
    if pid == 0:  # x is there: see `weft.kernels.triton_linear.launch`
        tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + turn % TURNS, turn, sem="relaxed")
    acc = _sums(
        x_ptr + (place % num_t * BLOCK_T).to(tl.int64) * x_stride,
        column[:, None] * x_stride,
        (t < T)[:, None],
        w_ptr,
        s_ptr,
        tile,
        part * BLOCKS // SPLIT,
        (part + 1) * BLOCKS // SPLIT,
        O,
        K,
        GROUP,
        CODE,
        PLAIN,
        BLOCK_T,
        BLOCK_O,
        COLUMNS,
        STAGES,
        EVICT,
    )
    done = True
    if SPLIT > 1:
        i = row[:, None] * BLOCK_T + column[None, :]
        size: tl.constexpr = BLOCK_O * BLOCK_T
        tl.store(parts_ptr + (place * SPLIT + part) * size + i, acc)
        tl.debug_barrier()
        done = tl.atomic_add(tickets_ptr + place, 1, sem="acq_rel") == SPLIT - 1
        if done:
            acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
            for p in tl.static_range(SPLIT):
                acc += tl.load(parts_ptr + (place * SPLIT + p) * size + i, cache_modifier=".cg")
            tl.store(tickets_ptr + place, 0)
    if done:
        if BIAS:
            acc += tl.load(bias_ptr + o).to(tl.float32)[:, None]
        y = tl.trans(acc).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + t[:, None].to(tl.int64) * O + o[None, :], y, mask=(t < T)[:, None])


MANY_ROWS = 256
"""With more rows, a library's product of the values is faster, although they are written first."""
_TILE_ROWS = 128
"""The most rows of a tile."""


def linear(x_TK: Tensor, weight: PackedMatrix, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b`, (T, O)."""
    x_TK = x_TK.contiguous()
    if not len(x_TK):
        return x_TK.new_empty(0, weight.shape[0])
    many = gluon_packed_many.form_of(x_TK, weight)
    if many is not None:
        return gluon_packed_many.launch(x_TK, weight, bias_O, many)
    if len(x_TK) > MANY_ROWS:
        return F.linear(x_TK, expand(weight), bias_O)
    return start(x_TK, weight, bias_O, None).y_TO


def start(
    x_TK: Tensor, weight: PackedMatrix, bias_O: Tensor | None, flags: Tensor | None
) -> Launched:
    """Start a product of at most MANY_ROWS rows by the faster of two kernels; see `launch`."""
    split = gluon_packed.split_of(x_TK, weight)
    if split is not None:
        return gluon_packed.launch(x_TK, weight, bias_O, split, flags)
    return launch(x_TK, weight, bias_O, form_of(x_TK, weight), flags)


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is cut for the device."""

    columns: int
    """Columns of the result that a program computes."""
    stages: int
    split: int = 1
    """The parts of K, each with a program of its own."""
    warps: int = 4
    pieces: int = 1
    """The pieces in which a block of words is taken."""
    ahead: int = 2
    """The blocks of its words that a program asks for early."""


ROOM = 40 << 10
"""Bytes of a processor's shared memory that a product leaves to the adapters' kernel beside it."""


def form_of(x_TK: Tensor, weight: PackedMatrix) -> Form:
    """How to cut a product of at most MANY_ROWS rows, from what was best on an H100 for up to 32
    rows, and on an H200 for more.

    K stays whole if the columns alone make `many` programs. Otherwise it has up to `most` parts, as
    long as there are not `enough` programs. Each has as many of its `stages` as fit, together with
    ROOM, for all programs that a processor runs at once.
    """
    O, four = weight.shape[0], weight.coding == "int4"  # noqa: E741
    rows, places = _tile_rows(len(x_TK)), processors(x_TK.device)
    num_tiles, many, ahead = cdiv(len(x_TK), rows), places * 3 // 4, 2
    columns, warps = 128 if O % 128 == 0 else 64, 4
    if rows <= 16:
        most, enough, ahead = 8, places * 3 // 2, 4 if four else 2
        stages = 5 if four or rows > 8 else 6
    elif rows == 32 and four:
        most, enough, stages = 8, places, 4
    elif rows == 32 and O % 256 == 0 and many <= O // 256:
        most, enough, stages, columns, warps = 1, 1, 3, 256, 8
    elif rows == 32:
        most, enough, stages, columns = 4, places * 3 // 2, 6, 64
    else:
        most, enough, stages = 4, places * 2 // 3, 3
        if rows == 64 and not four:
            enough, stages = many, 5
        elif rows == 64 and O % 256 == 0 and enough <= O // 256:
            columns = 256
        warps = min(columns // 16, 8)
    split, num_programs = 1, num_tiles * (O // columns)
    most = min(most, weight.words.shape[1], MEETING_FLOATS // (O * rows * num_tiles))
    if num_programs < many:
        while 2 * split <= most and num_programs * split < enough:
            split *= 2
    form = Form(columns, stages, split, warps, ahead=ahead)
    for_each, shared = cdiv(num_programs * split, places), _shared_memory(x_TK.device)
    at_once = for_each if for_each <= 3 else 2
    while form.stages > 3 and at_once * _shared_bytes(form, rows, weight) > shared - ROOM:
        form = replace(form, stages=form.stages - 1)
    while _shared_bytes(form, rows, weight) > shared:
        less = form.pieces == 2
        form = replace(form, stages=form.stages - less, pieces=2)
    return form


def _tile_rows(num_rows: int) -> int:
    return min(max(8, next_power_of_2(num_rows)), _TILE_ROWS)


def _shared_bytes(form: Form, rows: int, weight: PackedMatrix) -> int:
    """What a program takes of a processor's shared memory: x, and words and scales of all stages
    but the one that is in registers."""
    step = step_of(weight.coding)
    x, words = 2 * rows * step * form.stages, 4 * COLUMNS * form.columns * (form.stages - 1)
    groups = 0 if len(weight.scales_GO) == 1 else max(1, step // weight.group)
    return (x + words) // form.pieces + 4 * groups * form.columns * (form.stages - 1) + 1024


@cache
def _shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory that a program can have: all of a processor but a KB."""
    if device.type == "cpu":
        return 1 << 20
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def launch(
    x_TK: Tensor, weight: PackedMatrix, bias_O: Tensor | None, form: Form, flags: Tensor | None
) -> Launched:
    """Start a product, and tell when x is there, as `weft.kernels.triton_linear.launch` does."""
    T, O = len(x_TK), weight.shape[0]  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    rows = _tile_rows(T)
    parts, tickets, nobody = meeting_place(x_TK.device)
    turn = next_turn()
    num_programs = cdiv(T, rows) * (O // form.columns) * form.split
    kernel = _product[num_programs,](
        x_TK,
        weight.words,
        weight.scales_GO,
        y_TO if bias_O is None else bias_O,
        y_TO,
        parts,
        tickets,
        nobody if flags is None else flags,
        T,
        x_TK.stride(0),
        turn,
        O=O,
        **constants_of(weight),
        BLOCK_T=rows,
        BLOCK_O=form.columns,
        COLUMNS=COLUMNS // form.pieces,
        SPLIT=form.split,
        STAGES=form.stages,
        AHEAD=form.ahead,
        EVICT="evict_first" if rows >= T else "",
        BIAS=bias_O is not None,
        TURNS=TURNS,
        num_warps=form.warps,
        **launch_options(starts_early(x_TK.device)),
    )
    return Launched(y_TO, turn, kernel, num_programs)
