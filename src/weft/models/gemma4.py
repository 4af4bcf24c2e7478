"""The layers of Gemma 4: norms on both sides of attention and MLP, and further parts that other
families do not have.

Each layer, with x the residual stream:

    x += norm(attend(norm(x)))
    y = mlp(norm(x));  with experts  y = norm(y) + norm(experts(norm(x)))
    x += norm(y)
    x += norm(project(gelu(gate(x)) * input))    with the layer's part of a token's second embedding
    x *= a factor of the layer

Shapes: T token rows, I hidden size, L layers, P width of a layer's part of the second embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activations import Activation
from weft.kernels.attention import KVCache
from weft.kernels.collective.base import Ranks
from weft.kernels.delta import StateCache
from weft.kernels.ops import Ops, Product, Rope, rms_norm
from weft.models.blueprint import (
    LAYER_SCALE,
    ROUTER_SCALE,
    TOKEN_EMBEDDING,
    TOKEN_INPUTS,
    TOKEN_NORM,
    experts_of,
)
from weft.models.builder import LayerBuilder
from weft.models.layers import Linear, RowNorm, StepContext, add_normed
from weft.models.moe import SparseMlp

LayerCache = KVCache | StateCache


class Layer(Protocol):
    """What every family's layer can do."""

    def attend(self, x_TI: Tensor, rope: Rope, step: StepContext, cache: LayerCache) -> Product: ...

    def mlp(self, x_TI: Tensor, step: StepContext) -> Product: ...


class TokenInputs:
    """Computes each layer's input from a token: its part of a second embedding of the token, plus
    its part of a projection of the first embedding."""

    def __init__(self, parts: LayerBuilder, width: int) -> None:
        config, vectors = parts.config, parts.weights.vectors
        self._shape = config.num_layers, width
        self._embedding_VO = vectors[TOKEN_EMBEDDING]
        self._norm = parts.norm(TOKEN_NORM)
        self._projection = parts.linear(TOKEN_INPUTS)
        scale = torch.tensor(width**0.5, dtype=torch.float32)
        self._scale = scale.to(self._embedding_VO.dtype).item()
        self._projection_scale = config.hidden_size**-0.5

    def __call__(self, ids_T: Tensor, x_TI: Tensor, step: StepContext) -> Tensor:
        """The inputs of all layers, (L, T, P). `x_TI`: the tokens' scaled embeddings."""
        shape = len(ids_T), *self._shape
        own_TLP = F.embedding(ids_T, self._embedding_VO).view(shape) * self._scale
        projected_TO = self._projection.whole(x_TI, step) * self._projection_scale
        projected_TLP = self._normed(projected_TO.view(shape), step)
        return ((projected_TLP + own_TLP) * 2**-0.5).transpose(0, 1)

    def _normed(self, x_TLP: Tensor, step: StepContext) -> Tensor:
        norm = self._norm
        y_TLP = rms_norm(x_TLP, norm.weight_I, norm.eps)
        if step.norms is not None:
            for start, stop, own_P in step.norms.of(norm.index):
                y_TLP[start:stop] = rms_norm(x_TLP[start:stop], own_P, norm.eps)
        return y_TLP


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds a layer's part of the token inputs to the residual stream."""

    gate: Linear
    projection: Linear
    ops: Ops
    activation: Activation

    def __call__(self, x_TI: Tensor, input_TP: Tensor, step: StepContext) -> Product:
        gate = self.gate(x_TI, step)
        return self.projection(self.ops.activate_and_mul(gate, self.activation, input_TP), step)


@dataclass(frozen=True, slots=True)
class BesideMlp:
    """The experts beside a layer's MLP. Their router reads the residual stream through a norm with
    a factor for each column."""

    experts: SparseMlp
    router_I: Tensor
    eps: float
    ops: Ops
    ranks: Ranks

    def __call__(self, x_TI: Tensor, normed_TI: Tensor, step: StepContext) -> Tensor:
        routed_TI = self.ops.rms_norm(x_TI, self.router_I, self.eps)
        return self.ranks.sum(self.experts(normed_TI, step, routed_TI).whole())


class Gemma4Blocks:
    """All layers of a model, after the embedding."""

    def __init__(self, parts: LayerBuilder) -> None:
        config, vectors = parts.config, parts.weights.vectors
        layers, inputs = range(config.num_layers), config.token_inputs
        self._ranks = parts.ranks
        self._scales: Sequence[Tensor] = [
            vectors[f"model.layers.{i}.{LAYER_SCALE}"] for i in layers
        ]
        self._experts = [_beside_mlp(parts, i) for i in layers]
        self._token_inputs = None if inputs is None else TokenInputs(parts, inputs.width)
        self._inputs = [
            LayerInput(
                parts.linear(f"{i}.input_gate"),
                parts.linear(f"{i}.input_projection"),
                parts.ops,
                parts.activation(i),
            )
            for i in layers
            if inputs is not None
        ]

    def __call__(
        self,
        ids_T: Tensor,
        x_TI: Tensor,
        layers: Iterable[tuple[Layer, LayerCache, Rope]],
        norms: Iterator[RowNorm],
        step: StepContext,
    ) -> Tensor:
        """The norm of the last layer's output, (T, I). `norms`: those of all layers, then this."""
        inputs_LTP = None
        if self._token_inputs is not None:
            inputs_LTP = self._token_inputs(ids_T, x_TI, step)
        normed_TI = next(norms)(x_TI, step)
        for i, (layer, cache, rope) in enumerate(layers):
            attended = layer.attend(normed_TI, rope, step, cache)
            normed_TI = add_normed(x_TI, attended, next(norms), next(norms), step)
            y, experts = layer.mlp(normed_TI, step), self._experts[i]
            is_part = experts is None
            if experts is not None:
                own_TI = next(norms)(self._ranks.sum(y.whole()), step)
                y = Product(own_TI + _normed(experts, norms, x_TI, step))
            if inputs_LTP is not None:
                add_normed(x_TI, y, next(norms), None, step, is_part)
                y, is_part = self._inputs[i](x_TI, inputs_LTP[i], step), False
            after, before, factor_1 = next(norms), next(norms), self._scales[i]
            normed_TI = add_normed(x_TI, y, after, before, step, is_part, factor_1)
        return normed_TI


def _normed(
    experts: BesideMlp, norms: Iterator[RowNorm], x_TI: Tensor, step: StepContext
) -> Tensor:
    """`norm(experts(norm(x)))`."""
    found_TI = experts(x_TI, next(norms)(x_TI, step), step)
    return next(norms)(found_TI, step)


def _beside_mlp(parts: LayerBuilder, layer: int) -> BesideMlp | None:
    config = parts.config
    moe = experts_of(config, layer)
    if moe is None:
        return None
    scale_I = parts.weights.vectors[f"model.layers.{layer}.{ROUTER_SCALE}"]
    router_I = scale_I.float() * config.hidden_size**-0.5
    experts = parts.experts_of(layer, moe)
    return BesideMlp(experts, router_I, config.norm_eps, parts.ops, parts.ranks)
