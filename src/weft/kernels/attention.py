"""Causal attention over a paged KV cache, for decodes and chunks of prefill in one batch.

Shapes: T token rows, S sequences, B blocks of a sequence, H query heads, K key and value heads,
D head dimension. Within one padded bucket: P sequences,
Q query rows each, L context tokens each. A *slot* is a token's place in the flat cache,
`block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer, each (num_blocks, block_size, kv_heads, head_dim)."""

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[1]


class RowWork(NamedTuple):
    """Which rows of a step go to which kernel, where decodes and chunks of prompts have their own.
    Entries in excess do nothing."""

    num_decodes: int
    pairs: Tensor | None
    """int32 (decodes, 2), sequence and row, -1 in excess; None: all sequences, each with its one
    row."""
    tiles: Tensor | None
    """int32 (tiles, 4): sequence, first row, number of rows (0 in excess) and position of the
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
    """S + 1, first row of each sequence (host)."""
    seq_lens: list[int]
    """S (host copy of `seq_lens_S`)."""
    work: RowWork | None = None
    """At fixed places, of a step that is captured; then the host's lists are not read."""
    prepared: dict[Hashable, object] = field(default_factory=dict, repr=False, compare=False)
    """What a backend derives from the batch once per step, for all layers."""


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[list[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """A batch from host values, one entry per sequence: rows of this step, context length
    including them, and the blocks that hold it. Simple rather than fast."""
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
"""Rows of a tile of a chunk, at least: G = H / K query heads of each of its tokens."""


def tile_rows(num_groups: int) -> int:
    """Rows of a tile, with G heads of each token."""
    return max(PREFILL_ROWS, 1 << (num_groups - 1).bit_length())


def row_work(
    query_start: list[int], seq_lens: Sequence[int] | Ints, num_groups: int, num_padding: int = 0
) -> tuple[Ints, Ints]:
    """Pairs of the sequences that have one row, and tiles of the others, as `RowWork` has them.
    Rows of padding behind the last one are a chunk with no context, which gives zeros."""
    starts = np.array(query_start, dtype=np.int32)
    counts = np.diff(starts)
    decodes = np.flatnonzero(counts == 1)
    chunks = [
        (seq, query_start[seq], int(counts[seq]), int(seq_lens[seq]))
        for seq in np.flatnonzero(counts > 1).tolist()
    ]
    if num_padding:
        chunks.append((0, query_start[-1], num_padding, 0))
    size = tile_rows(num_groups) // num_groups
    tiles = [
        (seq, row + first, min(size, count - first), length - count + first)
        for seq, row, count, length in chunks
        for first in range(0, count, size)
    ]
    tiles.sort(key=lambda tile: -tile[3])  # the longest contexts first: none is left for the end
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
    ) -> Tensor:
        """(T, H, D), in q's dtype. Row t, at position p of its sequence, attends to the positions
        in (p - window, p], or to all up to p when `window` is None. Query head h reads key head
        h // (H / K)."""
        ...


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
) -> Tensor:
    """The oracle of every `Attend`: one sequence at a time, dense, in fp32."""
    out_THD = torch.empty_like(q_THD)
    groups = q_THD.shape[1] // cache.k.shape[2]
    for s, length in enumerate(batch.seq_lens):
        start, stop = batch.query_start[s], batch.query_start[s + 1]
        blocks = batch.block_table_SB[s, : -(-length // cache.block_size)].long()
        k, v = (
            t[blocks].flatten(0, 1)[:length].float().repeat_interleave(groups, 1)
            for t in (cache.k, cache.v)
        )
        score_HQL = torch.einsum("qhd,lhd->hql", q_THD[start:stop].float(), k) * scale
        p = torch.arange(length, device=q_THD.device)
        distance_QL = p[length - (stop - start) :, None] - p
        seen_QL = distance_QL >= 0
        if window is not None:
            seen_QL &= distance_QL < window
        weight_HQL = score_HQL.masked_fill(~seen_QL, -torch.inf).softmax(-1)
        out_THD[start:stop] = torch.einsum("hql,lhd->qhd", weight_HQL, v).to(q_THD.dtype)
    return out_THD


def torch_attend(
    q_THD: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """An `Attend` of plain torch operations: gather, pad, scaled_dot_product_attention.

    Sequences of like size share a padded bucket. What that takes (indices, masks) is made once
    per step and window; in a step of decodes only, a layer costs two gathers and one attention.
    """
    plan = _plan_of(batch, cache.block_size, window, q_THD.dtype)
    k_XKD, v_XKD = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    outs = [_attend(q_THD, k_XKD, v_XKD, bucket, scale) for bucket in plan.buckets]
    out_YHD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_YHD if plan.order_T is None else out_YHD.index_select(0, plan.order_T)


class _Bucket(NamedTuple):
    """Sequences computed together, padded to Q query rows and L context tokens.

    A padded query row repeats the sequence's last one. A padded context token repeats one of the
    sequence's own: what other sequences left in the cache, NaN perhaps, is never read.
    """

    shape: tuple[int, int, int]
    """(P, Q, L)"""
    rows_X: Tensor | None
    """int64 (P * Q,), the query rows; None: all rows of the step in their order, Q = 1."""
    slots_X: Tensor
    """int32 (P * L,), slots of the context."""
    mask_P1QL: Tensor
    """0 where a query sees a context token, -inf where not; in the dtype of q."""


class _Plan(NamedTuple):
    buckets: list[_Bucket]
    order_T: Tensor | None
    """int64 (T,), where each row's result is among the buckets' results; None: in order."""


def _attend(q_THD: Tensor, k_XKD: Tensor, v_XKD: Tensor, bucket: _Bucket, scale: float) -> Tensor:
    """The bucket's results, (P * Q, H, D)."""
    P, Q, L = bucket.shape
    H, D = q_THD.shape[1:]
    K = k_XKD.shape[1]
    q = q_THD if bucket.rows_X is None else q_THD.index_select(0, bucket.rows_X)
    k = k_XKD.index_select(0, bucket.slots_X).view(P, L, K, D).transpose(1, 2)
    v = v_XKD.index_select(0, bucket.slots_X).view(P, L, K, D).transpose(1, 2)
    attend = partial(F.scaled_dot_product_attention, attn_mask=bucket.mask_P1QL, scale=scale)
    if Q == 1:
        # The query heads of one key head stand in for query rows: K and V are read once.
        return attend(q.reshape(P, K, H // K, D), k, v).reshape(P, H, D)
    q = q.reshape(P, Q, H, D).transpose(1, 2)
    return attend(q, k, v, enable_gqa=H != K).transpose(1, 2).reshape(P * Q, H, D)


def _plan_of(
    batch: AttentionBatch, block_size: int, window: int | None, dtype: torch.dtype
) -> _Plan:
    key = ("torch", block_size, window, dtype)
    plan = batch.prepared.get(key)
    if plan is None:
        plan = batch.prepared[key] = _make_plan(batch, block_size, window, dtype)
    assert isinstance(plan, _Plan)
    return plan


def _make_plan(
    batch: AttentionBatch, block_size: int, window: int | None, dtype: torch.dtype
) -> _Plan:
    start = batch.query_start
    queries = [b - a for a, b in pairwise(start)]
    contexts = batch.seq_lens
    if window is not None:
        contexts = [min(n, q + window - 1) for n, q in zip(contexts, queries, strict=True)]
    make = partial(_make_bucket, batch, queries, contexts, block_size, window, dtype)
    groups = _group(queries, contexts)
    if len(groups) == 1 and start[-1] == len(queries):
        return _Plan([make(None)], None)
    order = [0] * start[-1]
    end = 0
    for seqs in groups:
        width = max(queries[s] for s in seqs)
        for s in seqs:
            order[start[s] : start[s + 1]] = range(end, end + queries[s])
            end += width
    device = batch.block_table_SB.device
    return _Plan([make(seqs) for seqs in groups], torch.tensor(order, device=device))


SPLIT_ROWS = 2048
"""Rows of padding that must be saved before decodes are computed as two buckets."""


def _group(queries: list[int], contexts: list[int]) -> list[list[int]]:
    """Sequences to pad together. Decodes: one group, or two when contexts differ much. Prefill:
    groups that differ less than twofold in query rows and in context (small ones don't count)."""
    decodes: list[int] = []
    prefills: dict[tuple[int, int], list[int]] = {}
    for s, (q, n) in enumerate(zip(queries, contexts, strict=True)):
        if q == 1:
            decodes.append(s)
        else:
            size = (max(q - 1, 15).bit_length(), max(n - 1, 63).bit_length())
            prefills.setdefault(size, []).append(s)
    return _split(decodes, contexts) + list(prefills.values())


def _split(decodes: list[int], contexts: list[int]) -> list[list[int]]:
    if not decodes:
        return []
    longest = max(contexts[s] for s in decodes)
    if longest * len(decodes) <= SPLIT_ROWS:
        return [decodes]
    short = [s for s in decodes if contexts[s] * 4 <= longest]
    if not short or len(short) * (longest - max(contexts[s] for s in short)) <= SPLIT_ROWS:
        return [decodes]
    return [short, [s for s in decodes if contexts[s] * 4 > longest]]


def _make_bucket(
    batch: AttentionBatch,
    queries: list[int],
    contexts: list[int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    seqs: list[int] | None,
) -> _Bucket:
    """`seqs` None: all sequences of the step, each with one query row."""
    device = batch.block_table_SB.device
    table_PB, lens_P1 = batch.block_table_SB, batch.seq_lens_S[:, None].long()
    if seqs is None:
        width, length = 1, max(contexts)
        rows_X, position_PQ, first_P1 = None, lens_P1 - 1, lens_P1 - 1
    else:
        width, length = max(queries[s] for s in seqs), max(contexts[s] for s in seqs)
        host = [(s, batch.query_start[s], queries[s]) for s in seqs]
        seq_P, start_P, num_P = torch.tensor(host, device=device).unbind(1)
        table_PB, lens_P1 = table_PB.index_select(0, seq_P), lens_P1.index_select(0, seq_P)
        query_PQ = torch.arange(width, device=device).minimum(num_P[:, None] - 1)
        rows_X = (start_P[:, None] + query_PQ).flatten()
        first_P1 = lens_P1 - num_P[:, None]
        position_PQ = first_P1 + query_PQ
    context_PL, slots_X = _context(table_PB, lens_P1, first_P1, length, block_size, window)
    hidden_PQL = context_PL[:, None, :] > position_PQ[:, :, None]
    if window is not None:
        hidden_PQL |= context_PL[:, None, :] <= position_PQ[:, :, None] - window
    mask_PQL = torch.zeros(hidden_PQL.shape, dtype=dtype, device=device)
    mask_PQL.masked_fill_(hidden_PQL, -torch.inf)
    return _Bucket((len(lens_P1), width, length), rows_X, slots_X, mask_PQL[:, None])


def _context(
    table_PB: Tensor,
    lens_P1: Tensor,
    first_P1: Tensor,
    length: int,
    block_size: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Positions (P or 1, L) that a bucket gathers, counted on past a sequence's end, and their
    slots, flat. `first_P1` is the position of each sequence's first query."""
    device = table_PB.device
    offsets = torch.arange(block_size, dtype=torch.int32, device=device)
    if window is None:
        table_PB = table_PB[:, : -(-length // block_size)]
    slots_PN = (table_PB[:, :, None] * block_size + offsets).flatten(1)
    positions_PL = torch.arange(length, device=device)[None]
    if window is None:
        slots_PL = slots_PN[:, :length].where(positions_PL < lens_P1, slots_PN[:, :1])
    else:
        positions_PL = positions_PL + (first_P1 - window + 1).clamp_(min=0)
        slots_PL = slots_PN.gather(1, positions_PL.minimum(lens_P1 - 1))
    return positions_PL, slots_PL.flatten()
