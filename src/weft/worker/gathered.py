"""Gathers weights of the whole model from the ranks, each of which holds a share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.checkpoint.base import BaseWeights, row_squares
from weft.core.shards import Shard
from weft.core.targets import Norm, Target
from weft.models.loading import LoadedModel
from weft.models.weights import Weights


class Part(NamedTuple):
    """A weight, or some of its rows, of which each rank has a part."""

    kind: str
    """matrix, bias or norm."""
    name: str
    """The key of a matrix or bias, or a norm's name. A bias is one of which each rank has some."""
    rows: tuple[int, int] | None = None
    """Which rows of the rank's part are meant; None: all."""

    def of(self, weights: Weights) -> Tensor:
        """One rank's part, in the serving dtype."""
        if self.kind == "matrix":
            found = weights.matrices[self.name].dequantized(weights.dtype)
        else:
            found = (weights.biases if self.kind == "bias" else weights.norms)[self.name]
        return found if self.rows is None else found[slice(*self.rows)]


class OtherShares(Protocol):
    """Asks the other ranks about their parts of a weight. Answers are in the order of the ranks.
    Raises WeftError."""

    def parts(self, part: Part, dtype: torch.dtype) -> Sequence[Tensor]:
        """The parts."""

    def row_squares(self, part: Part, pairs: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        """See `weft.checkpoint.base.row_squares`, of each part. `pairs`: A and B for each rank."""


class GatheredWeights(BaseWeights):
    """The weights of a model that is divided over ranks. One is gathered only when an adapter that
    is packed needs all of its values."""

    def __init__(self, model: LoadedModel, shards: Sequence[Shard], others: OtherShares) -> None:
        """`model`: the first rank's share. `shards`: all ranks'."""
        self._weights = model.weights
        self._shards = shards
        self._others = others

    def weight(self, target: Target) -> Tensor:
        if target.kind == "embedding":
            return self._weights.embed.t()
        target = self._whole(target)
        shape = (target.out_features, target.in_features)
        whole = self._weights.embed.new_empty(shape)
        for shard, share in zip(self._shards, self._all(self._part("matrix", target)), strict=True):
            for rows, entries in _with_entries(shard.weight_rows(target)):
                whole[rows, shard.inputs(target)] = share[entries].to(whole.device)
        return whole

    def row_squares(self, target: Target, a: Tensor, b: Tensor) -> Tensor:
        target, part = self._whole(target), self._part("matrix", target)
        pairs = [
            (a[:, s.inputs(target)], torch.cat([b[rows] for rows in s.weight_rows(target)]))
            for s in self._shards
        ]
        theirs = self._others.row_squares(part, pairs[1:])
        shares = (row_squares(part.of(self._weights), *pairs[0]), *theirs)
        squares = torch.zeros(target.out_features)
        for shard, share in zip(self._shards, shares, strict=True):
            has_all = shard.inputs(target) == slice(0, target.in_features)
            for rows, entries in _with_entries(shard.weight_rows(target)):
                # Several ranks may have the same rows, if each has all columns of them.
                squares[rows] = share[entries] + (0.0 if has_all else squares[rows])
        return squares

    def bias(self, target: Target) -> Tensor | None:
        if not self._shards[0].whole.has_bias(target):
            return None
        if not self._shards[-1].adds_vectors(target):  # then the first rank has all of it
            return self._weights.bias(self._shards[0].own.targets[target.slice])
        whole = self._weights.embed.new_empty(target.out_features)
        for shard, share in zip(self._shards, self._all(self._part("bias", target)), strict=True):
            _place(whole, share, shard.outputs(target))
        return whole

    def norm(self, norm: Norm) -> Tensor:
        own = self._weights.norms[norm.name]
        if len(own) == norm.size:
            return own
        whole = own.new_empty(norm.size)
        for shard, share in zip(self._shards, self._all(Part("norm", norm.name)), strict=True):
            _place(whole, share, shard.norm(norm))
        return whole

    def _whole(self, target: Target) -> Target:
        """The target in the whole model's table, as an adapter may have other tokens."""
        return self._shards[0].whole.targets[target.slice]

    def _part(self, kind: str, target: Target) -> Part:
        """A target's rows of its group's matrix or bias, of which all ranks have as many."""
        mine = self._shards[0].own.targets[target.slice]
        key = self._shards[0].whole.groups[target.group].packed.key
        return Part(kind, key, (mine.offset, mine.offset + mine.out_features))

    def _all(self, part: Part) -> Sequence[Tensor]:
        """All ranks' parts."""
        return (part.of(self._weights), *self._others.parts(part, self._weights.dtype))


def _with_entries(slices: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Yields each slice of a whole weight's rows that a rank has, and which entries of the rank's
    part these rows are."""
    begin = 0
    for rows in slices:
        end = begin + rows.stop - rows.start
        yield rows, slice(begin, end)
        begin = end


def _place(whole: Tensor, share: Tensor, slices: Sequence[slice]) -> None:
    for rows, entries in _with_entries(slices):
        whole[rows] = share[entries].to(whole.device)
