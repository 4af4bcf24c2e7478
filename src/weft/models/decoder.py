"""One decoder for all families: what differs between them is in ModelConfig.

Shapes: T token rows, N sampled rows, I hidden size, V vocabulary, H query heads, K key and value
heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.targets import TargetTable
from weft.kernels.activation import silu_and_mul
from weft.kernels.attention import AttentionBackend, KVCache
from weft.kernels.norm import rms_norm
from weft.kernels.rope import apply_rope
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
        attention: AttentionBackend,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self._embed = Embedding(weights.embed, 0)
        self._layers = [
            _Layer(config, layer, i, attention) for i, layer in enumerate(weights.layers)
        ]
        self._norm_I = weights.norm
        self._head = Head(weights.head, len(table.groups) - 1)
        self._rope = RopeTable(config.rope, config.head_dim, max_model_len, self.dtype, self.device)

    def forward(self, ids_T: Tensor, step: StepContext, kv: list[KVCache]) -> Tensor:
        """Hidden states after the final norm, (T, I). Writes the rows' K and V to `kv`."""
        x_TI = self._embed(ids_T, step)
        rope = self._rope.at(step.positions_T)
        for layer, cache in zip(self._layers, kv, strict=True):
            x_TI = layer.forward(x_TI, rope, step, cache)
        return rms_norm(x_TI, self._norm_I, self.config.rms_norm_eps)

    def logits(self, x_NI: Tensor, step: StepContext) -> Tensor:
        """(N, V), for the sampled rows of what `forward` returned."""
        return self._head(x_NI, step)


class _Layer:
    """Attention and MLP, each with its norm before and its residual after."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, index: int, attention: AttentionBackend
    ) -> None:
        group = 1 + index * GROUPS_PER_LAYER
        self._qkv = Linear(weights.qkv, weights.qkv_bias, group)
        self._o = Linear(weights.o, weights.o_bias, group + 1)
        self._gate_up = Linear(weights.gate_up, weights.gate_up_bias, group + 2)
        self._down = Linear(weights.down, weights.down_bias, group + 3)
        self._attention_norm_I = weights.attention_norm
        self._mlp_norm_I = weights.mlp_norm
        self._qk_norm_ND = _qk_norm(config, weights)
        self._attention = attention
        self._eps = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.windows[index]

    def forward(
        self, x_TI: Tensor, rope: tuple[Tensor, Tensor], step: StepContext, cache: KVCache
    ) -> Tensor:
        """Changes `x_TI` in place and returns it."""
        x_TI += self._attend(rms_norm(x_TI, self._attention_norm_I, self._eps), rope, step, cache)
        x_TI += self._mlp(rms_norm(x_TI, self._mlp_norm_I, self._eps), step)
        return x_TI

    def _attend(
        self, x_TI: Tensor, rope: tuple[Tensor, Tensor], step: StepContext, cache: KVCache
    ) -> Tensor:
        H, K = self._heads, self._kv_heads
        qkv_TND = self._qkv(x_TI, step).view(-1, H + 2 * K, self._head_dim)
        qk_TND, v_TKD = qkv_TND.split_with_sizes((H + K, K), 1)
        if self._qk_norm_ND is not None:
            qk_TND = rms_norm(qk_TND, None, self._eps) * self._qk_norm_ND
        q_THD, k_TKD = apply_rope(qk_TND, *rope).split_with_sizes((H, K), 1)
        out_THD = self._attention(
            q_THD, k_TKD, v_TKD, cache, step.attention, scale=self._scale, window=self._window
        )
        return self._o(out_THD.flatten(1), step)

    def _mlp(self, x_TI: Tensor, step: StepContext) -> Tensor:
        return self._down(silu_and_mul(self._gate_up(x_TI, step)), step)


def _qk_norm(config: ModelConfig, weights: LayerWeights) -> Tensor | None:
    """The norm weights of q and k repeated for their heads, (H + K, D)."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_HD = weights.q_norm.expand(config.num_heads, -1)
    return torch.cat((q_HD, weights.k_norm.expand(config.num_kv_heads, -1)))
