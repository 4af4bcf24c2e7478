"""Experts' weights in mxfp4, as checkpoints of gpt-oss hold them: read as the values that they
stand for.

A row of a matrix is cut into blocks of 32 columns. A block is 16 bytes, of which each has two
columns, the first in its low bits, and one scale: a power of 2, whose exponent is a byte less 127.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of blocks, uint8 (..., G, 16), and their scales, uint8 (..., G): float32
    (..., 32 G)."""
    values = torch.tensor([*_POSITIVE, *(-v for v in _POSITIVE)], device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(values[pairs.int()], exponents).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A matrix for each expert, which is read as a file's 16-bit tensor (experts, in, out) is."""

    blocks: Any
    """In the file, (experts, out, G, 16)."""
    scales: Any
    """In the file, (experts, out, G)."""

    def get_shape(self) -> list[int]:
        experts, out, num_blocks, num_bytes = self.blocks.get_shape()
        return [experts, 2 * num_blocks * num_bytes, out]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, experts: slice) -> Tensor:
        return dequantized(self.blocks[experts], self.scales[experts]).transpose(1, 2)


def with_mxfp4(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A file's tensors by name, of which the pairs `NAME_blocks` and `NAME_scales` become one."""
    halves: dict[str, Any] = {}
    for name, tensor in tensors:
        whole, _, part = name.rpartition("_")
        if part not in ("blocks", "scales"):
            yield name, tensor
        elif (other := halves.pop(whole, None)) is None:
            halves[whole] = tensor
        else:
            blocks, scales = (tensor, other) if part == "blocks" else (other, tensor)
            yield whole, Mxfp4Tensor(blocks, scales)
