"""Causal attention over a paged KV cache, for decodes and chunks of prompts in one batch: a step's
sequences and their cache, which every attention kernel takes.

Shapes: T token rows, S sequences, B blocks of a sequence, H query heads, K key and value heads,
D head dimension. A *slot* is a token's place in the flat cache, `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.numbers import next_power_of_2

Ints = NDArray[np.int32]
T = TypeVar("T")
Positions = TypeVar("Positions", int, Tensor, NDArray[Any])


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer, each (num_blocks, block_size, kv_heads, head_dim). With
    attention to latents, values are the first part of the keys: a view of the same memory, with a
    smaller head_dim."""

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    def without_heads(self) -> KVCache:
        """A cache of the same shape with no heads, for a layer that reads another layer's cache."""
        return KVCache(self.k[:, :, :0], self.v[:, :, :0])


class RowWork(NamedTuple):
    """Which rows of a step go to which kernel, if decodes and chunks of prompts have kernels of
    their own. Padding entries do nothing."""

    num_decodes: int
    pairs: Tensor | None
    """int32 (decodes, 2), sequence and row, -1 for padding; None: all sequences, one row each."""
    tiles: Tensor | None
    """int32 (tiles, 4): sequence, first row, number of rows (0 for padding) and position of the
    first row; None: there are none."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's sequences over the flat token rows. A sequence's query rows are its last tokens,
    consecutive and in order."""

    slot_mapping_T: Tensor
    """int64 (T,), the slot that each row's K and V are written to."""
    block_table_SB: Tensor
    """int32 (S, max blocks of this step); entries past a sequence's end are never read."""
    seq_lens_S: Tensor
    """int32 (S,), context length including this step's tokens."""
    query_start: list[int]
    """The first row of each sequence, and the end: S + 1 numbers on the host."""
    seq_lens: list[int]
    """A copy of `seq_lens_S` on the host."""
    work: RowWork | None = None
    """The work of a captured step, at fixed addresses; the host's lists are then not read."""
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which is called once per step and key, for all layers."""
        found: T | None = self.prepared.get(key)
        if found is None:
            found = self.prepared[key] = make()
        return found


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[list[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """Make a batch from host values, one entry per sequence: rows of this step, context length
    including them, and the blocks that hold it. It is simple rather than fast."""
    query_start = list(accumulate(query_lens, initial=0))
    slots: list[int] = []
    for q, n, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(n - q, n)]
    width = max(map(len, block_tables), default=0)
    padded = [b + [0] * (width - len(b)) for b in block_tables]
    return AttentionBatch(
        slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=device),
        block_table_SB=torch.tensor(padded, dtype=torch.int32, device=device),
        seq_lens_S=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start=query_start,
        seq_lens=seq_lens,
    )


PREFILL_ROWS = 64
"""The fewest rows of a tile of a chunk; each token gives it G = H / K rows, its query heads."""


def tile_rows(num_groups: int) -> int:
    """How many rows a tile has, with `num_groups` query heads of each token."""
    return max(PREFILL_ROWS, next_power_of_2(num_groups))


def row_work(
    query_start: list[int], seq_lens: Sequence[int] | Ints, num_groups: int, num_padding: int = 0
) -> tuple[Ints, Ints]:
    """`RowWork`'s pairs, for the sequences with one row, and tiles, for all others. Rows of padding
    behind the last one are a chunk without context, whose results are zeros."""
    starts = np.array(query_start, dtype=np.int32)
    alone = starts[1:] - starts[:-1] == 1
    decodes = alone.nonzero()[0]
    chunks = [
        (seq, query_start[seq], query_start[seq + 1] - query_start[seq], int(seq_lens[seq]))
        for seq in (~alone).nonzero()[0].tolist()
    ]
    if num_padding:
        chunks.append((0, query_start[-1], num_padding, 0))
    size = tile_rows(num_groups) // num_groups
    tiles = [
        (seq, row + first, min(size, count - first), length - count + first)
        for seq, row, count, length in chunks
        for first in range(0, count, size)
    ]
    tiles.sort(key=lambda tile: -tile[3])  # the longest contexts first, so that none ends last
    pairs = np.stack((decodes, starts[decodes]), 1).astype(np.int32)
    return pairs, np.array(tiles, dtype=np.int32).reshape(-1, 4)


class Attend(Protocol):
    """Attend over each row's own context; this step's K and V are in the cache already."""

    def __call__(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        chunked: bool = False,
        sinks_H: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Returns (T, H, D) in q's dtype, where D is the head_dim of values. Row t, at position p
        of its sequence, attends to the positions from `first_seen` to p, or to all up to p when
        `window` is None. Query head h reads key head h // (H / K). `sinks_H`: a score for each head
        that takes part in its softmax but has no value, so that weights may sum to less than 1.
        `cap`: see `capped`; not together with sinks."""


def first_seen(position: Positions, window: int, chunked: bool) -> Positions:
    """The first position that a row at `position` attends to, which is negative where the window
    begins before the sequence. A window holds the row's own position and those before it. If it is
    `chunked`, it begins at a multiple of its size."""
    return position // window * window if chunked else position - window + 1


def capped(score: Tensor, cap: float | None) -> Tensor:
    """The scores z, or with a cap c `c * tanh(z / c)`, whose magnitude stays below c."""
    return score if cap is None else (score / cap).tanh() * cap


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, batch: AttentionBatch) -> None:
    """Put this step's keys and values into the cache."""
    cache.k.flatten(0, 1).index_copy_(0, batch.slot_mapping_T, k_TKD)
    cache.v.flatten(0, 1).index_copy_(0, batch.slot_mapping_T, v_TKD)


def reference_attend(
    q_THD: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    chunked: bool = False,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The oracle of every `Attend`: one sequence at a time, dense, in fp32."""
    out_THD = q_THD.new_empty((*q_THD.shape[:2], cache.v.shape[-1]))
    groups = q_THD.shape[1] // cache.k.shape[2]
    for s, length in enumerate(batch.seq_lens):
        start, stop = batch.query_start[s], batch.query_start[s + 1]
        blocks = batch.block_table_SB[s, : -(-length // cache.block_size)].long()
        k, v = (
            t[blocks].flatten(0, 1)[:length].float().repeat_interleave(groups, 1)
            for t in (cache.k, cache.v)
        )
        score_HQL = torch.einsum("qhd,lhd->hql", q_THD[start:stop].float(), k) * scale
        score_HQL = capped(score_HQL, cap)
        p = torch.arange(length, device=q_THD.device)
        position_Q1 = p[length - (stop - start) :, None]
        seen_QL = p <= position_Q1
        if window is not None:
            seen_QL &= p >= first_seen(position_Q1, window, chunked)
        score_HQL = score_HQL.masked_fill(~seen_QL, -torch.inf)
        if sinks_H is not None:
            sink_HQ1 = sinks_H.float()[:, None, None].expand(-1, stop - start, 1)
            score_HQL = torch.cat((score_HQL, sink_HQ1), -1)
        weight_HQL = score_HQL.softmax(-1)[..., :length]
        out_THD[start:stop] = torch.einsum("hql,lhd->qhd", weight_HQL, v).to(q_THD.dtype)
    return out_THD
