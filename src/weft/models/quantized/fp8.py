"""Matrices in 8-bit floating point (e4m3), with one scale for all, for each output, or for each
block of both dimensions, as `quant_method: fp8` and compressed-tensors store them; the former also
stores the matrices of all experts as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    experts = {n for n in tensors if not n.endswith(".weight") and f"{n}_scale_inv" in tensors}
    of_experts = {f"{n}_{end}" for n in experts for end in ("scale_inv", "activation_scale")}
    others = (scale, ".input_scale", ".activation_scale")
    for name, tensor in joined(tensors, ".weight", others, make):
        if name in experts:
            yield name, Fp8Experts.of(Parts(tensors, name), block)
        elif name not in of_experts:
            yield name, tensor


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """The matrices of all experts, read like a file's tensor (experts, out, in)."""

    codes: Any
    """In the file, (experts, out, in)."""
    scales: Tensor
    """fp32 (experts, blocks of outputs, blocks of inputs)."""
    block: Block

    @classmethod
    def of(cls, parts: Parts, block: Block | None) -> Fp8Experts:
        """Make one. Raises ConfigError, naming the tensor, unless the two fit each other."""
        num, outputs, inputs = parts.shape("", 3)
        if parts.dtype("") != "F8_E4M3":
            message = f"{parts.stem} has dtype {parts.dtype('')}, expected F8_E4M3"
            raise ConfigError(message, parts.stem)
        rows, columns = block or (outputs, inputs)
        size = num, -(-outputs // rows), -(-inputs // columns)
        scales = parts.read("_scale_inv", size, *FLOATS, "F8_E8M0").float()
        return cls(parts.tensors[parts.stem], scales, (rows, columns))

    def get_shape(self) -> list[int]:
        found: list[int] = self.codes.get_shape()
        return found

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        """The values for some experts, outputs and inputs. Only these are read."""
        experts, *others = index
        of_each = [
            torch.arange(size)[part] // width
            for size, part, width in zip(self.get_shape()[1:], others, self.block, strict=True)
        ]
        values: Tensor = self.codes[index].float()
        rows, columns = (blocks.to(values.device) for blocks in of_each)
        for matrix_OI, scale in zip(values, self.scales[experts], strict=True):
            matrix_OI *= scale[rows[:, None], columns]
        return values


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
