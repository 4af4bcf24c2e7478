"""Guesses a request's next tokens from what its own text says earlier.

Text that is edited, quoted or filled in repeats itself. Where the last three tokens stand further
up, too, those that came after them there are guessed to come now (prompt lookup decoding, as
`transformers` calls it). A step then computes the guesses beside the next token:

    tokens      ... a b c d e f   ...   a b c        "a b c" was followed by "d e f"
    positions                           7 8 9
    the step                                c d e    three rows; rows of d and e are guesses
    it samples                              d e x    d and e were right, and x comes after them

A row's sample counts if all guesses before it are what was sampled there. So the tokens of a
request are those that it would have had without guesses, sampled ones included. How many of them
are computed is up to `weft.schedule.lengths`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from weft.core.units import MAX_GUESSES

WIDTH = 3
"""Tokens that have to stand further up."""
DOUBT = 2.0
"""For how many tokens an assumption counts."""
LEAST = 0.05
"""Guesses with a smaller chance are worth no row."""
_KEPT = 0.94
"""The part of what was known of a text's repetitions that stays when it goes on."""
_MOST_BITS = 3
"""Runs of 4 right tokens and more are counted together, as are those of 2 and 3."""


class Guesser(ABC):
    """Owner of the guesses at one request, and of how often guesses were right, or would have been.
    Right guesses come in runs, so this is counted by how many came in a row before them."""

    first_chance: float
    """That a guess is right, as long as nothing is known of the text."""
    takes_drafts = False
    """Whether its guesses are what the model's own head drafts."""

    __slots__ = ("_first", "_found", "_guesses", "_right", "_seen")

    def __init__(self) -> None:
        self._seen = [0.0] * (_MOST_BITS + 1)
        """How many tokens there was a guess at, by the bits of how many in a row came as guessed
        before them. Old ones count less."""
        self._right = [0.0] * (_MOST_BITS + 1)
        """How many of these came as guessed."""
        self._first = 0
        self._guesses: list[int] = []
        self._found = 0

    @property
    def guessing(self) -> bool:
        """Whether guesses are in a step in flight."""
        return bool(self._guesses)

    def offer(self, num_tokens: int, drafts: list[int]) -> None:
        """Take what was drafted behind so many tokens. Only a guesser that `takes_drafts` is
        offered some."""
        raise NotImplementedError

    @abstractmethod
    def chances(self, tokens: Sequence[int], pending: int) -> list[float]:
        """For each guess behind `tokens` and `pending` more that only the device knows, the chance
        that it is right and all before it are; empty if there is nothing to guess."""

    @abstractmethod
    def guess(self, tokens: Sequence[int], pending: int, num: int) -> list[int]:
        """So many tokens, or fewer, of those whose `chances` were asked for."""

    def _outlook(self, in_a_row: int, num: int) -> list[float]:
        """The chances of `num` tokens, behind so many that came as guessed."""
        by_bits, chance = [], self.first_chance
        for seen, right in zip(self._seen, self._right, strict=True):
            chance = (right + DOUBT * chance) / (seen + DOUBT)
            by_bits.append(chance)
            chance = (1 + chance) / 2  # a run that has begun is more likely to go on
        found, product = [], 1.0
        for nth in range(in_a_row, in_a_row + num):
            product *= by_bits[min(nth.bit_length(), _MOST_BITS)]
            if product < LEAST:
                break
            found.append(product)
        return found

    def _note(self, in_a_row: int, is_right: bool) -> None:
        """A token came as guessed or not, behind so many that did."""
        bits = min(in_a_row.bit_length(), _MOST_BITS)
        self._seen[bits] = _KEPT * self._seen[bits] + 1
        self._right[bits] = _KEPT * self._right[bits] + is_right

    def fits(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether a row with the token at `start` counts, now that these are known."""
        i = start - self._first
        if i < 0 or not self._guesses:
            return True
        if start != len(tokens) - 1 or tokens[start] != self._guesses[i]:
            return False
        self._found += 1
        return True

    def settle(self) -> tuple[int, int]:
        """The step with the guesses is over. Returns how many there were, and how many were
        right."""
        num, found = len(self._guesses), self._found
        self._guesses = []
        return num, found


class TextGuesser(Guesser):
    """Guesses by what the text says earlier. Each token of the output is compared with the guess at
    it, whether or not that was in a step."""

    first_chance = 0.4

    __slots__ = ("_after", "_in_a_row", "_indexed", "_num_prompt")

    def __init__(self, num_prompt: int) -> None:
        super().__init__()
        self._num_prompt = num_prompt
        self._after: dict[tuple[int, ...], int] = {}
        """By three tokens that follow each other, the position after their last occurrence."""
        self._indexed = WIDTH
        self._in_a_row = 0
        """How many of the last output tokens came as the text before them said."""

    def chances(self, tokens: Sequence[int], pending: int) -> list[float]:
        self._watch(tokens)
        if tuple(tokens[-WIDTH:]) not in self._after:
            return []
        return self._outlook(self._in_a_row, pending + MAX_GUESSES)[pending:]

    def guess(self, tokens: Sequence[int], pending: int, num: int) -> list[int]:
        start = self._after[tuple(tokens[-WIDTH:])]
        period = len(tokens) - start  # the text may end within what is repeated
        following = [tokens[start + i % period] for i in range(pending, pending + num)]
        self._first, self._guesses, self._found = len(tokens) + pending, following, 0
        return following

    def _watch(self, tokens: Sequence[int]) -> None:
        """Remember what came after what, and count the output that came as the text said."""
        for end in range(self._indexed, len(tokens)):
            key = tuple(tokens[end - WIDTH : end])
            before = self._after.get(key)
            is_right = before is not None and tokens[before] == tokens[end]
            if end >= self._num_prompt:
                if before is not None:
                    self._note(self._in_a_row, is_right)
                self._in_a_row = self._in_a_row + 1 if is_right else 0
            self._after[key] = end
        self._indexed = max(self._indexed, len(tokens))
