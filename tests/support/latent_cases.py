"""Batches for attention to latents, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_cases import random_batch

from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.ops import Rope


def latent_batch(
    lens: list[tuple[int, int]],
    num_heads: int,
    sizes: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[torch.Tensor, KVCache, AttentionBatch]:
    """Queries, a cache whose unwritten slots hold NaN, and sequences of (query rows, tokens before
    them). `sizes`: of the latent, and of the rotated part."""
    batch, generator = random_batch(lens, block_size, 0), torch.Generator().manual_seed(0)
    width, blocks = sum(sizes), int(batch.block_table_SB.max()) + 2
    k = torch.full((blocks, block_size, 1, width), torch.nan)
    for table, length in zip(batch.block_table_SB.tolist(), batch.seq_lens, strict=True):
        for p in range(length):
            place = k[table[p // block_size], p % block_size]
            place.copy_(torch.randn(1, width, generator=generator))
    q = torch.randn(batch.query_start[-1], num_heads, width, generator=generator)
    q, k = (x.to(device, dtype) for x in (q, k))
    moved = replace(
        batch,
        slot_mapping_T=batch.slot_mapping_T.to(device),
        block_table_SB=batch.block_table_SB.to(device),
        seq_lens_S=batch.seq_lens_S.to(device),
    )
    return q, KVCache(k, k[..., : sizes[0]]), moved


def random_rope(num_rows: int, size: int, interleaved: bool) -> Rope:
    angle = 6 * torch.rand(num_rows, 1, size // 2, generator=torch.Generator().manual_seed(1))
    pairs = ((x, y) for x, y in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    parts = [torch.stack(pair, -1) for pair in pairs]
    if not interleaved:
        parts = [part.transpose(2, 3) for part in parts]
    return Rope(parts[0].flatten(2), parts[1].flatten(2), interleaved)
