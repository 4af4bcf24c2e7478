"""Builds the inputs of steps behind which a model's own multi-token prediction head drafts.

Shapes: see `weft.worker.inputs`. Tokens are drafted for D requests. For each, the step computes at
most G tokens that sample: the first is known to be right, and the others are guesses.
"""

from __future__ import annotations

import numpy as np

from weft.core.units import NUM_DRAFTS
from weft.schedule.plan import StepPlan
from weft.worker.choosing import Ints
from weft.worker.inputs import Array, DraftArrays, RowState, StepInputs


def more_blocks(block_size: int) -> int:
    """How many blocks, beyond its own, the drafts of a request may take."""
    return -(-(NUM_DRAFTS - 1) // block_size)


class DraftingRows(RowState):
    """The RowState of a model whose multi-token prediction head drafts."""

    def build(self, plan: StepPlan) -> StepInputs:
        inputs = super().build(plan)
        behind_T = np.minimum(inputs.positions_T + 1, self._tokens.shape[1] - 1)
        next_T = self._tokens[inputs.row_T, behind_T].astype(np.int64)
        drafts = self._draft_arrays(inputs, plan) if plan.drafted else None
        return inputs._replace(next_T=next_T, drafts=drafts)

    def _draft_arrays(self, inputs: StepInputs, plan: StepPlan) -> DraftArrays:
        entries, places = zip(*plan.drafted, strict=True)
        rows = np.array([plan.rows[entry] for entry in entries], dtype=np.int64)
        row_N = inputs.sampled_rows_N
        counts = np.bincount(row_N, minlength=len(self._blocks))[rows]
        first_R = np.zeros(len(self._blocks), dtype=np.int64)
        first_R[row_N[::-1]] = np.arange(len(row_N))[::-1]  # the samples of a row are consecutive
        nth_G = np.arange(counts.max())
        sample_DG = first_R[rows][:, None] + np.minimum(nth_G, counts[:, None] - 1)
        token_DG = inputs.sampled_tokens_N[sample_DG]
        is_guess_DG = nth_G[1:] < counts[:, None]
        return DraftArrays(
            list(entries),
            sample_DG,
            token_DG,
            np.where(is_guess_DG, inputs.ids_T[token_DG[:, 1:]], -1),
            self._tables(rows, np.array(places, dtype=np.int64) // self._block_size),
            self._sampling.arrays(rows, self._vocab_size),
        )

    def _tables(self, rows: Ints, num_blocks_D: Ints) -> Array:
        """`DraftArrays.block_table_DB` of these rows, each of which holds `num_blocks_D` blocks."""
        num_more = more_blocks(self._block_size)
        table_DB = np.zeros((len(rows), num_blocks_D.max() + num_more), dtype=np.int32)
        width = min(table_DB.shape[1], self._blocks.shape[1])
        table_DB[:, :width] = self._blocks[rows, :width]
        for i in range(num_more):
            table_DB[np.arange(len(rows)), num_blocks_D + i] = -1 - i - num_more * rows
        return table_DB
