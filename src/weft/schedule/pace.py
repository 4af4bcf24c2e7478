"""Limits the prompt tokens beside decodes, so that decodes are delayed by no more than a cap.

A step with a chunk of a prompt takes longer, and every request that decodes in it waits. For each
such step, the delay per token of the chunk is measured. Chunks have as many tokens as fit the cap
by recent measurements, but at least one block, so that prompts make progress on any device. A step
without decodes delays nobody, and is not capped.

A chunk's delay is not proportional to its tokens, as a part of it is fixed. But each measurement is
made on a chunk of the current size, so after a few steps the size is the one that just fits.
"""

from __future__ import annotations

KEPT = 0.8
"""The weight of the earlier estimate when a step is measured."""
ASSUMED_TOKEN_S = 2e-5
"""Seconds for a token until something was measured."""


class ChunkPace:
    """Owner of the measured delay by chunks of prompts."""

    def __init__(self, max_delay_s: float, least: int) -> None:
        """`least`: the tokens that a step may always compute."""
        self._max_delay_s = max_delay_s
        self._least = least
        self._token_s = ASSUMED_TOKEN_S

    @property
    def most(self) -> int:
        """The most prompt tokens that a step with decodes may compute."""
        return max(self._least, int(self._max_delay_s / self._token_s))

    def measure(self, num_tokens: int, delay_s: float) -> None:
        """Add a step with decodes, which took `delay_s` longer for `num_tokens` of prompts."""
        token_s = max(delay_s, 0.0) / num_tokens
        token_s = max(token_s, ASSUMED_TOKEN_S / 100)
        self._token_s = KEPT * self._token_s + (1 - KEPT) * token_s
