"""Products with fp8 weights on CUDA devices: see `weft.kernels.quant.fp8`.

Shapes: T token rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.quant.e4m3 import FP8, FP8_MAX
from weft.kernels.triton_base import INTERPRETED

FEW_ROWS = 64
"""Up to so many rows, a weight-only product is bound by the weight's bytes."""

COLUMNS = 32
"""How many columns a program of the weight-only product computes."""


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


def dynamic_linear(x_TK: Tensor, q_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """`x W^T + b`, both operands in fp8. K and N are multiples of 16."""
    q_TK, scale_T = quantize_rows(x_TK)
    y_TN = torch._scaled_mm(
        q_TK,
        q_NK.t(),
        scale_a=scale_T[:, None],
        scale_b=scale_N[None, :],
        out_dtype=x_TK.dtype,
        use_fast_accum=False,
    )
    return y_TN if bias_N is None else y_TN.add_(bias_N)


@triton.jit(do_not_specialize=["T"])
def _weight_only(
    x_ptr,
    q_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    T,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A program computes BLOCK_N columns of all T rows: y = (x @ q^T) * scale + bias."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for k0 in range(0, K, BLOCK_K):
        there = k0 + k < K
        q = tl.load(
            q_ptr + n[:, None].to(tl.int64) * K + (k0 + k)[None, :],
            mask=(n < N)[:, None] & there[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * x_stride + (k0 + k)[None, :],
            mask=(m < T)[:, None] & there[None, :],
            other=0.0,
        )
        w = q.to(tl.float32) if EXACT else q.to(x.dtype)
        x = x.to(tl.float32) if EXACT else x
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    y = acc * tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(m < T)[:, None] & (n < N)[None, :])


def weight_only_linear(
    x_TK: Tensor, q_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Tensor:
    """`x W^T + b` with the weight in fp8: read once for few rows; for more than FEW_ROWS it is
    expanded to x's dtype first."""
    T, K = x_TK.shape
    if T > FEW_ROWS:
        return F.linear(x_TK, dequantized(q_NK, scale_N, x_TK.dtype), bias_N)
    N = len(q_NK)
    y_TN = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device)
    _weight_only[(triton.cdiv(N, COLUMNS),)](
        x_TK,
        q_NK,
        scale_N,
        scale_N if bias_N is None else bias_N,
        y_TN,
        T,
        N,
        K,
        x_TK.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(T)),
        BLOCK_N=COLUMNS,
        BLOCK_K=256,
        BIAS=bias_N is not None,
        EXACT=INTERPRETED or x_TK.dtype == torch.float32,
        num_warps=4,
        num_stages=3,
    )
    return y_TN


@triton.jit
def _dequantize(q_ptr, scale_ptr, w_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * K + k, mask=k < K, other=0.0)
    w = q.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(w_ptr + row * K + k, w.to(w_ptr.dtype.element_ty), mask=k < K)


def dequantized(q_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight (N, K), in one pass."""
    N, K = q_NK.shape
    w_NK = torch.empty((N, K), dtype=dtype, device=q_NK.device)
    _dequantize[(N, triton.cdiv(K, 4096))](q_NK, scale_N, w_NK, K, BLOCK=4096)
    return w_NK
