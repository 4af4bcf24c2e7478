"""Matrices in 8-bit floating point (e4m3), with one scale for all, for each output, or for each
block of both dimensions, as `quant_method: fp8` and compressed-tensors store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.quant.packed import Codes
from weft.models.quantized.values import FLOATS, Dequantized, Parts, Tensors, joined, of_codes

Block = tuple[int, int]


def read_fp8(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    block = block_size(stated.get("weight_block_size"))
    inverse = ".weight_scale_inv"
    scale = inverse if block or any(n.endswith(inverse) for n in tensors) else ".weight_scale"
    make = partial(fp8_matrix, scale=scale, block=block, rounds=False)
    return joined(tensors, ".weight", (scale, ".input_scale", ".activation_scale"), make)


def block_size(stated: Any) -> Block | None:
    """(outputs, inputs) of a block; None if scales are not by block. Raises ConfigError."""
    if stated is None:
        return None
    whole = isinstance(stated, list) and len(stated) == 2 and all(type(n) is int for n in stated)
    if not whole or min(stated) < 1:
        message = f"quantization_config: a block of {stated!r} is not two positive sizes"
        raise ConfigError(message, "quantization_config.weight_block_size")
    return stated[0], stated[1]


def fp8_matrix(parts: Parts, scale: str, block: Block | None, rounds: bool) -> Dequantized:
    """`rounds`: whether values have the dtype of the scales; else they are float32."""
    outputs, inputs = shape = parts.shape(".weight", 2)

    def with_dtype(scales: Tensor) -> Tensor:
        return scales if rounds and scales.dtype != torch.float8_e8m0fnu else scales.float()

    def codes() -> Codes:
        numbers = parts.read(".weight", shape, "F8_E4M3").view(torch.uint8)
        if block is None:
            scales = _scale_of_rows(parts, scale, outputs)
            return Codes("e4m3", numbers, with_dtype(scales).expand(outputs, 1))
        rows, columns = block
        size = -(-outputs // rows), -(-inputs // columns)
        scales = with_dtype(parts.read(scale, size, *FLOATS, "F8_E8M0"))
        scales = scales.repeat_interleave(rows, 0)[:outputs]
        if inputs % columns:  # the last block is narrower
            scales = scales.repeat_interleave(columns, 1)[:, :inputs]
        return Codes("e4m3", numbers, scales)

    return of_codes((outputs, inputs), codes)


def _scale_of_rows(parts: Parts, scale: str, outputs: int) -> Tensor:
    """One scale, or one for each output: (1, 1) or (outputs, 1)."""
    shape = parts.shape(scale)
    wanted = shape if shape in ((), (1,), (1, 1), (outputs,)) else (outputs, 1)
    return parts.read(scale, wanted, *FLOATS).reshape(-1, 1)
