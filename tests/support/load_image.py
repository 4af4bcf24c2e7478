"""From an adapter's folder to its image, in one call."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint.base import BaseWeights
from weft.checkpoint.kinds import CONVERSION_TOLERANCE
from weft.checkpoint.pack import AdapterImage, pack_image
from weft.checkpoint.read import read_adapter
from weft.core.config import MAX_ADDED_TOKENS
from weft.core.targets import TargetTable
from weft.registry import Sources


def load_image(
    path: Path,
    table: TargetTable,
    dtype: torch.dtype,
    max_rank: int,
    expect_digest: str | None = None,
    base: BaseWeights | None = None,
    conversion_tolerance: float = CONVERSION_TOLERANCE,
    max_added_tokens: int = MAX_ADDED_TOKENS,
) -> AdapterImage:
    """Read, validate and pack the PEFT adapter in the folder `path` for the base in `table`."""
    with Sources().open(str(path)) as folder:
        files = read_adapter(folder, table, max_rank, expect_digest)
    return pack_image(files, table, dtype, max_rank, base, conversion_tolerance, max_added_tokens)
