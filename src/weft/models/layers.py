"""The layers that adapters can change: linear, embedding and head. Nothing else knows of them.

Shapes: T token rows, N sampled rows, I inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.attention import AttentionBatch
from weft.kernels.lora.base import LoraStep


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the layers need to know of one step beside their input."""

    positions_T: Tensor
    """int64 (T,), of each token within its sequence."""
    attention: AttentionBatch
    lora: LoraStep | None
    """None: no row of this step belongs to an adapter."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`, plus the adapters' part. Packed projections are one layer."""

    weight_OI: Tensor
    bias_O: Tensor | None
    group: int
    """In the model's TargetTable."""

    def __call__(self, x_TI: Tensor, step: StepContext) -> Tensor:
        if step.lora is None:
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        step.lora.start(x_TI, self.group)
        y_TO = F.linear(x_TI, self.weight_OI, self.bias_O)
        step.lora.linear(y_TO, x_TI, self.group)
        return y_TO


@dataclass(frozen=True, slots=True)
class Embedding:
    weight_VO: Tensor
    group: int

    def __call__(self, ids_T: Tensor, step: StepContext) -> Tensor:
        y_TO = F.embedding(ids_T, self.weight_VO)
        if step.lora is not None:
            step.lora.embedding(y_TO, ids_T, self.group)
        return y_TO


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection, over sampled rows; a tied one shares the embedding's tensor."""

    weight_VI: Tensor
    group: int

    def __call__(self, x_NI: Tensor, step: StepContext) -> Tensor:
        y_NV = F.linear(x_NI, self.weight_VI)
        if step.lora is not None:
            step.lora.head(y_NV, x_NI, self.group)
        return y_NV
