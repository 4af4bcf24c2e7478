"""The torch backend: matrix products per segment, or one product for all segments of a group.

A segment of many rows (prefill) is worth its own products. With few rows per segment (decode)
the products are tiny and calls cost more than arithmetic; then the matrices of all adapters in
the batch are stacked once,

    v_TR = x_TI @ stack(A)^T             R: the ranks of all adapters in the batch, by slice
    y_TO[t] += v_TR[t, r] * stack(B)[r]  for the ranks r of each row's own adapter

which is a few calls whatever the number of adapters. Adding up rows of a table, each with a weight,
is what torch calls an embedding bag. A stack serves all steps with the same set of adapters; it is
built when a set is met for the second time, within a bound on memory.

Shapes: G tiles of y's columns, W columns of a tile, E entries of a table, X bags.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.collective.base import Ranks
from weft.kernels.linear import DenseWeight, Weight
from weft.kernels.lora.base import AdapterPool, GroupView, LoraBatch, LoraStep, Segment
from weft.kernels.ops import Product

MAX_STACK_BYTES = 256 << 20
MAX_STACKS = 16
FEW_ROWS = 8
"""How many rows a segment has on average, at most, for stacking to be considered."""


class _Bags(NamedTuple):
    """What is added up for each tile of each row; int32."""

    ranks_E: Tensor
    """For each entry, the index of its weight in v, flat."""
    rows_E: Tensor
    """For each entry, its row of B."""
    starts_X: Tensor
    """Where the entries of each bag begin, (T * G,)."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """The matrices of several adapters for one group. Tiles are as wide as they can be if each
    slice is to be whole tiles. B has a row for each tile and each rank of the tile's slice."""

    a_IR: Tensor
    columns: slice | None
    """See `GroupView`, as is `sums_ranks`; None: all."""
    sums_ranks: bool
    b_EW: Tensor
    order: dict[int, int]
    """The place of each slot among the adapters, S."""
    places_3SG: NDArray[np.int32]
    """How many ranks an adapter has in a tile's slice, and where the first of them is in v and in
    B. The others follow it in both."""
    key: bytes
    """Stacks of a set with equal keys have equal places."""

    def bags(self, segments: tuple[Segment, ...]) -> _Bags:
        """The bags of the rows from the first segment on."""
        adapters = [self.order[s.slot] for s in segments]
        places_3TG = self.places_3SG[:, adapters].repeat([s.stop - s.start for s in segments], 1)
        places_3TG[1] += np.arange(places_3TG.shape[1])[:, None] * self.a_IR.shape[1]
        count_X, rank_X, row_X = places_3TG.reshape(3, -1)
        ends_X = count_X.cumsum()
        starts_X = ends_X - count_X
        entry_E = np.arange(ends_X[-1])
        ranks_E, rows_E = (
            entry_E + (first_X - starts_X).repeat(count_X) for first_X in (rank_X, row_X)
        )
        arrays = (torch.from_numpy(array) for array in (ranks_E, rows_E, starts_X))
        return _Bags(*(array.to(self.b_EW.device, torch.int32) for array in arrays))


@dataclass(slots=True)
class _StackSet:
    """Stacks of one set of adapters, by group, filled when first needed."""

    fits: bool
    stacks: dict[int, _Stack | None] = field(default_factory=dict)
    rows: tuple[object, ...] = ()
    """How many rows the last step had, all and sampled ones, and their segments."""
    bags: dict[tuple[bytes, bool], _Bags] = field(default_factory=dict)
    """The bags of the last step's rows, by a stack's key and whether these are the sampled ones."""

    def begin(self, batch: LoraBatch) -> None:
        """Forget the bags unless a step has the same segments of rows as the last one."""
        sizes = len(batch.slot_T), len(batch.slot_N)
        rows = (*sizes, batch.segments, batch.sampled_segments)
        if rows != self.rows:
            self.rows = rows
            self.bags.clear()


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

    def product(
        self, x_TI: Tensor, weight: Weight, bias_O: Tensor | None, group: int
    ) -> Product | None:
        """Compute the adapters' part first, if it is stacked, to which the base's is added without
        a further operation."""
        segments = self._batch.segments
        if self._set is None or segments[0].start or not isinstance(weight, DenseWeight):
            return None
        stack = self._stack(group)
        if stack is None or weight.deterministic or not x_TI.is_cpu:
            return None
        y_TO = self._added(x_TI, stack, segments, sampled=False)
        y_TO.addmm_(x_TI, weight.values_OI.t())
        return Product(y_TO if bias_O is None else y_TO.add_(bias_O))

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._apply(y_TO, x_TI, group, sampled=False)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self._apply(y_NV, x_NI, group, sampled=True)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for slot, start, stop in self._batch.segments:
            if view := self._pool.view(slot, group):
                v_TR = view.a_RI[ids_T[start:stop]]
                y_TO[start:stop].addmm_(v_TR, view.slices[0].b_OR.t())

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        H, N = q_THN.shape[1:]
        for rows, a_RL, b_HOR in self._absorbed(group, H):
            v_HnR = q_THN[rows].transpose(0, 1) @ b_HOR[:, :N]
            y_THL[rows] += (v_HnR @ a_RL).transpose(0, 1)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        H, V = y_THV.shape[1:]
        for rows, a_RL, b_HOR in self._absorbed(group, H):
            v_HnR = (x_THL[rows] @ a_RL.t()).transpose(0, 1)
            y_THV[rows] += (v_HnR @ b_HOR[:, -V:].mT).transpose(0, 1)

    def _absorbed(self, group: int, num_heads: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The rows of each segment whose adapter changes an absorbed projection, its A (R, L), and
        its B by heads (H, N + V, R)."""
        for slot, start, stop in self._batch.segments:
            if view := self._pool.view(slot, group):
                b_OR = view.slices[0].b_OR
                yield slice(start, stop), view.a_RI, b_OR.view(num_heads, -1, b_OR.shape[1])

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
            y += self._added(x, stack, segments, sampled)

    def _stack(self, group: int) -> _Stack | None:
        assert self._set is not None
        if group not in self._set.stacks:
            slots = [s.slot for s in self._batch.segments]
            self._set.stacks[group] = _build_stack(self._pool, slots, group)
        return self._set.stacks[group]

    def _added(
        self, x_TI: Tensor, stack: _Stack, segments: tuple[Segment, ...], sampled: bool
    ) -> Tensor:
        """What is added to the rows from the first segment on, whose inputs are these."""
        assert self._set is not None
        x_TI = x_TI if stack.columns is None else x_TI[:, stack.columns]
        v_TR = torch.mm(x_TI, stack.a_IR)
        if stack.sums_ranks:
            v_TR = self._pool.ranks.sum(v_TR)
        found = self._set.bags.get((stack.key, sampled))
        if found is None:
            found = self._set.bags[stack.key, sampled] = stack.bags(segments)
        weight_E, by_sum = v_TR.view(-1).index_select(0, found.ranks_E), 0
        bags = torch.embedding_bag(
            stack.b_EW, found.rows_E, found.starts_X, False, by_sum, False, weight_E
        )
        return bags[0].view(len(x_TI), -1)


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
    views = [(i, v) for i, slot in enumerate(slots) if (v := pool.view(slot, group))]
    if not views:
        return None
    by_slice: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
    for i, view in views:
        for s in view.slices:
            a_RI = view.a_RI[s.r_start : s.r_stop]
            by_slice.setdefault((s.out_start, s.out_stop), []).append((i, a_RI, s.b_OR))
    target = pool.table.groups[group]
    width = math.gcd(target.out_features, *(edge for edges in by_slice for edge in edges))
    places_3SG = np.zeros((3, len(slots), target.out_features // width), np.int32)
    b: list[Tensor] = []
    num_ranks = num_rows = 0
    for (start, stop), parts in by_slice.items():
        b_OR = torch.cat([b_OR for *_, b_OR in parts], 1)
        b.append(b_OR.view(-1, width, b_OR.shape[1]).transpose(1, 2).flatten(0, 1))
        rows_G = np.arange(num_rows, num_rows + len(b[-1]), b_OR.shape[1])
        for i, a_RI, _ in parts:
            places_3SG[0, i, start // width : stop // width] = len(a_RI)
            places_3SG[1, i, start // width : stop // width] = num_ranks
            places_3SG[2, i, start // width : stop // width] = rows_G
            num_ranks += len(a_RI)
            rows_G += len(a_RI)
        num_rows += len(b[-1])
    a_IR = torch.cat([a_RI for parts in by_slice.values() for _, a_RI, _ in parts]).t().contiguous()
    first = views[0][1]
    return _Stack(
        a_IR,
        None if len(a_IR) == target.in_features else first.columns,
        first.sums_ranks,
        torch.cat(b),
        {slot: i for i, slot in enumerate(slots)},
        places_3SG,
        places_3SG.tobytes(),
    )
