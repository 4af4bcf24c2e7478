"""Runs a model's own multi-token prediction head behind each step.

All rows of a step go through the head's layer, so that its KV cache has every position that the
base's has: prompts, decodes, guesses. To draft, the device compares a request's guesses with the
step's samples. From the last row whose token was right, the head drafts the next tokens, one after
the other:

    step        rows of    a  b  c  d      b, c and d are guesses, the row of c samples x, not d
    drafts from the row of       c         behind x

A draft is chosen as the base chooses the token at its position, with the same noise, so that drafts
are right nearly as often for random sampling as for greedy. Shapes: see `weft.worker.drafting`; I
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.core.units import NUM_DRAFTS
from weft.kernels.attention import AttentionBatch, KVCache, RowWork
from weft.kernels.sampling import SamplingBatch, sample
from weft.kernels.staging import Staging
from weft.models.layers import StepContext
from weft.models.mtp import MtpHead
from weft.worker.choosing import SamplingArrays
from weft.worker.inputs import StepInputs


class Drafter:
    """Owner of the head's KV cache, whose blocks have the numbers of the base's."""

    def __init__(self, head: MtpHead, cache: KVCache, num_blocks: int, max_model_len: int) -> None:
        """`cache` has `num_blocks` blocks, as the base's cache, and `more_blocks` more for each row
        of the batch."""
        self._head, self._cache = head, cache
        self._num_blocks, self._max_model_len = num_blocks, max_model_len
        self._device = cache.k.device
        self._staging = Staging(0, self._device)

    def run(self, inputs: StepInputs, states_TI: Tensor, ids_N: Tensor | None) -> Tensor | None:
        """Add a step to the head's KV cache, and draft tokens. Returns int64 (D, NUM_DRAFTS), or
        None if nothing is drafted. `states_TI`: the states after the base's last norm. `ids_N`: the
        sampled tokens."""
        assert inputs.next_T is not None
        drafts = inputs.drafts
        sampling = None if drafts is None else drafts.sampling
        next_T, positions_T, place_T, table_SB, lens_S, sampled_N, *of_drafts = (
            self._staging.send_all(
                (
                    inputs.next_T,
                    inputs.positions_T,
                    inputs.slot_mapping_T,
                    inputs.block_table_SB,
                    inputs.seq_lens_S,
                    inputs.sampled_tokens_N,
                    *(() if drafts is None else drafts[1:5]),
                    *(array for array in sampling or () if array is not None),
                )
            )
        )
        if ids_N is not None:
            next_T = next_T.index_copy(0, sampled_N, ids_N)
        attention = AttentionBatch(
            place_T, table_SB, lens_S, inputs.query_start, inputs.seq_lens_S.tolist()
        )
        step = StepContext(positions_T, attention, None, changes_experts=False)
        x_TI = self._head.forward(next_T, states_TI, step, self._cache)
        if drafts is None or ids_N is None:
            return None
        sample_DG, token_DG, guess_DG, table_DB, *parameters = of_drafts
        right_DG = ids_N[sample_DG[:, :-1]] == guess_DG
        num_right_D1 = right_DG.long().cumprod(1).sum(1, keepdim=True)
        last_D = token_DG.gather(1, num_right_D1)[:, 0]
        table_DB = torch.where(table_DB < 0, self._num_blocks - 1 - table_DB, table_DB)
        batch = None if sampling is None else _on_device(sampling, parameters)
        return self._draft(x_TI[last_D], positions_T[last_D], table_DB, batch)

    def _draft(
        self, x_DI: Tensor, position_D: Tensor, table_DB: Tensor, batch: SamplingBatch | None
    ) -> Tensor:
        """Draft int64 (D, NUM_DRAFTS) from the head's states of D rows at these positions."""
        step = self._step(position_D, table_DB)
        drafts: list[Tensor] = []
        for i in range(NUM_DRAFTS):
            if i:
                step = self._step(position_D + i, table_DB)
                x_DI = self._head.forward(drafts[-1], x_DI, step, self._cache)
            logits_DV = self._head.logits(x_DI, step)
            drafts.append(_choose(logits_DV, batch, position_D + 2 + i))
        return torch.stack(drafts, 1)

    def _step(self, position_D: Tensor, table_DB: Tensor) -> StepContext:
        """The context of a step with one row at each of these positions."""
        size = self._cache.block_size
        block_D1 = table_DB.gather(1, (position_D // size)[:, None])
        place_D = block_D1[:, 0].long() * size + position_D % size
        lens_D = (position_D + 1).int()
        num, on_gpu = len(position_D), self._device.type == "cuda"
        attention = AttentionBatch(
            place_D,
            table_DB,
            lens_D,
            list(range(num + 1)),
            [] if on_gpu else lens_D.tolist(),
            RowWork(num, None, None),
        )
        rotated_D = position_D.clamp(max=self._max_model_len - 1)  # what is beyond is not used
        return StepContext(rotated_D, attention, None, changes_experts=False)


def _on_device(sampling: SamplingArrays, parameters: Sequence[Tensor]) -> SamplingBatch:
    """`sampling` with its arrays, as far as they are not None, replaced by `parameters`."""
    each = iter(parameters)
    return SamplingBatch(*(None if array is None else next(each) for array in sampling))  # type: ignore[arg-type]


def _choose(logits_DV: Tensor, batch: SamplingBatch | None, position_D: Tensor) -> Tensor:
    """Choose the tokens at these positions, int64 (D,)."""
    if batch is None:
        return logits_DV.argmax(-1)
    return sample(logits_DV, replace(batch, position_M=position_D[batch.random_M]))
