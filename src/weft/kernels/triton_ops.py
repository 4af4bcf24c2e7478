"""Fused Triton kernels between the matrix products: norms and activations here, those of heads in
`weft.kernels.triton_heads`.

Shapes: T token rows, I hidden size, F intermediate width, H query heads, K key and value heads,
D head dimension.

Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.errors import ConfigError
from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels import triton_choice, triton_experts
from weft.kernels.activations import Activation, ClampedSwiglu, Xielu, is_gated
from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.attention.paged import PagedAttention
from weft.kernels.collective.base import Ranks
from weft.kernels.collective.peers import PeerRanks
from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.experts import Chosen, ExpertAdapters, ExpertChoice, ExpertWeights
from weft.kernels.ops import Ops, Product, Rope, Shared
from weft.kernels.short_conv import ShortConvLayer
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    INTERPRETED,
    activated,
    activated_alone,
    has_pending,
    launch_options,
    starts_early,
    with_pending,
    xielu,
)
from weft.kernels.triton_delta import gated_delta
from weft.kernels.triton_heads import apply_gates, rope_and_write
from weft.kernels.triton_latents import MOST_ROWS, absorb, rotate_queries, write_latents
from weft.kernels.triton_short_conv import short_conv


@triton.jit
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    width,
    eps,
    delta_scale,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = rms_norm(x), or layer_norm(x) if CENTERED. With ADD, x += delta first (times
    delta_scale if SCALED). One program per row of `width`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    at = row * width + i
    weight = tl.load(weight_ptr + i, mask=i < width, other=0.0).to(tl.float32)
    has = has_pending(add_slot_ptr + row, PENDING)
    if PDL:  # what the kernel ahead writes is read from here on
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=i < width, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + at, mask=i < width, other=0.0)
        delta = with_pending(delta, add_ptr + at, has, i < width, PENDING)
        delta = delta.to(tl.float32)
        if SCALED:
            delta *= delta_scale
        x = (x.to(tl.float32) + delta).to(x.dtype)
        tl.store(x_ptr + at, x, mask=i < width)
    wide = x.to(tl.float32)
    if CENTERED:
        wide = tl.where(i < width, wide - tl.sum(wide) / width, 0.0)
    scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out_ptr + at, (wide * scale * weight).to(x.dtype), mask=i < width)


@triton.jit
def _square_parts(x_ptr, out_ptr, columns, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = the sum of the squares of x (T, columns), over `width`. One program per row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * columns + i, mask=i < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x) / width)


@triton.jit
def _norm_parts(
    x_ptr, mean_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = x / sqrt(mean + eps) * weight. One program per row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + i, mask=i < columns, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * columns + i, mask=i < columns, other=0.0)
    scale = 1 / tl.sqrt(tl.load(mean_ptr + row) + eps)
    out = (x.to(tl.float32) * scale * weight).to(x.dtype)
    tl.store(out_ptr + row * columns + i, out, mask=i < columns)


@triton.jit
def _add_normed(
    x_ptr,
    delta_ptr,
    after_ptr,
    factor_ptr,
    before_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    width,
    eps,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += rms_norm(delta) by the weights `after`; if SCALED, x *= factor; with NORM, out =
    rms_norm(x) by the weights `before`. One program per row of `width`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    ok = i < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + i
    after = tl.load(after_ptr + i, mask=ok, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(factor_ptr).to(tl.float32)
    if NORM:
        before = tl.load(before_ptr + i, mask=ok, other=0.0).to(tl.float32)
    has = has_pending(add_slot_ptr + row, PENDING)
    if PDL:  # what the kernel ahead writes is read from here on
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=ok, other=0.0)
    delta = tl.load(delta_ptr + at, mask=ok, other=0.0)
    delta = with_pending(delta, add_ptr + at, has, ok, PENDING)
    wide = delta.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    added = (wide * scale * after).to(x.dtype)
    x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    if SCALED:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    tl.store(x_ptr + at, x, mask=ok)
    if NORM:
        wide = x.to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
        tl.store(out_ptr + at, (wide * scale * before).to(x.dtype), mask=ok)


@triton.jit
def _activate_and_mul(
    gate_up_ptr,
    up_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    F,
    up_stride,
    alpha,
    limit,
    beta,
    eps,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    APART: tl.constexpr,
    GATED: tl.constexpr,
    XIELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, F) = activation(gate) * up of rows (gate, up); programs: row, block of columns.
    APART: up is not behind gate, but at `up_ptr`, in rows that are `up_stride` apart. If not GATED,
    rows are of up alone, and out is the square of its ReLU, or with XIELU the activation of these
    four numbers.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * 2 * F + f
    to_up = F
    if CLAMPED:
        at += f
        to_up = 1
    if APART or not GATED:
        at = row * F + f
    has = has_pending(add_slot_ptr + row, PENDING)
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + at, mask=f < F, other=0.0)
    gate = with_pending(gate, add_ptr + at, has, f < F, PENDING)
    if GATED:
        if APART:
            up = tl.load(up_ptr + row * up_stride + f, mask=f < F, other=0.0).to(tl.float32)
        else:
            up = tl.load(gate_up_ptr + at + to_up, mask=f < F, other=0.0)
            up = with_pending(up, add_ptr + at + to_up, has, f < F, PENDING).to(tl.float32)
        out = activated(gate.to(tl.float32), up, alpha, limit, GELU, CLAMPED)
    elif XIELU:
        out = xielu(gate.to(tl.float32), alpha, limit, beta, eps)
    else:
        out = activated_alone(gate.to(tl.float32))
    tl.store(out_ptr + row * F + f, out.to(gate.dtype), mask=f < F)


def _of_rows(columns: int) -> dict[str, int]:
    """The options of a kernel with one program per row."""
    block = next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), **ALL_AT_ONCE}


class TritonOps(Ops):
    """Ops for CUDA devices (and, in Triton's interpreter, for the CPU)."""

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        if device.type == "cpu" and not INTERPRETED:
            raise ConfigError("the triton ops need a GPU", "ops")
        super().__init__(PagedAttention(device, deterministic))
        self._options = launch_options(starts_early(device))

    def rms_norm(
        self,
        x_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        delta: Product | None = None,
        delta_scale: float = 1.0,
        centered: bool = False,
    ) -> Tensor:
        whole = Product(x_TI) if delta is None else delta
        num_rows, width = x_TI.shape
        out_TI = torch.empty_like(x_TI)
        if num_rows:
            _add_rms_norm[(num_rows,)](
                x_TI,
                whole.y_TO,
                weight_I,
                out_TI,
                *whole.pending_tensors(),
                width,
                eps,
                delta_scale,
                ADD=delta is not None,
                SCALED=delta_scale != 1,
                CENTERED=centered,
                PENDING=whole.pending is not None,
                **_of_rows(width),
                **self._options,
            )
        return out_TI

    def square_parts(self, x_TI: Tensor, width: int) -> Tensor:
        num_rows, columns = x_TI.shape
        out_T1 = x_TI.new_empty((num_rows, 1), dtype=torch.float32)
        if num_rows:
            _square_parts[(num_rows,)](
                x_TI, out_T1, columns, width, **_of_rows(columns), **self._options
            )
        return out_T1

    def norm_parts(self, x_TI: Tensor, mean_T1: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        num_rows, columns = x_TI.shape
        out_TI = torch.empty_like(x_TI)
        if num_rows:
            _norm_parts[(num_rows,)](
                x_TI, mean_T1, weight_I, out_TI, columns, eps, **_of_rows(columns), **self._options
            )
        return out_TI

    def sum_and_norm(
        self,
        x_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        delta: Product,
        ranks: Ranks,
        delta_scale: float = 1.0,
        centered: bool = False,
    ) -> Tensor:
        if centered or not isinstance(ranks, PeerRanks):
            return super().sum_and_norm(x_TI, weight_I, eps, delta, ranks, delta_scale, centered)
        y_TI, pending = delta
        added = None if pending is None else (pending.add_TO, pending.slot_T)
        return ranks.sum_and_norm(x_TI, weight_I, eps, y_TI, added, delta_scale)

    def add_normed(
        self,
        x_TI: Tensor,
        delta: Product,
        after_I: Tensor,
        before_I: Tensor | None,
        eps: float,
        factor_1: Tensor | None = None,
    ) -> Tensor:
        num_rows, width = x_TI.shape
        out_TI = x_TI if before_I is None else torch.empty_like(x_TI)
        if num_rows:
            _add_normed[(num_rows,)](
                x_TI,
                delta.y_TO,
                after_I,
                after_I if factor_1 is None else factor_1,
                after_I if before_I is None else before_I,
                out_TI,
                *delta.pending_tensors(),
                width,
                eps,
                SCALED=factor_1 is not None,
                NORM=before_I is not None,
                PENDING=delta.pending is not None,
                **_of_rows(width),
                **self._options,
            )
        return out_TI

    def activate_and_mul(
        self, gate_up: Product, activation: Activation = "silu", up_TF: Tensor | None = None
    ) -> Tensor:
        gate_up_T2F = gate_up.y_TO
        num_rows, width = gate_up_T2F.shape
        gated = is_gated(activation)
        if gated and up_TF is None:
            width //= 2
        out_TF = gate_up_T2F.new_empty(num_rows, width)
        numbers = activation if isinstance(activation, ClampedSwiglu | Xielu) else ()
        if num_rows:
            grid = (num_rows, cdiv(width, 1024))
            _activate_and_mul[grid](
                gate_up_T2F,
                gate_up_T2F if up_TF is None else up_TF,
                out_TF,
                *gate_up.pending_tensors(),
                width,
                0 if up_TF is None else up_TF.stride(0),
                *numbers,
                *([0.0] * (4 - len(numbers))),
                CLAMPED=isinstance(activation, ClampedSwiglu),
                APART=up_TF is not None,
                GATED=gated,
                XIELU=isinstance(activation, Xielu),
                GELU=activation == "gelu_tanh",
                BLOCK=1024,
                PENDING=gate_up.pending is not None,
                num_warps=4,
                **ALL_AT_ONCE,
                **self._options,
            )
        return out_TF

    def exact_linear(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        made_TO = triton_choice.exact_linear(x_TI, weight_OI)
        return super().exact_linear(x_TI, weight_OI) if made_TO is None else made_TO

    def choose_experts(
        self, logits: Product, choice: ExpertChoice, experts: ExpertWeights
    ) -> Chosen:
        return triton_choice.choose_experts(logits, choice, experts)

    def mixture(
        self,
        x_TI: Tensor,
        chosen: Chosen,
        experts: ExpertWeights,
        activation: Activation,
        shared: Shared | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor | None:
        return triton_experts.mixture(x_TI, chosen, experts, activation, shared, adapters)

    def rope_and_write(
        self,
        qkv: Product,
        rope: Rope,
        norm_ND: Tensor | None,
        eps: float,
        cache: KVCache,
        batch: AttentionBatch,
        gated_heads: int = 0,
    ) -> Tensor:
        return rope_and_write(qkv, rope, norm_ND, eps, cache, batch, gated_heads, self._options)

    def write_latents(
        self,
        a: Product,
        query_norm_Q: Tensor | None,
        norm_L: Tensor,
        eps: float,
        rope: Rope,
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor | None:
        norms = query_norm_Q, norm_L, eps
        return write_latents(a, *norms, rope, cache, batch, self._options)

    def rotate_queries(self, q: Product, out_THR: Tensor, rope: Rope) -> Tensor:
        return rotate_queries(q, out_THR, rope, self._options)

    def absorb(self, x_THI: Tensor, weight_HIO: Tensor, y_THO: Tensor) -> None:
        if len(x_THI) > MOST_ROWS:
            super().absorb(x_THI, weight_HIO, y_THO)
        else:
            absorb(x_THI, weight_HIO, y_THO, self._options)

    def apply_gates(self, x_THD: Tensor, qkv: Product) -> Tensor:
        return apply_gates(x_THD, qkv, self._options)

    def gated_delta(
        self, y: Product, layer: DeltaLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
    ) -> Tensor:
        return gated_delta(y, layer, cache, rows, positions_T)

    def short_conv(
        self,
        y: Product,
        layer: ShortConvLayer,
        cache: StateCache,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        return short_conv(y, layer, cache, rows, positions_T)
