"""Gathers weights of the whole model from the ranks, each of which holds a share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from weft.core.shards import Shard
from weft.core.targets import Norm, Target
from weft.models.loading import LoadedModel
from weft.models.weights import Weights

GetShares = Callable[[str, str], Sequence[Tensor]]
"""(kind, name) -> the other ranks' parts of a weight, in rank order; see `share_of_weight`."""


def share_of_weight(weights: Weights, kind: str, name: str) -> Tensor:
    """One rank's part of a weight, in the serving dtype. `kind`: "matrix" or "bias", where `name`
    is its key, or "norm". A bias must be one of which each rank has a part."""
    if kind == "matrix":
        return weights.matrices[name].dequantized(weights.dtype)
    return weights.biases[name] if kind == "bias" else weights.norms[name]


class GatheredWeights:
    """The `weft.checkpoint.base.BaseWeights` of a model that is divided over ranks. A weight is
    gathered only when an adapter that is packed from it needs it."""

    def __init__(self, model: LoadedModel, shards: Sequence[Shard], others: GetShares) -> None:
        """`model`: the first rank's share. `shards`: all ranks'."""
        self._weights = model.weights
        self._shards = shards
        self._others = others

    def weight(self, target: Target) -> Tensor:
        if target.kind == "embedding":
            return self._weights.embed.t()
        target = self._shards[0].whole.targets[target.slice]  # an adapter may have other tokens
        shape = (target.out_features, target.in_features)
        whole = self._weights.embed.new_empty(shape)
        for shard, share in self._shares("matrix", target):
            begin = 0
            for rows in shard.weight_rows(target):
                end = begin + rows.stop - rows.start
                whole[rows, shard.inputs(target)] = share[begin:end].to(whole.device)
                begin = end
        return whole

    def bias(self, target: Target) -> Tensor | None:
        if not self._shards[0].whole.has_bias(target):
            return None
        if not self._shards[-1].adds_vectors(target):  # then the first rank has all of it
            return self._weights.bias(self._shards[0].own.targets[target.slice])
        whole = self._weights.embed.new_empty(target.out_features)
        for shard, share in self._shares("bias", target):
            _place(whole, share, shard.outputs(target))
        return whole

    def norm(self, norm: Norm) -> Tensor:
        own = self._weights.norms[norm.name]
        if len(own) == norm.size:
            return own
        whole = own.new_empty(norm.size)
        for shard, share in zip(self._shards, (own, *self._others("norm", norm.name)), strict=True):
            _place(whole, share, shard.norm(norm))
        return whole

    def _shares(self, kind: str, target: Target) -> list[tuple[Shard, Tensor]]:
        """Each rank's shard, and its part of a target's matrix or bias."""
        key = self._shards[0].whole.groups[target.group].packed.key
        own = share_of_weight(self._weights, kind, key)
        mine = self._shards[0].own.targets[target.slice]
        rows = slice(mine.offset, mine.offset + mine.out_features)
        return [
            (shard, share[rows])
            for shard, share in zip(self._shards, (own, *self._others(kind, key)), strict=True)
        ]


def _place(whole: Tensor, share: Tensor, slices: Sequence[slice]) -> None:
    begin = 0
    for entries in slices:
        end = begin + entries.stop - entries.start
        whole[entries] = share[begin:end].to(whole.device)
        begin = end
