"""The base's part of a linear layer: a matrix, in whatever form it is held, and products with it.

Shapes: T token rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


class Weight(Protocol):
    """A matrix (O, I). Other formats than a dense one are in `weft.kernels.quant`."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def num_bytes(self) -> int:
        """The memory that it takes on a GPU."""

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b` in x's dtype, (T, O)."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values, (O, I), each rounded to `dtype` once."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix as a tensor in the serving dtype."""

    values_OI: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_OI.shape

    @property
    def num_bytes(self) -> int:
        return self.values_OI.nbytes

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if x_TI.is_cuda and HAS_TRITON:
            from weft.kernels import triton_linear

            return triton_linear.linear(x_TI, self.values_OI, bias_O)
        return F.linear(x_TI, self.values_OI, bias_O)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.values_OI.to(dtype)
