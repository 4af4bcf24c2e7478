"""Attention for any device that computes one query row at a time.

Shapes: as in `weft.kernels.attention`; G = H / K query heads of one key head, L tokens that a row
sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.attention import AttentionBatch, KVCache, capped, first_seen


def attend_by_row(
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
    """An `Attend` that gives a row the same bits whatever else is in its step, as the shapes of all
    its operations follow from the row's position alone. Sums are in fp32."""
    out_THD = q_THD.new_empty((*q_THD.shape[:2], cache.v.shape[-1]))
    (H, D), K = q_THD.shape[1:], cache.k.shape[2]
    for s, length in enumerate(batch.seq_lens):
        start, stop = batch.query_start[s], batch.query_start[s + 1]
        blocks = batch.block_table_SB[s, : -(-length // cache.block_size)].long()
        k_KND, v_KND = (t[blocks].flatten(0, 1).transpose(0, 1) for t in (cache.k, cache.v))
        for row in range(start, stop):
            end = length - (stop - 1 - row)
            first = 0 if window is None else max(first_seen(end - 1, window, chunked), 0)
            seen = slice(first, end)
            k_KLD, v_KLD = (
                t[:, seen].float().clone(memory_format=torch.contiguous_format)
                for t in (k_KND, v_KND)
            )
            score_KGL = capped(q_THD[row].float().view(K, H // K, D) @ k_KLD.mT * scale, cap)
            if sinks_H is not None:
                sink_KG1 = sinks_H.float().view(K, H // K, 1)
                score_KGL = torch.cat((score_KGL, sink_KG1), -1)
            weight_KGL = score_KGL.softmax(-1)[..., : k_KLD.shape[1]].contiguous()
            out_THD[row] = (weight_KGL @ v_KLD).view(H, -1).to(q_THD.dtype)
    return out_THD
