"""Experts' weights in mxfp4, as checkpoints of gpt-oss hold them: read as the values that they
stand for.

A row of a matrix is cut into blocks of 32 columns. A block is 16 bytes, of which each has two
columns, the first in its low bits, and one scale: a power of 2, whose exponent is a byte less 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.models.quantized.values import Tensors

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_BLOCK = 32


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of blocks, uint8 (..., G, 16), and their scales, uint8 (..., G): float32
    (..., 32 G)."""
    values = torch.tensor([*_POSITIVE, *(-v for v in _POSITIVE)], device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(values[pairs.int()], exponents).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """The matrices of all experts, read like a file's 16-bit tensor (experts, in, out)."""

    blocks: Any
    """In the file, (experts, out, G, 16)."""
    scales: Any
    """In the file, (experts, out, G)."""

    @classmethod
    def of(cls, name: str, blocks: Any, scales: Any) -> Mxfp4Tensor:
        """Make one. Raises ConfigError, naming the tensor, unless the two fit each other."""
        shape, size = list(blocks.get_shape()), _BLOCK // 2
        if len(shape) != 4 or shape[3] != size:
            wanted = f"(experts, out, blocks, {size})"
            message = f"{name}_blocks has shape {tuple(shape)}, expected {wanted}"
            raise ConfigError(message, f"{name}_blocks")
        if list(scales.get_shape()) != shape[:3]:
            found, wanted = tuple(scales.get_shape()), f"{tuple(shape[:3])}"
            message = f"{name}_scales has shape {found}, expected {wanted}"
            raise ConfigError(message, f"{name}_scales")
        for part, tensor in (("blocks", blocks), ("scales", scales)):
            if tensor.get_dtype() != "U8":
                message = f"{name}_{part} has dtype {tensor.get_dtype()}, expected U8"
                raise ConfigError(message, f"{name}_{part}")
        return cls(blocks, scales)

    def get_shape(self) -> list[int]:
        experts, out, num_blocks, num_bytes = self.blocks.get_shape()
        return [experts, 2 * num_blocks * num_bytes, out]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        """The values for some experts, inputs and outputs. Only blocks with some of the inputs are
        read."""
        experts, inputs, outputs = index
        blocks = slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        where = experts, outputs, blocks
        values = mxfp4_values(self.blocks[where], self.scales[where])
        first = blocks.start * _BLOCK
        return values[..., inputs.start - first : inputs.stop - first].transpose(1, 2)


def read_mxfp4(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All tensors by name; each pair NAME_blocks and NAME_scales becomes one tensor, NAME."""
    for name, tensor in tensors.items():
        whole, _, part = name.rpartition("_")
        if part == "blocks" and f"{whole}_scales" in tensors:
            yield whole, Mxfp4Tensor.of(whole, tensor, tensors[f"{whole}_scales"])
        elif part != "scales" or f"{whole}_blocks" not in tensors:
            yield name, tensor
