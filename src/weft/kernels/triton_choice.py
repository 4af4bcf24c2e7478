"""The choice of each token's experts in one launch, and routers' logits in float32.

Shapes: T token rows, I hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.compiling import is_compiling_ahead
from weft.kernels.experts import Chosen, ExpertChoice, ExpertWeights
from weft.kernels.ops import Product
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    has_pending,
    launch_options,
    starts_early,
    with_pending,
)

FEW_TOKENS = 64
"""The most tokens for which `exact_linear` takes the place of torch's product, which needs a copy
of x in float32."""
OUTPUTS, ROWS = 2, 4
"""Outputs and rows that a program of `exact_linear` has."""
WIDEST = 8192
"""The most inputs of which a program holds all weights of its outputs."""


@triton.jit(do_not_specialize=["T"])
def _exact_linear(
    x_ptr,
    w_ptr,
    out_ptr,
    T,
    x_stride,
    O: tl.constexpr,  # noqa: E741
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out, fp32 (T, O) = x (T, I) times w^T, fp32 (O, I). Programs (parts of O, parts of T)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, BLOCK_I)
    ok = (o < O)[:, None] & (i < I)[None, :]
    w = tl.load(w_ptr + o[:, None] * I + i[None, :], mask=ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1) * ROWS
    for row in range(first, tl.minimum(first + ROWS, T)):
        x = tl.load(x_ptr + row * x_stride + i, mask=i < I, other=0.0)
        tl.store(out_ptr + row * O + o, tl.sum(w * x.to(tl.float32)[None, :], 1), mask=o < O)


def exact_linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor | None:
    """The product x W^T in float32, (T, O), of few rows with a weight in float32. No bit of a row
    depends on the others. None where torch's product is better, or this one can't."""
    (O, I), T = weight_OI.shape, len(x_TI)  # noqa: E741
    if not 0 < T <= FEW_TOKENS or I > WIDEST or x_TI.stride(1) != 1:
        return None
    out_TO = x_TI.new_empty((T, O), dtype=torch.float32)
    _exact_linear[cdiv(O, OUTPUTS), cdiv(T, ROWS)](
        x_TI, weight_OI, out_TO, T, x_TI.stride(0), O, I, next_power_of_2(I), OUTPUTS, ROWS,
        num_warps=4 if I <= WIDEST // 2 else 8, **launch_options(starts_early(x_TI.device)),
    )  # fmt: skip
    return out_TO


@triton.jit
def _choose(
    logits_ptr,
    weight_ptr,
    expert_ptr,
    shared_ptr,
    scale_ptr,
    add_ptr,
    add_slot_ptr,
    correction_ptr,
    E,
    FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHS_SHARED: tl.constexpr,
    PENDING: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one row, the likeliest first, less FIRST, and their weights; with
    WEIGHS_SHARED also that of the shared expert, whose logit is behind the others. One program per
    row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.arange(0, BLOCK_E)
    row = tl.program_id(0)
    has = has_pending(add_slot_ptr + row, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_logits = E
    if WEIGHS_SHARED:
        num_logits += 1
    at = row.to(tl.int64) * num_logits + e
    last = (row + 1).to(tl.int64) * num_logits - 1
    logits = tl.load(logits_ptr + at, mask=e < E, other=float("-inf"))
    logits = with_pending(logits, add_ptr + at, has, e < E, PENDING).to(tl.float32)
    shared = 0.0
    if WEIGHS_SHARED:
        shared = tl.load(logits_ptr + last)
        shared = with_pending(shared, add_ptr + last, has, row >= 0, PENDING).to(tl.float32)
    # What is no number comes last, but ahead of what is beyond the experts.
    left = tl.where(e < E, tl.where(logits > -3e38, logits, -3e38), float("-inf"))
    share = tl.exp(logits - tl.max(left))
    if SIGMOID or CORRECTED or TOP_GROUPS < GROUPS:
        share = tl.sigmoid(left) if SIGMOID else share / tl.sum(share)
        rating = share
        if CORRECTED:
            rating += tl.load(correction_ptr + e, mask=e < E, other=0.0)
        left = tl.where(e < E, tl.where(rating > -3e38, rating, -3e38), float("-inf"))
        if TOP_GROUPS < GROUPS:
            left = _in_top_groups(left, e, e // (E // GROUPS), GROUPS, TOP_GROUPS, BEST_TWO)
    chosen = tl.full((BLOCK_E,), 0, tl.int32)
    order = tl.full((BLOCK_E,), 0, tl.int32)
    for rank in tl.static_range(TOP_K):
        expert = tl.argmax(tl.where(chosen > 0, float("-inf"), left), 0, tie_break_left=True)
        order = tl.where(e == expert, rank, order)
        chosen = tl.where(e == expert, 1, chosen)
    counted = share
    if OF_CHOSEN or NORMALIZE:
        counted = tl.where(chosen > 0, share, 0.0)
    weight = share / tl.sum(counted)
    if SIGMOID or CORRECTED or TOP_GROUPS < GROUPS:
        weight = share / (tl.sum(counted) + LEAST_SUM) if NORMALIZE else share
    if ROUNDED:
        weight = weight.to(logits_ptr.dtype.element_ty).to(tl.float32)
    if SCALED:
        weight *= tl.load(scale_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    pair = row.to(tl.int64) * TOP_K + order
    tl.store(weight_ptr + pair, weight, mask=chosen > 0)
    tl.store(expert_ptr + pair, e.to(tl.int64) - FIRST, mask=chosen > 0)
    if WEIGHS_SHARED:
        tl.store(shared_ptr + row, tl.sigmoid(shared))


@triton.jit
def _in_top_groups(
    rating, e, group, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr
):
    """The ratings of one row's experts e, and -inf for experts outside the TOP_GROUPS best groups.
    A group is rated by its best expert, or with BEST_TWO by the sum of its best two."""
    of_group = tl.full(rating.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, rating, float("-inf"))
        best_of_group = tl.max(own)
        if BEST_TWO:
            rest = tl.where(e == tl.argmax(own, 0, tie_break_left=True), float("-inf"), own)
            best_of_group += tl.max(rest)
        of_group = tl.where(group == g, best_of_group, of_group)
    best = tl.full(rating.shape, 0, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.argmax(tl.where(best > 0, float("-inf"), of_group), 0, tie_break_left=True)
        best = tl.where(group == tl.sum(tl.where(e == at, group, 0)), 1, best)
    return tl.where(best > 0, rating, float("-inf"))


def choose_experts(logits: Product, choice: ExpertChoice, experts: ExpertWeights) -> Chosen:
    """See `weft.kernels.ops.Ops.choose_experts`. Weights are float32, or of the logits' dtype if
    they are rounded."""
    logits_TO, scale_E, correction_E = logits.y_TO, experts.scale_E, experts.correction_E
    num_rows, top_k = len(logits_TO), choice.top_k
    num_experts = logits_TO.shape[1] - choice.weighs_shared
    dtype = logits_TO.dtype if choice.rounded and scale_E is None else torch.float32
    weight_TK = logits_TO.new_empty((num_rows, top_k), dtype=dtype)
    expert_TK = logits_TO.new_empty((num_rows, top_k), dtype=torch.int64)
    shared_T1 = None
    if choice.weighs_shared:
        shared_T1 = logits_TO.new_empty((num_rows, 1), dtype=torch.float32)
    chosen, block = Chosen(weight_TK, expert_TK, shared_T1), next_power_of_2(num_experts)
    if is_compiling_ahead():  # plain torch reads matrices by these numbers
        expert_TK.zero_()
    if not num_rows:
        return chosen
    _choose[num_rows,](
        logits_TO,
        weight_TK,
        expert_TK,
        weight_TK if shared_T1 is None else shared_T1,
        weight_TK if scale_E is None else scale_E,
        *logits.pending_tensors(),
        weight_TK if correction_E is None else correction_E,
        num_experts,
        FIRST=experts.first or 0,
        TOP_K=top_k,
        BLOCK_E=block,
        OF_CHOSEN=choice.of_chosen,
        NORMALIZE=choice.normalize,
        ROUNDED=choice.rounded,
        SCALED=scale_E is not None,
        WEIGHS_SHARED=choice.weighs_shared,
        PENDING=logits.pending is not None,
        SIGMOID=choice.sigmoid,
        CORRECTED=correction_E is not None,
        GROUPS=choice.groups,
        TOP_GROUPS=choice.top_groups,
        BEST_TWO=choice.best_of_group == 2,
        LEAST_SUM=choice.least_sum,
        num_warps=1 if block <= 128 else 4,
        **ALL_AT_ONCE,
        **launch_options(starts_early(logits_TO.device)),
    )
    return chosen
