"""One decoder for all families: what differs between them is in ModelConfig.

Shapes: T token rows, N sampled rows, I hidden size, V vocabulary, H query heads, K key and value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.targets import TargetTable
from weft.kernels.attention import KVCache
from weft.kernels.ops import Ops
from weft.kernels.pending import Pending
from weft.models.config import ModelConfig
from weft.models.layers import Embedding, Head, HeadNorm, Linear, Norm, StepContext
from weft.models.loading import LayerWeights, Weights
from weft.models.moe import SparseMlp, is_capturable
from weft.models.rope import RopeTable
from weft.models.targets import first_group

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
        self._embed = Embedding(weights.embed, 0)
        self._layers = [
            _Layer(config, layer, i, table, ops) for i, layer in enumerate(weights.layers)
        ]
        norms = [
            (f"model.layers.{i}.input_layernorm", layer.attention_norm)
            for i, layer in enumerate(weights.layers)
        ]
        self._first_norm, *self._next_norms = (
            Norm(weight_I, config.rms_norm_eps, table.norms_by_name[name].index, ops)
            for name, weight_I in (*norms, ("model.norm", weights.norm))
        )
        """The norm before the first layer, and the one that follows each layer."""
        self._head = Head(weights.head, len(table.groups) - 1)
        self._rope = RopeTable(config.rope, config.head_dim, max_model_len, self.dtype, self.device)

    def forward(self, ids_T: Tensor, step: StepContext, kv: Iterable[KVCache]) -> Tensor:
        """Hidden states after the final norm, (T, I). Writes the rows' K and V to `kv`, which is
        asked for each layer's when its turn comes."""
        x_TI = self._embed(ids_T, step)
        rope = self._rope.at(step.positions_T)
        normed_TI = self._first_norm(x_TI, step)
        for layer, cache, next_norm in zip(self._layers, kv, self._next_norms, strict=True):
            delta_TI, pending = layer.attend(normed_TI, rope, step, cache)
            normed_TI = layer.mlp_norm.add(x_TI, delta_TI, step, pending)
            delta_TI, pending = layer.mlp(normed_TI, step)
            normed_TI = next_norm.add(x_TI, delta_TI, step, pending)
        return normed_TI

    @property
    def is_capturable(self) -> bool:
        """Whether steps on a GPU can be captured in CUDA graphs."""
        return self.config.moe is None or is_capturable(self.dtype, self.device)

    def logits(self, x_NI: Tensor, step: StepContext) -> Tensor:
        """(N, V), for the sampled rows of what `forward` returned; wider if there are larger
        vocabularies in the step."""
        return self._head(x_NI, step)


class _Layer:
    """Attention and MLP over normed rows; the residual stream is the decoder's."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, index: int, table: TargetTable, ops: Ops
    ) -> None:
        name, group, eps = f"model.layers.{index}", first_group(table, index), config.rms_norm_eps
        mlp_norm = table.norms_by_name[f"{name}.post_attention_layernorm"]
        self.mlp_norm = Norm(weights.mlp_norm, eps, mlp_norm.index, ops)
        self._qkv = Linear(weights.qkv, weights.qkv_bias, group)
        self._o = Linear(weights.o, weights.o_bias, group + 1)
        self._mlp = _mlp(config, weights, group + 2, ops)
        self._qk_norm = _qk_norm(config, weights, name, table)
        self._ops = ops
        self._eps = eps
        self._num_heads = config.num_heads + 2 * config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.windows[index]

    def attend(
        self, x_TI: Tensor, rope: tuple[Tensor, Tensor], step: StepContext, cache: KVCache
    ) -> tuple[Tensor, Pending | None]:
        ops, batch = self._ops, step.attention
        qkv_TO, pending = self._qkv.pending(x_TI, step)
        qkv_TND = qkv_TO.view(-1, self._num_heads, self._head_dim)
        norm = self._qk_norm(len(x_TI), step) if self._qk_norm else None
        q_THD = ops.rope_and_write(qkv_TND, rope, norm, self._eps, cache, batch, pending)
        out_THD = ops.attend(q_THD, cache, batch, scale=self._scale, window=self._window)
        return self._o.pending(out_THD.flatten(1), step)

    def mlp(self, x_TI: Tensor, step: StepContext) -> tuple[Tensor, Pending | None]:
        y = self._mlp(x_TI, step)
        return (y, None) if isinstance(y, Tensor) else y


@dataclass(frozen=True, slots=True)
class _DenseMlp:
    gate_up: Linear
    down: Linear
    ops: Ops

    def __call__(self, x_TI: Tensor, step: StepContext) -> tuple[Tensor, Pending | None]:
        return self.down.pending(self.ops.silu_and_mul(*self.gate_up.pending(x_TI, step)), step)


def _mlp(config: ModelConfig, weights: LayerWeights, group: int, ops: Ops) -> _DenseMlp | SparseMlp:
    """The MLP of a layer, whose groups begin with `group`."""
    w = weights
    if w.gate_up is not None and w.down is not None:
        gate_up = Linear(w.gate_up, w.gate_up_bias, group)
        return _DenseMlp(gate_up, Linear(w.down, w.down_bias, group + 1), ops)
    assert w.router is not None and config.moe is not None
    assert w.experts_gate_up is not None and w.experts_down is not None
    router = Linear(w.router, None, group)
    return SparseMlp(router, w.experts_gate_up, w.experts_down, group + 1, config.moe, ops)


def _qk_norm(
    config: ModelConfig, weights: LayerWeights, layer: str, table: TargetTable
) -> HeadNorm | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_HD = weights.q_norm.expand(config.num_heads, -1)
    weight_ND = torch.cat((q_HD, weights.k_norm.expand(config.num_kv_heads, -1)))
    q, k = (table.norms_by_name[f"{layer}.self_attn.{name}"].index for name in ("q_norm", "k_norm"))
    return HeadNorm(weight_ND, config.num_heads, q, k)
