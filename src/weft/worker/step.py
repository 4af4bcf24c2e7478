"""The forward pass of a step, from tensors on the device to logits.

All uses share this one: eager steps, captured steps, the log-probabilities of prompts, and the
check of adapters.

Shapes: T token rows, N sampled rows, R rows of the batch, I hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.lora import LoraBatch, Segment
from weft.models.decoder import Decoder, LayerCache, StepContext
from weft.worker.inputs import Segments


class Carried(NamedTuple):
    """Tokens that earlier steps have sampled, and that only the device knows yet."""

    carried_T: Tensor
    """bool (T,), whether the token is the last one sampled for its row."""
    row_T: Tensor
    """int64 (T,)."""
    last_token_R: Tensor
    """int64 (R,)."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of one step's forward pass, besides weights and caches."""

    ids_T: Tensor
    """int64 (T,)."""
    carried: Carried | None
    sampled_N: Tensor | None
    """int64 (N,), the rows whose logits are computed; None: all of them."""
    context: StepContext


def hidden_states(decoder: Decoder, step: StepTensors, kv: Iterable[LayerCache]) -> Tensor:
    """The states after the final norm, (T, I). Writes the rows' keys, values and states to
    `kv`."""
    ids_T = step.ids_T
    if step.carried is not None:
        carried_T, row_T, last_token_R = step.carried
        ids_T = torch.where(carried_T, last_token_R.index_select(0, row_T), ids_T)
    return decoder.forward(ids_T, step.context, kv)


def logits(decoder: Decoder, step: StepTensors, hidden_TI: Tensor) -> Tensor:
    """The logits of the sampled rows of what `hidden_states` gave, (N, V)."""
    if step.sampled_N is not None:
        hidden_TI = hidden_TI.index_select(0, step.sampled_N)
    return decoder.logits(hidden_TI, step.context)


def lora_batch(
    slot_T: Tensor, segments: Segments, slot_N: Tensor, sampled_segments: Segments
) -> LoraBatch:
    """A step's adapters as kernels take them, from the segments of its inputs."""
    each = sampled = tuple(map(Segment._make, segments))
    if sampled_segments is not segments:
        sampled = tuple(map(Segment._make, sampled_segments))
    return LoraBatch(slot_T, each, slot_N, sampled)
