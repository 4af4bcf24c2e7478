"""The torch backend: matrix products per segment, or one product for all segments of a group.

A segment of many rows (prefill) is worth its own products. With few rows per segment (decode)
the products are tiny and calls cost more than arithmetic; then the matrices of all adapters in
the batch are stacked once,

    v_TR = x_TI @ stack(A)^T               R: the ranks of all adapters in the batch, by slice
    v_TR *= owner(R) == slot(T)            each row keeps the columns of its own adapter
    y_TO[slice] += v_TR[slice] @ stack(B)  for each slice

which is a few calls whatever the number of adapters. A stack serves all steps with the same set
of adapters; it is built when a set is met for the second time, within a bound on memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.collective.base import Ranks
from weft.kernels.lora.base import AdapterPool, GroupView, LoraBatch, LoraStep, Segment

MAX_STACK_BYTES = 256 << 20
MAX_STACKS = 16
FEW_ROWS = 8
"""How many rows a segment has on average, at most, for stacking to be considered."""


class _StackedSlice(NamedTuple):
    """B of several adapters for one slice."""

    outputs: slice | None
    """The columns of y that it is for; None, as for `ranks`: all."""
    ranks: slice | None
    """The columns of v that it multiplies."""
    b_RO: Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """The matrices of several adapters for one group. `owner_R` is the slot of each column."""

    a_IR: Tensor
    columns: slice | None
    """See `GroupView`, as is `sums_ranks`; None: all."""
    sums_ranks: bool
    slices: tuple[_StackedSlice, ...]
    owner_R: Tensor
    key: str
    """Stacks with equal keys have equal owners."""


@dataclass(slots=True)
class _StackSet:
    """Stacks of one set of adapters, by group, filled when first needed."""

    fits: bool
    stacks: dict[int, _Stack | None] = field(default_factory=dict)
    rows: tuple[object, ...] = ()
    """How many rows the last step had, all and sampled ones, and their segments."""
    masks: dict[tuple[str, bool], Tensor] = field(default_factory=dict)
    """Those of the last step's rows, by a stack's key and whether they are the sampled ones."""

    def begin(self, batch: LoraBatch) -> None:
        """Forget the masks if a step has its rows elsewhere than the last one."""
        sizes = len(batch.slot_T), len(batch.slot_N)
        rows = (*sizes, batch.segments, batch.sampled_segments)
        if rows != self.rows:
            self.rows = rows
            self.masks.clear()


class GroupedBackend:
    """LoraBackend in plain torch, for any device."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._sets: OrderedDict[tuple[tuple[int, int], ...], _StackSet] = OrderedDict()

    def reserve(self, num_rows: int) -> bool:
        return False

    def begin(self, batch: LoraBatch) -> GroupedStep:
        return GroupedStep(self._pool, batch, self._stack_set(batch))

    def _stack_set(self, batch: LoraBatch) -> _StackSet | None:
        """The set whose stacks to use; None when products per segment are better."""
        segments = batch.segments
        rows = sum(s.stop - s.start for s in segments)
        if len(segments) < 2 or rows > FEW_ROWS * len(segments):
            return None
        key = tuple((s.slot, self._pool.generation[s.slot]) for s in segments)
        found = self._sets.get(key)
        if found is None:
            self._sets[key] = _StackSet(fits=self._fits(segments))
            if len(self._sets) > MAX_STACKS:
                self._sets.popitem(last=False)
            return None
        self._sets.move_to_end(key)
        return found if found.fits else None

    def _fits(self, segments: tuple[Segment, ...]) -> bool:
        """Whether stacks of these slots stay in bounds."""
        elements = sum(self._pool.num_elements(s.slot) for s in segments)
        return elements * self._pool.element_bytes <= MAX_STACK_BYTES // MAX_STACKS


class GroupedStep(LoraStep):
    """LoraStep of the torch backend."""

    def __init__(self, pool: AdapterPool, batch: LoraBatch, stacks: _StackSet | None) -> None:
        self._pool = pool
        self._batch = batch
        self._set = stacks
        if stacks is not None:
            stacks.begin(batch)

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._apply(y_TO, x_TI, group, sampled=False)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self._apply(y_NV, x_NI, group, sampled=True)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for slot, start, stop in self._batch.segments:
            if view := self._pool.view(slot, group):
                v_TR = view.a_RI[ids_T[start:stop]]
                y_TO[start:stop].addmm_(v_TR, view.slices[0].b_OR.t())

    def experts(self, token_P: Tensor, expert_P: Tensor) -> GroupedExperts:
        pair_P2 = torch.stack((expert_P, self._batch.slot_T[token_P].to(expert_P.dtype)), 1)
        pairs, counts = torch.unique_consecutive(pair_P2, dim=0, return_counts=True)
        ends = counts.cumsum(0).tolist()
        runs = zip(pairs.tolist(), [0, *ends], ends, strict=False)
        return GroupedExperts(
            self._pool,
            [(e, Segment(slot, *rows)) for (e, slot), *rows in runs if min(e, slot) >= 0],
        )

    def _apply(self, y: Tensor, x: Tensor, group: int, *, sampled: bool) -> None:
        segments = self._batch.sampled_segments if sampled else self._batch.segments
        if not segments:
            return
        if self._set is None:
            _per_segment(self._pool, segments, y, x, group)
            return
        stack = self._stack(group)
        if stack is not None:
            first = segments[0].start
            if first:
                x, y = x[first:], y[first:]
            v_TR = torch.mm(_columns(x, stack.columns), stack.a_IR)
            if stack.sums_ranks:
                v_TR = self._pool.ranks.sum(v_TR)
            v_TR.mul_(self._mask(stack, first, sampled))
            for outputs, ranks, b_RO in stack.slices:
                _columns(y, outputs).addmm_(_columns(v_TR, ranks), b_RO)

    def _stack(self, group: int) -> _Stack | None:
        assert self._set is not None
        if group not in self._set.stacks:
            slots = [s.slot for s in self._batch.segments]
            self._set.stacks[group] = _build_stack(self._pool, slots, group)
        return self._set.stacks[group]

    def _mask(self, stack: _Stack, first: int, sampled: bool) -> Tensor:
        assert self._set is not None
        masks = self._set.masks
        found = masks.get((stack.key, sampled))
        if found is None:
            slot = self._batch.slot_N if sampled else self._batch.slot_T
            found = (slot[first:, None] == stack.owner_R).to(stack.a_IR.dtype)
            masks[stack.key, sampled] = found
        return found


class GroupedExperts:
    """ExpertStep of the torch backend: products per run of rows of one expert and slot."""

    def __init__(self, pool: AdapterPool, runs: list[tuple[int, Segment]]) -> None:
        self._pool = pool
        self._runs = runs

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        for expert, (slot, start, stop) in self._runs:
            if view := self._pool.view(slot, group, expert):
                _add(y_PO[start:stop], x_PI[start:stop], view, self._pool.ranks)


def _per_segment(
    pool: AdapterPool, segments: tuple[Segment, ...], y: Tensor, x: Tensor, group: int
) -> None:
    for slot, start, stop in segments:
        if view := pool.view(slot, group):
            _add(y[start:stop], x[start:stop], view, pool.ranks)


def _add(y_TO: Tensor, x_TI: Tensor, view: GroupView, ranks: Ranks) -> None:
    v_TR = x_TI[:, view.columns] @ view.a_RI.t()
    if view.sums_ranks:
        v_TR = ranks.sum(v_TR)
    for s in view.slices:
        y_TO[:, s.out_start : s.out_stop].addmm_(v_TR[:, s.r_start : s.r_stop], s.b_OR.t())


def _build_stack(pool: AdapterPool, slots: list[int], group: int) -> _Stack | None:
    views = [(slot, v) for slot in slots if (v := pool.view(slot, group))]
    if not views:
        return None
    by_slice: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
    for slot, view in views:
        for s in view.slices:
            a_RI = view.a_RI[s.r_start : s.r_stop]
            by_slice.setdefault((s.out_start, s.out_stop), []).append((slot, a_RI, s.b_OR))
    stacked = [part for parts in by_slice.values() for part in parts]
    a_IR = torch.cat([a_RI for _, a_RI, _ in stacked]).t().contiguous()
    (num_inputs, num_ranks), target = a_IR.shape, pool.table.groups[group]
    slices: list[_StackedSlice] = []
    end = 0
    for outputs, parts in by_slice.items():
        b_RO = torch.cat([b_OR for *_, b_OR in parts], 1).t().contiguous()
        begin, end = end, end + len(b_RO)
        of_y, of_v = _unless_all(*outputs, target.out_features), _unless_all(begin, end, num_ranks)
        slices.append(_StackedSlice(of_y, of_v, b_RO))
    owner = [slot for slot, a_RI, _ in stacked for _ in range(len(a_RI))]
    columns, sums_ranks = views[0][1].columns, views[0][1].sums_ranks
    return _Stack(
        a_IR,
        None if num_inputs == target.in_features else columns,
        sums_ranks,
        tuple(slices),
        torch.tensor(owner, dtype=torch.int32, device=a_IR.device),
        repr(owner),
    )


def _unless_all(start: int, stop: int, size: int) -> slice | None:
    return None if stop - start == size else slice(start, stop)


def _columns(x_TC: Tensor, columns: slice | None) -> Tensor:
    return x_TC if columns is None else x_TC[:, columns]
