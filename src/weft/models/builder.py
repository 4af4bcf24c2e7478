"""Builds the layers of a model from its weights and its table."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from weft.kernels.activations import Activation, ClampedSwiglu, Xielu
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.delta import DeltaLayer
from weft.kernels.ops import Ops
from weft.kernels.short_conv import ShortConvLayer
from weft.models.blueprint import EXPERT_SCALES, XIELU, experts_of, sinks_of
from weft.models.config import ModelConfig
from weft.models.family import MoeConfig
from weft.models.layers import (
    HeadNorm,
    Linear,
    RotatedNorm,
    RowNorm,
    UnitNorm,
    WidthNorm,
    with_offset,
)
from weft.models.linear_attention import GroupNorm, LinearAttention, ShortConv, columns_of
from weft.models.moe import DenseMlp, Experts, Latents, SparseMlp, check_width
from weft.models.state_config import LinearConfig, ShortConvConfig
from weft.models.weights import Weights


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Makes layers from the model's weights and table."""

    config: ModelConfig
    weights: Weights
    ops: Ops
    ranks: Ranks

    def group(self, key: str) -> int:
        (group,) = self.weights.table.by_key[key]
        return group.index

    def linear(self, key: str) -> Linear:
        w = self.weights
        return Linear(w.matrices[key], w.biases.get(key), self.group(key))

    def experts(self, key: str) -> Experts:
        groups = tuple(group.index for group in self.weights.table.by_key[key])
        weight_EOI = self.weights.dense(key)
        check_width(weight_EOI)
        return Experts(weight_EOI, groups, self.weights.biases.get(key))

    def sort(self, layer: int) -> Hashable:
        """A key that is equal for layers that launch the same kernels."""
        config, w, of = self.config, self.weights, f"{layer}."
        held = [(key.removeprefix(of), w.matrices[key]) for key in w.matrices if key.startswith(of)]
        shape = config.layer(layer)
        return (
            tuple((name, type(matrix)) for name, matrix in held),
            tuple(key.removeprefix(of) for key in w.biases if key.startswith(of)),
            replace(shape, cache=-1),
            shape.cache == layer,
            config.windows[layer],
            config.ropes[layer],
            config.growths[layer : layer + 1],
            sinks_of(layer) in w.vectors,
        )

    def norm(self, name: str, eps: float | None = None, factor: float = 1.0) -> RowNorm:
        """The norm of this name. `eps`: None for the model's epsilon. `factor`: what its output is
        multiplied by."""
        index, config = self.weights.table.norms_by_name[name].index, self.config
        eps = config.norm_eps if eps is None else eps
        weight_I = with_offset(self.weights.norms[name], config.norm_offset, factor)
        offset, centered = config.norm_offset, config.centered_norms
        norm = RowNorm(weight_I, eps, index, self.ops, self.ranks, offset, centered, factor)
        return replace(norm, bias_I=self.weights.vectors.get(f"{name}.bias"))

    def norms_of(self, layer: int) -> list[RowNorm]:
        """The norms around attention and MLP, in the order of their use. A norm whose output is
        added to the residual stream also multiplies it by the model's factor for that."""
        config, names = self.config, self.config.norm_names_of(layer)
        after = {"post": names, "both": names[1::2]}.get(config.blocks, ())
        factors = (config.scales.residual if name in after else 1.0 for name in names)
        return [
            self.norm(f"model.layers.{layer}.{name}", factor=factor)
            for name, factor in zip(names, factors, strict=True)
        ]

    def qk_norm(self, layer: int) -> HeadNorm | WidthNorm | RotatedNorm | UnitNorm | None:
        """The norms over q and k, if the model has them."""
        config = self.config
        of = f"model.layers.{layer}.{config.names.attention}."
        if config.qk_norm is None:
            return None
        shape = config.layer(layer)
        if config.qk_norm == "unit":
            size = config.num_heads + shape.num_kv_heads, shape.head_dim
            is_rotated, device = config.ropes[layer] is not None, self.weights.embed.device
            return UnitNorm(torch.ones(size, device=device)) if is_rotated else None
        q_norm, k_norm = config.names.qk_norms
        q = self.norm(of + q_norm)
        q_HD = q.weight_I.expand(config.num_heads, -1)
        if shape.cache != layer:
            return HeadNorm(q_HD.contiguous(), config.num_heads, 0, q.index)
        k, num_keys = self.norm(of + k_norm), shape.num_kv_heads
        if config.qk_norm == "width":
            return WidthNorm(q, k, self.ranks)
        if config.qk_norm == "rotated":
            return RotatedNorm(torch.ones_like(q_HD[:1]).repeat(len(q_HD) + num_keys, 1), q, k)
        weights = [q_HD, k.weight_I.expand(num_keys, -1)]
        if config.value_norm:
            weights.append(torch.ones_like(weights[1]))
        weight_ND, offset = torch.cat(weights), config.norm_offset
        return HeadNorm(weight_ND, config.num_heads, num_keys, q.index, k.index, offset)

    def linear_attention(self, layer: int) -> LinearAttention | ShortConv:
        """The mixer of a layer with a recurrent state."""
        config, shape = self.config, self.config.linear
        assert shape is not None
        if isinstance(shape, ShortConvConfig):
            return self._short_conv(layer, f"model.layers.{layer}.{shape.name}.")
        of, vectors = f"model.layers.{layer}.{shape.name}.", self.weights.vectors
        conv_C, bias_C = vectors[of + "conv1d.weight"][:, 0], vectors.get(of + "conv1d.bias")
        norm_O, skip_H = vectors[of + shape.norm], vectors.get(of + "D")
        delta = DeltaLayer(
            conv_WC=_queries_first(conv_C, shape).t().contiguous(),
            log_a_H=vectors[of + "A_log"],
            dt_bias_H=vectors[of + "dt_bias"],
            norm_E=None if shape.mamba else norm_O,
            eps=config.norm_eps if shape.norm_eps is None else shape.norm_eps,
            num_keys=shape.num_keys,
            num_values=shape.num_values,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            columns=columns_of(shape),
            skip_H=skip_H,
            bias_C=None if bias_C is None else _queries_first(bias_C, shape),
            doubled=shape.doubled,
        )
        norm = None
        if shape.mamba:
            groups, over = shape.num_keys, self.ranks if shape.spans_ranks else ALONE
            norm = GroupNorm(norm_O, config.norm_eps, groups, self.ops, over)
        into, out = self.linear(f"{layer}.in"), self.linear(f"{layer}.out")
        least_H = None
        if shape.least_step:  # a time step is softplus(projection + bias)
            least = shape.least_step + math.log(-math.expm1(-shape.least_step))
            least_H = least - delta.dt_bias_H
        return LinearAttention(into, out, delta, self.ops, norm, least_H)

    def _short_conv(self, layer: int, of: str) -> ShortConv:
        """`of`: the prefix of the names of its parts."""
        vectors = self.weights.vectors
        conv_WC = vectors[of + "conv.weight"][:, 0].t().contiguous()
        own = ShortConvLayer(conv_WC, vectors.get(of + "conv.bias"))
        return ShortConv(self.linear(f"{layer}.in"), self.linear(f"{layer}.out"), own, self.ops)

    def mlp(self, layer: int) -> DenseMlp | SparseMlp:
        moe, mlp = experts_of(self.config, layer), None
        if self.config.has_mlp(layer):
            mlp = self._dense_mlp(layer)
        if moe is None or self.config.blocks == "gemma4":  # its experts are no part of the MLP
            assert mlp is not None
            return mlp
        sparse = self.experts_of(layer, moe)
        return sparse if mlp is None else replace(sparse, shared=mlp)

    def experts_of(self, layer: int, moe: MoeConfig) -> SparseMlp:
        """The mixture of experts of a layer."""
        gate_up_E, down_E = (self.experts(f"{layer}.experts_{n}") for n in ("gate_up", "down"))
        router, clamped = self.linear(f"{layer}.router"), moe.clamped_swiglu
        activation = self.activation(layer) if clamped is None else ClampedSwiglu(*clamped)
        shared = self._dense_mlp(layer, "shared_") if moe.shared_size else None
        vectors = self.weights.vectors
        scale_E = vectors.get(f"model.layers.{layer}.{EXPERT_SCALES}")
        if moe.scale != 1:
            scale_E = torch.full((moe.num_experts,), moe.scale, device=self.weights.embed.device)
        correction_E = vectors[moe.correction_of(layer)].flatten() if moe.correction else None
        first = self.ranks.rank * moe.num_here if moe.expert_ranks > 1 else None
        mlp = SparseMlp(router, gate_up_E, down_E, moe, self.ops, activation)
        if moe.latent_size:
            into, out = (self.linear(f"{layer}.latent_{way}") for way in ("in", "out"))
            mlp = replace(mlp, latents=Latents(into, out, self.ranks))
        return replace(mlp, shared=shared, scale_E=scale_E, first=first, correction_E=correction_E)

    def _dense_mlp(self, layer: int, of: str = "") -> DenseMlp:
        gate_up, down = (self.linear(f"{layer}.{of}{name}") for name in ("gate_up", "down"))
        return DenseMlp(gate_up, down, self.ops, self.activation(layer))

    def activation(self, layer: int) -> Activation:
        """The activation of a layer's MLP, with its parameters."""
        name, vectors = self.config.activation, self.weights.vectors
        if name != "xielu":
            return name
        found = (vectors[f"model.layers.{layer}.{parameter}"] for parameter in XIELU)
        alpha_p, alpha_n, beta, eps = (tensor.cpu() for tensor in found)
        steep = beta + F.softplus(alpha_n)
        return Xielu(F.softplus(alpha_p).item(), steep.item(), beta.item(), eps.item())


def _queries_first(of_channels: torch.Tensor, shape: LinearConfig) -> torch.Tensor:
    """A tensor of the convolution's channels as checkpoints have it, with those of queries, keys
    and values in this order."""
    parts = of_channels.split_with_sizes(shape.channel_parts)
    return torch.cat(parts[::-1]) if shape.mamba else of_channels
