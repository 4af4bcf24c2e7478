"""Choosing tokens from logits, without state: the noise is a function of (seed, position).

    logits -> shape: bias, penalties, mask -> sample: temperature, min_p, top_k, top_p, noise

Shapes: N sampled rows, V vocabulary; of these rows, P have penalties, K a mask of W 32-bit words,
M are random; B biases. A row's choice depends on that row's values alone, to the bit, so a seeded
request gets the same tokens whoever shares its batch, and again after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""The bit of a row's counts that says that a token is in the prompt. The bits below it count how
often it is in the output."""

_MASK = 0xFFFFFFFF
_SHARES = 2**40
"""Probabilities are summed as multiples of 1 / _SHARES: sums of integers don't depend on order."""


@dataclass(frozen=True, slots=True)
class Bias:
    """Numbers, float32, that are added to single logits: those of an int64 token in one of the N
    rows. No (row, token) is there twice."""

    row_B: Tensor
    token_B: Tensor
    value_B: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows with penalties on tokens that are already in prompt or output."""

    row_P: Tensor
    """int64 (P,), among the N rows."""
    counts_PV: Tensor
    """int32 (P, V), see IN_PROMPT."""
    repetition_P: Tensor
    """float32 (P,), positive; 1 does nothing."""
    presence_P: Tensor
    frequency_P: Tensor
    """float32 (P,), as the presence penalty."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The rows that may only choose some tokens."""

    row_K: Tensor
    """int64 (K,), among the N rows."""
    words_KW: Tensor
    """int32 (K, ceil(V / 32)): bit t % 32 of word t // 32 is set if token t may be chosen; at least
    one is."""


def count_tokens(counts_V: Tensor, prompt_L: Tensor, output_L: Tensor) -> None:
    """Set a row's counts, int32 (V,), from its tokens, int64."""
    counts_V.zero_()
    counts_V.scatter_add_(0, output_L, torch.ones_like(output_L, dtype=torch.int32))
    in_prompt_V = torch.zeros_like(counts_V)
    in_prompt_V[prompt_L] = IN_PROMPT
    counts_V += in_prompt_V


def shape(
    logits_NV: Tensor, bias: Bias | None, penalties: Penalties | None, mask: Mask | None
) -> Tensor:
    """The logits to choose from, (N, V). `logits_NV` is not changed; it is returned itself if there
    is nothing to do, and float32 otherwise."""
    if bias is None and penalties is None and mask is None:
        return logits_NV
    shaped_NV = logits_NV.to(torch.float32, copy=True)
    if bias is not None:
        shaped_NV[bias.row_B, bias.token_B] += bias.value_B
    if penalties is not None:
        shaped_NV[penalties.row_P] = _penalised(shaped_NV[penalties.row_P], penalties)
    if mask is not None:
        allowed_KV = _unpacked(mask.words_KW, logits_NV.shape[1])
        shaped_NV[mask.row_K] = shaped_NV[mask.row_K].masked_fill(~allowed_KV, -torch.inf)
    return shaped_NV


def _penalised(logits_PV: Tensor, penalties: Penalties) -> Tensor:
    """Punish repetition, in prompt or output; then the other two, which are for the output only."""
    counts_PV = penalties.counts_PV
    factor_PV = torch.where(counts_PV > 0, penalties.repetition_P[:, None], 1.0)
    logits_PV = torch.where(logits_PV > 0, logits_PV / factor_PV, logits_PV * factor_PV)
    times_PV = counts_PV & (IN_PROMPT - 1)
    logits_PV = logits_PV - penalties.frequency_P[:, None] * times_PV
    return logits_PV - penalties.presence_P[:, None] * (times_PV > 0)


def _unpacked(words_KW: Tensor, vocab_size: int) -> Tensor:
    """The bits as bool (K, V), taken byte by byte, as words have their lowest byte first."""
    bits_8 = torch.arange(8, dtype=torch.uint8, device=words_KW.device)
    bytes_KB = words_KW.view(torch.uint8)
    return ((bytes_KB[:, :, None] >> bits_8) & 1).flatten(1)[:, :vocab_size].bool()


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the sampled rows, int64 or float32; `random_M` are the indices of rows that are
    not greedy. A filter is None when no row filters by it."""

    random_M: Tensor
    temperature_M: Tensor
    """float32, positive."""
    top_k_M: Tensor | None
    """int64, 1..V."""
    top_p_M: Tensor | None
    """float32, in (0, 1]."""
    min_p_M: Tensor | None
    """float32, in [0, 1]."""
    seed_M: Tensor
    position_M: Tensor
    """int64, position of the token to choose in its sequence."""


def sample(logits_NV: Tensor, batch: SamplingBatch | None) -> Tensor:
    """Choose token ids, int64 (N,): the most likely one, or for random rows a draw from

        softmax(logits / temperature), restricted to tokens at least min_p times as likely as
        the most likely one, then to the top_k most likely ones, and then to the fewest most
        likely ones whose probabilities reach top_p.

    logits_NV: of any precision, one of each row finite. Everything is computed in float32. `batch`
    None: all rows are greedy.
    """
    ids_N = logits_NV.argmax(-1)
    if batch is None:
        return ids_N
    row_M, temperature_M = batch.random_M, batch.temperature_M
    if batch.min_p_M is None and batch.top_k_M is None and batch.top_p_M is None:
        ids_N[row_M] = _draw(logits_NV, row_M, temperature_M, batch)
        return ids_N
    scaled_MV = logits_NV[row_M] / temperature_M[:, None]
    if batch.min_p_M is not None:
        floor_M = scaled_MV.amax(-1) + batch.min_p_M.log()
        scaled_MV = scaled_MV.masked_fill(scaled_MV < floor_M[:, None], -torch.inf)
    scaled_MV = _filter(scaled_MV, batch.top_k_M, batch.top_p_M)
    every_M = torch.arange(len(row_M), device=row_M.device)
    ids_N[row_M] = _draw(scaled_MV, every_M, torch.ones_like(temperature_M), batch)
    return ids_N


def _draw(logits_NV: Tensor, row_M: Tensor, temperature_M: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw tokens of some rows, int64 (M,), with the noise of a batch's random ones."""
    seed_M, position_M = batch.seed_M, batch.position_M
    if logits_NV.is_cuda:  # in one kernel, in place of some forty
        from weft.kernels.triton_draw import draw  # Triton is for Linux

        return draw(logits_NV, row_M, temperature_M, seed_M, position_M)
    noise_MV = gumbel(seed_M, position_M, logits_NV.shape[1])
    return (logits_NV[row_M] / temperature_M[:, None] + noise_MV).argmax(-1)


def gumbel(seed_M: Tensor, position_M: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 (M, V): a hash of (seed, position, token). Adding it to logits
    and taking the argmax draws from their softmax."""
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
    """The logits, with those that top_k and then top_p leave out set to minus infinity. Tokens as
    likely as the last one kept are kept too."""
    if top_k_M is None and top_p_M is None:
        return logits_MV
    sorted_MV = logits_MV.sort(-1, descending=True).values
    floor_M1 = sorted_MV[:, -1:]
    if top_k_M is not None:
        floor_M1 = sorted_MV.gather(1, top_k_M[:, None] - 1)
        sorted_MV = sorted_MV.masked_fill(sorted_MV < floor_M1, -torch.inf)
    if top_p_M is not None:
        shares_MV = (sorted_MV.softmax(-1) * _SHARES).to(torch.int64)
        before_MV = shares_MV.cumsum(-1) - shares_MV
        enough_M = (top_p_M.double() * _SHARES).to(torch.int64).masked_fill(top_p_M >= 1, 2**62)
        kept_M1 = (before_MV < enough_M[:, None]).sum(-1, keepdim=True).clamp(min=1)
        floor_M1 = torch.maximum(floor_M1, sorted_MV.gather(1, kept_M1 - 1))
    return logits_MV.masked_fill(logits_MV < floor_M1, -torch.inf)


def top_logprobs(logits_NV: Tensor, ids_N: Tensor, num: int) -> tuple[Tensor, ...]:
    """Log-probabilities of the chosen tokens, float32 (N,), and their ranks from 1, int64 (N,); and
    of the `num` most likely ones, (N, num), and their ids, (N, num)."""
    logprobs_NV = logits_NV.log_softmax(-1, dtype=torch.float32)
    chosen_N1 = logprobs_NV.gather(1, ids_N[:, None])
    rank_N = (logprobs_NV > chosen_N1).sum(-1) + 1
    top = logprobs_NV.topk(num, dim=-1)
    return chosen_N1[:, 0], rank_N, top.values, top.indices
