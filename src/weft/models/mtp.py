"""The multi-token prediction (MTP) head of Qwen3-Next and Qwen3.5, which drafts the tokens behind
the next one.

From the token at position p + 1 and the base's state at position p, it drafts the token at p + 2:

    state of p      ── norm ──┐
                              fc ── a layer with attention ── norm ── the base's head
    token of p + 1  ── norm ──┘        KV cache at p

The base's state is the one after its last norm, which its own head reads. For the next draft, the
last draft takes the place of the token, and the output of the head's norm that of the state.

Shapes: T token rows, I hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.core.shards import Shard
from weft.core.targets import Packed, TargetTable, build_table
from weft.kernels.attention import KVCache
from weft.kernels.ops import Ops
from weft.models.blueprint import EMBED, HEAD, target_table
from weft.models.builder import LayerBuilder
from weft.models.config import ModelConfig
from weft.models.decoder import AttentionLayer, Decoder, pre_norm
from weft.models.families import FAMILIES
from weft.models.layers import StepContext
from weft.models.share import share_of
from weft.models.weights import Weights

PREFIX = "mtp."
"""The prefix of the head's tensors in checkpoints."""
_FC, _STATE_NORM, _TOKEN_NORM = "fc", "model.pre_fc_norm_hidden", "model.pre_fc_norm_embedding"


def has_head(config: ModelConfig) -> bool:
    """Whether checkpoints of the model's family may have an MTP head."""
    return FAMILIES[config.architecture].mtp_head


def with_mtp_head(config: ModelConfig) -> ModelConfig:
    """The config of the same model with its MTP head served. Raises ConfigError for a model of a
    family that has none."""
    if not has_head(config):
        message = f"--speculative mtp: {config.architecture} has no head that drafts tokens"
        raise ConfigError(message, "speculative")
    return replace(config, mtp_head=True)


def head_config(config: ModelConfig) -> ModelConfig:
    """The config of a model that has only the head's layer."""
    moe = config.moe and replace(config.moe, layers=(True,))
    return replace(
        config,
        num_layers=1,
        windows=(None,),
        ropes=config.ropes[-1:],
        linear=None,
        moe=moe,
        mtp_head=False,
    )


def _head_table(config: ModelConfig) -> TargetTable:
    """The table of the head's own tensors, by the names that they would have in a model of one
    layer. `config`: the base's, or that of a rank's share."""
    of_layer, hidden = target_table(head_config(config)), config.hidden_size
    rows = [g.packed for g in of_layer.groups if g.packed.key not in (EMBED, HEAD)]
    fc = Packed(_FC, "linear", 2 * hidden, (hidden,), ("model.fc",))
    norms = [(norm.name, norm.size) for norm in of_layer.norms]
    norms += [(_TOKEN_NORM, hidden), (_STATE_NORM, hidden)]
    return build_table([fc, *rows], norms, num_experts=of_layer.num_experts)


def head_shard(config: ModelConfig, rank: int, size: int) -> Shard:
    """What one of `size` ranks has of the head: a share of its layer, as of the base's layers, and
    all of fc and the norms. `config`: the whole base's. Raises ConfigError if it can't be cut."""
    return Shard(_head_table(config), _head_table(share_of(config, size)), rank, size)


class MtpHead:
    """The head over flat token rows, with the embedding, the output projection and the rotation of
    its base, and divided over the same ranks. It has no adapters."""

    def __init__(self, base: Decoder, weights: Weights, ops: Ops) -> None:
        """`weights`: the head's own, of the same rank's share as the base's."""
        parts = LayerBuilder(head_config(base.config), weights, ops, base.ranks)
        self._base = base
        self._token_norm, self._state_norm = parts.norm(_TOKEN_NORM), parts.norm(_STATE_NORM)
        self._fc = parts.linear(_FC)
        self._layer = AttentionLayer(parts, 0)
        of_layer = [f"model.layers.0.{name}" for name in parts.config.norm_names]
        self._norms = [parts.norm(name) for name in (*of_layer, parts.config.names.last_norm)]
        self._last_token = base.config.vocab_size - 1

    def forward(
        self, next_T: Tensor, states_TI: Tensor, step: StepContext, cache: KVCache
    ) -> Tensor:
        """The states after the head's norm, (T, I), from which the tokens behind `next_T`, int64
        (T,), are drafted. `states_TI`: the base's states at the positions of `step`, each right
        before its token in `next_T`. Writes the rows' K and V to `cache`."""
        known_T = next_T.clamp(0, self._last_token)  # an adapter may have added others
        tokens_TI = self._token_norm(self._base.embed(known_T, step), step)
        both_TI = torch.cat((tokens_TI, self._state_norm(states_TI, step)), 1)
        layer = self._layer, cache, self._base.ropes[-1].at(step.positions_T)
        return pre_norm(self._fc.whole(both_TI, step), [layer], iter(self._norms), step)

    def logits(self, x_TI: Tensor, step: StepContext) -> Tensor:
        """The logits, (T, V), from the states that `forward` returned."""
        return self._base.logits(x_TI, step)
