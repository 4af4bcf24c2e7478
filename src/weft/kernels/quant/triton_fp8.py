"""Products of fp8 numbers on CUDA devices: see `weft.kernels.quant.fp8`.

Shapes: T token rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.quant.e4m3 import FP8, FP8_MAX


@triton.jit
def _quantize(x_ptr, q_ptr, scale_ptr, x_stride, K, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: scale = max |x| / MAX (1 for zeros), q = x / scale."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), 0.0, tl.float32)
    for k0 in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * x_stride + k0 + k, mask=k0 + k < K, other=0.0)
        most = tl.maximum(most, tl.abs(x.to(tl.float32)))
    scale = tl.max(most, 0) / MAX
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scale_ptr + row, scale)
    for k0 in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * x_stride + k0 + k, mask=k0 + k < K, other=0.0)
        q = tl.div_rn(x.to(tl.float32), scale)
        q = tl.minimum(tl.maximum(q, -MAX), MAX)
        tl.store(q_ptr + row * K + k0 + k, q.to(tl.float8e4nv), mask=k0 + k < K)


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows as `weft.kernels.quant.e4m3.quantize_rows` does, in one launch."""
    T, K = x_TK.shape
    q_TK = torch.empty((T, K), dtype=FP8, device=x_TK.device)
    scale_T = torch.empty(T, dtype=torch.float32, device=x_TK.device)
    if T:
        _quantize[(T,)](x_TK, q_TK, scale_T, x_TK.stride(0), K, MAX=FP8_MAX, BLOCK=1024)
    return q_TK, scale_T


def dynamic_linear(x_TK: Tensor, q_NK: Tensor, scale_N: Tensor) -> Tensor:
    """`x W^T`, both operands in fp8. K and N are multiples of 16."""
    q_TK, scale_T = quantize_rows(x_TK)
    return torch._scaled_mm(
        q_TK,
        q_NK.t(),
        scale_a=scale_T[:, None],
        scale_b=scale_N[None, :],
        out_dtype=x_TK.dtype,
        use_fast_accum=False,
    )
