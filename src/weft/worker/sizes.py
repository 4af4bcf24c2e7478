"""The sizes of steps that are captured in CUDA graphs; steps in between are padded."""

from __future__ import annotations

MANY_TOKENS, MOST_TOKENS = 1024, 4096
"""Up to how many tokens mixed steps of any size have graphs, and those of the largest size do,
which most steps are while prompts wait. With more, the device takes much longer than the host does
without a graph: 55 ms were seen for 2,048 tokens with adapters."""
FULL = 15 / 16
"""The part of the largest graph that a step of more than MANY_TOKENS must need, as padding takes
the device as long as tokens do."""


def batch_sizes(max_seqs: int) -> list[int]:
    """Decodes to capture: fine steps where one more is a large share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4096, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


def token_sizes(max_tokens: int) -> list[int]:
    """Tokens of mixed steps to capture: fewer rows of padding take no less time, or more (448)."""
    sizes = [16, 32, *range(64, 385, 64), *range(512, MANY_TOKENS + 1, 128)]
    if max_tokens > MANY_TOKENS:
        return sizes + ([max_tokens] if max_tokens <= MOST_TOKENS else [])
    return [size for size in sizes if size < max_tokens] + [max_tokens]
