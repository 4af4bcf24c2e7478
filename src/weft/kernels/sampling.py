"""Choosing tokens from logits, without state: the noise is a function of (seed, position).

Shapes: N sampled rows, V vocabulary. A row's choice depends on that row's values alone, so a
seeded request gets the same tokens whoever shares its batch, and again after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the sampled rows; `random_M` are the indices of rows that are not greedy."""

    random_M: Tensor
    """int64 (M,)."""
    temperature_M: Tensor
    """float32 (M,), positive."""
    top_k_M: Tensor | None
    """int64 (M,), 1..V; None when no row filters by it."""
    top_p_M: Tensor | None
    """float32 (M,), in (0, 1]; None when no row filters by it."""
    seed_M: Tensor
    """int64 (M,)."""
    position_M: Tensor
    """int64 (M,), position of the token to choose in its sequence."""


def sample(logits_NV: Tensor, batch: SamplingBatch | None) -> Tensor:
    """Token ids, int64 (N,): the most likely one, or for random rows a draw from

        softmax(logits / temperature), restricted to the top_k most likely tokens and then to
        the fewest most likely ones whose probabilities reach top_p.

    logits_NV: float32. `batch` None: all rows are greedy.
    """
    ids_N = logits_NV.argmax(-1)
    if batch is None:
        return ids_N
    scaled_MV = logits_NV[batch.random_M] / batch.temperature_M[:, None]
    scaled_MV = _filter(scaled_MV, batch.top_k_M, batch.top_p_M)
    noise_MV = gumbel(batch.seed_M, batch.position_M, logits_NV.shape[1])
    ids_N[batch.random_M] = (scaled_MV + noise_MV).argmax(-1)
    return ids_N


def gumbel(seed_M: Tensor, position_M: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 (M, V): a hash of (seed, position, token).

    Adding it to logits and taking the argmax draws from their softmax.
    """
    seed_M1, position_M1 = seed_M[:, None], position_M[:, None]
    low, high = seed_M1 & _MASK, (seed_M1 >> 32) & _MASK
    key = _mix(low ^ _mix(high ^ _mix(position_M1 & _MASK)))
    token_V = torch.arange(vocab_size, device=seed_M.device)
    bits = _mix(_mix(token_V ^ key) + key & _MASK)
    uniform = (bits.to(torch.float64) + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).to(torch.float32)


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) in which every input bit reaches all."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & _MASK
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def _filter(logits_MV: Tensor, top_k_M: Tensor | None, top_p_M: Tensor | None) -> Tensor:
    """Minus infinity for what top_k, and after it top_p, leave out; ties are kept."""
    if top_k_M is None and top_p_M is None:
        return logits_MV
    sorted_MV = logits_MV.sort(-1, descending=True).values
    floor_M1 = sorted_MV[:, -1:]
    if top_k_M is not None:
        floor_M1 = sorted_MV.gather(1, top_k_M[:, None] - 1)
        sorted_MV = sorted_MV.masked_fill(sorted_MV < floor_M1, -torch.inf)
    if top_p_M is not None:
        probs_MV = sorted_MV.softmax(-1)
        before_MV = probs_MV.cumsum(-1) - probs_MV
        kept_M1 = (before_MV < top_p_M[:, None]).sum(-1, keepdim=True)
        floor_M1 = torch.maximum(floor_M1, sorted_MV.gather(1, kept_M1 - 1))
    return logits_MV.masked_fill(logits_MV < floor_M1, -torch.inf)


def top_logprobs(logits_NV: Tensor, ids_N: Tensor, num: int) -> tuple[Tensor, ...]:
    """Log-probabilities of the chosen tokens and of the `num` most likely ones.

    Returns chosen float32 (N,), its rank from 1 int64 (N,), top values (N, num), top ids (N, num).
    """
    logprobs_NV = logits_NV.log_softmax(-1)
    chosen_N1 = logprobs_NV.gather(1, ids_N[:, None])
    rank_N = (logprobs_NV > chosen_N1).sum(-1) + 1
    top = logprobs_NV.topk(num, dim=-1)
    return chosen_N1[:, 0], rank_N, top.values, top.indices
