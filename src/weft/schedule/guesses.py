"""Guesses a request's next tokens from what its own text says earlier.

Text that is edited, quoted or filled in repeats itself. Where the last three tokens stand further
up, too, those that came after them there are guessed to come now (prompt lookup decoding, as
`transformers` calls it). A step then computes the guesses beside the next token:

    tokens      ... a b c d e f   ...   a b c        "a b c" was followed by "d e f"
    positions                           7 8 9
    the step                                c d e    three rows; rows of d and e are guesses
    it samples                              d e x    d and e were right, and x comes after them

A row's sample counts if all guesses before it are what was sampled there. So the tokens of a
request are those that it would have had without guesses, sampled ones included.
"""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 3
"""Tokens that have to stand further up."""
MAX_GUESSES = 7
"""With the next token they are eight rows, which take hardly longer than one."""
_MAX_DEBT, _MAX_CREDIT = 3, 8
"""Bounds of what guesses have cost or won, in tokens."""


class Guesser:
    """Owner of the guesses at one request. It guesses more where it was right. While guesses have
    cost more than they won, it only watches, until enough tokens in a row have come that it would
    have guessed: 2 after one miss, 4 after two, and 8 after more.

    Guesses cost the step that could have been planned while theirs was under way: one token. So one
    right guess is worth nothing, two win a token, and a wrong one loses a token.
    """

    __slots__ = (
        "_after",
        "_debt",
        "_first",
        "_found",
        "_guesses",
        "_in_a_row",
        "_indexed",
        "_most",
        "_num_prompt",
    )

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._after: dict[tuple[int, ...], int] = {}
        """By three tokens that follow each other, the position after their last occurrence."""
        self._indexed = WIDTH
        self._most = 3
        self._debt = 0
        """Tokens that guesses have cost so far, less those that they won."""
        self._in_a_row = 0
        """How many of the last output tokens came as the text before them said."""
        self._first = 0
        self._guesses: list[int] = []
        self._found = 0

    @property
    def guessing(self) -> bool:
        """Whether guesses are in a step in flight."""
        return bool(self._guesses)

    def guess(self, tokens: Sequence[int], pending: int, room: int) -> list[int]:
        """At most `room` tokens, for the positions behind `tokens` and `pending` more that only
        the device knows."""
        room = min(room, self._most)
        self._watch(tokens)
        start = self._after.get(tuple(tokens[-WIDTH:]))
        if room < 1 or start is None or (self._debt > 0 and self._in_a_row < 1 << self._debt):
            return []
        period = len(tokens) - start  # the text may end within what is repeated
        following = [tokens[start + i % period] for i in range(pending, pending + room)]
        self._first, self._guesses, self._found = len(tokens) + pending, following, 0
        return following

    def _watch(self, tokens: Sequence[int]) -> None:
        """Remember what came after what, and count the output that came as the text said."""
        for end in range(self._indexed, len(tokens)):
            key = tuple(tokens[end - WIDTH : end])
            before = self._after.get(key)
            if before is None or tokens[before] != tokens[end]:
                self._in_a_row = 0
            elif end >= self._num_prompt:
                self._in_a_row += 1
            self._after[key] = end
        self._indexed = max(self._indexed, len(tokens))

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
        self._debt = min(max(self._debt + 1 - found, -_MAX_CREDIT), _MAX_DEBT)
        self._most = min(MAX_GUESSES, self._most + 2) if found == num else found + 1
        self._guesses = []
        return num, found
