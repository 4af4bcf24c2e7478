"""Adapter memory as kernels see it, and the interface of a LoRA backend.

Shapes: T token rows of a step, N sampled rows, S slots, G groups, L slices (targets), I inputs,
O outputs of a group, V vocabulary, R the summed ranks of a group's slices, P pairs of a token and
one of its experts.

For every row t with slot[t] >= 0, every backend computes, per slice of a group,

    y[t, slice] += (x[t] @ A[slot[t]]^T) @ B[slot[t], slice]^T

with the adapter's scale folded into B. Where adapters are fully sharded over ranks
(`weft.core.shards`), A is for some columns of x, B for some of y, and `x A^T` is the sum over all
ranks' parts. Rows with slot -1 are left untouched. Rows of a step are
ordered by slot (base rows first), so that the rows of one adapter are one segment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.core.targets import ImageLayout, TargetTable, aligned
from weft.kernels.activations import Activation
from weft.kernels.checksum import checksum
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.linear import Weight
from weft.kernels.ops import Product

SCRATCH_BYTES = 32 << 20
"""Scratch memory to move an image, piece by piece, whose old and new place overlap."""

Relocation = tuple[int, int, int, int]
"""(slot, source, dest, size): an image's place in the arena, its new one, and its elements."""


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
    columns: slice
    """The columns of x that A is for."""
    sums_ranks: bool
    """Whether x A^T is summed over ranks."""
    slices: tuple[SliceView, ...]


class AdapterPool:
    """Device memory for adapters: one flat arena and the tables that find images in it.

    The worker allocates it once; residency decides which extent belongs to which slot and calls
    `write`, `move`, `install` and `clear`. `a_offset_SG` and `b_offset_SL` hold absolute element
    offsets into the arena (-1: absent), `rank_SL` the rank per slice (0: absent).

    On CUDA, `move`, `install` and `clear` are queued on the current stream, where steps are, and
    wait for nothing; `write` has a stream of its own. On a CPU they are done when they return, and
    `move` is to be called where steps run. Slots that a step in flight uses may be moved, but
    neither installed nor cleared.
    """

    def __init__(
        self,
        table: TargetTable,
        num_elements: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: whether a row's results must not depend on other rows, to the bit."""
        self.table = table
        self.deterministic = deterministic
        self.ranks = ranks
        self.num_slots = num_slots
        self.arena = torch.empty(num_elements, dtype=dtype, device=device)
        groups, slices = len(table.groups), len(table.targets)
        self.a_offset_SG = torch.full((num_slots, groups), -1, dtype=torch.int64, device=device)
        self.b_offset_SL = torch.full((num_slots, slices), -1, dtype=torch.int64, device=device)
        self.rank_SL = torch.zeros((num_slots, slices), dtype=torch.int32, device=device)
        self.generation = [0] * num_slots
        """Counts installs per slot, by which data derived from a slot are recognised as stale."""
        self.num_changes = 0
        """The same count for all slots together."""
        self._scratch = self.arena.new_empty(
            min(num_elements, SCRATCH_BYTES // self.arena.element_size())
        )
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        """Guards what a slot holds: on a CPU, a slot may be cleared while its move is under way."""
        self._placed: list[tuple[int, ImageLayout] | None] = [None] * num_slots
        self._views: list[dict[tuple[int, int], GroupView | None]] = [{} for _ in range(num_slots)]

    @property
    def element_bytes(self) -> int:
        return self.arena.element_size()

    def write(self, start: int, data: Tensor) -> int:
        """Copy an image (1-D) to the arena, and wait for it. Returns the checksum of the copy. For
        any thread; nothing may read that extent meanwhile."""
        extent = self.arena[start : start + data.numel()]
        if self._copies is None:
            extent.copy_(data)
            return int(checksum(extent))
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        found = torch.empty((), dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._copies):
            extent.copy_(data, non_blocking=True)
            found.copy_(checksum(extent), non_blocking=True)
            done.record(self._copies)
        done.synchronize()
        return int(found)

    def move(self, moves: Sequence[Relocation]) -> None:
        """Copy images within the arena, one after the other, and update their slots' offsets. An
        image's old and new place may overlap."""
        for _, source, dest, size in moves:
            self._copy_within(source, dest, size)
        with self._lock:
            for slot, source, dest, _ in moves:
                placed = self._placed[slot]
                if placed is not None and placed[0] == source:
                    self._placed[slot] = (dest, placed[1])
                    self._views[slot] = {}
                    self._shift(slot, dest - source)

    def install(self, slot: int, start: int, layout: ImageLayout) -> None:
        """Make the image at `start` visible to kernels as `slot`, from the next step on."""
        a = [o if o < 0 else start + o for o in layout.a_offset]
        b = [o if o < 0 else start + o for o in layout.b_offset]
        with self._lock:
            self._set(self.a_offset_SG[slot], a)
            self._set(self.b_offset_SL[slot], b)
            self._set(self.rank_SL[slot], layout.rank)
            self._place(slot, (start, layout))

    def clear(self, slot: int) -> None:
        """Forget what `slot` held."""
        with self._lock:
            self.rank_SL[slot].zero_()
            for table in (self.a_offset_SG, self.b_offset_SL):
                table[slot].fill_(-1)
            self._place(slot, None)

    def _place(self, slot: int, placed: tuple[int, ImageLayout] | None) -> None:
        self._placed[slot] = placed
        self._views[slot] = {}
        self.generation[slot] += 1
        self.num_changes += 1

    def _set(self, row: Tensor, values: Sequence[int]) -> None:
        """Set a row of a table from page-locked memory; other copies wait for steps in flight."""
        host = torch.tensor(values, dtype=row.dtype, pin_memory=row.is_cuda)
        row.copy_(host, non_blocking=True)

    def _shift(self, slot: int, by: int) -> None:
        for table in (self.a_offset_SG, self.b_offset_SL):
            row = table[slot]
            row.add_((row >= 0).to(row.dtype), alpha=by)

    def _copy_within(self, source: int, dest: int, size: int) -> None:
        """Copy within the arena as memmove does, piece by piece, so that none is overwritten."""
        if abs(source - dest) >= size:
            self.arena[dest : dest + size].copy_(self.arena[source : source + size])
            return
        step = len(self._scratch)
        starts = range(0, size, step)
        for begin in starts if dest < source else reversed(starts):
            count = min(step, size - begin)
            piece = self._scratch[:count]
            piece.copy_(self.arena[source + begin : source + begin + count])
            self.arena[dest + begin : dest + begin + count].copy_(piece)

    def placed(self, slot: int) -> tuple[int, ImageLayout] | None:
        """Where the image in `slot` begins in the arena, and its layout; None when it is empty."""
        return self._placed[slot]

    def num_elements(self, slot: int) -> int:
        """How many elements the image in `slot` has; 0 when it is empty."""
        placed = self._placed[slot]
        return placed[1].num_elements if placed else 0

    def view(self, slot: int, group: int, expert: int = 0) -> GroupView | None:
        """The matrices of `slot` for `group`, or for one of its experts; None if the adapter does
        not change the group. A of an embedding group is (V, R), of any other (R, I).
        Raises LookupError for a slot that holds nothing: a row must never run with an adapter that
        is not there.
        """
        views = self._views[slot]
        if (group, expert) not in views:
            views[group, expert] = self._make_view(slot, group, expert)
        return views[group, expert]

    def _make_view(self, slot: int, group: int, expert: int) -> GroupView | None:
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
            b_start = start + layout.b_offset[s.slice] + expert * aligned(s.b_features * r)
            b = self._matrix(b_start, s.b_features, r)
            out = s.b_start(self.ranks.rank)
            slices.append(SliceView(b, out, out + s.b_features, r_start, r_start + r))
            r_start += r
        shape = (g.a_features, r_start) if g.kind == "embedding" else (r_start, g.a_features)
        a_start = start + layout.a_offset[group] + expert * aligned(r_start * g.a_features)
        a = self._matrix(a_start, *shape)
        return GroupView(a, g.a_columns(self.ranks.rank), g.sums_ranks, tuple(slices))

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
    """int32 (N,), of the sampled rows. `slot_T` itself if all rows are sampled, both when a graph
    is captured and when it is replayed."""
    sampled_segments: tuple[Segment, ...]


class ExpertStep(Protocol):
    """The part of a step that the experts of a layer call."""

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        """Add the adapters' part to the product of a group of experts."""


class LoraStep(Protocol):
    """The adapters of one step, as layers call them. Methods that take `y` add to it in place.
    Steps inherit from this, so that those without fused kernels have `product` and `start`."""

    def product(
        self, x_TI: Tensor, weight: Weight, bias_O: Tensor | None, group: int
    ) -> Product | None:
        """The whole of a linear layer, by kernels that compute base and adapters together; the
        adapters' part may be pending. None if there are no such kernels for this step or layer:
        then the caller runs `start`, the base product and `linear`."""
        return None

    def gated(
        self,
        x_TI: Tensor,
        weight: Weight,
        bias_O: Tensor | None,
        group: int,
        down: int,
        activation: Activation,
    ) -> Tensor | None:
        """activation(gate) * up of x, (T, F), by kernels that compute base and adapters together;
        `linear` of `down`, the group that reads it, follows. None if there are no such kernels for
        this step or layer: then the caller computes the product and the activation."""
        return None

    def start(self, x_TI: Tensor, group: int) -> None:
        """Begin what can run beside the base product, which is launched next. `linear` of the same
        group follows."""
        return

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        """Add the adapters' part to the base product of the rows."""

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        """Add the adapters' part to the embedding of the tokens `ids`."""

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        """Add the adapters' part to the logits of the sampled rows."""

    def scaled_queries(self, q_THN: Tensor, group: int) -> Tensor:
        """The queries times the adapters' factors of the keys of an absorbed projection (see
        `weft.models.latent_attention`, as for the next two methods); `q_THN` itself if no adapter
        has factors. H heads have keys of size N and values of size V, and latents have size L."""
        return q_THN

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        """Add the adapters' part to the product of the scaled queries with the base's projection to
        keys: A^T (B_K^T q). What adapters add to keys themselves has no effect, as it changes all
        scores of a query alike."""

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        """Add the adapters' part to the product of sums of latents with the base's projection to
        values: B_V (A x)."""

    def pairs(self, expert_TK: Tensor, num_experts: int) -> ExpertStep | None:
        """The adapters' part of a layer's experts for few rows, as `experts` gives it, but for all
        pairs in the order token * K + rank. Numbers below 0, and from `num_experts` on, are of
        experts that are elsewhere, which no adapter changes. What is pending of a product stays
        valid. None if the caller must order the pairs and call `experts`."""
        return None

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        """The adapters' part of a layer's experts, for pairs of a row of the step and an expert,
        int64 (P,) each. They are ordered by expert, then by slot; behind them may be pairs with
        expert -1, which no adapter changes. On a GPU, an operation that does not start early comes
        between this and `linear`, which reads at once what is made here."""


class NormStep(Protocol):
    """The norms of one step's adapters, in place of the base's."""

    def of(self, index: int) -> list[tuple[int, int, Tensor]]:
        """For a norm of the table, (first row, end, weight) of the rows that have their own."""


class VocabularyStep(Protocol):
    """The vocabularies of one step's adapters that are larger than the base's, V."""

    def embedding(self, y_TO: Tensor, ids_T: Tensor) -> None:
        """Overwrite the rows of added tokens in `y` with the adapters' own."""

    def logits(self, y_NV: Tensor, x_NI: Tensor) -> Tensor:
        """The logits of the sampled rows, as wide as the largest vocabulary: minus infinity for
        tokens that are not in a row's own."""


class LoraBackend(Protocol):
    """Computes the deltas of all adapters in a batch. Made once over a pool."""

    def reserve(self, num_rows: int) -> bool:
        """Make room for steps of that many rows. Returns whether steps can then be captured in CUDA
        graphs, to be replayed after a `begin` of as many rows."""

    def begin(self, batch: LoraBatch) -> LoraStep:
        """Prepare one step; the batch has at least one segment."""
