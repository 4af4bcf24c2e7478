"""The layers that adapters can change: linear, embedding, head and norms. No other part of the
models knows about adapters.

Shapes: T token rows, N sampled rows, I inputs, O outputs, V vocabulary, H query heads, K key and
value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.attention import AttentionBatch
from weft.kernels.collective.base import Ranks
from weft.kernels.delta import StateRows
from weft.kernels.linear import Weight, product
from weft.kernels.lora.base import LoraStep, NormStep, VocabularyStep
from weft.kernels.ops import Ops, Product


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the layers need to know of one step besides their input."""

    positions_T: Tensor
    """The position of each token within its sequence, int64 (T,)."""
    attention: AttentionBatch
    lora: LoraStep | None
    """The step's adapters; None: no row of this step belongs to one."""
    norms: NormStep | None = None
    """The norms of the step's adapters; None: all rows have the base's."""
    vocabulary: VocabularyStep | None = None
    """The vocabularies of the step's adapters; None: all rows have the base's."""
    states: StateRows | None = None
    """The sequences' recurrent states; None: the model has none."""
    changes_experts: bool = True
    """Whether an adapter of the step may change experts, or a router whose logits are float32."""


def with_offset(weight: Tensor, offset: float, factor: float = 1.0) -> Tensor:
    """The weights of a norm plus `offset`, times `factor`, in fp32; the same tensor if they would
    not change."""
    return weight if not offset and factor == 1 else (weight.float() + offset) * factor


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of rows, in which an adapter may have weights of its own for its rows."""

    weight_I: Tensor
    """The weights, including offset and factor."""
    eps: float
    index: int
    """Its number in the model's TargetTable."""
    ops: Ops
    ranks: Ranks
    offset: float = 0.0
    """What is added to an adapter's weights."""
    centered: bool = False
    """Whether it is a LayerNorm; else it is an RMS norm."""
    factor: float = 1.0
    """What the output is multiplied by. An adapter's own weights do not include it."""
    bias_I: Tensor | None = None
    """What is added to the output, also where an adapter has weights of its own; None: nothing."""

    def __call__(
        self,
        x_TI: Tensor,
        step: StepContext,
        delta: Product | None = None,
        delta_scale: float = 1.0,
    ) -> Tensor:
        """The norm of x. With a `delta`, the sum over ranks of `delta * delta_scale` is first added
        to x in place."""
        if delta is None or self.ranks.size == 1:
            y_TI = self.ops.rms_norm(
                x_TI, self.weight_I, self.eps, delta, delta_scale, self.centered
            )
        else:
            y_TI = self.ops.sum_and_norm(
                x_TI, self.weight_I, self.eps, delta, self.ranks, delta_scale, self.centered
            )
        if step.norms is not None:
            for start, stop, own_I in step.norms.of(self.index):
                weight_I = with_offset(own_I, self.offset, self.factor)
                y_TI[start:stop] = self.ops.rms_norm(
                    x_TI[start:stop], weight_I, self.eps, centered=self.centered
                )
        return y_TI if self.bias_I is None else y_TI.add_(self.bias_I)

    def weights(self, num_rows: int, step: StepContext) -> Tensor:
        """`weight_I`, if it is for all rows; else each row's weights, (T, I)."""
        own = [] if step.norms is None else step.norms.of(self.index)
        if not own:
            return self.weight_I
        weight_TI = self.weight_I.repeat(num_rows, 1)
        for start, stop, own_I in own:
            weight_TI[start:stop] = with_offset(own_I, self.offset, self.factor)
        return weight_TI

    def scaled(self, x_TI: Tensor, mean_T: Tensor, step: StepContext) -> Tensor:
        """The RMS norm of rows of which x has only some columns, given the whole rows' mean squares
        `mean_T`, fp32 (T,)."""
        x_TI = x_TI.float() * (mean_T + self.eps).rsqrt()[:, None]
        y_TI = x_TI * self.weight_I
        if step.norms is not None:
            for start, stop, weight_I in step.norms.of(self.index):
                y_TI[start:stop] = x_TI[start:stop] * weight_I
        return y_TI


def add_normed(
    x_TI: Tensor,
    delta: Product,
    after: RowNorm,
    before: RowNorm | None,
    step: StepContext,
    is_part: bool = True,
    factor_1: Tensor | None = None,
) -> Tensor:
    """Add the norm `after` of `delta` to x and multiply x by the factor, if there is one, in place.
    Returns the norm `before` of x, which the next operation takes, or x itself without one.
    `is_part`: whether `delta` is a rank's part of a sum; else each rank has all of it."""
    if step.norms is not None or after.ranks.size > 1:
        delta_TI = delta.whole()
        x_TI += after(after.ranks.sum(delta_TI) if is_part else delta_TI, step)
        if factor_1 is not None:
            x_TI *= factor_1
        return x_TI if before is None else before(x_TI, step)
    before_I = None if before is None else before.weight_I
    return after.ops.add_normed(x_TI, delta, after.weight_I, before_I, after.eps, factor_1)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The weights of the norms over each head's q and k, and v if that has one. The operation of
    rope applies these norms."""

    weight_ND: Tensor
    """(H + K, D), or (H + 2 K, D) with those of v; repeated for the heads."""
    num_heads: int
    """How many query heads there are: H."""
    num_keys: int
    """K; 0 for a layer without keys of its own."""
    q_index: int
    k_index: int = -1
    """Numbers of the two norms in the model's TargetTable; -1 for none."""
    offset: float = 0.0
    """What is added to an adapter's weights."""

    def __call__(self, num_rows: int, step: StepContext) -> Tensor:
        """`weight_ND`, if it is for all rows; else each row's weights, (T, H + K or H + 2 K, D)."""
        if step.norms is None:
            return self.weight_ND
        q_own = step.norms.of(self.q_index)
        k_own = step.norms.of(self.k_index) if self.num_keys else ()
        if not (q_own or k_own):
            return self.weight_ND
        weight_TND = self.weight_ND.repeat(num_rows, 1, 1)
        for start, stop, weight_D in q_own:
            weight_TND[start:stop, : self.num_heads] = with_offset(weight_D, self.offset)
        for start, stop, weight_D in k_own:
            keys = slice(self.num_heads, self.num_heads + self.num_keys)
            weight_TND[start:stop, keys] = with_offset(weight_D, self.offset)
        return weight_TND


@dataclass(frozen=True, slots=True)
class RotatedNorm:
    """The norms over each head's q and k after rope. As a rotation keeps lengths, the operation of
    rope norms q and k ahead of it, without weights. As a score is a sum of products of q and k, the
    weights of both norms then multiply q."""

    ones_ND: Tensor
    """(H + K, D)"""
    q: RowNorm
    k: RowNorm

    def __call__(self, num_rows: int, step: StepContext) -> Tensor:
        return self.ones_ND

    def weighted(self, q_THD: Tensor, step: StepContext) -> Tensor:
        weight_TD = torch.ones_like(q_THD[:, 0], dtype=torch.float32)
        for norm in (self.q, self.k):
            own_TD = norm.weight_I.float().repeat(len(q_THD), 1)
            if step.norms is not None:
                for start, stop, own_D in step.norms.of(norm.index):
                    own_TD[start:stop] = own_D
            weight_TD *= own_TD
        return (q_THD * weight_TD[:, None]).to(q_THD.dtype)


@dataclass(frozen=True, slots=True)
class UnitNorm:
    """The norms over each head's q and k, without weights, so that no adapter changes them. As a
    rotation keeps lengths, they may come ahead of rope, whose operation applies them."""

    ones_ND: Tensor
    """(H + K, D)"""

    def __call__(self, num_rows: int, step: StepContext) -> Tensor:
        return self.ones_ND


@dataclass(frozen=True, slots=True)
class WidthNorm:
    """The norms over the q of all heads together, and over their k, before rope. On several ranks,
    they are over the heads of all ranks."""

    q: RowNorm
    k: RowNorm
    ranks: Ranks

    def __call__(self, qkv: Product, step: StepContext) -> Product:
        """Norm the columns of q and k, which come first, in place."""
        qkv_TO = qkv.whole()
        q_size, k_size = len(self.q.weight_I), len(self.k.weight_I)
        q_TO, k_TO = qkv_TO[:, :q_size], qkv_TO[:, q_size : q_size + k_size]
        if self.ranks.size > 1:
            squares_T2 = torch.stack([x.float().square().mean(1) for x in (q_TO, k_TO)], 1)
            means_T2 = self.ranks.sum(squares_T2) / self.ranks.size
            for norm, x_TO, mean_T in zip(
                (self.q, self.k), (q_TO, k_TO), means_T2.t(), strict=True
            ):
                x_TO.copy_(norm.scaled(x_TO, mean_T, step))
            return Product(qkv_TO)
        q_TO.copy_(self.q(q_TO.contiguous(), step))
        k_TO.copy_(self.k(k_TO.contiguous(), step))
        return Product(qkv_TO)


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`, plus the adapters' part. Packed projections are one layer."""

    weight: Weight
    bias_O: Tensor | None
    group: int
    """Its number in the model's TargetTable."""

    def __call__(self, x_TI: Tensor, step: StepContext) -> Product:
        """The product. The adapters' part may be pending, for the operation that reads it next."""
        return self.beside(x_TI, step) or Product(self.whole(x_TI, step))

    def beside(self, x_TI: Tensor, step: StepContext) -> Product | None:
        """The product with its adapters' part pending; None where that is computed apart."""
        if step.lora is None:
            return None
        return step.lora.product(x_TI, self.weight, self.bias_O, self.group)

    def whole(self, x_TI: Tensor, step: StepContext) -> Tensor:
        """The product with its adapters' part added, (T, O)."""
        if step.lora is None:
            return self.weight.apply(x_TI, self.bias_O)
        step.lora.start(x_TI, self.group)
        y_TO = self.weight.apply(x_TI, self.bias_O)
        step.lora.linear(y_TO, x_TI, self.group)
        return y_TO


@dataclass(frozen=True, slots=True)
class Embedding:
    weight_VO: Tensor
    group: int

    def __call__(self, ids_T: Tensor, step: StepContext) -> Tensor:
        known_T = ids_T
        if step.vocabulary is not None:
            known_T = ids_T.clamp(max=len(self.weight_VO) - 1)
        y_TO = F.embedding(known_T, self.weight_VO)
        if step.lora is not None:
            step.lora.embedding(y_TO, known_T, self.group)
        if step.vocabulary is not None:
            step.vocabulary.embedding(y_TO, ids_T)
        return y_TO


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection, over sampled rows; a tied one shares the embedding's tensor. Each rank
    computes the logits of some tokens, and adapters change the logits of all."""

    weight_VI: Tensor
    group: int
    ranks: Ranks
    deterministic: bool = False
    """See `weft.kernels.linear.product`."""

    def __call__(self, x_NI: Tensor, step: StepContext) -> Tensor:
        if self.deterministic:
            y_NV = product(x_NI, self.weight_VI, None, True)
        else:
            y_NV = F.linear(x_NI, self.weight_VI)
        y_NV = self.ranks.gather_columns(y_NV)
        if step.lora is not None:
            step.lora.head(y_NV, x_NI, self.group)
        if step.vocabulary is not None:
            return step.vocabulary.logits(y_NV, x_NI)
        return y_NV
