"""Base weights in 8-bit floating point (e4m3), with one scale per output; their products round the
inputs, too.

    w[o, i] ~ q[o, i] * scale[o]            scale[o] = max |w[o, :]| / 448

Inputs are rounded row by row in the same way, so that products run on 8-bit matrix units. Sums are
in fp32, and what a row gets is rounded once. Adapters see the input as it was.

Shapes: T token rows, O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.quant.e4m3 import dequantized, quantize_rows

UNIT = 16
"""Products with fp8 on a GPU take inputs and outputs in whole units of so many."""


def quantize_dynamic(weight_OI: Tensor) -> Fp8Weight:
    """The weight in fp8. Raises ConfigError for what a GPU can't multiply."""
    outputs, inputs = weight_OI.shape
    on_cpu = weight_OI.device.type == "cpu"
    if not on_cpu:
        check_products(weight_OI.device, inputs, weight_OI.dtype)
    filled_OI = F.pad(weight_OI, (0, 0, 0, -outputs % UNIT)) if outputs % UNIT else weight_OI
    q_OI, scale_O = quantize_rows(filled_OI)
    dense_OI = dequantized(q_OI[:outputs], scale_O[:outputs], weight_OI.dtype) if on_cpu else None
    return Fp8Weight(q_OI, scale_O, dense_OI, weight_OI.shape)


def check_products(device: torch.device, inputs: int, dtype: torch.dtype) -> None:
    """Raises ConfigError unless the GPU multiplies matrices in fp8 with this number of inputs and
    results of this dtype."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if capability < (8, 9):
        what = "needs a GPU of compute capability 8.9 or later; fp8-weight-only does not"
        raise ConfigError(f"--quantization fp8 {what}", "quantization")
    if capability != (9, 0) and dtype != torch.bfloat16:  # torch has others for Hopper only
        raise ConfigError("--quantization fp8 needs --dtype bfloat16 on this GPU", "dtype")
    if inputs % UNIT:
        message = f"--quantization fp8: {inputs} inputs of a layer are no multiple of {UNIT}"
        raise ConfigError(message, "quantization")


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A `Weight` in fp8."""

    q_OI: Tensor
    """float8_e4m3fn, filled up to whole units of outputs with rows of zeros."""
    scale_O: Tensor
    """float32, one for each row of `q_OI`."""
    dense_OI: Tensor | None
    """The values in the serving dtype on a CPU, which has no products with fp8; else None."""
    shape: torch.Size
    """The matrix's own, without the rows of zeros."""

    @property
    def num_bytes(self) -> int:
        return self.q_OI.nbytes + self.scale_O.nbytes

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.dense_OI is not None:
            return F.linear(_rounded(x_TI), self.dense_OI, bias_O)
        from weft.kernels.quant import triton_fp8

        y_TO = triton_fp8.dynamic_linear(x_TI, self.q_OI, self.scale_O)
        y_TO = y_TO[:, : self.shape[0]].contiguous()
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor) -> None:
        return None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if self.dense_OI is not None and self.dense_OI.dtype == dtype:
            return self.dense_OI
        outputs = self.shape[0]
        return dequantized(self.q_OI[:outputs], self.scale_O[:outputs], dtype)


def _rounded(x_TI: Tensor) -> Tensor:
    """The values that `x` has as fp8."""
    q_TI, scale_T = quantize_rows(x_TI)
    return dequantized(q_TI, scale_T, x_TI.dtype)
