"""The operations of a decoder layer between its matrix products, in plain torch for any device;
`weft.kernels.triton_ops` has fused Triton kernels.

Shapes: T token rows, O outputs of a linear layer, I hidden size, F intermediate width, H query
heads, K key and value heads, N any number of heads, D head dimension, R rotated dimensions of a
head, which come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.activations import Activation, activate_and_mul
from weft.kernels.attention import Attend, AttentionBatch, KVCache, write_kv
from weft.kernels.attention.by_row import attend_by_row
from weft.kernels.attention.sdpa import torch_attend
from weft.kernels.collective.base import Ranks
from weft.kernels.delta import DeltaLayer, StateCache, StateRows, gated_delta
from weft.kernels.experts import (
    Chosen,
    ExpertAdapters,
    ExpertChoice,
    ExpertWeights,
    choose_experts,
)
from weft.kernels.short_conv import ShortConvLayer, short_conv


def rms_norm(x_D: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension of x (..., D), with weight (D,),
    computed in fp32; the result has x's dtype."""
    if x_D.dtype == torch.float32 and x_D.is_cpu:
        # On a CPU, torch's own function takes eight operations; these are four.
        size = x_D.shape[-1]
        norm_1 = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True)
        y_D: Tensor = x_D / norm_1.hypot_(_number((size * eps) ** 0.5))
        if weight_D is None:
            return y_D.mul_(size**0.5)
        return torch.addcmul(_number(0.0), y_D, weight_D, value=size**0.5)
    if weight_D is None or weight_D.dtype == x_D.dtype:
        return F.rms_norm(x_D, (x_D.shape[-1],), weight_D, eps)
    return F.rms_norm(x_D.float(), (x_D.shape[-1],), weight_D.float(), eps).to(x_D.dtype)


@cache
def _number(value: float) -> Tensor:
    return torch.tensor(value)


def layer_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x less its mean: a LayerNorm without a bias."""
    return F.layer_norm(x_D.float(), (x_D.shape[-1],), weight_D.float(), None, eps).to(x_D.dtype)


def reference_rms_norm(
    x_D: Tensor, weight_D: Tensor | None, eps: float, centered: bool = False
) -> Tensor:
    """The oracle of `rms_norm` and, if `centered`, of `layer_norm`."""
    x = x_D.float()
    if centered:
        x = x - x.mean(-1, keepdim=True)
    y = (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x_D.dtype)
    return y if weight_D is None else y * weight_D


class Rope(NamedTuple):
    """The rotation of a step's rows, for the first R dimensions of every head. They are rotated in
    pairs: x becomes `x * cos + x' * sin`, where x' is the other one of its pair. So cos is the same
    for both of a pair, and sin is negative for the first. All have one dtype."""

    cos_T1R: Tensor
    sin_T1R: Tensor
    interleaved: bool = False
    """Whether neighbours are the pairs, (2 i, 2 i + 1); else they are (i, i + R/2)."""
    query_T11: Tensor | None = None
    """Factors of the rotated queries; None: 1."""


def apply_rope(x_TND: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R dimensions of every head. The others, if R is less than D, stay as they
    are."""
    cos_T1R, sin_T1R, interleaved, _ = rope
    R = cos_T1R.shape[-1]
    x_TNR = x_TND if x_TND.shape[-1] == R else x_TND[..., :R]
    if interleaved:
        other_TNR = x_TNR.reshape(*x_TNR.shape[:-1], R // 2, 2).flip(-1).flatten(-2)
    else:
        other_TNR = x_TNR.roll(R // 2, -1)
    rotated_TNR = torch.addcmul(x_TNR * cos_T1R, other_TNR, sin_T1R)
    if x_TNR is x_TND:
        return rotated_TNR
    return torch.cat((rotated_TNR, x_TND[..., R:]), -1)


def reference_rope(x_TND: Tensor, rope: Rope) -> Tensor:
    """The oracle of `apply_rope`: one 2 x 2 rotation per pair, in fp32."""
    R = rope.cos_T1R.shape[-1]
    half = R // 2
    first, second = slice(0, half), slice(half, R)
    if rope.interleaved:
        first, second = slice(0, R, 2), slice(1, R, 2)
    a, b = x_TND[..., first].float(), x_TND[..., second].float()
    cos, sin = rope.cos_T1R[..., second].float(), rope.sin_T1R[..., second].float()
    out_TND = x_TND.clone()
    out_TND[..., first] = (a * cos - b * sin).to(x_TND.dtype)
    out_TND[..., second] = (b * cos + a * sin).to(x_TND.dtype)
    return out_TND


@dataclass(frozen=True, slots=True)
class Pending:
    """What adapters add to a product, if that is left to the operation that reads the product next.
    For rows with a negative slot, `add` is undefined, and the result is just `y`."""

    add_TO: Tensor
    """In the precision of the product, or in fp32."""
    slot_T: Tensor
    """int32"""

    def added_to(self, y_TO: Tensor) -> Tensor:
        """`y` plus `add`, rounded once; rows with a negative slot keep their bits."""
        sum_TO = (y_TO + self.add_TO).to(y_TO.dtype)
        return torch.where(self.slot_T[:, None] >= 0, sum_TO, y_TO)


class Product(NamedTuple):
    """The product of a linear layer, and what is to be added to it before it is used."""

    y_TO: Tensor
    pending: Pending | None = None
    """None: y is the whole result. Otherwise, it is valid until the next linear layer is called."""

    def whole(self) -> Tensor:
        """The result with what is pending, (T, O); y itself if nothing is."""
        return self.y_TO if self.pending is None else self.pending.added_to(self.y_TO)

    def pending_tensors(self) -> tuple[Tensor, Tensor]:
        """What is pending, and the slots of rows, as kernels take them; y twice if nothing is."""
        if self.pending is None:
            return self.y_TO, self.y_TO
        return self.pending.add_TO, self.pending.slot_T


class Shared(NamedTuple):
    """What an expert that all tokens go through adds to a mixture, (T, I)."""

    product: Product
    weight_T1: Tensor | None = None
    """None: weights are 1."""

    def whole(self) -> Tensor:
        y_TI = self.product.whole()
        return y_TI if self.weight_T1 is None else (y_TI * self.weight_T1).to(y_TI.dtype)


class Ops:
    """The operations of a layer, here of plain torch. Others override them."""

    def __init__(self, attend: Attend = torch_attend) -> None:
        self.attend = attend

    def rms_norm(
        self,
        x_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        delta: Product | None = None,
        delta_scale: float = 1.0,
        centered: bool = False,
    ) -> Tensor:
        """Norm rows as the function `rms_norm` does, or if `centered` as `layer_norm`, after adding
        any `delta * delta_scale` to x in place."""
        if delta is not None:
            x_TI.add_(delta.whole(), alpha=delta_scale)
        return (layer_norm if centered else rms_norm)(x_TI, weight_I, eps)

    def square_parts(self, x_TI: Tensor, width: int) -> Tensor:
        """What the columns of x add to the mean squares of rows of `width`, fp32 (T, 1)."""
        return x_TI.float().square().sum(1, keepdim=True) / width

    def norm_parts(self, x_TI: Tensor, mean_T1: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """The columns of x of the RMS norm of rows whose mean squares are `mean_T1`."""
        return (x_TI.float() * (mean_T1 + eps).rsqrt() * weight_I).to(x_TI.dtype)

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
        """Add to x, in place, the sum over ranks of `delta * delta_scale`, including each rank's
        pending part, and return the norm of x. Most of a model's sums over ranks are of this form,
        so one kernel may do all of it."""
        whole = Product(ranks.sum(delta.whole()))
        return self.rms_norm(x_TI, weight_I, eps, whole, delta_scale, centered)

    def add_normed(
        self,
        x_TI: Tensor,
        delta: Product,
        after_I: Tensor,
        before_I: Tensor | None,
        eps: float,
        factor_1: Tensor | None = None,
    ) -> Tensor:
        """Add the norm of `delta` to x and multiply by the factor, if there is one, in place. Then
        norm that; without weights `before_I`, x itself is returned. Both norms are as the function
        `rms_norm`."""
        x_TI += rms_norm(delta.whole(), after_I, eps)
        if factor_1 is not None:
            x_TI *= factor_1
        return x_TI if before_I is None else rms_norm(x_TI, before_I, eps)

    def activate_and_mul(
        self, gate_up: Product, activation: Activation = "silu", up_TF: Tensor | None = None
    ) -> Tensor:
        """Compute what the function `activate_and_mul` does. With `up_TF`, the product is the gate
        alone. `up_TF` must be None for the clamped activation, whose gate and up lie interleaved,
        and for activations without a gate."""
        both_T2F = gate_up.whole()
        if up_TF is not None:
            both_T2F = torch.cat((both_T2F, up_TF), 1)
        return activate_and_mul(both_T2F, activation)

    def exact_linear(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """The product x W^T in float32, (T, O), of a weight in float32."""
        return F.linear(x_TI.float(), weight_OI)

    def choose_experts(
        self, logits: Product, choice: ExpertChoice, experts: ExpertWeights
    ) -> Chosen:
        """Compute what the function `choose_experts` does, and the weight of the shared expert."""
        logits_TE, shared_T1 = logits.whole(), None
        if choice.weighs_shared:
            logits_TE, shared_T1 = logits_TE[:, :-1], logits_TE[:, -1:].sigmoid()
        weight_TK, expert_TK = choose_experts(
            logits_TE, choice, experts.scale_E, experts.correction_E
        )
        return Chosen(weight_TK, expert_TK - (experts.first or 0), shared_T1)

    def mixture(
        self,
        x_TI: Tensor,
        chosen: Chosen,
        experts: ExpertWeights,
        activation: Activation,
        shared: Shared | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor | None:
        """Compute the sum of each token's experts, as far as they are here, and of the shared one,
        (T, I), by kernels that do all of it. None where there are no such kernels for so many rows
        or such shapes."""
        return None

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
        """Norm (if there are weights for it) and rotate q and k, write k and v to the cache.

        A row of `qkv` holds H query, K key and K value heads of the cache's D; it may be changed,
        but for gates: if there are `gated_heads`, they are the H query heads, and the gate of each
        comes behind it. `rope` is what `weft.models.rope.RopeTable.at` gives, `norm_ND` (H + K, D),
        or row by row (T, H + K, D); with H + 2 K heads, v is normed too. Returns q, (T, H, D).
        """
        K, D = cache.k.shape[2:]
        qkv_TO = qkv.whole()
        if gated_heads:
            q_TH2D = _with_gates(qkv_TO, gated_heads, D)
            others_TO = qkv_TO[:, 2 * gated_heads * D :]
            qkv_TO = torch.cat((q_TH2D[..., :D].flatten(1), others_TO), 1)
        qkv_TND = qkv_TO.view(-1, qkv_TO.shape[1] // D, D)
        H = qkv_TND.shape[1] - 2 * K
        qk_TND, v_TKD = qkv_TND.split_with_sizes((H + K, K), 1)
        if norm_ND is not None and norm_ND.shape[-2] > H + K:
            normed_TND = (rms_norm(qkv_TND, None, eps) * norm_ND).to(qkv_TND.dtype)
            qk_TND, v_TKD = normed_TND.split_with_sizes((H + K, K), 1)
        elif norm_ND is not None:
            qk_TND = (rms_norm(qk_TND, None, eps) * norm_ND).to(qk_TND.dtype)
        q_THD, k_TKD = apply_rope(qk_TND, rope).split_with_sizes((H, K), 1)
        write_kv(k_TKD, v_TKD, cache, batch)
        return q_THD

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
        """Norm the latent of each row and rotate the key behind it, at the end of a row of `a`, and
        write both to the cache, as the key of an only head. Returns the norm of the latent of
        queries at the beginning of a row, (T, Q); None without weights for it. Weights of norms are
        for all rows, (L,), or row by row (T, L). For `weft.models.latent_attention`."""
        a_TO, L = a.whole(), norm_L.shape[-1]
        entry_TW = a_TO[:, -cache.k.shape[-1] :]
        latent_TL = (rms_norm(entry_TW[:, :L], None, eps) * norm_L).to(a_TO.dtype)
        key_T1R = apply_rope(entry_TW[:, None, L:], rope)
        entry_T1W = torch.cat((latent_TL[:, None], key_T1R), 2)
        cache.k.flatten(0, 1).index_copy_(0, batch.slot_mapping_T, entry_T1W)
        if query_norm_Q is None:
            return None
        query_TQ = a_TO[:, : query_norm_Q.shape[-1]]
        return (rms_norm(query_TQ, None, eps) * query_norm_Q).to(a_TO.dtype)

    def rotate_queries(self, q: Product, out_THR: Tensor, rope: Rope) -> Tensor:
        """Write the rotated ends of H queries to `out`. Returns the other parts (T, H, N). Both are
        multiplied by the rope's factors of queries. For `weft.models.latent_attention`."""
        T, H, R = out_THR.shape
        q_THD = q.whole().view(T, H, -1)
        if rope.query_T11 is not None:
            q_THD = q_THD * rope.query_T11
        out_THR.copy_(apply_rope(q_THD[..., -R:], rope))
        return q_THD[..., :-R]

    def absorb(self, x_THI: Tensor, weight_HIO: Tensor, y_THO: Tensor) -> None:
        """Write to y (T, H, O) the products of the rows of each head, x (T, H, I), with the head's
        matrix (H, I, O). x and y have unit stride along their last dimension. For
        `weft.models.latent_attention`."""
        torch.bmm(x_THI.transpose(0, 1), weight_HIO, out=y_THO.transpose(0, 1))

    def apply_gates(self, x_THD: Tensor, qkv: Product) -> Tensor:
        """Multiply each head's `x` by the sigmoid of its gate, which comes behind its q in `qkv`;
        see `rope_and_write`. Changes x, and returns it."""
        H, D = x_THD.shape[1:]
        return x_THD.mul_(_with_gates(qkv.whole(), H, D)[..., D:].sigmoid())

    def gated_delta(
        self, y: Product, layer: DeltaLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
    ) -> Tensor:
        """Compute what the function `weft.kernels.delta.gated_delta` does."""
        return gated_delta(y.whole(), layer, cache, rows, positions_T)

    def short_conv(
        self,
        y: Product,
        layer: ShortConvLayer,
        cache: StateCache,
        rows: StateRows,
        positions_T: Tensor,
    ) -> Tensor:
        """Compute what the function `weft.kernels.short_conv.short_conv` does."""
        return short_conv(y.whole(), layer, cache, rows, positions_T)


def _with_gates(qkv_TO: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Each query head with its gate behind it, (T, H, 2 D)."""
    return qkv_TO[:, : 2 * num_heads * head_dim].view(len(qkv_TO), num_heads, 2 * head_dim)


def make_ops(name: str, device: torch.device, deterministic: bool = False) -> Ops:
    """Make the ops of that name; "auto" is triton on a CUDA device, else torch. If
    `deterministic`, what a row gets has the same bits whatever else is in its step, and in
    whatever steps the rows before it were computed. Raises ConfigError when there are none of that
    name, or they can't run there."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return Ops(attend_by_row if deterministic else torch_attend)
    if name == "triton":
        made: Ops = import_module("weft.kernels.triton_ops").TritonOps(device, deterministic)
        return made
    raise ConfigError(f"there are no ops named {name!r}; there are: torch, triton", "ops")
