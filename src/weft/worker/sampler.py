"""From logits to tokens, with what the device keeps of running requests for it.

Shapes: see `weft.kernels.sampling`; R rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from weft.kernels.sampling import Bias, Mask, Penalties, SamplingBatch, count_tokens, sample, shape
from weft.worker.inputs import (
    Array,
    Counted,
    PenaltyArrays,
    SamplingArrays,
    ShapingArrays,
    StepInputs,
    part_of,
)

Put = Callable[[Array], Tensor]
"""Brings a host array to the device."""

VocabularyRun = tuple[int, int, int]
"""(first, end, V) of consecutive sampled rows that have a vocabulary of V."""


class Sampler:
    """Owner of the counts of tokens by row, for penalties: as they are kept on the device, a
    step's penalties see the previous step's tokens before the host does. `vocab_size`: the largest
    of any row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, put: Put) -> None:
        self.put = put
        self._counts_RV = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)

    def admit(self, counted: Iterable[Counted]) -> None:
        """Rows that begin with these tokens; before the step that first runs them."""
        put = self.put
        for c in counted:
            count_tokens(self._counts_RV[c.row], put(c.prompt_ids), put(c.output_ids))

    def choose(
        self, logits_NV: Tensor, inputs: StepInputs, runs: Sequence[VocabularyRun] | None = None
    ) -> Tensor:
        """Token ids, int64 (N,), of a step's sampled rows. Steps come in their order. `runs`: of
        all rows; None: they have one vocabulary, as wide as the logits."""
        sampling, shaping = inputs.sampling, inputs.shaping
        if runs is None:
            return self._choose(logits_NV, sampling, shaping)
        parts = [
            self._choose(
                logits_NV[begin:end, :size],
                sampling and part_of(sampling, begin, end),
                shaping and shaping.part(begin, end),
            )
            for begin, end, size in runs
        ]
        return torch.cat(parts)

    def _choose(
        self, logits_NV: Tensor, sampling: SamplingArrays | None, shaping: ShapingArrays | None
    ) -> Tensor:
        batch, put = self._batch(sampling), self.put
        if shaping is None:
            return sample(logits_NV, batch)
        b, penalties, m = shaping.bias, shaping.penalties, shaping.mask
        shaped_NV = shape(
            logits_NV,
            Bias(put(b.sampled_B), put(b.token_B), put(b.value_B)) if b else None,
            self._penalties(penalties, logits_NV.shape[1]) if penalties else None,
            Mask(put(m.sampled_K), put(m.words_KW)) if m else None,
        )
        ids_N = sample(shaped_NV, batch)
        if penalties is not None:
            row_P, ids_P = put(penalties.row_P), ids_N[put(penalties.sampled_P)]
            self._counts_RV[row_P, ids_P] += 1
        return ids_N

    def _penalties(self, arrays: PenaltyArrays, vocab_size: int) -> Penalties:
        put = self.put
        return Penalties(
            put(arrays.sampled_P),
            self._counts_RV[put(arrays.row_P), :vocab_size],
            put(arrays.repetition_P),
            put(arrays.presence_P),
            put(arrays.frequency_P),
        )

    def _batch(self, arrays: SamplingArrays | None) -> SamplingBatch | None:
        if arrays is None:
            return None
        put = self.put
        return SamplingBatch(
            put(arrays.random_M),
            put(arrays.temperature_M),
            None if arrays.top_k_M is None else put(arrays.top_k_M),
            None if arrays.top_p_M is None else put(arrays.top_p_M),
            None if arrays.min_p_M is None else put(arrays.min_p_M),
            put(arrays.seed_M),
            put(arrays.position_M),
        )
