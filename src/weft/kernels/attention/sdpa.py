"""Attention by torch's own scaled_dot_product_attention, for any device.

Shapes: as in `weft.kernels.attention`; within one padded bucket P sequences, Q query rows
each, L context tokens each.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.attention import AttentionBatch, KVCache


def torch_attend(
    q_THD: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """An `Attend` of plain torch operations: gather, pad, scaled_dot_product_attention.

    Sequences of like size share a padded bucket. What that takes (indices, masks) is made once
    per step and window; in a step of decodes only, a layer costs two gathers and one attention.
    """
    facts = (cache.block_size, window, q_THD.dtype)
    plan = batch.once(("torch", *facts), partial(_make_plan, batch, *facts))
    k_XKD, v_XKD = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    outs = [_attend(q_THD, k_XKD, v_XKD, bucket, scale, sinks_H) for bucket in plan.buckets]
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


def _attend(
    q_THD: Tensor,
    k_XKD: Tensor,
    v_XKD: Tensor,
    bucket: _Bucket,
    scale: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """The bucket's results, (P * Q, H, D)."""
    P, Q, L = bucket.shape
    H, D = q_THD.shape[1:]
    K, mask = k_XKD.shape[1], bucket.mask_P1QL
    q = q_THD if bucket.rows_X is None else q_THD.index_select(0, bucket.rows_X)
    k = k_XKD.index_select(0, bucket.slots_X).view(P, L, K, D).transpose(1, 2)
    v = v_XKD.index_select(0, bucket.slots_X).view(P, L, K, D).transpose(1, 2)
    if sinks_H is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks_H / scale)
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, scale=scale)
    if Q == 1:
        # The query heads of one key head stand in for query rows: K and V are read once.
        out = attend(q.reshape(P, K, H // K, -1), k, v).reshape(P, H, -1)
    else:
        q = q.reshape(P, Q, H, -1).transpose(1, 2)
        out = attend(q, k, v, enable_gqa=H != K).transpose(1, 2).reshape(P * Q, H, -1)
    return out if sinks_H is None else out[..., :D]


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with one more context token, which every row sees and whose value is zero. One more
    dimension gives it a head's score, and adds nothing to those of the others."""
    q = torch.cat((q, scores_H.to(q.dtype)[:, None].expand(len(q), -1, 1)), -1)
    k = F.pad(k, (0, 1, 0, 1))
    k[:, :, -1, -1] = 1
    return q, k, F.pad(v, (0, 1, 0, 1)), F.pad(mask, (0, 1))


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
"""How many rows of padding must be saved before decodes are computed as two buckets."""


def _group(queries: list[int], contexts: list[int]) -> list[list[int]]:
    """Choose the sequences to pad together. Decodes: one group, or two when contexts differ much.
    Prefill: groups that differ less than twofold in query rows and in context (small ones don't
    count)."""
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
    """Make the bucket of some sequences; `seqs` None: all of the step, each with one query row."""
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
