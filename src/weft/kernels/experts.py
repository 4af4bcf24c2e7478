"""Mixtures of experts: how a token's experts are chosen, in plain torch, and what they are made of.

Shapes: T token rows, E experts, K experts of a token, I hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How the experts of a token are chosen."""

    top_k: int
    of_chosen: bool
    """Whether weights are the softmax over the chosen experts alone; else they are of all."""
    normalize: bool
    """Whether weights are scaled to a sum of 1."""
    rounded: bool
    """Whether weights are rounded to the dtype of the logits."""
    sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its logit; else weights are a softmax."""
    groups: int = 1
    """Into how many groups of neighbours the experts are divided."""
    top_groups: int = 1
    """From how many of these groups, the best ones, a token chooses its experts."""
    best_of_group: int = 2
    """How many of a group's best experts are summed to rate the group."""
    least_sum: float = 0.0
    """What is added to the sum that weights are divided by."""
    weighs_shared: bool = False
    """Whether the last logit is that of the shared expert's weight, which is its sigmoid; else all
    logits are those of experts to choose from."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of a layer, E, each of width F; or those of some."""

    gate_up_EOI: Tensor
    down_EIF: Tensor
    gate_up_bias_EO: Tensor | None = None
    down_bias_EI: Tensor | None = None
    scale_E: Tensor | None = None
    """What the weight of each expert is multiplied by, of all experts; None: nothing."""
    correction_E: Tensor | None = None
    """What is added to the weight of each expert for the choice alone, of all experts, float32;
    None: nothing."""
    first: int | None = None
    """The number of the first of these experts, where others are elsewhere; None: these are all."""


class Chosen(NamedTuple):
    """The experts of each token, and their weights."""

    weight_TK: Tensor
    expert_TK: Tensor
    """int64, counted from the first expert that is here, so that those before it have negative
    numbers."""
    shared_T1: Tensor | None = None
    """The weight of the expert that all tokens go through; None: 1, or there is no such expert."""


class ExpertAdapters(NamedTuple):
    """What adapters add to both products of a mixture's experts. The rows of a product are the P
    pairs of a token and one of its experts, in the order token * K + rank."""

    add: Callable[[Tensor, Tensor, int], None]
    """Adds a group's part to y (P, O), given x (P, I) and the group; see
    `weft.kernels.lora.base.ExpertStep`."""
    gate_up: tuple[int, ...]
    """The groups of the first product, each of which adds its part."""
    down: tuple[int, ...]


def choose_experts(
    logits_TE: Tensor,
    choice: ExpertChoice,
    scale_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: their weights, float32 unless rounded, and their numbers,
    int64, both (T, top_k). `scale_E` and `correction_E`: see `ExpertWeights`."""
    if choice.sigmoid or correction_E is not None or choice.top_groups < choice.groups:
        share_TE = logits_TE.float().sigmoid()
        if not choice.sigmoid:
            share_TE = logits_TE.softmax(-1, dtype=torch.float32)
        rating_TE = share_TE if correction_E is None else share_TE + correction_E
        expert_TK = _in_top_groups(rating_TE, choice).topk(choice.top_k).indices
        weight_TK = share_TE.gather(1, expert_TK)
    elif choice.of_chosen:
        logit_TK, expert_TK = logits_TE.topk(choice.top_k)
        weight_TK = logit_TK.softmax(-1, dtype=torch.float32)
    else:
        weight_TK, expert_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(choice.top_k)
    if choice.normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + choice.least_sum)
    if choice.rounded:
        weight_TK = weight_TK.to(logits_TE.dtype)
    return weight_TK if scale_E is None else weight_TK * scale_E[expert_TK], expert_TK


def _in_top_groups(rating_TE: Tensor, choice: ExpertChoice) -> Tensor:
    """The ratings, and -inf for experts of other groups than each token's best."""
    if choice.top_groups == choice.groups:
        return rating_TE
    rating_TGN = rating_TE.view(len(rating_TE), choice.groups, -1)
    of_group_TG = rating_TGN.topk(choice.best_of_group).values.sum(-1)
    out_TG = torch.ones_like(of_group_TG, dtype=torch.bool)
    out_TG.scatter_(1, of_group_TG.topk(choice.top_groups).indices, False)
    return rating_TGN.masked_fill(out_TG[..., None], -torch.inf).flatten(1)
