"""Rotary position embedding. Shapes: T token rows, N heads, D head dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head: `x * cos + roll(x, D/2) * sin`.

    `cos_T1D` repeats its first half; `sin_T1D` holds -sin in the first half and sin in the
    second, so that swapping the halves of x is all that a rotation needs. All of one dtype.
    """
    swapped = x_TND.roll(x_TND.shape[-1] // 2, -1)
    return torch.addcmul(x_TND * cos_T1D, swapped, sin_T1D)


def reference_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """The oracle of `apply_rope`: one 2 x 2 rotation per pair, in fp32."""
    half = x_TND.shape[-1] // 2
    a, b = x_TND[..., :half].float(), x_TND[..., half:].float()
    cos, sin = cos_T1D[..., half:].float(), sin_T1D[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_TND.dtype)
