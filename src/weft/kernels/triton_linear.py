"""The base product for few rows; and for any number of rows, where bits must not depend on it.

Shapes: T token rows, K inputs, O outputs.

With few rows a product only reads its weights. So its programs keep many bytes in flight, and
ask for the first ones before the kernel ahead has ended. Kernels that run beside it are told when x
is there (`weft.kernels.lora.triton_beside`).

A *deterministic* product gives a row the same bits whatever other rows there are. Both kernels add
up K in the same order: each of its parts, whose number follows from the weight alone, from its
first element to its last by the same matrix instruction, and then the parts in their order. How
many rows and columns a program computes changes no sum.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels import tuned
from weft.kernels.triton_base import (
    INTERPRETED,
    TURNS,
    ask_for,
    dot,
    launch_options,
    meeting_place,
    processors,
    starts_early,
)
from weft.kernels.tuned import Cut

FEW_ROWS, MOST_ROWS = 64, 128
"""Up to so many rows, these products are faster than a library's; and up to so many if adapters are
computed beside them."""


@triton.jit(do_not_specialize=["T", "turn", "steps"])
def _product(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    flags_ptr,
    T,
    x_stride,
    turn,
    steps,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    TURNS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns [tile * BLOCK_O, ...) of y (T, O) = x @ w^T + bias, over one of SPLIT parts of K;
    the program that is the last of its tile adds the parts in order. `steps`: the steps in a
    part, for few rows: the assembler would write out all of them if it knew how many there are."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    tile = pid // SPLIT
    part = pid % SPLIT
    EACH: tl.constexpr = K // SPLIT
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    # What differs between a thread's elements is constant, so that it takes no registers.
    w_at = w_ptr + (tile.to(tl.int64) * BLOCK_O * K + part * EACH)
    row = tl.arange(0, BLOCK_O)
    if O % BLOCK_O > 0:  # the last program reads the last row again
        row = tl.minimum(row, O - 1 - tile * BLOCK_O)
    w_row = row[:, None] * K
    if PDL:
        if AHEAD > 0:
            ask_for(w_at + w_row + 64 * tl.arange(0, AHEAD)[None, :])
        tl.extra.cuda.gdc_wait()
    if pid == 0:  # x is there: see `launch`. It has been in memory since the kernels ahead ended.
        tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + turn % TURNS, turn, sem="relaxed")
    x_at = x_ptr + part * EACH
    x_row = t[:, None] * x_stride
    acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
    num_steps = EACH // BLOCK_K
    if BLOCK_T == 16:
        num_steps = steps
    for step in tl.range(0, num_steps, num_stages=STAGES):
        w = tl.load(w_at + step * BLOCK_K + (w_row + k[None, :]), eviction_policy="evict_first")
        x = tl.load(x_at + step * BLOCK_K + (x_row + k[None, :]), mask=(t < T)[:, None], other=0.0)
        acc = dot(w, tl.trans(x), acc, EXACT)
    last = True
    if SPLIT > 1:
        i = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + t[None, :]
        size: tl.constexpr = BLOCK_O * BLOCK_T
        tl.store(parts_ptr + (tile * SPLIT + part) * size + i, acc)
        tl.debug_barrier()
        last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
            for p in tl.static_range(SPLIT):
                acc += tl.load(parts_ptr + (tile * SPLIT + p) * size + i, cache_modifier=".cg")
            tl.store(tickets_ptr + tile, 0)
    if last:
        o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        there = (t < T)[:, None]
        if O % BLOCK_O > 0:
            there = there & (o < O)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + tile * BLOCK_O + row).to(tl.float32)[:, None]
        y = tl.trans(acc).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + t[:, None] * O + o[None, :], y, mask=there)


@triton.jit(do_not_specialize=["T"])
def _product_of_many(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    T,
    x_stride,
    O,  # noqa: E741
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A tile of y (T, O) = x @ w^T + bias, with the bits of `_product` where that has as many
    SPLIT parts. Programs: tiles of rows of one tile of columns after another, which share its
    weights."""
    num_t = tl.cdiv(T, BLOCK_T)
    t = tl.program_id(0) % num_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0) // num_t * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_K)
    x_row = x_ptr + t[:, None].to(tl.int64) * x_stride
    w_row = w_ptr + o[:, None].to(tl.int64) * K
    each = K // SPLIT
    total = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
    for part in tl.static_range(SPLIT):
        acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
        for start in tl.range(part * each, (part + 1) * each, BLOCK_K, num_stages=STAGES):
            k = start + i
            w = tl.load(w_row + k[None, :], mask=(o < O)[:, None] & (k < K)[None, :], other=0.0)
            x = tl.load(x_row + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
            acc = dot(w, tl.trans(x), acc, EXACT)
        total += acc
    if BIAS:
        total += tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + t[:, None].to(tl.int64) * O + o[None, :]
    y = tl.trans(total).to(y_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=(t < T)[:, None] & (o < O)[None, :])


_launches = itertools.count()


def next_turn() -> int:
    """The number of a launch, by which a kernel beside it knows that x is there."""
    return 1 + next(_launches) % (1 << 30)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a processor's shared memory holds two programs of every cut."""
    if device.type == "cpu":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return bool(found >= 200 << 10)


def cut_of(
    x_TK: Tensor, weight_OK: Tensor, deterministic: bool = False, most_rows: int = MOST_ROWS
) -> Cut | None:
    """How to cut a product; None for more than `most_rows`, or if this kernel can't compute it."""
    if not 0 < len(x_TK) <= most_rows or not _can_cut(weight_OK) or x_TK.stride(1) != 1:
        return None
    cut = _cut(weight_OK, len(x_TK))
    if not deterministic:
        return cut
    if cut.columns < _COLUMNS:  # of another matrix instruction
        return None
    split = _split(weight_OK)
    return cut if cut.split == split else Cut(_step(weight_OK), split, 3)


MOST_ODD = 1024
"""Up to so many outputs, their number need not be a multiple of 32: a router may have any."""
_COLUMNS = 64
"""The fewest columns of a program that multiplies by the matrix instruction for many."""


def _can_cut(weight_OK: Tensor) -> bool:
    O, K = weight_OK.shape  # noqa: E741
    if (O % 32 and O > MOST_ODD) or K % 64:
        return False
    if not weight_OK.is_contiguous() or not _has_room(weight_OK.device):
        return False
    return INTERPRETED or weight_OK.dtype != torch.float32


def _step(weight_OK: Tensor) -> int:
    return 64 if weight_OK.shape[1] % 128 else 128


def _cut(weight_OK: Tensor, num_rows: int) -> Cut:
    (O, K), device = weight_OK.shape, weight_OK.device  # noqa: E741
    found = tuned.cut_for(device, num_rows, O, K)
    if found is not None:
        return found
    step, columns, many = _step(weight_OK), _COLUMNS if O % _COLUMNS == 0 else 32, num_rows > 32
    if num_rows > 64:
        step = 64
    num_tiles, places = cdiv(O, columns), processors(device)
    if num_rows > 16 and O % 128 == 0 and num_tiles > (places if many else 2 * places):
        # More programs would fill the device, so that adapters' would have to wait for the last.
        return Cut(64, 1, 5 if many else 6, columns=128)
    most, enough = 4 if num_tiles > 4 else 16, places * 2 // 3
    if step == 64:
        splits = [n for n in range(1, most + 2) if K // step % n == 0]
        split = next((n for n in splits if num_tiles * n >= enough), splits[-1])
        return Cut(step, split, 5 if many else 8, columns)
    split = 1
    while split < most and num_tiles * split < enough and K % (256 * split) == 0:
        split *= 2
    stages = (3 if many else 4) + (num_rows > 16 and num_tiles * split <= places)
    cut = Cut(step, split, stages, columns)
    if num_rows <= 16 and split > 1 and K % (256 * split) == 0:
        cut = replace(cut, step=256, stages=3)
    return cut


def _split(weight_OK: Tensor) -> int:
    """How many parts K has in all deterministic products with a weight: as many as it has with few
    rows, if it can have them with MOST_ROWS too."""
    O, K = weight_OK.shape  # noqa: E741
    split = _cut(weight_OK, 1).split if _can_cut(weight_OK) else 1
    while split > 1 and not Cut(_step(weight_OK), split, 3).fits(MOST_ROWS, O, K):
        split -= 1
    return split


def linear(
    x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, deterministic: bool = False
) -> Tensor:
    """`x W^T + b`, (T, O)."""
    cut = cut_of(x_TK, weight_OK, deterministic, FEW_ROWS)
    if cut is not None:
        return launch(x_TK, weight_OK, bias_O, cut, None).y_TO
    if deterministic and len(x_TK):
        return _launch_many(x_TK.contiguous(), weight_OK.contiguous(), bias_O)
    return F.linear(x_TK, weight_OK, bias_O)


def _launch_many(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    (T, K), O = x_TK.shape, len(weight_OK)  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    exact = INTERPRETED or x_TK.dtype == torch.float32
    rows = columns = 64 if exact else 128
    _product_of_many[cdiv(T, rows) * cdiv(O, columns),](
        x_TK,
        weight_OK,
        y_TO if bias_O is None else bias_O,
        y_TO,
        T,
        K,
        O,
        K,
        BLOCK_T=rows,
        BLOCK_O=columns,
        BLOCK_K=32 if exact else 64,
        SPLIT=_split(weight_OK),
        STAGES=4,
        BIAS=bias_O is not None,
        EXACT=exact,
        num_warps=4 if exact else 8,
    )
    return y_TO


class Launched(NamedTuple):
    """A product that is under way."""

    y_TO: Tensor
    turn: int
    """What is written to a flag once x is there."""
    kernel: Any
    """What Triton returns of a launch."""
    num_programs: int
    room: int = 128
    """How many registers a thread of a kernel beside it may have, where programs of both are to fit
    on a processor."""

    @property
    def has_begun(self) -> bool:
        """Whether the kernel is on the device; else it is compiled ahead, and nothing runs."""
        return INTERPRETED or hasattr(self.kernel, "n_regs")


def launch(
    x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, cut: Cut, flags: Tensor | None
) -> Launched:
    """Start the base product. Once x is there, entry turn % TURNS of `flags`, int32, says `turn`,
    for a kernel beside it that waits for that."""
    (T, K), O = x_TK.shape, len(weight_OK)  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    parts, tickets, nobody = meeting_place(x_TK.device)
    turn = next_turn()
    num_programs = cdiv(O, cut.columns) * cut.split
    kernel = _product[num_programs,](
        x_TK,
        weight_OK,
        y_TO if bias_O is None else bias_O,
        y_TO,
        parts,
        tickets,
        nobody if flags is None else flags,
        T,
        x_TK.stride(0),
        turn,
        K // cut.split // cut.step,
        O=O,
        K=K,
        BLOCK_T=max(16, next_power_of_2(T)),
        BLOCK_O=cut.columns,
        BLOCK_K=cut.step,
        SPLIT=cut.split,
        STAGES=cut.stages,
        AHEAD=cut.ahead,
        BIAS=bias_O is not None,
        TURNS=TURNS,
        EXACT=INTERPRETED or x_TK.dtype == torch.float32,
        num_warps=4,
        **launch_options(starts_early(x_TK.device)),
    )
    return Launched(y_TO, turn, kernel, num_programs)
