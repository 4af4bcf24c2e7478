"""One decoder for all families: what differs between them is in ModelConfig and its table.

Shapes: T token rows, N sampled rows, I hidden size, V vocabulary, H query heads, K key and value
heads, D head dimension.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from weft.kernels.attention import KVCache
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.delta import StateCache
from weft.kernels.ops import Ops, Product, Rope
from weft.models.blueprint import EMBED, HEAD, is_linear, sinks_of
from weft.models.builder import LayerBuilder
from weft.models.config import ModelConfig
from weft.models.gemma4 import Gemma4Blocks
from weft.models.latent_attention import LatentLayer
from weft.models.layers import (
    Embedding,
    Head,
    RotatedNorm,
    RowNorm,
    StepContext,
    WidthNorm,
    add_normed,
)
from weft.models.linear_attention import allocate_states
from weft.models.moe import DenseMlp, SparseMlp, is_capturable
from weft.models.rope import RopeTable
from weft.models.weights import Weights

__all__ = ["Decoder", "StepContext"]

LayerCache = KVCache | StateCache
"""What one layer keeps for all sequences: keys and values, or recurrent states."""


class Decoder:
    """A causal language model over flat token rows and a paged KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        max_model_len: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """`config` and `weights` are those of this rank's share."""
        self.config = config
        self.dtype, self.device = weights.dtype, weights.embed.device
        self.num_logits = config.vocab_size
        self.ranks = ranks
        parts = LayerBuilder(config, weights, ops, ranks)
        self.embed = Embedding(weights.embed, parts.group(EMBED))
        layers = range(config.num_layers)
        self._sorts = [parts.sort(i) for i in layers]
        self._layers = [_layer(parts, i) for i in layers]
        of_layers = (norm for i in layers for norm in parts.norms_of(i))
        self._norms = [*of_layers, parts.norm(config.names.last_norm)]
        """The norms of all layers, in the order of their use, and the last norm."""
        self._head = Head(weights.head, parts.group(HEAD), ranks, weights.deterministic)
        sizes, growths = map(config.rope_dim, layers), config.growths or (None,) * len(layers)
        ropes = list(zip(config.ropes, sizes, growths, strict=True))
        distinct = list(dict.fromkeys(ropes))
        self.ropes = [
            RopeTable(rope, size, max_model_len, self.dtype, self.device, growth)
            for rope, size, growth in distinct
        ]
        self._rope_of_layer = [distinct.index(rope) for rope in ropes]
        self._gemma4 = Gemma4Blocks(parts) if config.blocks == "gemma4" else None
        scales = config.scales
        embed_scale = torch.tensor(scales.embedding, dtype=torch.float32)
        self._embed_scale = (
            embed_scale.to(self.dtype) if scales.rounds_embedding else embed_scale
        ).item()

    def forward(self, ids_T: Tensor, step: StepContext, kv: Iterable[LayerCache]) -> Tensor:
        """Hidden states after the final norm, (T, I). Writes the rows' K and V, or states, to the
        caches in `kv`, which is iterated layer by layer."""
        x_TI = self.embed(ids_T, step)
        if self._embed_scale != 1:
            x_TI *= self._embed_scale
        ropes = [table.at(step.positions_T) for table in self.ropes]
        rope_of_layer = (ropes[i] for i in self._rope_of_layer)
        layers = zip(self._layers, kv, rope_of_layer, strict=True)
        if self._gemma4 is not None:
            return self._gemma4(ids_T, x_TI, layers, iter(self._norms), step)
        blocks = _BLOCKS[self.config.blocks]
        return blocks(x_TI, layers, iter(self._norms), step)

    def abridged(self) -> tuple[Decoder, list[int]]:
        """The same model with only the first layer of each sort, and the numbers of these layers.
        Its steps launch every kernel of the whole model's steps in a fraction of the time. Gemma 4
        keeps all layers, as they depend on each other."""
        kept = [self._sorts.index(sort) for sort in dict.fromkeys(self._sorts)]
        if self._gemma4 is not None:
            kept = list(range(len(self._layers)))
        per_layer = len(self.config.norm_names)
        short = copy.copy(self)
        short._sorts = [self._sorts[i] for i in kept]
        short._layers = [self._layers[i] for i in kept]
        short._rope_of_layer = [self._rope_of_layer[i] for i in kept]
        norms = [self._norms[i * per_layer : (i + 1) * per_layer] for i in kept]
        short._norms = [*(norm for of_layer in norms for norm in of_layer), self._norms[-1]]
        return short, kept

    @property
    def is_capturable(self) -> bool:
        """Whether steps on a GPU can be captured in CUDA graphs."""
        return self.config.moe is None or is_capturable(self.dtype, self.device)

    def logits(self, x_NI: Tensor, step: StepContext) -> Tensor:
        """The logits, (N, V), for `x_NI`, the sampled rows of what `forward` returned; wider if an
        adapter in the step has a larger vocabulary."""
        logits_NV, scales = self._head(x_NI, step), self.config.scales
        if scales.logits != 1:
            logits_NV /= scales.logits
        if scales.logit_cap is not None:
            logits_NV.div_(scales.logit_cap).tanh_().mul_(scales.logit_cap)
        return logits_NV


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """How many bytes the keys and values, or latents, of one block take over all layers, including
    the multi-token prediction head if that is served."""
    per_token = 0
    for i in range(config.num_layers):
        shape = config.layer(i)
        if shape.cache == i and config.has_attention(i):
            of_keys = shape.num_kv_heads * shape.head_dim * dtype.itemsize
            per_token += of_keys if config.latent is not None else 2 * of_keys
    if config.mtp_head:
        per_token += 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return block_size * per_token


def state_bytes(config: ModelConfig, num_states: int, dtype: torch.dtype) -> int:
    """How many bytes `num_states` recurrent states take over all layers."""
    if config.linear is None:
        return 0
    of_layer = allocate_states(config.linear, num_states, dtype, "meta")
    return sum(config.linear.layers) * (of_layer.inputs.nbytes + of_layer.delta.nbytes)


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    num_states: int = 0,
) -> list[LayerCache]:
    """The cache of every layer, zeroed. A layer with attention has keys and values, each of shape
    (num_blocks, block_size, kv_heads, head_dim). With attention to latents, the values are a view
    of the first part of the keys. A layer with a recurrent state has states, and a layer without
    both has a cache of 0 heads. Layers that share a cache have the same object."""
    found: list[LayerCache] = []
    states = iter(_states_of_layers(config, num_states, dtype, device))
    for i in range(config.num_layers):
        own = config.layer(i)
        if is_linear(config, i):
            found.append(next(states))
        elif own.cache != i:
            found.append(found[own.cache])
        else:
            num_heads = own.num_kv_heads if config.has_attention(i) else 0
            shape = (num_blocks, block_size, num_heads, own.head_dim)
            k = torch.zeros(shape, dtype=dtype, device=device)
            latent = config.latent
            v = torch.zeros_like(k) if latent is None else k[..., : latent.rank]
            found.append(KVCache(k, v))
    return found


def _states_of_layers(
    config: ModelConfig, num_states: int, dtype: torch.dtype, device: torch.device | str
) -> list[StateCache]:
    """The states of each layer with a recurrent state, as parts of two tensors: see `stacked`."""
    if config.linear is None:
        return []
    size = (sum(config.linear.layers), num_states)
    whole = allocate_states(config.linear, math.prod(size), dtype, device)
    parts = (tensor.view(*size, *tensor.shape[1:]) for tensor in (whole.inputs, whole.delta))
    return [StateCache(*of_layer) for of_layer in zip(*parts, strict=True)]


def stacked(kv: Iterable[LayerCache]) -> list[Tensor]:
    """The states of all layers of `allocate_kv_cache` as two tensors (layers, states, ...), so that
    one copy of each takes a sequence's states in all layers; [] for a model without states."""
    caches = [cache for cache in kv if isinstance(cache, StateCache)]
    firsts = (caches[0].inputs, caches[0].delta) if caches else ()
    return [
        first.as_strided((len(caches), *first.shape), (first.numel(), *first.stride()))
        for first in firsts
    ]


def pre_norm(x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext) -> Tensor:
    """`x += attend(norm(x)); x += mlp(norm(x))` for each layer. Returns the last norm of x. The sum
    over ranks, the addition and the norm that follows it are one operation."""
    normed_TI = next(norms)(x_TI, step)
    for layer, cache, rope in layers:
        delta = layer.attend(normed_TI, rope, step, cache)
        normed_TI = next(norms)(x_TI, step, delta, layer.residual_scale)
        delta = layer.mlp(normed_TI, step)
        normed_TI = next(norms)(x_TI, step, delta, layer.residual_scale)
    return normed_TI


def _post_norm(
    x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext
) -> Tensor:
    """`x += norm(attend(x)); x += norm(mlp(x))` for each layer. Returns the last norm of x."""
    for layer, cache, rope in layers:
        add_normed(x_TI, layer.attend(x_TI, rope, step, cache), next(norms), None, step)
        add_normed(x_TI, layer.mlp(x_TI, step), next(norms), None, step)
    return next(norms)(x_TI, step)


def _both_norms(
    x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext
) -> Tensor:
    """`x += norm(attend(norm(x))); x += norm(mlp(norm(x)))` for each layer. Returns the last norm
    of x."""
    normed_TI = next(norms)(x_TI, step)
    for layer, cache, rope in layers:
        attended = layer.attend(normed_TI, rope, step, cache)
        normed_TI = add_normed(x_TI, attended, next(norms), next(norms), step)
        normed_TI = add_normed(x_TI, layer.mlp(normed_TI, step), next(norms), next(norms), step)
    return normed_TI


def _parallel(x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext) -> Tensor:
    """`n = norm(x); x += attend(n) + mlp(n)` for each layer. Returns the last norm of x."""
    normed_TI = next(norms)(x_TI, step)
    for layer, cache, rope in layers:
        attended_TI = layer.attend(normed_TI, rope, step, cache).whole()
        delta = Product(attended_TI + layer.mlp(normed_TI, step).whole())
        normed_TI = next(norms)(x_TI, step, delta, layer.residual_scale)
    return normed_TI


def _single(x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext) -> Tensor:
    """`x += mix(norm(x))` for each layer. Returns the last norm of x."""
    normed_TI = next(norms)(x_TI, step)
    for layer, cache, rope in layers:
        delta = layer.attend(normed_TI, rope, step, cache)
        normed_TI = next(norms)(x_TI, step, delta, layer.residual_scale)
    return normed_TI


def _mixed(x_TI: Tensor, layers: _Layers, norms: Iterator[RowNorm], step: StepContext) -> Tensor:
    """`x += attend(norm(x)); x += mlp(norm(x))` for each layer with a recurrent state, and
    `x += norm(attend(x)); x += norm(mlp(x))` for the others. Returns the last norm of x."""
    pending: Product | None = None
    """What an MLP gave that has yet to be added to x."""
    for layer, cache, rope in layers:
        first, second = next(norms), next(norms)
        if isinstance(layer, _LinearLayer):
            attended = layer.attend(first(x_TI, step, pending), rope, step, cache)
            pending = layer.mlp(second(x_TI, step, attended), step)
            continue
        if pending is not None:
            x_TI += first.ranks.sum(pending.whole())
            pending = None
        add_normed(x_TI, layer.attend(x_TI, rope, step, cache), first, None, step)
        add_normed(x_TI, layer.mlp(x_TI, step), second, None, step)
    return next(norms)(x_TI, step, pending)


_BLOCKS = {
    "pre": pre_norm,
    "post": _post_norm,
    "both": _both_norms,
    "parallel": _parallel,
    "single": _single,
    "mixed": _mixed,
}


def _layer(parts: LayerBuilder, index: int) -> _Layer:
    config = parts.config
    if is_linear(config, index):
        return _LinearLayer(parts, index)
    if not config.has_attention(index):
        return _MlpLayer(parts, index)
    return (AttentionLayer if config.latent is None else LatentLayer)(parts, index)


class AttentionLayer:
    """Attention of one layer, and its MLP if it has one. The decoder has the layer's norms and the
    residual stream."""

    mlp: DenseMlp | SparseMlp
    """Absent if layers are a single mixer."""

    def __init__(self, parts: LayerBuilder, index: int) -> None:
        config = parts.config
        self._qkv, self._o = parts.linear(f"{index}.qkv"), parts.linear(f"{index}.o")
        if not config.mixers:
            self.mlp = parts.mlp(index)
        self._qk_norm = parts.qk_norm(index)
        self._ops = parts.ops
        self._eps = config.norm_eps
        scale, self._cap = config.scales.attention, config.scales.score_cap
        self._shape = config.layer(index)
        self._writes = self._shape.cache == index
        self._scale = self._shape.head_dim**-0.5 if scale is None else scale
        self.residual_scale = config.scales.residual
        self._window, self._chunked = config.windows[index], config.chunked
        self._sinks_H = parts.weights.vectors.get(sinks_of(index))
        self._gated_heads = config.num_heads if config.output_gate else 0

    def attend(self, x_TI: Tensor, rope: Rope, step: StepContext, cache: LayerCache) -> Product:
        """The output of attention, (T, I). The rows' keys and values are written to the cache."""
        assert isinstance(cache, KVCache)
        ops, batch = self._ops, step.attention
        qkv, norm = self._qkv(x_TI, step), None
        if isinstance(self._qk_norm, WidthNorm):
            qkv = self._qk_norm(qkv, step)
        elif self._qk_norm is not None:
            norm = self._qk_norm(len(x_TI), step)
        if self._shape.keys_are_values:
            qkv = self._with_values(qkv)
        written = cache if self._writes else cache.without_heads()
        gates = self._gated_heads
        q_THD = ops.rope_and_write(qkv, rope, norm, self._eps, written, batch, gates)
        if isinstance(self._qk_norm, RotatedNorm):
            q_THD = self._qk_norm.weighted(q_THD, step)
        if rope.query_T11 is not None:
            q_THD = (q_THD * rope.query_T11).to(q_THD.dtype)
        out_THD = ops.attend(
            q_THD,
            cache,
            batch,
            scale=self._scale,
            window=self._window,
            chunked=self._chunked,
            sinks_H=self._sinks_H,
            cap=self._cap,
        )
        if gates:
            out_THD = ops.apply_gates(out_THD, qkv)
        return self._o(out_THD.flatten(1), step)

    def _with_values(self, qk: Product) -> Product:
        """q, k and v where v is k."""
        qk_TO, size = qk.whole(), self._shape.num_kv_heads * self._shape.head_dim
        return Product(torch.cat((qk_TO, qk_TO[:, -size:]), 1))


class _LinearLayer:
    """A layer with a recurrent state, and its MLP if it has one."""

    mlp: DenseMlp | SparseMlp
    """Absent if layers are a single mixer."""

    def __init__(self, parts: LayerBuilder, index: int) -> None:
        self._attention = parts.linear_attention(index)
        if not parts.config.mixers:
            self.mlp = parts.mlp(index)
        self.residual_scale = parts.config.scales.residual

    def attend(self, x_TI: Tensor, rope: Rope, step: StepContext, cache: LayerCache) -> Product:
        """The output of the layer's mixer, (T, I). The sequences' states are brought up to date."""
        assert isinstance(cache, StateCache)
        return self._attention(x_TI, step, cache)


class _MlpLayer:
    """A layer that is nothing but an MLP or a mixture of experts."""

    def __init__(self, parts: LayerBuilder, index: int) -> None:
        self.mlp = parts.mlp(index)
        self.residual_scale = parts.config.scales.residual

    def attend(self, x_TI: Tensor, rope: Rope, step: StepContext, cache: LayerCache) -> Product:
        """The output of the MLP, (T, I), as if it were attention."""
        return self.mlp(x_TI, step)


_Layer = AttentionLayer | LatentLayer | _LinearLayer | _MlpLayer
_Layers = Iterable[tuple[_Layer, LayerCache, Rope]]
