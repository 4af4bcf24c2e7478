"""Guesses a request's next tokens from its own earlier text.

Text that is edited, quoted or filled in repeats itself. If the last three tokens occur earlier, the
tokens that came after them there are guessed to come now (`transformers` calls this prompt lookup
decoding). A step then computes the guesses beside the next token:

    tokens      ... a b c d e f   ...   a b c        "a b c" was followed by "d e f"
    positions                           7 8 9
    the step                                c d e    three rows; rows of d and e are guesses
    it samples                              d e x    d and e were right, and x comes after them

A row's sample counts if all guesses before it were right. So a request's tokens are those that it
would have without guesses, even if they are sampled. `weft.schedule.lengths` decides how many
guesses are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from weft.core.units import MAX_GUESSES

WIDTH = 3
"""How many last tokens must occur earlier in the text."""
DOUBT = 2.0
"""An assumed chance counts as much as this many observed tokens."""
LEAST = 0.05
"""Guesses with a smaller chance are worth no row."""
_KEPT = 0.94
"""The weight that earlier counts keep with each further guessed token of the text."""
_MOST_BITS = 3
"""Runs of 4 right tokens and more are counted together, as are those of 2 and 3."""


class Guesser(ABC):
    """Owner of the guesses for one request, and of the counts of right ones, computed or not. Right
    guesses come in runs, so they are counted by how many right ones came in a row before."""

    first_chance: float
    """The assumed chance that a guess is right, before anything is known of the text."""
    takes_drafts = False
    """Whether its guesses are what the model's own head drafts."""

    __slots__ = ("_first", "_found", "_guesses", "_right", "_seen")

    def __init__(self) -> None:
        self._seen = [0.0] * (_MOST_BITS + 1)
        """How many guesses were checked, by the bit length of the number of right ones in a row
        before them. Old ones count less."""
        self._right = [0.0] * (_MOST_BITS + 1)
        """How many of these were right."""
        self._first = 0
        self._guesses: list[int] = []
        self._found = 0

    @property
    def guessing(self) -> bool:
        """Whether guesses are in a step in flight."""
        return bool(self._guesses)

    def offer(self, num_tokens: int, drafts: list[int]) -> None:
        """Take the tokens that were drafted behind the first `num_tokens`. Only for a guesser that
        `takes_drafts`."""
        raise NotImplementedError

    @abstractmethod
    def chances(self, tokens: Sequence[int], pending: int) -> list[float]:
        """For each possible guess behind `tokens` and `pending` more that only the device knows:
        the chance that it and all before it are right. Empty if there is nothing to guess."""

    @abstractmethod
    def guess(self, tokens: Sequence[int], pending: int, num: int) -> list[int]:
        """The first `num` guessed tokens, or fewer. `chances` was called for the same tokens."""

    def _outlook(self, in_a_row: int, num: int) -> list[float]:
        """The `chances` of up to `num` tokens, behind `in_a_row` right ones."""
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
        """Count a token that came as guessed or not, behind `in_a_row` that did."""
        bits = min(in_a_row.bit_length(), _MOST_BITS)
        self._seen[bits] = _KEPT * self._seen[bits] + 1
        self._right[bits] = _KEPT * self._right[bits] + is_right

    def fits(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether the row of position `start` counts, now that `tokens` are known: whether its
        token, if guessed, was right, and all guesses before it were."""
        i = start - self._first
        if i < 0 or not self._guesses:
            return True
        if start != len(tokens) - 1 or tokens[start] != self._guesses[i]:
            return False
        self._found += 1
        return True

    def settle(self) -> tuple[int, int]:
        """End the step with the guesses. Returns how many there were, and how many were right."""
        num, found = len(self._guesses), self._found
        self._guesses = []
        return num, found


class TextGuesser(Guesser):
    """Guesses from earlier text. Each token of the output is compared with the guess for it,
    whether or not a step computed that guess."""

    first_chance = 0.4

    __slots__ = ("_after", "_in_a_row", "_indexed", "_num_prompt")

    def __init__(self, num_prompt: int) -> None:
        super().__init__()
        self._num_prompt = num_prompt
        self._after: dict[tuple[int, ...], int] = {}
        """By WIDTH successive tokens: the position after their last occurrence."""
        self._indexed = WIDTH
        self._in_a_row = 0
        """How many of the last output tokens came in a row as earlier text said."""

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
        """Index the new tokens, and count which of the output came as earlier text said."""
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
