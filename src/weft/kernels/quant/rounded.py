"""Rounds a matrix in 16 or 32 bits to 4 or 8. A group's scale is its greatest magnitude over the
greatest code, and each number becomes the nearest code times that scale.

Shapes: O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.linear import DenseWeight, Weight
from weft.kernels.quant.e4m3 import FP8, FP8_MAX
from weft.kernels.quant.packed import Codes, has_layout
from weft.kernels.quant.packed_weight import pack

_GROUPS, _ZERO = (128, 64, 32), 8


def in_fp8(matrix_OK: Tensor) -> Weight:
    """Numbers in fp8 (e4m3), with a scale for each output."""
    dtype = torch.float32 if matrix_OK.dtype == torch.float16 else torch.bfloat16
    scale_O1 = _scales(matrix_OK.abs().amax(1, keepdim=True), FP8_MAX, dtype)
    codes = (matrix_OK.float() / scale_O1.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return _held(Codes("e4m3", codes.view(torch.uint8), scale_O1), matrix_OK.dtype)


def in_int4(matrix_OK: Tensor) -> Weight:
    """Integers from -7 to 7, with a scale for each 128 inputs of an output; for fewer if a rank's
    share can't be cut so, or for all of them if it can't be cut at all."""
    outputs, inputs = matrix_OK.shape
    dtype = torch.float16 if matrix_OK.dtype == torch.float16 else torch.bfloat16
    group = next((size for size in _GROUPS if inputs % size == 0), inputs)
    groups = matrix_OK.float().reshape(outputs, -1, group)
    scale_OG = _scales(groups.abs().amax(2), _ZERO - 1, dtype)
    codes_OGI = (groups / scale_OG.float()[:, :, None]).round() + _ZERO
    codes_OK = codes_OGI.to(torch.uint8).view(outputs, inputs)
    zero_OG = torch.full_like(scale_OG, _ZERO, dtype=torch.int32)
    return _held(Codes("int4", codes_OK, scale_OG, zero_OG), matrix_OK.dtype)


def _scales(greatest: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Scales that take the greatest magnitudes to `most` or a little less; 1 for zeros."""
    scale = (greatest.float() / most * (1 + 2.0**-8)).to(dtype)
    return torch.where(scale > 0, scale, 1.0)


def _held(codes: Codes, dtype: torch.dtype) -> Weight:
    """Packed where there are kernels for it, else the values."""
    if codes.codes_OK.device.type == "cpu" or dtype == torch.float32 or not has_layout(codes):
        return DenseWeight(codes.values().to(dtype))
    return pack(codes, dtype)
