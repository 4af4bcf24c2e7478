"""Mixtures of experts for few rows: the experts' MLPs, in two launches.

With few rows a mixture only reads the weights of the experts that are chosen. So each of its
programs reads some rows of one expert's matrix, once, for all tokens that chose it: it finds these
tokens in the list of choices, and nothing is sorted or copied. What a token gets does not depend on
the others in its step, to the bit: its sums follow from its own row, and those over its experts are
in the order of its choices.

Shapes: T token rows, E experts, K experts of a token, I hidden size, F width of an expert; a pair
is a token and one of its experts, token * K + rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import next_power_of_2
from weft.core.units import EXPERT_UNIT
from weft.kernels.activations import Activation, ClampedSwiglu, is_gated
from weft.kernels.experts import Chosen, ExpertAdapters, ExpertWeights
from weft.kernels.ops import Product, Shared
from weft.kernels.triton_base import (
    INTERPRETED,
    activated,
    activated_alone,
    ask_for,
    dot,
    launch_options,
    load_pending,
    meeting_place,
    plus_pending,
    starts_early,
)

FEW_TOKENS = 64
"""Up to so many tokens, these kernels are faster than a grouped product."""


@triton.jit
def _tokens_of(
    expert_ptr,
    place,
    T,
    E,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_PAIR: tl.constexpr,
):
    """Which tokens chose the expert of a program's `place`: (expert, how many, for each token the
    number of those before it or -1, its pair). BY_PAIR: places are pairs, of which the first with
    an expert does the work of all; else experts. Choices beyond E, or below 0, are of experts that
    are elsewhere."""
    t = tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    pair = t * TOP_K + k
    there = (t < T) & (k < TOP_K)
    # Past the first-level cache, which may have what an earlier layer wrote there.
    experts = tl.load(expert_ptr + pair, mask=there, other=-1, cache_modifier=".cg").to(tl.int32)
    expert = place
    if BY_PAIR:
        expert = tl.load(expert_ptr + place, cache_modifier=".cg").to(tl.int32)
    hits = tl.where(experts == expert, 1, 0)
    count = tl.sum(tl.sum(hits, 1), 0)
    if BY_PAIR:
        earlier = tl.sum(tl.sum(tl.where(pair < place, hits, 0), 1), 0)
        count = tl.where((earlier > 0) | (expert < 0) | (expert >= E), 0, count)
    chosen = tl.sum(hits, 1)
    before = tl.where(chosen > 0, tl.cumsum(chosen, 0) - 1, -1)
    return expert, count, before, tl.sum(hits * pair, 1)


@triton.jit
def _pairs_at(r, before, pair, BLOCK_T: tl.constexpr):
    """The pairs of an expert's tokens number r."""
    match = before[None, :] == r[:, None]
    return tl.sum(tl.where(match, pair[None, :], 0), 1)


@triton.jit
def _rows_times(
    x_at,
    there,
    w_at,
    w_row,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """fp32 (BLOCK_O, BLOCK_R): rows of weights times rows of x, of which some are there. `x_at` are
    pointers to rows; a row of weights begins at w_at + w_row, whose constants take no registers."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_O, BLOCK_R), 0.0, tl.float32)
    for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + step * BLOCK_K + (w_row[:, None] + k[None, :]))
        x = tl.load(x_at[:, None] + (step * BLOCK_K + k)[None, :], mask=there[:, None], other=0.0)
        acc = dot(w, tl.trans(x), acc, EXACT)
    return acc


@triton.jit(do_not_specialize=["T"])
def _gate_up(
    x_ptr,
    w_ptr,
    bias_ptr,
    expert_ptr,
    add_ptr,
    out_ptr,
    T,
    E,
    x_stride,
    add_stride,
    alpha,
    limit,
    I: tl.constexpr,  # noqa: E741
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CLAMPED: tl.constexpr,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADAPTED: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (pairs, F) = activation(gate) * up; programs: tiles of one expert after another, each of
    BLOCK_O rows of its matrix, a row of gate and the same one of up in turns. If not GATED, all
    rows are of up, and out = activation(up), without biases. If ADAPTED, gate and up have add
    (pairs, outputs) added first. Activations are as in `weft.kernels.triton_base`."""
    if PDL:  # `_down` begins when the experts have been chosen
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    TILES: tl.constexpr = F // HALF
    OUTPUTS: tl.constexpr = 2 * F if GATED else F
    place = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert, count, before, pair = _tokens_of(
        expert_ptr, place, T, E, TOP_K, BLOCK_T, BLOCK_TOP, BY_PAIR
    )
    i = tl.arange(0, BLOCK_O)
    f = tile * HALF + tl.arange(0, HALF)
    first_row = tile * BLOCK_O
    w_row = i * I
    to_up = 1
    at = 2 * f
    if GATED and not CLAMPED:
        first_row = tile * HALF
        w_row = (i % 2 * F + i // 2) * I
        to_up = F
        at = f
    w_at = w_ptr + (expert.to(tl.int64) * OUTPUTS + first_row) * I
    for first in range(0, count, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        there = r < count
        pair_r = _pairs_at(r, before, pair, BLOCK_T)
        x_at = x_ptr + (pair_r // TOP_K).to(tl.int64) * x_stride
        acc = _rows_times(x_at, there, w_at, w_row, I, BLOCK_R, BLOCK_O, BLOCK_K, STAGES, EXACT)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (HALF, 2, BLOCK_R)), (0, 2, 1)))
            if BIAS:
                bias_at = bias_ptr + expert * 2 * F + at
                gate += tl.load(bias_at).to(tl.float32)[:, None]
                up += tl.load(bias_at + to_up).to(tl.float32)[:, None]
            if ADAPTED:
                add_at = add_ptr + pair_r[None, :] * add_stride + at[:, None]
                gate += tl.load(add_at, mask=there[None, :], other=0.0).to(tl.float32)
                up += tl.load(add_at + to_up, mask=there[None, :], other=0.0).to(tl.float32)
            y = activated(gate, up, alpha, limit, GELU, CLAMPED)
        else:
            if ADAPTED:
                add_at = add_ptr + pair_r[None, :] * add_stride + f[:, None]
                acc += tl.load(add_at, mask=there[None, :], other=0.0).to(tl.float32)
            y = activated_alone(acc)
        y = tl.trans(y).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair_r[:, None] * F + f[None, :], y, mask=there[:, None])


@triton.jit(do_not_specialize=["T"])
def _down(
    x_ptr,
    w_ptr,
    bias_ptr,
    expert_ptr,
    add_ptr,
    weight_ptr,
    parts_ptr,
    tickets_ptr,
    shared_ptr,
    shared_add_ptr,
    shared_slot_ptr,
    shared_weight_ptr,
    out_ptr,
    T,
    E,
    places,
    add_stride,
    I: tl.constexpr,  # noqa: E741
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    ADAPTED: tl.constexpr,
    SOME: tl.constexpr,
    SHARED: tl.constexpr,
    PENDING: tl.constexpr,
    WEIGHED: tl.constexpr,
    AHEAD: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, I): the sum over a token's experts of weight * (x @ w^T + bias), x (pairs, F); if
    ADAPTED of weight * (x @ w^T + bias + add), add (pairs, I); if SOME, over those that are here.
    With SHARED, what the shared expert gives is in it, times a weight if WEIGHED. Programs: tiles
    of one expert after another, each of BLOCK_O columns of the result; the last one of some columns
    adds the parts (pairs, I) in the order of each token's choices."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = I // BLOCK_O
    place = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert, count, before, pair = _tokens_of(
        expert_ptr, place, T, E, TOP_K, BLOCK_T, BLOCK_TOP, BY_PAIR
    )
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    w_at = w_ptr + (expert.to(tl.int64) * I + tile * BLOCK_O) * F
    w_row = tl.arange(0, BLOCK_O) * F
    if PDL:  # what `_gate_up` writes is read from here on
        if count > 0:
            ask_for(w_at + w_row[:, None] + 64 * tl.arange(0, AHEAD)[None, :])
        tl.extra.cuda.gdc_wait()
    for first in range(0, count, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        there = r < count
        pair_r = _pairs_at(r, before, pair, BLOCK_T)
        x_at = x_ptr + pair_r.to(tl.int64) * F
        acc = _rows_times(x_at, there, w_at, w_row, F, BLOCK_R, BLOCK_O, BLOCK_K, STAGES, EXACT)
        if BIAS:
            acc += tl.load(bias_ptr + expert * I + o).to(tl.float32)[:, None]
        if ADAPTED:
            add_at = add_ptr + pair_r[None, :] * add_stride + o[:, None]
            acc += tl.load(add_at, mask=there[None, :], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + pair_r, mask=there, other=0.0).to(tl.float32)
        acc *= weight[None, :]
        tl.store(parts_ptr + pair_r[:, None] * I + o[None, :], tl.trans(acc), mask=there[:, None])
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == places - 1:
        t = tl.arange(0, BLOCK_T)
        at = t[:, None] * TOP_K * I + o[None, :]
        ok = t < T
        here = ok
        total = tl.full((BLOCK_T, BLOCK_O), 0.0, tl.float32)
        if SHARED:
            at_row = t[:, None] * I + o[None, :]
            has = ok
            if PENDING:
                has = tl.load(shared_slot_ptr + t, mask=ok, other=-1) >= 0
            add = load_pending(shared_add_ptr + at_row, ok[:, None], PENDING)
            total += tl.load(shared_ptr + at_row, mask=ok[:, None], other=0.0)
            total = plus_pending(total, add, has[:, None], PENDING)
            if WEIGHED:
                total *= tl.load(shared_weight_ptr + t, mask=ok, other=0.0)[:, None]
        for rank in tl.static_range(TOP_K):
            if SOME:
                of = tl.load(expert_ptr + t * TOP_K + rank, mask=ok, other=-1)
                here = (of >= 0) & (of < E)
            part_at = parts_ptr + at + rank * I
            total += tl.load(part_at, mask=here[:, None], other=0.0, cache_modifier=".cg")
        y = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t[:, None] * I + o[None, :], y, mask=ok[:, None])
        tl.store(tickets_ptr + tile, 0)


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """How a product of experts is cut for the device."""

    columns: int
    """Rows of a matrix that a program reads."""
    step: int
    """Elements of a row that it takes at a time."""
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_O": self.columns, "BLOCK_K": self.step, "STAGES": self.stages}


ROWS = 16
"""Tokens of an expert that a program takes at a time."""
AHEAD = 2
"""How many lines of 128 bytes of each row of its weights a program of `_down` asks for early."""


def _cut(inputs: int) -> ExpertCut:
    """The cut for an H200, on which products of 1 to 64 rows take the time of their bytes."""
    if inputs % 128 == 0:
        return ExpertCut(64, 128, 4)
    return ExpertCut(64, 32, 16) if inputs % 64 else ExpertCut(64, 64, 10)


def _added_first(
    x_TI: Tensor, num_chosen: int, sizes: tuple[int, int], adapters: ExpertAdapters
) -> tuple[Tensor, Tensor]:
    """What adapters add to the first product, (pairs, sizes[0]), and zeros, (pairs, sizes[1]), to
    which the caller has them add their part of the second one."""
    T, I = x_TI.shape  # noqa: E741
    first, second = x_TI.new_zeros(T * num_chosen, sum(sizes)).split_with_sizes(sizes, 1)
    x_PI = x_TI[:, None].expand(T, num_chosen, I).reshape(T * num_chosen, I)
    for group in adapters.gate_up:
        adapters.add(first, x_PI, group)
    return first, second


def mixture(
    x_TI: Tensor,
    chosen: Chosen,
    experts: ExpertWeights,
    activation: Activation,
    shared: Shared | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor | None:
    """The sum of each token's experts that are here, and of the shared one, (T, I); see
    `weft.kernels.ops.Ops.mixture`. None where other kernels are better, or these can't."""
    T, (E, I, F), O = len(x_TI), experts.down_EIF.shape, experts.gate_up_EOI.shape[1]  # noqa: E741
    unit = EXPERT_UNIT if is_gated(activation) else 2 * EXPERT_UNIT
    if not 0 < T <= FEW_TOKENS or I % 64 or F % unit or x_TI.stride(1) != 1:
        return None
    if x_TI.dtype == torch.float32 and not INTERPRETED:
        return None
    weight_TK, expert_TK, _ = chosen
    K = expert_TK.shape[1]
    inner_PF, parts_PI = x_TI.new_empty(T * K, F), x_TI.new_empty(T * K, I, dtype=torch.float32)
    out_TI = x_TI.new_empty(T, I)
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    alpha, limit = clamped or (0.0, 0.0)
    places = min(E, T * K)
    common = {
        "I": I,
        "F": F,
        "TOP_K": K,
        "BLOCK_R": ROWS,
        "BLOCK_T": max(16, next_power_of_2(T)),
        "BLOCK_TOP": next_power_of_2(K),
        "BY_PAIR": T * K < E,
        "ADAPTED": adapters is not None,
        "EXACT": INTERPRETED or x_TI.dtype == torch.float32,
        "num_warps": 4,
        **launch_options(starts_early(x_TI.device)),
    }
    add_PO = add_PI = out_TI
    if adapters is not None:
        add_PO, add_PI = _added_first(x_TI, K, (O, I), adapters)
    cut, bias_EO = _cut(I), experts.gate_up_bias_EO
    _gate_up[places * (O // cut.columns),](
        x_TI, experts.gate_up_EOI, out_TI if bias_EO is None else bias_EO, expert_TK, add_PO,
        inner_PF, T, E, x_TI.stride(0), add_PO.stride(0), alpha, limit, CLAMPED=clamped is not None,
        GELU=activation == "gelu_tanh", GATED=is_gated(activation), BIAS=bias_EO is not None,
        **cut.constants, **common,
    )  # fmt: skip
    for group in adapters.down if adapters is not None else ():
        adapters.add(add_PI, inner_PF, group)
    cut, bias_EI = _cut(F), experts.down_bias_EI
    _, tickets, _ = meeting_place(x_TI.device)
    product, weight_T1 = shared or Shared(Product(out_TI))
    of_shared = product.y_TO, *product.pending_tensors(), out_TI if weight_T1 is None else weight_T1
    _down[places * (I // cut.columns),](
        inner_PF, experts.down_EIF, out_TI if bias_EI is None else bias_EI, expert_TK, add_PI,
        weight_TK, parts_PI, tickets, *of_shared, out_TI, T, E, places, add_PI.stride(0),
        BIAS=bias_EI is not None, SOME=experts.first is not None, SHARED=shared is not None,
        PENDING=shared is not None and shared.product.pending is not None,
        WEIGHED=weight_T1 is not None, AHEAD=AHEAD, **cut.constants, **common,
    )  # fmt: skip
    return out_TI
