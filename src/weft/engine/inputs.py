"""From a plan to arrays: what the forward pass of one step reads.

Shapes: R rows of the batch (one per running request, kept between steps), S sequences and T
tokens of a step, N sampled tokens, B blocks of the longest sequence.

All work is vectorised over the step. Sequences are ordered by adapter slot, base first, so that
the tokens of one adapter are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.engine.plan import Admitted, StepPlan

Ints = NDArray[np.int64]
Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Parameters of the rows, among the sampled ones, that are not greedy (M of N)."""

    random_M: Ints
    temperature_M: NDArray[np.float32]
    top_k_M: Ints | None
    top_p_M: NDArray[np.float32] | None
    seed_M: Ints
    position_M: Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Host arrays of one step; nothing in here aliases state that later steps change."""

    ids_T: Ints
    from_device_T: NDArray[np.bool_] | None
    """Tokens to take from the last sample of their row; None if none are."""
    row_T: Ints
    positions_T: Ints
    slot_mapping_T: Ints
    block_table_SB: NDArray[np.int32]
    seq_lens_S: NDArray[np.int32]
    query_start: list[int]
    slot_T: NDArray[np.int32]
    segments: tuple[tuple[int, int, int], ...]
    sampled_rows_N: Ints
    """Row of the batch of each sampled token."""
    sampled_tokens_N: Ints
    """Index among the T tokens of each sampled position."""
    slot_N: NDArray[np.int32]
    sampled_segments: tuple[tuple[int, int, int], ...]
    plan_order_N: Ints
    """Puts the sampled tokens into the plan's order."""
    sampling: SamplingArrays | None
    num_logprobs_N: Ints | None
    """Alternatives asked for, -1 for none at all; None if nobody asked."""


class RowState:
    """What is kept of running requests between steps, indexed by their row."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        blocks = -(-max_model_len // block_size)
        self._tokens = np.empty((num_rows, max_model_len), dtype=np.int32)
        self._known = np.zeros(num_rows, dtype=np.int64)
        """Tokens in `_tokens`; what comes after them only the device knows."""
        self._blocks = np.zeros((num_rows, blocks), dtype=np.int32)
        self._slot = np.full(num_rows, -1, dtype=np.int32)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.int64)
        self._logprobs = np.full(num_rows, -1, dtype=np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a plan that is not empty; plans are built in their order."""
        for admitted in plan.admitted:
            self._admit(admitted)
        if plan.new_blocks:
            row, index, block = np.array(plan.new_blocks, dtype=np.int64).T
            self._blocks[row, index] = block
        rows = np.array(plan.rows, dtype=np.int64)
        order = np.argsort(self._slot[rows], kind="stable")
        return self._assemble(plan, rows[order], order)

    def _admit(self, a: Admitted) -> None:
        row, params = a.row, a.params
        self._tokens[row, : len(a.token_ids)] = a.token_ids
        self._known[row] = len(a.token_ids)
        self._slot[row] = a.slot
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[row] = params.top_p
        self._seed[row] = a.seed
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def _assemble(self, plan: StepPlan, rows: Ints, order: Ints) -> StepInputs:
        starts = np.array(plan.starts, dtype=np.int64)[order]
        # Which sequences sample, and which sequence each token belongs to. When each sequence has
        # one token and samples, both are the identity, and slices of everything cost nothing.
        sampled: Ints | slice = slice(None)
        seq_T: Ints | slice = slice(None)
        if plan.num_tokens == len(rows) and all(plan.samples):
            seq_lens, positions_T = starts + 1, starts
            ends = np.arange(1, len(rows) + 1)
            firsts = ends - 1
        else:
            counts = np.array(plan.counts, dtype=np.int64)[order]
            sampled = np.flatnonzero(np.array(plan.samples)[order])
            seq_T = np.repeat(np.arange(len(rows)), counts)
            seq_lens = starts + counts
            ends = np.cumsum(counts)
            firsts = ends - counts
            positions_T = np.arange(len(seq_T)) - (firsts - starts)[seq_T]
        row_T = rows[seq_T]
        from_device_T = positions_T >= self._known[row_T]
        block_T = self._blocks[row_T, positions_T // self._block_size].astype(np.int64)
        most_blocks = -(-int(seq_lens.max()) // self._block_size)
        slot_S = self._slot[rows]
        sampled_ends = ends[sampled]
        segments = _segments(slot_S, firsts, ends)
        return StepInputs(
            ids_T=self._ids(row_T, positions_T, from_device_T),
            from_device_T=from_device_T if from_device_T.any() else None,
            row_T=row_T,
            positions_T=positions_T,
            slot_mapping_T=block_T * self._block_size + positions_T % self._block_size,
            block_table_SB=self._blocks[rows, :most_blocks],
            seq_lens_S=seq_lens.astype(np.int32),
            query_start=[0, *ends.tolist()],
            slot_T=slot_S[seq_T],
            segments=segments,
            sampled_rows_N=rows[sampled],
            sampled_tokens_N=sampled_ends - 1,
            slot_N=slot_S[sampled],
            sampled_segments=(
                segments
                if isinstance(sampled, slice)
                else _segments(
                    slot_S[sampled], np.arange(len(sampled)), np.arange(1, len(sampled) + 1)
                )
            ),
            plan_order_N=np.argsort(order[sampled]),
            sampling=self._sampling(rows[sampled], seq_lens[sampled]),
            num_logprobs_N=self._num_logprobs(rows[sampled]),
        )

    def _ids(self, row_T: Ints, positions_T: Ints, from_device_T: NDArray[np.bool_]) -> Ints:
        """Token ids; 0 for those that only the device knows."""
        if from_device_T.all():
            return np.zeros(len(row_T), dtype=np.int64)
        ids_T = self._tokens[row_T, positions_T].astype(np.int64)
        ids_T[from_device_T] = 0
        return ids_T

    def _sampling(self, rows: Ints, positions: Ints) -> SamplingArrays | None:
        random = np.flatnonzero(self._temperature[rows] > 0)
        if not len(random):
            return None
        rows = rows[random]
        top_k, top_p = self._top_k[rows], self._top_p[rows]
        return SamplingArrays(
            random,
            self._temperature[rows],
            np.where(top_k > 0, top_k, self._vocab_size) if top_k.any() else None,
            top_p if (top_p < 1).any() else None,
            self._seed[rows],
            positions[random],
        )

    def _num_logprobs(self, rows: Ints) -> Ints | None:
        asked = self._logprobs[rows]
        return asked if (asked >= 0).any() else None


def _segments(
    slot_S: NDArray[np.int32], firsts: Ints, ends: Ints
) -> tuple[tuple[int, int, int], ...]:
    """(slot, first, end) of the runs of equal slots, base runs left out."""
    if not len(slot_S) or slot_S[-1] < 0:
        return ()
    edges = np.flatnonzero(np.diff(slot_S)) + 1
    begins = np.concatenate(([0], edges))
    lasts = np.concatenate((edges, [len(slot_S)])) - 1
    runs = zip(slot_S[begins].tolist(), firsts[begins].tolist(), ends[lasts].tolist(), strict=True)
    return tuple(run for run in runs if run[0] >= 0)
