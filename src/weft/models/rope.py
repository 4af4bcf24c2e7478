"""Tables of the rotary position embedding.

Shapes: M positions, T token rows, R rotated dimensions of a head, F = R / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.kernels.ops import Rope
from weft.models.rope_config import QueryGrowth, RopeConfig


class RopeTable:
    """cos and sin for every position below `max_len`, computed in fp32 and kept in `dtype`. Without
    a `rope` they are 1 and 0, and rotate nothing. With `growth`, factors of queries too."""

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        growth: QueryGrowth | None = None,
    ) -> None:
        freq_F, scale = torch.zeros(1), 1.0
        if rope is not None:
            freq_F, scale = inverse_frequencies(rope, head_dim)
        angle_MF = torch.arange(max_len, device=device).float()[:, None] * freq_F.to(device)
        cos, sin = angle_MF.cos() * scale, angle_MF.sin() * scale
        self._interleaved = rope is not None and rope.interleaved
        pairs_M2F2 = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), 1)
        if not self._interleaved:
            pairs_M2F2 = pairs_M2F2.transpose(2, 3)
        self._table_M2R = pairs_M2F2.flatten(2).to(dtype)
        self._query_M: Tensor | None = None
        if growth is not None:
            lengths_M = (torch.arange(max_len, device=device) + growth.ahead) // growth.length
            self._query_M = 1 + growth.factor * (1 + lengths_M).log()
            if growth.rounded:
                self._query_M = self._query_M.to(dtype)

    def at(self, positions_T: Tensor) -> Rope:
        """The rotation of rows at these positions."""
        rows_T2R = self._table_M2R.index_select(0, positions_T)
        query_T11 = None
        if self._query_M is not None:
            query_T11 = self._query_M.index_select(0, positions_T)[:, None, None]
        return Rope(rows_T2R[:, :1], rows_T2R[:, 1:], self._interleaved, query_T11)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """fp32 (F,) angles per position, and the factor for cos and sin."""
    size = rope.rotated(head_dim)
    freq = 1.0 / rope.theta ** (torch.arange(0, size, 2).float() / size)
    if rope.type == "linear":
        return freq / rope.factor, 1.0
    if rope.type == "proportional":
        freq[int(rope.partial_rotary_factor * size // 2) :] = 0
        return freq / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, freq), 1.0
    if rope.type == "yarn":
        return _yarn(rope, freq), _attention_factor(rope)
    if rope.type == "longrope":
        return freq / torch.tensor(rope.short_factor), _attention_factor(rope)
    return freq, 1.0


def _llama3(rope: RopeConfig, freq_F: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / freq_F
    length = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * freq_F / rope.factor + smooth * freq_F
    stretched = torch.where(wavelength > length / low, freq_F / rope.factor, blended)
    return torch.where(wavelength < length / high, freq_F, stretched)


def _yarn(rope: RopeConfig, freq_F: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from kept to stretched frequencies."""
    dim = 2 * len(freq_F)
    low = _yarn_dimension(rope, dim, rope.beta_fast)
    high = _yarn_dimension(rope, dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return freq_F / rope.factor * ramp + freq_F * (1 - ramp)


def _yarn_dimension(rope: RopeConfig, dim: int, rotations: float) -> float:
    """The dimension that makes `rotations` full turns within the original context."""
    turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeConfig) -> float:
    """The factor for cos and sin of yarn and longrope."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "yarn" and rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    if rope.type == "yarn" or rope.factor <= 1:
        return _mscale(rope.factor, 1.0)
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
