"""Adapter memory as kernels see it, and the interface of a LoRA backend.

Shapes: T token rows of a step, N sampled rows, S slots, G groups, L slices (targets), I inputs,
O outputs of a group, V vocabulary, R the summed ranks of a group's slices.

For every row t with slot[t] >= 0, every backend computes, per slice of a group,

    y[t, slice] += (x[t] @ A[slot[t]]^T) @ B[slot[t], slice]^T

with the adapter's scale folded into B. Rows with slot -1 are left untouched. Rows of a step are
ordered by slot (base rows first), so that the rows of one adapter are one segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.core.targets import ImageLayout, TargetTable


class SliceView(NamedTuple):
    """B of one slice, and where it belongs."""

    b_OR: Tensor
    out_start: int
    out_stop: int
    r_start: int
    r_stop: int


class GroupView(NamedTuple):
    """One adapter's matrices for one group, as views into the arena."""

    a_RI: Tensor
    slices: tuple[SliceView, ...]


class AdapterPool:
    """Device memory for adapters: one flat arena and the tables that find images in it.

    The runner allocates it once; residency decides which extent belongs to which slot and calls
    `write`, `install` and `clear`. `a_offset_SG` and `b_offset_SL` hold absolute element offsets
    into the arena (-1: absent), `rank_SL` the rank per slice (0: absent).
    """

    def __init__(
        self,
        table: TargetTable,
        num_elements: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.table = table
        self.num_slots = num_slots
        self.arena = torch.empty(num_elements, dtype=dtype, device=device)
        groups, slices = len(table.groups), len(table.targets)
        self.a_offset_SG = torch.full((num_slots, groups), -1, dtype=torch.int64, device=device)
        self.b_offset_SL = torch.full((num_slots, slices), -1, dtype=torch.int64, device=device)
        self.rank_SL = torch.zeros((num_slots, slices), dtype=torch.int32, device=device)
        self.generation = [0] * num_slots
        """Counts installs per slot, so that what is derived from a slot can be told stale."""
        self._placed: list[tuple[int, ImageLayout] | None] = [None] * num_slots
        self._views: list[dict[int, GroupView | None]] = [{} for _ in range(num_slots)]

    @property
    def element_bytes(self) -> int:
        return self.arena.element_size()

    def write(self, start: int, data: Tensor) -> None:
        """Copy an image (1-D) to the arena. Any thread; nothing may read that extent."""
        self.arena[start : start + data.numel()].copy_(data, non_blocking=True)

    def install(self, slot: int, start: int, layout: ImageLayout) -> None:
        """Make the image at `start` visible to kernels as `slot`, from the next step on."""
        a = torch.tensor([o if o < 0 else start + o for o in layout.a_offset], dtype=torch.int64)
        b = torch.tensor([o if o < 0 else start + o for o in layout.b_offset], dtype=torch.int64)
        self.a_offset_SG[slot].copy_(a)
        self.b_offset_SL[slot].copy_(b)
        self.rank_SL[slot].copy_(torch.tensor(layout.rank, dtype=torch.int32))
        self._placed[slot] = (start, layout)
        self._views[slot] = {}
        self.generation[slot] += 1

    def clear(self, slot: int) -> None:
        """Forget what `slot` held."""
        self.rank_SL[slot].zero_()
        self.a_offset_SG[slot].fill_(-1)
        self.b_offset_SL[slot].fill_(-1)
        self._placed[slot] = None
        self._views[slot] = {}
        self.generation[slot] += 1

    def num_elements(self, slot: int) -> int:
        """Of the image in `slot`; 0 when it is empty."""
        placed = self._placed[slot]
        return placed[1].num_elements if placed else 0

    def view(self, slot: int, group: int) -> GroupView | None:
        """The matrices of `slot` for `group`; None when it leaves the group alone.

        A of an embedding group is (V, R), of any other (R, I). Raises LookupError for a slot
        that holds nothing: a row must never run with an adapter that is not there.
        """
        views = self._views[slot]
        if group not in views:
            views[group] = self._make_view(slot, group)
        return views[group]

    def _make_view(self, slot: int, group: int) -> GroupView | None:
        placed = self._placed[slot]
        if placed is None:
            raise LookupError(f"slot {slot} holds no adapter")
        start, layout = placed
        if layout.a_offset[group] < 0:
            return None
        g = self.table.groups[group]
        slices: list[SliceView] = []
        r_start = 0
        for s in g.slices:
            r = layout.rank[s.slice]
            if r == 0:
                continue
            b = self._matrix(start + layout.b_offset[s.slice], s.out_features, r)
            stop = s.offset + s.out_features
            slices.append(SliceView(b, s.offset, stop, r_start, r_start + r))
            r_start += r
        shape = (g.in_features, r_start) if g.kind == "embedding" else (r_start, g.in_features)
        a = self._matrix(start + layout.a_offset[group], *shape)
        return GroupView(a, tuple(slices))

    def _matrix(self, start: int, rows: int, columns: int) -> Tensor:
        return self.arena[start : start + rows * columns].view(rows, columns)


class Segment(NamedTuple):
    """Consecutive rows [start, stop) of one slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which rows of a step belong to which slot: all rows, and the sampled rows for the head.

    Segments leave base rows out, are in row order, and each slot has one at most.
    """

    slot_T: Tensor
    """int32 (T,), -1 for base rows."""
    segments: tuple[Segment, ...]
    slot_N: Tensor
    """int32 (N,), of the sampled rows; `slot_T` itself if those are all rows, in a graph and in its
    replays alike."""
    sampled_segments: tuple[Segment, ...]


class LoraStep(Protocol):
    """What a layer calls during one step; each method but `start` adds to `y` in place."""

    def start(self, x_TI: Tensor, group: int) -> None:
        """The input of a linear layer is there, and its base product is about to be launched:
        what can run beside it may begin. `linear` of the same group follows."""
        ...

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None: ...

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None: ...

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        """As `linear`, over the sampled rows."""
        ...


class LoraBackend(Protocol):
    """Computes the deltas of all adapters in a batch. Made once over a pool."""

    def reserve(self, num_rows: int) -> bool:
        """Make room for steps of that many rows. Whether steps can then be captured in CUDA
        graphs, to be replayed after a `begin` of as many rows."""
        ...

    def begin(self, batch: LoraBatch) -> LoraStep:
        """Prepare one step; the batch has at least one segment."""
        ...
