"""Normalisation. Shapes: any leading dimensions, D the normalised one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32.

    x (..., D) and weight (D,) in the serving dtype; the result has x's dtype.
    """
    return F.rms_norm(x_D, (x_D.shape[-1],), weight_D, eps)


def reference_rms_norm(x_D: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """The oracle of `rms_norm`."""
    x = x_D.float()
    y = (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x_D.dtype)
    return y if weight_D is None else y * weight_D
