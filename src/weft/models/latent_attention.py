"""Multi-head latent attention, as in DeepSeek V2 and V3, Kimi K2 and Mistral 4.

The keys and values of a token are projections of one short vector, its latent c: a head's key is
W_K c, and its value is W_V c. All heads also share one rotated key k_r. The cache holds only c and
k_r. W_K and W_V are never applied to the cached latents. They are *absorbed*: W_K is applied to the
query, and W_V to the weighted sum of latents, which gives the same results,

    score = q . (W_K c) + q_r . k_r = (W_K^T q) . c + q_r . k_r
    out = sum of weight W_V c = W_V (sum of weight c)

So all heads attend to one head, whose keys are (c, k_r) and whose values are c.

Shapes: T token rows, I hidden size, H query heads, N the part of a query without position, R its
rotated part, L the latent, V the value of a head, W = L + R.
"""

from __future__ import annotations

from torch import Tensor

from weft.kernels.attention import KVCache
from weft.kernels.delta import StateCache
from weft.kernels.ops import Product, Rope
from weft.models.blueprint import LATENT_NORM, Q_LATENT_NORM
from weft.models.builder import LayerBuilder
from weft.models.layers import StepContext

NORM_EPS = 1e-6
"""The epsilon of the norms of latents. As in transformers, it does not depend on `rms_norm_eps`."""


class LatentLayer:
    """Attention to latents, and the MLP, of one layer. The decoder has the layer's norms and the
    residual stream."""

    def __init__(self, parts: LayerBuilder, index: int) -> None:
        config = parts.config
        assert config.latent is not None
        self._shape, self._num_heads = config.latent, config.num_heads
        self._a, self._q, self._o = (parts.linear(f"{index}.{name}") for name in "aqo")
        self._group = parts.group(f"{index}.kv_b")
        size = self._shape.key_dim, self._shape.value_dim
        matrix_HOL = parts.weights.dense(f"{index}.kv_b").view(-1, sum(size), self._shape.rank)
        self._keys_HNL, values_HVL = matrix_HOL.split_with_sizes(size, 1)
        self._values_HLV = values_HVL.transpose(1, 2)
        of = f"model.layers.{index}.self_attn."
        self._norm, self._q_norm = parts.norm(of + LATENT_NORM, NORM_EPS), None
        if self._shape.query_rank is not None:
            self._q_norm = parts.norm(of + Q_LATENT_NORM, NORM_EPS)
        self._ops = parts.ops
        scale = config.scales.attention
        assert scale is not None
        self._scale: float = scale
        self.residual_scale = config.scales.residual
        self.mlp = parts.mlp(index)

    def attend(
        self, x_TI: Tensor, rope: Rope, step: StepContext, cache: KVCache | StateCache
    ) -> Product:
        """The output of attention, (T, I). The rows' latents and keys are written to the cache."""
        assert isinstance(cache, KVCache)
        shape, batch, lora = self._shape, step.attention, step.lora
        T, H = len(x_TI), self._num_heads
        q_norm_Q = None if self._q_norm is None else self._q_norm.weights(T, step)
        query_TQ = self._ops.write_latents(
            self._a(x_TI, step), q_norm_Q, self._norm.weights(T, step), NORM_EPS, rope, cache, batch
        )
        q = self._q(x_TI if query_TQ is None else query_TQ, step)
        q_THW = x_TI.new_empty(T, H, shape.width)
        q_THL = q_THW[..., : shape.rank]
        q_THN = self._ops.rotate_queries(q, q_THW[..., shape.rank :], rope)
        if lora is not None:
            q_THN = lora.scaled_queries(q_THN, self._group)
        self._ops.absorb(q_THN, self._keys_HNL, q_THL)
        if lora is not None:
            lora.absorbed_keys(q_THL, q_THN, self._group)
        out_THL = self._ops.attend(q_THW, cache, batch, scale=self._scale, window=None)
        out_THV = x_TI.new_empty(T, H, shape.value_dim)
        self._ops.absorb(out_THL, self._values_HLV, out_THV)
        if lora is not None:
            lora.absorbed_values(out_THV, out_THL, self._group)
        return self._o(out_THV.flatten(1), step)
