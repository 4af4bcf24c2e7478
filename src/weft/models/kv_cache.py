"""Sizes and allocation of the paged KV cache of a model."""

from __future__ import annotations

import torch

from weft.kernels.attention import KVCache
from weft.models.config import ModelConfig


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    per_token = config.num_kv_heads * config.head_dim * dtype.itemsize
    return 2 * config.num_layers * block_size * per_token


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[KVCache]:
    """The cache of every layer, zeroed: (num_blocks, block_size, kv_heads, head_dim) each."""
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return [
        KVCache(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(config.num_layers)
    ]
