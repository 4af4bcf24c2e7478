"""The values that a matrix has after bitsandbytes has quantized it to 4 bits (nf4) with double
quantization, as most QLoRA adapters were trained on. They are held in the serving dtype.

64 consecutive values share a scale, their greatest magnitude; each becomes the nearest of 16
multiples of it. The scales, less their mean, are rounded in turn: 256 share a greatest magnitude,
and each becomes the nearest of 256 multiples of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.linear import DenseWeight

_BLOCK, _BLOCK_OF_SCALES = 64, 256
_MULTIPLES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The codes of nf4, about equally likely for normally distributed values."""
_DECADES = 7


def nf4_values(matrix_OI: Tensor) -> DenseWeight:
    """A dense matrix, (O, I), of the values that stand for this one."""
    flat = matrix_OI.float().flatten()
    scales = _greatest(flat, _BLOCK)
    codes = _nearest(flat, scales, _BLOCK, torch.tensor(_MULTIPLES, device=flat.device))
    mean = scales.mean()
    rest = scales - mean
    tops = _greatest(rest, _BLOCK_OF_SCALES)
    rounded = _nearest(rest, tops, _BLOCK_OF_SCALES, _scale_multiples().to(flat.device))
    scales = rounded * tops.repeat_interleave(_BLOCK_OF_SCALES)[: len(rest)] + mean
    values = codes * scales.repeat_interleave(_BLOCK)[: len(flat)]
    return DenseWeight(values.view(matrix_OI.shape).to(matrix_OI.dtype))


def _scale_multiples() -> Tensor:
    """The 256 multiples that scales are rounded to, ascending. In each power of 10 from 1e-6 to 1
    they are evenly spaced, twice as many as in the power below; 0 and 1 are there, too."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10 ** (decade + 1 - _DECADES) * ((edges[:-1] + edges[1:]) / 2)
        found += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(found), dtype=torch.float32)


def _greatest(flat: Tensor, block: int) -> Tensor:
    """The greatest magnitude in each block of neighbours; the last block may be shorter."""
    padded = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % block))
    return padded.view(-1, block).amax(1)


def _nearest(flat: Tensor, scales: Tensor, block: int, multiples: Tensor) -> Tensor:
    """The multiple that is nearest to each value over its block's scale, the lower of two."""
    inverse = (1 / scales.clamp(min=1e-38)).repeat_interleave(block)[: len(flat)]
    bounds = (multiples[1:] + multiples[:-1]) / 2
    return multiples[torch.bucketize((flat * inverse).clamp(-1, 1), bounds)]
