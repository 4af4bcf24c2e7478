"""Turns a plan into the arrays that the forward pass of a step reads.

Shapes: R rows of the batch (one per running request, kept between steps), S sequences and T
tokens of a step, N sampled tokens, B blocks of the longest sequence.

All work is vectorised over the step. Sequences are ordered by adapter slot, base first, so that
the tokens of one adapter are consecutive.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.requests import Pooling
from weft.schedule.masks import FOREVER
from weft.schedule.plan import Admitted, StepPlan
from weft.worker.choosing import (
    Counted,
    Ints,
    SamplingArrays,
    SamplingRows,
    ShapingArrays,
    ShapingRows,
)
from weft.worker.layout import Layout, layout_of

Array = NDArray[np.generic]
Segments = tuple[tuple[int, int, int], ...]
"""(slot, first, end) of consecutive rows."""
Copies = tuple[tuple[int, int], ...]
_POOLINGS: tuple[Pooling | None, ...] = (None, "last", "mean")
_LAST, _MEAN = 1, 2


@dataclass(frozen=True, slots=True)
class PromptArrays:
    """The L positions of prompts, of the T tokens and in their order, that need logits."""

    token_L: Ints
    """The index of the position among the T tokens."""
    target_L: Ints
    """The prompt's next token."""
    slot_L: NDArray[np.int32]
    entries: list[tuple[int, int, int]]
    """(entry of the plan, its positions, alternatives asked for), in order."""

    def segments(self, begin: int, end: int) -> Segments:
        """The segments of the positions [begin, end), counted from `begin`."""
        firsts = np.arange(end - begin)
        return _segments(self.slot_L[begin:end], firsts, firsts + 1)


class PooledRows(NamedTuple):
    """Consecutive rows [first, end) of the T tokens, whose hidden states are summed."""

    entry: int
    """The entry of the plan."""
    first: int
    end: int


class DraftArrays(NamedTuple):
    """The requests for which a step drafts tokens."""

    entries: list[int]
    """The requests' entries of the plan."""
    sample_DG: Ints
    """The indices of each request's samples among the N; if fewer than G, the last is repeated."""
    token_DG: Ints
    """The indices, among the T, of the tokens that these samples come after."""
    guess_DG: Ints
    """(D, G - 1): the guesses; each is right if it equals the sample before it. -1: no guess."""
    block_table_DB: Array
    """int32, each request's blocks, and behind them -1, -2 and so on: numbers of blocks that only
    drafts use, first those of row 0 of the batch, then of row 1."""
    sampling: SamplingArrays | None = None
    """How drafts are chosen, without positions; its rows are indices among D. None: greedily."""


class StepInputs(NamedTuple):
    """Host arrays of one step. None of them is a view of state that later steps change. Successive
    decodes of the same rows share most of these objects."""

    ids_T: Ints
    from_device_T: NDArray[np.bool_] | None
    """Which tokens to take from the last sample of their row; None if none."""
    row_T: Ints
    positions_T: Ints
    slot_mapping_T: Ints
    block_table_SB: NDArray[np.int32]
    seq_lens_S: NDArray[np.int32]
    query_start: list[int]
    slot_T: NDArray[np.int32]
    segments: Segments
    sampled_rows_N: Ints
    """Row of the batch of each sampled token."""
    sampled_tokens_N: Ints
    """The index among the T tokens of each sampled position."""
    slot_N: NDArray[np.int32]
    sampled_segments: Segments
    plan_order_N: Ints
    """The permutation of the sampled tokens into the plan's order."""
    sampling: SamplingArrays | None
    """Without positions, so that successive decodes of the same rows share these arrays."""
    position_M: Ints | None
    """The positions that the tokens of `sampling` will have."""
    shaping: ShapingArrays | None
    counted: tuple[Counted, ...]
    prompt: PromptArrays | None
    num_logprobs_N: Ints | None
    """How many alternatives are asked for; -1: no log-probability. None: no request wants any."""
    state_S: Ints | None = None
    """The recurrent state that each sequence has after the step; None: the model has none."""
    source_S: Ints | None = None
    """The one that each sequence has before the step; None: the same. See `StateRows`."""
    lag_S: Ints | None = None
    """How many right guesses each sequence's state lacks; None: none lacks any."""
    restored: Copies = ()
    """(snapshot, recurrent state): copied before the step."""
    snapshots: Copies = ()  # (recurrent state, snapshot): copied after it
    pooled: tuple[PooledRows, ...] = ()
    next_T: Ints | None = None
    """The token behind each one. If this step samples it, the value here is arbitrary, and replaced
    on the device. None: the model has no head that drafts."""
    drafts: DraftArrays | None = None
    """The requests for which the step drafts tokens; None: there are none."""


@dataclass(frozen=True, slots=True)
class _Mix:
    """The rows of a step, and all that follows from them and not from their positions. Successive
    decodes of the same rows share one."""

    planned: list[int]
    """The rows in the order of the plan."""
    order: Ints
    """The permutation of the plan's entries into the order of the sequences."""
    layout: Layout
    row_S: Ints
    slot_S: NDArray[np.int32]
    row_T: Ints
    first_block_T: Ints
    """Where the blocks of each token's row begin in the table of all rows."""
    slot_T: NDArray[np.int32]
    row_N: Ints
    slot_N: NDArray[np.int32]
    plan_order_N: Ints
    is_shaped: bool
    """Whether anything may change the logits of a row."""
    segments: Segments
    sampled_segments: Segments
    query_start: list[int]
    sampling: SamplingArrays | None
    num_logprobs_N: Ints | None
    state_S: Ints | None
    carried: tuple[Ints, NDArray[np.bool_]] | None = None
    """The token ids and `from_device_T`, once all tokens are known to the device only, as they are
    then in all later steps of these rows."""


class RowState:
    """Host arrays of the running requests, indexed by row, which are kept between steps."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        blocks = -(-max_model_len // block_size)
        self._tokens = np.empty((num_rows, max_model_len), dtype=np.int32)
        self._known = np.zeros(num_rows, dtype=np.int64)
        """How many tokens of a row are in `_tokens`; later ones are known to the device only."""
        self._blocks = np.zeros((num_rows, blocks), dtype=np.int32)
        self._slot = np.full(num_rows, -1, dtype=np.int32)
        self._state = np.full(num_rows, -1, dtype=np.int64)
        self._active_from = np.zeros(num_rows, dtype=np.int64)
        """The position from which on the row's adapter is active."""
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        self._logprobs = np.full(num_rows, -1, dtype=np.int64)
        self._prompt_logprobs = np.full(num_rows, -1, dtype=np.int64)
        self._pooling: NDArray[np.int8] | None = None
        """An index of _POOLINGS; None: no request was pooled so far."""
        self._decodes: _Mix | None = None
        """The _Mix of the last decode-only step, if no row was admitted since."""
        self._sampling = SamplingRows(num_rows, vocab_size)
        self._shaping = ShapingRows(num_rows)

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a plan that is not empty. Call it for all such plans, in their order."""
        counted = tuple(c for c in map(self._admit, plan.admitted) if c is not None)
        for row, index, block in plan.new_blocks:
            self._blocks[row, index] = block
        starts = np.frombuffer(array("Q", plan.starts), np.int64)
        mix = self._mix(plan, starts)
        inputs = self._assemble(mix, starts[mix.order], counted, plan)
        if plan.fed:
            inputs = self._fed(inputs, plan.fed)
        if plan.lags and inputs.state_S is not None:
            inputs = inputs._replace(lag_S=_lags(inputs.state_S, plan.lags))
        if inputs.state_S is not None and not mix.layout.plain:
            return _cut_at_snapshots(inputs, inputs.state_S)
        return inputs

    def _mix(self, plan: StepPlan, starts: Ints) -> _Mix:
        all_sample = all(plan.num_samples)
        plain = all_sample and plan.num_tokens == len(plan.rows)
        last = None if plan.admitted else self._decodes
        if last is not None and plain and last.planned == plan.rows:
            return last
        rows = np.array(plan.rows, dtype=np.int64)
        slot_S = self._slot[rows]
        if not all_sample:  # what samples is at the end of a sequence, where its adapter is active
            slot_S[starts < self._active_from[rows]] = -1
        order = np.argsort(slot_S, kind="stable")
        rows, slot_S = rows[order], slot_S[order]
        layout = layout_of(plan, order, plain)
        row_N, slot_N, state_S = rows[layout.seq_N], slot_S[layout.seq_N], self._state[rows]
        row_T = rows[layout.seq_T]
        segments = sampled_segments = _segments(slot_S, layout.firsts, layout.ends)
        if not plain:
            firsts_N = np.arange(len(slot_N))
            sampled_segments = _segments(slot_N, firsts_N, firsts_N + 1)
        mix = _Mix(
            planned=plan.rows,
            order=order,
            layout=layout,
            row_S=rows,
            slot_S=slot_S,
            row_T=row_T,
            first_block_T=row_T * self._blocks.shape[1],
            slot_T=slot_S[layout.seq_T],
            row_N=row_N,
            slot_N=slot_N,
            plan_order_N=np.argsort(order[layout.seq_N], kind="stable"),
            is_shaped=self._shaping.any(row_N),
            segments=segments,
            sampled_segments=sampled_segments,
            query_start=[0, *layout.ends.tolist()],
            sampling=self._sampling.arrays(row_N),
            num_logprobs_N=self._num_logprobs(row_N),
            state_S=state_S if state_S[0] >= 0 else None,
        )
        self._decodes = mix if plain else last
        return mix

    def _fed(self, inputs: StepInputs, fed: list[tuple[int, int, int]]) -> StepInputs:
        """The inputs with the tokens of `StepPlan.fed`."""
        row, position, token = np.array(fed, dtype=np.int64).T
        self._tokens[row, position] = token
        fed_from = np.full(len(self._known), FOREVER, dtype=np.int64)
        np.minimum.at(fed_from, row, position)
        from_device_T = inputs.positions_T >= self._known[inputs.row_T]
        from_device_T &= inputs.positions_T < fed_from[inputs.row_T]
        ids_T = self._ids(inputs.row_T, inputs.positions_T, from_device_T)
        some = from_device_T if from_device_T.any() else None
        return inputs._replace(ids_T=ids_T, from_device_T=some)

    def _admit(self, a: Admitted) -> Counted | None:
        row, vocab_size = a.row, a.vocab_size or self._vocab_size
        self._tokens[row, : len(a.token_ids)] = a.token_ids
        self._known[row] = len(a.token_ids)
        self._blocks[row, : len(a.blocks)] = a.blocks
        self._slot[row] = a.slot
        self._state[row] = a.state
        self._active_from[row] = a.active_from
        self._num_prompt[row] = a.num_prompt
        self._logprobs[row] = -1 if a.params.logprobs is None else a.params.logprobs
        self._prompt_logprobs[row] = a.num_prompt_logprobs
        if a.pooling is not None and self._pooling is None:
            self._pooling = np.zeros(len(self._known), dtype=np.int8)
        if self._pooling is not None:
            self._pooling[row] = _POOLINGS.index(a.pooling)
        self._sampling.admit(a, vocab_size)
        return self._shaping.admit(a, vocab_size)

    def _assemble(
        self, mix: _Mix, starts: Ints, counted: tuple[Counted, ...], plan: StepPlan
    ) -> StepInputs:
        layout, rows, row_T, size = mix.layout, mix.row_S, mix.row_T, self._block_size
        positions_T, seq_lens, position_N = layout.positions(starts)
        ids_T, from_device_T = mix.carried or self._tokens_at(mix, positions_T)
        index_T = positions_T // size
        block_T = self._blocks.take(mix.first_block_T + index_T)
        return StepInputs(
            ids_T=ids_T,
            from_device_T=from_device_T,
            row_T=row_T,
            positions_T=positions_T,
            slot_mapping_T=(block_T - index_T) * size + positions_T,
            block_table_SB=self._blocks[rows, : -(-int(seq_lens.max()) // size)],
            seq_lens_S=seq_lens.astype(np.int32),
            query_start=mix.query_start,
            slot_T=mix.slot_T,
            segments=mix.segments,
            sampled_rows_N=mix.row_N,
            sampled_tokens_N=layout.token_N,
            slot_N=mix.slot_N,
            sampled_segments=mix.sampled_segments,
            plan_order_N=mix.plan_order_N,
            sampling=mix.sampling,
            position_M=None if mix.sampling is None else position_N[mix.sampling.random_M],
            shaping=self._shaping.arrays(mix.row_N, position_N) if mix.is_shaped else None,
            counted=counted,
            prompt=None if layout.plain else self._prompt(mix, starts),
            num_logprobs_N=mix.num_logprobs_N,
            state_S=mix.state_S,
            restored=_restored(plan.admitted) if plan.admitted else (),
            snapshots=tuple(plan.snapshots),
            pooled=() if self._pooling is None else self._pooled(mix, seq_lens, self._pooling),
        )

    def _tokens_at(self, mix: _Mix, positions_T: Ints) -> tuple[Ints, NDArray[np.bool_] | None]:
        """Token ids, and a mask of those that only the device knows; None: it has none of them."""
        from_device_T = positions_T >= self._known[mix.row_T]
        if not from_device_T.all():
            ids_T = self._ids(mix.row_T, positions_T, from_device_T)
            return ids_T, from_device_T if from_device_T.any() else None
        carried = np.zeros(len(positions_T), dtype=np.int64), from_device_T
        if mix is self._decodes:
            self._decodes = replace(mix, carried=carried)
        return carried

    def _ids(self, row_T: Ints, positions_T: Ints, from_device_T: NDArray[np.bool_]) -> Ints:
        """Token ids; 0 for those that only the device knows."""
        ids_T = self._tokens[row_T, positions_T].astype(np.int64)
        ids_T[from_device_T] = 0
        return ids_T

    def _prompt(self, mix: _Mix, starts: Ints) -> PromptArrays | None:
        """The positions of prompts that are followed by another token of the prompt."""
        rows, firsts = mix.row_S, mix.layout.firsts
        counts = np.minimum(mix.layout.counts, self._num_prompt[rows] - 1 - starts)
        asked = np.flatnonzero((self._prompt_logprobs[rows] >= 0) & (counts > 0))
        if not len(asked):
            return None
        rows, starts, counts, firsts = rows[asked], starts[asked], counts[asked], firsts[asked]
        nth_L = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row_L = np.repeat(rows, counts)
        nums = self._prompt_logprobs[rows].tolist()
        return PromptArrays(
            token_L=np.repeat(firsts, counts) + nth_L,
            target_L=self._tokens[row_L, np.repeat(starts, counts) + nth_L + 1].astype(np.int64),
            slot_L=np.repeat(mix.slot_S[asked], counts),
            entries=list(zip(mix.order[asked].tolist(), counts.tolist(), nums, strict=True)),
        )

    def _pooled(
        self, mix: _Mix, seq_lens: Ints, pooling_R: NDArray[np.int8]
    ) -> tuple[PooledRows, ...]:
        """The rows to pool: all of a sequence's ("mean"), or that of its prompt's end ("last")."""
        pooling, layout = pooling_R[mix.row_S], mix.layout
        is_last = seq_lens == self._num_prompt[mix.row_S]
        found = np.flatnonzero((pooling == _MEAN) | ((pooling == _LAST) & is_last))
        ends = layout.ends[found]
        firsts = np.where(pooling[found] == _MEAN, layout.firsts[found], ends - 1)
        columns = mix.order[found].tolist(), firsts.tolist(), ends.tolist()
        return tuple(map(PooledRows, *columns))

    def _num_logprobs(self, rows: Ints) -> Ints | None:
        asked = self._logprobs[rows]
        return asked if (asked >= 0).any() else None


def _restored(admitted: Iterable[Admitted]) -> Copies:
    return tuple((a.restored, a.state) for a in admitted if a.restored >= 0)


def _cut_at_snapshots(inputs: StepInputs, state_S: Ints) -> StepInputs:
    """The inputs, where a sequence of two parts hands its state over in its snapshot: the first
    part writes the snapshot, which so need not be copied, and the second part reads it. The first
    part has several tokens, unlike a decode that is followed by guesses."""
    counts = np.diff(inputs.query_start)
    second = np.flatnonzero((state_S[1:] == state_S[:-1]) & (counts[:-1] > 1)) + 1
    if not len(second):
        return inputs
    numbers = dict(inputs.snapshots)
    cut = [(i, numbers.pop(int(state_S[i]), int(state_S[i]))) for i in second.tolist()]
    state_S, source_S = state_S.copy(), state_S.copy()
    for i, number in cut:
        state_S[i - 1] = source_S[i] = number
    kept = tuple(numbers.items())
    return inputs._replace(state_S=state_S, source_S=source_S, snapshots=kept)


def _lags(state_S: Ints, lags: list[tuple[int, int]]) -> Ints:
    """`StepInputs.lag_S`: a state's number of missing tokens is at the state's first sequence."""
    lag_S = np.zeros_like(state_S)
    for state, lag in lags:
        lag_S[np.argmax(state_S == state)] = lag
    return lag_S


def _segments(slot_S: NDArray[np.int32], firsts: Ints, ends: Ints) -> Segments:
    """(slot, first, end) of the runs of equal slots, base runs left out."""
    if not len(slot_S) or slot_S[-1] < 0:
        return ()
    edges = np.flatnonzero(np.diff(slot_S)) + 1
    begins = np.concatenate(([0], edges))
    lasts = np.concatenate((edges, [len(slot_S)])) - 1
    runs = zip(slot_S[begins].tolist(), firsts[begins].tolist(), ends[lasts].tolist(), strict=True)
    return tuple(run for run in runs if run[0] >= 0)
