"""Adapters in the slots of a pool, and batches of rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core.targets import TargetTable, layout_of
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.lora import AdapterPool, LoraBatch, Segment


def empty_pool(
    table: TargetTable,
    ranks: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    share: Ranks = ALONE,
) -> AdapterPool:
    """Adapters of these ranks in slots 0 on, one behind the other, of which all is NaN."""
    layouts = [layout_of(table, each) for each in ranks]
    total = sum(layout.num_elements for layout in layouts)
    pool = AdapterPool(table, total, len(ranks), dtype, torch.device(device), share)
    pool.arena.fill_(torch.nan)
    start = 0
    for slot, layout in enumerate(layouts):
        pool.install(slot, start, layout)
        start += layout.num_elements
    return pool


def random_pool(
    table: TargetTable,
    ranks: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    std: float = 1.0,
) -> AdapterPool:
    """Random adapters in slots 0 on; what lies between their matrices is NaN."""
    pool = empty_pool(table, ranks, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for slot in range(len(ranks)):
        for group in table.groups:
            for expert in range(table.copies(group.kind)):
                if view := pool.view(slot, group.index, expert):
                    for matrix in (view.a_RI, *(s.b_OR for s in view.slices)):
                        values = torch.randn(matrix.shape, generator=generator, device=device)
                        matrix.copy_(std * values)
    return pool


def batch_of(
    slots: Sequence[int], sampled: Sequence[int] | None = None, device: str = "cpu"
) -> LoraBatch:
    """Of rows that lie together by slot; -1 is the base. `sampled`: the slots of the sampled rows;
    None: all rows are sampled."""
    slot_T, segments = _rows_of(slots, device)
    if sampled is None:
        return LoraBatch(slot_T, segments, slot_T, segments)
    return LoraBatch(slot_T, segments, *_rows_of(sampled, device))


def _rows_of(slots: Sequence[int], device: str) -> tuple[torch.Tensor, tuple[Segment, ...]]:
    slots = list(slots)
    segments = [
        Segment(slot, slots.index(slot), slots.index(slot) + slots.count(slot))
        for slot in dict.fromkeys(slots)
        if slot >= 0
    ]
    return torch.tensor(slots, dtype=torch.int32, device=device), tuple(segments)
