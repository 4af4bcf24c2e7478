"""Guesses that a model's own multi-token prediction head has drafted.

A step drafts the tokens after its last valid one, and these drafts are the guesses of the next
step, if no other token has come in between:

    step 1      ... a               samples b, drafts c d e
    step 2          b c d e         samples c d x: c and d were right; drafts what comes after x

Whether tokens are drafted is decided as for other guesses (`weft.schedule.lengths`), by how many of
the request's drafts were right lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from weft.core.units import NUM_DRAFTS
from weft.schedule.guesses import Guesser

_KEPT = 0.99
"""The weight that counts of right drafts keep with each step. So if drafts didn't pay, they are
tried again after a long time."""


class HeadGuesser(Guesser):
    """Owner of the drafts for one request, whose vocabulary may be smaller than the base's."""

    first_chance = 0.6
    takes_drafts = True

    __slots__ = ("_behind", "_drafts", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._behind = 0
        self._drafts: list[int] = []

    def offer(self, num_tokens: int, drafts: list[int]) -> None:
        self._behind = num_tokens
        self._drafts = list(takewhile(lambda token: token < self._vocab_size, drafts))

    def chances(self, tokens: Sequence[int], pending: int) -> list[float]:
        """The chances of drafts, even if there are none yet: if they pay, the head is run."""
        for bits, (seen, right) in enumerate(zip(self._seen, self._right, strict=True)):
            self._seen[bits], self._right[bits] = _KEPT * seen, _KEPT * right
        return self._outlook(0, NUM_DRAFTS)

    def guess(self, tokens: Sequence[int], pending: int, num: int) -> list[int]:
        fits = not pending and self._behind == len(tokens)
        self._guesses = self._drafts[:num] if fits else []
        self._first, self._found = len(tokens), 0
        return self._guesses

    def settle(self) -> tuple[int, int]:
        for nth in range(min(self._found + 1, len(self._guesses))):
            self._note(nth, nth < self._found)
        return super().settle()
