"""Weights that stay packed on a GPU, in the layout of `weft.kernels.quant.packed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.kernels.quant.packed import (
    BITS,
    Codes,
    PackedMatrix,
    pack_words,
    scale_dtype_of,
    scale_words,
)

if TYPE_CHECKING:
    from weft.kernels.triton_linear import Launched


@dataclass(frozen=True, slots=True)
class PackedWeight(PackedMatrix):
    """A `Weight` in that layout, on a GPU."""

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        from weft.kernels.quant import triton_packed

        return triton_packed.linear(x_TI, self, bias_O)

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor) -> Launched | None:
        from weft.kernels.quant import triton_packed
        from weft.kernels.quant.gluon_packed_many import FEWEST_ROWS

        if not 0 < len(x_TI) < FEWEST_ROWS or x_TI.stride(1) != 1:
            return None
        return triton_packed.start(x_TI, self, bias_O, flags)


def pack(codes: Codes, dtype: torch.dtype) -> PackedWeight:
    """Bring a matrix that `fits` into the layout."""
    scale_dtype = scale_dtype_of(codes, dtype)
    assert scale_dtype is not None
    scale_GO = codes.scale_OG.t().to(scale_dtype).contiguous()
    zero_GO = None if codes.zero_OG is None else codes.zero_OG.t()
    words = pack_words(codes.codes_OK, BITS[codes.coding])
    scales = scale_words(codes.coding, scale_GO, zero_GO)
    return PackedWeight(words, scales, codes.coding, scale_dtype, dtype)


def concatenated(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Matrices of the same inputs as one; None where they differ in more than their outputs."""
    if len({part.scale_dtype for part in parts}) > 1:
        parts = [part.with_wide_scales() for part in parts]
    first = parts[0]
    if len({(p.coding, p.scale_dtype, p.dtype, len(p.scales_GO)) for p in parts}) > 1:
        return None
    words = torch.cat([p.words for p in parts])
    scales = torch.cat([p.scales_GO for p in parts], 1)
    return PackedWeight(words, scales, first.coding, first.scale_dtype, first.dtype)
