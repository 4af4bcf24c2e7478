"""Masks of the tokens that a request may choose next, as packed bits (see `Words`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from weft.schedule.plan import Admitted, Matcher, Words

FOREVER = np.iinfo(np.int64).max


def words_of(token_ids: Iterable[int] | slice, vocab_size: int) -> Words:
    """The bits of `token_ids`, which are below `vocab_size`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[token_ids if isinstance(token_ids, slice) else list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class BadSequences:
    """A Matcher that keeps forbidden sequences of two or more tokens out of the output: when the
    output, without the prompt, ends with all of one but its last token, that token is forbidden.
    """

    def __init__(
        self, sequences: Sequence[tuple[int, ...]], output_ids: Iterable[int] = ()
    ) -> None:
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        """By the last token of a beginning: (beginning, token that must not follow)."""
        for *beginning, end in sequences:
            self._by_last.setdefault(beginning[-1], []).append((beginning, end))
        longest = max(len(sequence) for sequence in sequences)
        self._tail = deque(output_ids, maxlen=longest - 1)

    def accept(self, token_id: int) -> None:
        self._tail.append(token_id)

    def fill(self, words: Words) -> None:
        tail = list(self._tail)
        bits = words.view(np.uint32)
        for beginning, end in self._by_last.get(tail[-1], ()) if tail else ():
            if tail[-len(beginning) :] == beginning:
                bits[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))


class TokenMask:
    """The tokens that one request may choose next.

    They are narrowed by several layers, the strongest first: the grammar, `allowed_token_ids`, bad
    words of one token, EOS and stop tokens before `min_tokens`, bad words of several tokens. A
    layer that would leave nothing to choose is skipped.
    """

    def __init__(self, admitted: Admitted, vocab_size: int) -> None:
        params = admitted.params
        self._all = words_of(slice(vocab_size), vocab_size)
        self._grammar = admitted.grammar
        self._bad_sequences = admitted.bad_sequences
        self._fixed: list[Words] = []
        if params.allowed_token_ids:
            self._fixed.append(words_of(params.allowed_token_ids, vocab_size))
        if admitted.bad_tokens:
            self._fixed.append(~words_of(admitted.bad_tokens, vocab_size))
        self._early = [*self._fixed, ~words_of(admitted.endings, vocab_size)]
        """The layers at positions before `_early_until`; from there on, those in `_fixed` hold."""
        self._early_until = admitted.num_prompt + params.min_tokens
        self._all_early = _narrowed(self._all, self._early)
        self._all_fixed = _narrowed(self._all, self._fixed)

    @property
    def num_words(self) -> int:
        return len(self._all)

    @property
    def until(self) -> int:
        """The position from which on any token may be chosen."""
        always = self._fixed or self._grammar or self._bad_sequences
        return FOREVER if always else self._early_until

    def fill(self, words: Words, position: int) -> None:
        """Write the mask of the tokens that may be chosen at `position` into `words`. The matchers
        must have accepted all tokens before."""
        early = position < self._early_until
        if self._grammar is None:
            left = self._all_early if early else self._all_fixed
        else:
            layers = self._early if early else self._fixed
            left = _narrowed(self._all, [self._ask(self._grammar), *layers])
        if self._bad_sequences is not None:
            left = _narrowed(left, [self._ask(self._bad_sequences)])
        words[:] = left

    def _ask(self, matcher: Matcher) -> Words:
        words = self._all.copy()
        matcher.fill(words)
        return words


def mask_of(a: Admitted, vocab_size: int) -> TokenMask | None:
    """The mask of a request that takes a row; None if it may always choose any token."""
    early = a.params.min_tokens and a.endings
    fixed = a.params.allowed_token_ids or a.bad_tokens
    if early or fixed or a.bad_sequences or a.grammar:
        return TokenMask(a, vocab_size)
    return None


def _narrowed(words: Words, layers: Iterable[Words]) -> Words:
    for layer in layers:
        both = words & layer
        if both.any():
            words = both
    return words
