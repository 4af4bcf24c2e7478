"""The weights of a model, by the keys of its table and by the names that adapters use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.targets import Norm, Target, TargetTable
from weft.kernels.linear import DenseWeight, Weight
from weft.models.blueprint import EMBED, HEAD


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, in one dtype and on one device; also the
    `weft.checkpoint.base.BaseWeights` of its adapters."""

    table: TargetTable
    matrices: dict[str, Weight]
    """By key, (out, in); the embedding's is (vocab, hidden), the experts' (experts, out, in). A
    tied head is the embedding's tensor."""
    biases: dict[str, Tensor]
    """By key, (out,); there is none where the model lacks it."""
    norms: dict[str, Tensor]
    """By name, (size,)."""

    def dense(self, key: str) -> Tensor:
        """A matrix that is never quantized."""
        matrix = self.matrices[key]
        assert isinstance(matrix, DenseWeight), key
        return matrix.values_OI

    @property
    def embed(self) -> Tensor:
        """(vocab, hidden)"""
        return self.dense(EMBED)

    @property
    def head(self) -> Tensor:
        """(vocab, hidden)"""
        return self.dense(HEAD)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        own = [m for key, m in self.matrices.items() if key != HEAD or not self.table.tied]
        vectors = (*self.biases.values(), *self.norms.values())
        return sum(m.shape.numel() for m in own) + sum(v.numel() for v in vectors)

    def weight(self, target: Target) -> Tensor:
        if target.kind == "embedding":
            return self.embed.t()
        matrix = self.matrices[self.table.groups[target.group].packed.key]
        return _rows(matrix.dequantized(self.dtype), target)

    def bias(self, target: Target) -> Tensor | None:
        bias = self.biases.get(self.table.groups[target.group].packed.key)
        return None if bias is None else _rows(bias, target)

    def norm(self, norm: Norm) -> Tensor:
        return self.norms[norm.name]


def _rows(packed: Tensor, target: Target) -> Tensor:
    """What belongs to a target in its group's matrix or bias."""
    return packed[target.offset : target.offset + target.out_features]
