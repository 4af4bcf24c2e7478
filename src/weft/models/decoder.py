"""One decoder for all families: what differs between them is in ModelConfig.

Shapes: T token rows, N sampled rows, I hidden size, V vocabulary, H query heads, K key and value
heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.targets import TargetTable
from weft.kernels.attention import KVCache
from weft.kernels.ops import Ops
from weft.models.config import ModelConfig
from weft.models.layers import Embedding, Head, Linear, StepContext
from weft.models.loading import LayerWeights, Weights
from weft.models.rope import RopeTable
from weft.models.targets import GROUPS_PER_LAYER

__all__ = ["Decoder", "StepContext"]


class Decoder:
    """A causal language model over flat token rows and a paged KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        table: TargetTable,
        ops: Ops,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self.num_logits = len(weights.head)
        self._ops = ops
        self._embed = Embedding(weights.embed, 0)
        self._layers = [_Layer(config, layer, i, ops) for i, layer in enumerate(weights.layers)]
        norms = [layer.attention_norm for layer in weights.layers]
        self._first_norm_I, *self._next_norms = *norms, weights.norm
        """The norm before the first layer, and the one that follows each layer."""
        self._head = Head(weights.head, len(table.groups) - 1)
        self._rope = RopeTable(config.rope, config.head_dim, max_model_len, self.dtype, self.device)

    def forward(self, ids_T: Tensor, step: StepContext, kv: list[KVCache]) -> Tensor:
        """Hidden states after the final norm, (T, I). Writes the rows' K and V to `kv`."""
        ops, eps = self._ops, self.config.rms_norm_eps
        x_TI = self._embed(ids_T, step)
        rope = self._rope.at(step.positions_T)
        normed_TI = ops.rms_norm(x_TI, self._first_norm_I, eps)
        for layer, cache, next_norm_I in zip(self._layers, kv, self._next_norms, strict=True):
            delta_TI = layer.attend(normed_TI, rope, step, cache)
            normed_TI = ops.add_rms_norm(x_TI, delta_TI, layer.mlp_norm_I, eps)
            delta_TI = layer.mlp(normed_TI, step)
            normed_TI = ops.add_rms_norm(x_TI, delta_TI, next_norm_I, eps)
        return normed_TI

    def logits(self, x_NI: Tensor, step: StepContext) -> Tensor:
        """(N, V), for the sampled rows of what `forward` returned."""
        return self._head(x_NI, step)


class _Layer:
    """Attention and MLP over normed rows; the residual stream is the decoder's."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, index: int, ops: Ops) -> None:
        group = 1 + index * GROUPS_PER_LAYER
        self.mlp_norm_I = weights.mlp_norm
        self._qkv = Linear(weights.qkv, weights.qkv_bias, group)
        self._o = Linear(weights.o, weights.o_bias, group + 1)
        self._gate_up = Linear(weights.gate_up, weights.gate_up_bias, group + 2)
        self._down = Linear(weights.down, weights.down_bias, group + 3)
        self._qk_norm_ND = _qk_norm(config, weights)
        self._ops = ops
        self._eps = config.rms_norm_eps
        self._num_heads = config.num_heads + 2 * config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.windows[index]

    def attend(
        self, x_TI: Tensor, rope: tuple[Tensor, Tensor], step: StepContext, cache: KVCache
    ) -> Tensor:
        ops, batch = self._ops, step.attention
        qkv_TND = self._qkv(x_TI, step).view(-1, self._num_heads, self._head_dim)
        q_THD = ops.rope_and_write(qkv_TND, rope, self._qk_norm_ND, self._eps, cache, batch)
        out_THD = ops.attend(q_THD, cache, batch, scale=self._scale, window=self._window)
        return self._o(out_THD.flatten(1), step)

    def mlp(self, x_TI: Tensor, step: StepContext) -> Tensor:
        return self._down(self._ops.silu_and_mul(self._gate_up(x_TI, step)), step)


def _qk_norm(config: ModelConfig, weights: LayerWeights) -> Tensor | None:
    """The norm weights of q and k repeated for their heads, (H + K, D)."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_HD = weights.q_norm.expand(config.num_heads, -1)
    return torch.cat((q_HD, weights.k_norm.expand(config.num_kv_heads, -1)))
