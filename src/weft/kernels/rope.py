"""Rotary position embedding.

Shapes: T token rows, N heads, D head dimension, R rotated dimensions of a head, which come first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of every head: `x * cos + roll(x, R/2) * sin` over its first R
    dimensions. The others, if R is less than D, stay as they are.

    `cos_T1R` repeats its first half; `sin_T1R` holds -sin in the first half and sin in the
    second, so that swapping the halves of x is all that a rotation needs. All of one dtype.
    """
    R = cos_T1R.shape[-1]
    x_TNR = x_TND[..., :R]
    rotated_TNR = torch.addcmul(x_TNR * cos_T1R, x_TNR.roll(R // 2, -1), sin_T1R)
    if x_TND.shape[-1] == R:
        return rotated_TNR
    return torch.cat((rotated_TNR, x_TND[..., R:]), -1)


def reference_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """The oracle of `apply_rope`: one 2 x 2 rotation per pair, in fp32."""
    R = cos_T1R.shape[-1]
    half = R // 2
    a, b = x_TND[..., :half].float(), x_TND[..., half:R].float()
    cos, sin = cos_T1R[..., half:].float(), sin_T1R[..., half:].float()
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_TND.dtype)
    return torch.cat((rotated, x_TND[..., R:]), -1)
