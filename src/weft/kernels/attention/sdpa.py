"""Attention by torch's own operations, for any device.

Shapes: as in `weft.kernels.attention`; within one padded bucket P sequences, Q query rows
each, L context tokens each; G = H / K query heads of one key head, X any number of entries.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionBatch, KVCache, capped, first_seen

Array = NDArray[Any]


def torch_attend(
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
    """An `Attend` of plain torch operations: gather, pad, scaled_dot_product_attention.

    Sequences of like size share a padded bucket. What that takes (indices, masks) is made once
    per step, window and number of heads. On a CPU, decodes gather keys alone, and add up values
    where they are in the cache.
    """
    assert sinks_H is None or cap is None
    by_head = q_THD.is_cpu and sinks_H is None
    heads = (q_THD.shape[1], cache.k.shape[2]) if by_head else None
    facts = (cache.block_size, window, chunked, heads, q_THD.dtype)
    plan = batch.once(("torch", *facts), partial(_make_plan, batch, *facts))
    outs = [
        _attend_by_head(q_THD, cache, bucket, scale, cap)
        if isinstance(bucket, _Decodes)
        else _attend(q_THD, cache, bucket, scale, sinks_H, cap)
        for bucket in plan.buckets
    ]
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


class _Decodes(NamedTuple):
    """A bucket of decodes whose contexts are found head by head: the keys and values of a slot are
    K rows of D numbers, of which the first is `slot * K`."""

    shape: tuple[int, int, int]
    """(P, 1, L)"""
    rows_X: Tensor | None
    """As in `_Bucket`."""
    keys_X: Tensor
    """int32 (P * K * L,), the rows of each key head's context."""
    values_X: Tensor
    """int32 (P * H * L,), those of each query head's."""
    starts_X: Tensor
    """int32 (P * H,), where each query head's begin in `values_X`."""
    mask_X1L: Tensor
    """fp32 (P * K, 1, L), 0 where a context token is seen, -inf where not."""


class _Plan(NamedTuple):
    buckets: list[_Bucket | _Decodes]
    order_T: Tensor | None
    """int64 (T,), where each row's result is among the buckets' results; None: in order."""


def _attend(
    q_THD: Tensor,
    cache: KVCache,
    bucket: _Bucket,
    scale: float,
    sinks_H: Tensor | None,
    cap: float | None,
) -> Tensor:
    """The bucket's results, (P * Q, H, D)."""
    P, Q, L = bucket.shape
    H = q_THD.shape[1]
    K, mask = cache.k.shape[2], bucket.mask_P1QL
    q = q_THD if bucket.rows_X is None else q_THD.index_select(0, bucket.rows_X)
    k, v = (
        x.flatten(0, 1).index_select(0, bucket.slots_X).view(P, L, K, -1).transpose(1, 2)
        for x in (cache.k, cache.v)
    )
    if sinks_H is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks_H / scale)
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, scale=scale)
    if cap is not None:
        attend = partial(_attend_capped, mask=mask, scale=scale, cap=cap)
    if Q == 1:
        # The query heads of one key head stand in for query rows: K and V are read once.
        out = attend(q.reshape(P, K, H // K, -1), k, v).reshape(P, H, -1)
    else:
        q = q.reshape(P, Q, H, -1).transpose(1, 2)
        out = attend(q, k, v, enable_gqa=H != K).transpose(1, 2).reshape(P * Q, H, -1)
    return out if sinks_H is None else out[..., :-1]


def _attend_capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    cap: float,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of capped scores, in fp32. It takes the heads one by one, so
    that only one head's scores are in memory."""
    outs, groups = [], q.shape[1] // k.shape[1] if enable_gqa else 1
    for head in range(q.shape[1]):
        k_PLD, v_PLD = (x[:, head // groups].float() for x in (k, v))
        score_PQL = capped(q[:, head].float() @ k_PLD.mT * scale, cap) + mask[:, 0]
        outs.append(score_PQL.softmax(-1) @ v_PLD)
    return torch.stack(outs, 1).to(q.dtype)


def _attend_by_head(
    q_THD: Tensor, cache: KVCache, decodes: _Decodes, scale: float, cap: float | None
) -> Tensor:
    """The bucket's results, (P, H, D). Scores are fp32, and a sum of weighted values is what torch
    calls an embedding bag: it reads them where they are in the cache."""
    P, _, L = decodes.shape
    (H, D), K = q_THD.shape[1:], cache.k.shape[2]
    q = q_THD if decodes.rows_X is None else q_THD.index_select(0, decodes.rows_X)
    k_XLD = cache.k.flatten(0, 2).index_select(0, decodes.keys_X).view(P * K, L, D).float()
    q_XGD = q.reshape(P * K, H // K, D).float()
    if cap is None:
        score_XGL = torch.baddbmm(decodes.mask_X1L, q_XGD, k_XLD.mT, alpha=scale)
    else:
        score_XGL = capped(q_XGD @ k_XLD.mT * scale, cap) + decodes.mask_X1L
    weight_X = score_XGL.softmax(-1).to(q.dtype).view(-1)
    v_XD, by_sum = cache.v.flatten(0, 2), 0
    bags = torch.embedding_bag(
        v_XD, decodes.values_X, decodes.starts_X, False, by_sum, False, weight_X
    )
    return bags[0].view(P, H, -1)


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
    batch: AttentionBatch,
    block_size: int,
    window: int | None,
    chunked: bool,
    heads: tuple[int, int] | None,
    dtype: torch.dtype,
) -> _Plan:
    start = batch.query_start
    queries = [b - a for a, b in pairwise(start)]
    contexts = batch.seq_lens
    if window is not None:
        firsts = (
            first_seen(n - q, window, chunked) for n, q in zip(contexts, queries, strict=True)
        )
        contexts = [n - max(first, 0) for n, first in zip(contexts, firsts, strict=True)]
    facts = (block_size, window, chunked, heads, dtype)
    make = partial(_make_bucket, batch, queries, contexts, *facts)
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
    chunked: bool,
    heads: tuple[int, int] | None,
    dtype: torch.dtype,
    seqs: list[int] | None,
) -> _Bucket | _Decodes:
    """Make the bucket of some sequences; `seqs` None: all of the step, each with one query row.
    `heads`: H and K, if decodes are to be found by head."""
    table_PB, lens_P1 = batch.block_table_SB.cpu().numpy(), np.array(batch.seq_lens)[:, None]
    if seqs is None:
        width, length = 1, max(contexts)
        rows_X, position_PQ, first_P1 = None, lens_P1 - 1, lens_P1 - 1
    else:
        width, length = max(queries[s] for s in seqs), max(contexts[s] for s in seqs)
        num_P1 = np.array([queries[s] for s in seqs])[:, None]
        start_P1 = np.array([batch.query_start[s] for s in seqs])[:, None]
        table_PB, lens_P1 = table_PB[seqs], lens_P1[seqs]
        query_PQ = np.minimum(np.arange(width), num_P1 - 1)
        rows_X = (start_P1 + query_PQ).ravel()
        first_P1 = lens_P1 - num_P1
        position_PQ = first_P1 + query_PQ
    begin_P1 = None if window is None else first_seen(first_P1, window, chunked).clip(min=0)
    context_PL, slots_PL = _context(table_PB, lens_P1, begin_P1, length, block_size)
    hidden_PQL = context_PL[:, None] > position_PQ[:, :, None]
    if window is not None:
        hidden_PQL |= context_PL[:, None] < first_seen(position_PQ, window, chunked)[:, :, None]
    mask_PQL = np.where(hidden_PQL, np.float32(-np.inf), np.float32(0))
    shape = (len(lens_P1), width, length)
    put = partial(_put, device=batch.block_table_SB.device)
    rows = None if rows_X is None else put(rows_X)
    if width > 1 or heads is None:
        return _Bucket(shape, rows, put(slots_PL), put(mask_PQL).view(-1, 1, *shape[1:]).to(dtype))
    H, K = heads
    keys_PKL = slots_PL[:, None] * K + np.arange(K, dtype=np.int32)[:, None]
    return _Decodes(
        shape,
        rows,
        put(keys_PKL),
        put(keys_PKL.repeat(H // K, 1)),
        torch.arange(0, shape[0] * H * length, length, dtype=torch.int32),
        put(mask_PQL.repeat(K, 0)).view(-1, 1, length),
    )


def _put(array: Array, device: torch.device) -> Tensor:
    """The array on the device, flat."""
    return torch.from_numpy(array.ravel()).to(device)


def _context(
    table_PB: Array,
    lens_P1: Array,
    begin_P1: Array | None,
    length: int,
    block_size: int,
) -> tuple[Array, Array]:
    """Positions (P or 1, L) that a bucket gathers, counted on past a sequence's end, and their
    slots, int32 (P, L). `begin_P1` is the first position of each sequence that is seen; None: 0."""
    if begin_P1 is None:
        table_PB = table_PB[:, : -(-length // block_size)]
    offsets = np.arange(block_size, dtype=np.int32)
    slots_PN = (table_PB[:, :, None] * block_size + offsets).reshape(len(table_PB), -1)
    positions_PL = np.arange(length)[None]
    if begin_P1 is None:
        return positions_PL, np.where(positions_PL < lens_P1, slots_PN[:, :length], slots_PN[:, :1])
    positions_PL = positions_PL + begin_P1
    return positions_PL, np.take_along_axis(slots_PN, np.minimum(positions_PL, lens_P1 - 1), 1)
