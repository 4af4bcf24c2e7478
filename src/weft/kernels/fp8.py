"""Base weights in 8-bit floating point (e4m3), with one scale per output.

    w[o, i] ~ q[o, i] * scale[o]            scale[o] = max |w[o, :]| / 448

*Weight-only*: the input stays as it is. *Dynamic*: the input is quantized too, row by row in the
same way, so that the product runs on 8-bit matrix units. Either way sums are in fp32 and what a row
gets is rounded once. Adapters see the input as it was.

Shapes: T token rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix (O, I) in fp8. `linear` is the product with it."""

    q_OI: Tensor
    """float8_e4m3fn"""
    scale_O: Tensor
    """float32"""
    dynamic: bool
    """Whether inputs are quantized too."""
    dense_OI: Tensor | None
    """On a CPU, which has no products with fp8: the values in the serving dtype."""

    @property
    def shape(self) -> torch.Size:
        return self.q_OI.shape

    def numel(self) -> int:
        return self.q_OI.numel()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values, (O, I): rounded to `dtype` once."""
        if self.dense_OI is not None and self.dense_OI.dtype == dtype:
            return self.dense_OI
        return (self.q_OI.float() * self.scale_O[:, None]).to(dtype)


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values (R, I) and fp32 scales (R,) of a matrix of any float dtype; rows of zeros have
    the scale 1."""
    scale_R = x_RI.abs().amax(1).float() / FP8_MAX
    scale_R = torch.where(scale_R > 0, scale_R, 1.0)
    q_RI = (x_RI.float() / scale_R[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return q_RI, scale_R


def quantize_weight(weight_OI: Tensor, dynamic: bool) -> Fp8Weight:
    """A weight as fp8, where it is."""
    q_OI, scale_O = quantize_rows(weight_OI)
    weight = Fp8Weight(q_OI, scale_O, dynamic, None)
    if weight_OI.is_cuda:
        return weight
    return Fp8Weight(q_OI, scale_O, dynamic, weight.dequantized(weight_OI.dtype))


def linear(x_TI: Tensor, weight_OI: Tensor | Fp8Weight, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b` in x's dtype, (T, O)."""
    if isinstance(weight_OI, Tensor):
        if x_TI.is_cuda and HAS_TRITON:
            from weft.kernels import triton_linear

            return triton_linear.linear(x_TI, weight_OI, bias_O)
        return F.linear(x_TI, weight_OI, bias_O)
    if weight_OI.dense_OI is not None:
        rows_TI = _rounded(x_TI) if weight_OI.dynamic else x_TI
        return F.linear(rows_TI, weight_OI.dense_OI, bias_O)
    from weft.kernels import triton_fp8

    if weight_OI.dynamic:
        return triton_fp8.dynamic_linear(x_TI, weight_OI.q_OI, weight_OI.scale_O, bias_O)
    return triton_fp8.weight_only_linear(x_TI, weight_OI.q_OI, weight_OI.scale_O, bias_O)


def _rounded(x_TI: Tensor) -> Tensor:
    """The values that `x` has as fp8."""
    q_TI, scale_T = quantize_rows(x_TI)
    return (q_TI.float() * scale_T[:, None]).to(x_TI.dtype)
