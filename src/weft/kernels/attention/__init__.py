"""Causal attention over a paged KV cache, for decodes and chunks of prefill in one batch."""

from weft.kernels.attention.batch import (
    Attend,
    AttentionBatch,
    KVCache,
    RowWork,
    make_batch,
    reference_attend,
    row_work,
    tile_rows,
    write_kv,
)
from weft.kernels.attention.sdpa import torch_attend

__all__ = [
    "Attend",
    "AttentionBatch",
    "KVCache",
    "RowWork",
    "make_batch",
    "reference_attend",
    "row_work",
    "tile_rows",
    "torch_attend",
    "write_kv",
]
