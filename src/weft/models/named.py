"""A model's weights by the names that adapters use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.core.targets import Norm, Target
from weft.kernels.fp8 import Fp8Weight
from weft.models.loading import LayerWeights, Weights

_MATRICES = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "gate": "router",
}
_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}
"""Fields of `LayerWeights` by the last part of a name."""


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """The `weft.checkpoint.BaseWeights` of a model."""

    weights: Weights

    def weight(self, target: Target) -> Tensor:
        if target.kind == "embedding":
            return self.weights.embed.t()
        if target.kind == "head":
            return self.weights.head
        packed = getattr(self._layer(target.name), _MATRICES[target.suffix])
        if isinstance(packed, Fp8Weight):
            packed = packed.dequantized(self.weights.embed.dtype)
        return _slice(packed, target)

    def bias(self, target: Target) -> Tensor | None:
        if target.kind != "linear" or target.suffix == "gate":
            return None
        packed = getattr(self._layer(target.name), _MATRICES[target.suffix] + "_bias")
        return None if packed is None else _slice(packed, target)

    def norm(self, norm: Norm) -> Tensor:
        if norm.name == "model.norm":
            return self.weights.norm
        layer = self._layer(norm.name)
        found: Tensor = getattr(layer, _NORMS[norm.name.rpartition(".")[2]])
        return found

    def _layer(self, name: str) -> LayerWeights:
        """model.layers.3.mlp.up_proj is in layer 3."""
        return self.weights.layers[int(name.split(".")[2])]


def _slice(packed: Tensor, target: Target) -> Tensor:
    """The rows of a target in its group's matrix or bias."""
    return packed[target.offset : target.offset + target.out_features]
