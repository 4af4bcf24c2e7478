"""Batches for attention kernels, and their comparison with the dense oracle."""

from __future__ import annotations

import torch

from weft.kernels.attention import (
    Attend,
    AttentionBatch,
    KVCache,
    make_batch,
    reference_attend,
    write_kv,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HEAD_DIM = 8


def random_batch(lens: list[tuple[int, int]], block_size: int, seed: int) -> AttentionBatch:
    """Sequences of (query rows, tokens before them) over shuffled blocks; one block is spare."""
    counts = [-(-(q + past) // block_size) for q, past in lens]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
    tables = [t.tolist() for t in ids.split(counts)]
    return make_batch([q for q, _ in lens], [q + past for q, past in lens], tables, block_size)


def random_inputs(
    batch: AttentionBatch, heads: tuple[int, int], block_size: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KVCache]:
    """q, k, v as a layer passes them (slices of a packed tensor), and a cache of random content
    whose unwritten slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, (H, K) = batch.query_start[-1], heads
    packed = torch.randn(num_rows, H + 2 * K, HEAD_DIM, generator=generator).to(dtype)
    q, k, v = packed.split((H, K, K), 1)
    shape = (int(batch.block_table_SB.max()) + 2, block_size, K, HEAD_DIM)
    cache = KVCache(
        torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    )
    for s, n in enumerate(batch.seq_lens):
        for p in range(n):
            block = int(batch.block_table_SB[s, p // block_size])
            for t in (cache.k, cache.v):
                t[block, p % block_size] = torch.randn(K, HEAD_DIM, generator=generator).to(dtype)
    return q, k, v, cache


def random_sinks(num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Scores far below and far above those of tokens, and of their size."""
    return torch.linspace(-8, 8, num_heads).to(dtype)


def assert_same_as_oracle(
    attend: Attend,
    batch: AttentionBatch,
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
    chunked: bool = False,
    has_sinks: bool = False,
    cap: float | None = None,
) -> None:
    q, k, v, cache = random_inputs(batch, heads, block_size, seed, dtype)
    write_kv(k, v, cache, batch)
    sinks = random_sinks(heads[0], dtype) if has_sinks else None
    windows = {"window": window, "chunked": chunked}
    more = {"scale": 0.3, **windows, "sinks_H": sinks, "cap": cap}
    expected = reference_attend(q, cache, batch, **more)
    for _ in range(2):  # two layers share what is prepared
        got = attend(q, cache, batch, **more)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
