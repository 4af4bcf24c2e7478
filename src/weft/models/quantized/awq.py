"""AWQ in its `gemm` layout: 4-bit integers with a scale and a zero point for each group of inputs.

Of a matrix (O, I), whose groups are G: qweight, int32 (I, O / 8), and qzeros, int32 (G, O / 8),
have eight outputs in a word; scales are (G, O).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.kernels.quant.packed import Codes
from weft.models.quantized.values import (
    FLOATS,
    Dequantized,
    Parts,
    Tensors,
    joined,
    of_codes,
    unpacked,
)

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in its word each of eight outputs is: even ones in the low half, odd ones in the high."""


def read_awq(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return joined(tensors, ".qweight", (".scales", ".qzeros"), _matrix)


def _matrix(parts: Parts) -> Dequantized:
    inputs, words = parts.shape(".qweight", 2)
    outputs, groups = 8 * words, parts.shape(".scales", 2)[0]

    def codes() -> Codes:
        numbers_IO = _in_order(parts.read(".qweight", (inputs, words), "I32"))
        zeros_GO = _in_order(parts.read(".qzeros", (groups, words), "I32"))
        scales_GO = parts.read(".scales", (groups, outputs), *FLOATS)
        return Codes("int4", numbers_IO.t().to(torch.uint8), scales_GO.t(), zeros_GO.t())

    return of_codes((outputs, inputs), codes)


def _in_order(packed: Tensor) -> Tensor:
    return unpacked(packed, 4)[..., _PLACES].flatten(1)
