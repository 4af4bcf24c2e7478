"""The loop over a context that the kernels of paged attention share."""

from __future__ import annotations

from typing import NamedTuple

import torch

_MOST_ROW_BYTES = 32 << 10
"""The most bytes of query rows, whose sums in fp32 four warps have registers for."""
FEWEST_TOKENS = 16
"""The fewest tokens of a round."""


class Rounds(NamedTuple):
    """How a program loops over a context."""

    tokens: int
    warps: int
    stages: int
    """How many rounds overlap, if there is room for their keys and values."""

    def within(self, shared_bytes: int, num_rows: int, row_bytes: int) -> Rounds:
        """These with as many stages as fit into shared memory beside the rows of queries. Heads of
        so many dimensions that not even two fit take fewer tokens a round; and where their rows
        would not fit into the registers of so many warps, twice as many warps."""
        room, tokens = shared_bytes - num_rows * row_bytes - 4096, self.tokens
        while 0 < room < 4 * tokens * row_bytes and tokens > FEWEST_TOKENS:
            tokens //= 2
        stages = max(2, min(self.stages, room // (2 * tokens * row_bytes)))
        warps = self.warps * (2 if num_rows * row_bytes > _MOST_ROW_BYTES else 1)
        return Rounds(tokens, warps, stages)


def rows_at_once(shared_bytes: int, num_rows: int, row_bytes: int, dtype: torch.dtype) -> int:
    """How many rows of a tile one program takes: all of them, if they fit. In fp32, whose operands
    lie in shared memory, several programs may have to divide a tile's rows among them."""

    def taken(num: int) -> int:
        return (num + 2 * FEWEST_TOKENS) * row_bytes + 4 * num * (FEWEST_TOKENS + 1)

    while dtype == torch.float32 and 0 < shared_bytes < taken(num_rows) and num_rows > 1:
        num_rows //= 2
    return num_rows


FEW_DECODES = Rounds(64, 4, 3)
"""Rounds of so few decodes that all of their programs run at once."""


def few_decodes(row_bytes: int) -> int:
    """How many programs of FEW_DECODES run at once on a processor, by their shared memory."""
    return 2 if row_bytes <= 256 else 1


def many_decodes(row_bytes: int) -> Rounds:
    """Rounds of decodes in more programs. A processor runs three or more of these, which takes up
    to 64 KB of keys and values in each."""
    if row_bytes <= 128:
        return Rounds(64, 4, 2)
    return Rounds(32, 4, 4) if row_bytes <= 256 else Rounds(32, 2, 2)


CHUNKS = Rounds(64, 4, 3)
"""Rounds of chunks of prompts."""
