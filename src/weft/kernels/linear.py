"""The base's part of a linear layer: a matrix, in any format, and products with it.

Shapes: T token rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from weft.kernels.triton_linear import Launched

HAS_TRITON = find_spec("triton") is not None


def product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, deterministic: bool = False
) -> Tensor:
    """`x W^T + b`, (T, O). If `deterministic`, a row's bits are a function of that row alone,
    however many others there are; without a GPU rows are then computed one by one."""
    if x_TI.is_cuda and HAS_TRITON:
        from weft.kernels import triton_linear

        return triton_linear.linear(x_TI, weight_OI, bias_O, deterministic)
    if deterministic and len(x_TI):
        # A copy begins at a multiple of 64 bytes; a library's choice may depend on the alignment.
        rows = (x_TI[t : t + 1].clone() for t in range(len(x_TI)))
        return torch.cat([F.linear(row_1I, weight_OI, bias_O) for row_1I in rows])
    return F.linear(x_TI, weight_OI, bias_O)


class Weight(Protocol):
    """A matrix (O, I). Other formats than a dense one are in `weft.kernels.quant`."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def num_bytes(self) -> int:
        """The memory that it takes on a GPU."""

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b` in x's dtype, (T, O)."""

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor) -> Launched | None:
        """Start the same product by a Triton kernel of few rows, beside which another one can run;
        see `weft.kernels.triton_linear.launch`. None: there is no such kernel."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values, (O, I), each rounded to `dtype` once."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix as a tensor in the serving dtype."""

    values_OI: Tensor
    deterministic: bool = False
    """See `product`."""

    @property
    def shape(self) -> torch.Size:
        return self.values_OI.shape

    @property
    def num_bytes(self) -> int:
        return self.values_OI.nbytes

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return product(x_TI, self.values_OI, bias_O, self.deterministic)

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor) -> Launched | None:
        from weft.kernels import triton_linear

        cut = triton_linear.cut_of(x_TI, self.values_OI, self.deterministic)
        if cut is None:
            return None
        return triton_linear.launch(x_TI, self.values_OI, bias_O, cut, flags)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.values_OI.to(dtype)
