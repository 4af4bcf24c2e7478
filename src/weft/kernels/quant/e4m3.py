"""Rounding to 8-bit floating point (e4m3) with one scale per row, in plain torch.

Shapes: R rows, I values each.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix of any float dtype: fp8 values (R, I) and fp32 scales (R,), 1 for zeros."""
    scale_R = x_RI.abs().amax(1).float() / FP8_MAX
    scale_R = torch.where(scale_R > 0, scale_R, 1.0)
    q_RI = (x_RI.float() / scale_R[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return q_RI, scale_R


def dequantized(q_RI: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, (R, I): rounded to `dtype` once."""
    return (q_RI.float() * scale_R[:, None]).to(dtype)
