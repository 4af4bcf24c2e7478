"""The sizes of steps that are captured in CUDA graphs; steps in between are padded."""

from __future__ import annotations

MANY_TOKENS, MOST_TOKENS = 1024, 4096
"""Mixed steps of up to MANY_TOKENS tokens have graphs. Steps of the largest size, as most are while
prompts wait, have one if that is up to MOST_TOKENS: beyond, the device takes much longer than the
host takes without a graph, such as 55 ms for 2,048 tokens with adapters."""
FULL = 15 / 16
"""A step of more than MANY_TOKENS tokens takes the largest graph only if it fills this part of it,
as padding takes the device as long as tokens do."""


def batch_sizes(max_seqs: int) -> list[int]:
    """The numbers of sequences for which decodes are captured; small ones are close together."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4096, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


def token_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens for which mixed steps are captured; others were not faster (448)."""
    sizes = [16, 32, *range(64, 385, 64), *range(512, MANY_TOKENS + 1, 128)]
    if max_tokens > MANY_TOKENS:
        return sizes + ([max_tokens] if max_tokens <= MOST_TOKENS else [])
    return [size for size in sizes if size < max_tokens] + [max_tokens]
