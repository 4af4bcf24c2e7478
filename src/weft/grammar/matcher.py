"""Follows one request's output through its form, and says which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from weft.core.errors import WeftError
from weft.grammar.aside import run_aside
from weft.grammar.regex import refusal
from weft.grammar.vocabulary import Vocabulary
from weft.schedule.masks import words_of
from weft.schedule.plan import Words

BURST_S = 0.5
STEP_S = 0.01
"""The average time per token that a matcher may take, beyond an initial allowance."""
MASK_S = 0.25
"""The most CPU time that one mask may take while other requests wait for the step."""
SLOW_MASK_S, SLOW_TOKEN_S = 2e-3, 2e-4
"""After a mask or token that took longer than this, the next mask may be very slow. With usual
forms they take a tenth of this."""


class GrammarMatcher:
    """Where one request's output is in its form. For the engine's thread alone."""

    def __init__(
        self,
        matcher: Any,
        reasoning: int | None,
        begin_after: int | None,
        vocabulary: Vocabulary,
        on_costly: Callable[[WeftError], None] | None,
    ) -> None:
        """The form applies from the token after `begin_after` on; None: at once. If `reasoning` is
        given, the form applies at once unless the output begins with that token. `on_costly` is
        called with the refusal when the matcher has taken more time than it may; if it is None, no
        request waits, and a single mask has no time limit."""
        self._matcher = matcher
        self._reasoning = reasoning
        """The `reasoning` token while it may still come first."""
        self._begin_after = begin_after
        self._vocabulary = vocabulary
        self._on_costly = on_costly
        self._ended = False
        self._stuck = False
        self._slow = False
        """Whether the next mask may take long."""
        self._spent_s = -BURST_S

    @property
    def over(self) -> bool:
        """Whether the output has its form and must end, or can't go on."""
        return self._ended or self._stuck

    def accept(self, token_id: int) -> None:
        """Take note of a chosen token, one that `fill` allowed.

        Raises InvalidRequest, which ends the request, if no token can follow the output so far, or
        the grammar has cost too much time.
        """
        if self._reasoning is not None:
            begins, self._reasoning = token_id == self._reasoning, None
            if begins:
                self._stuck = False
                return
            self._begin_after = None
        if self._begin_after is not None:
            if token_id == self._begin_after:
                self._begin_after = None
        elif self._stuck:
            raise refusal("nothing that the tokenizer can write follows the output so far")
        elif not self._ended:
            self._advance(token_id)

    def fill(self, words: Words) -> None:
        """Keep the bits of the tokens that may come next, and clear all others. If none may, all
        but EOS stay, and `accept` refuses what is chosen. No form has an adapter's added tokens."""
        known = np.zeros_like(self._vocabulary.eos)
        known[: len(words)] = words[: len(known)]
        allowed = self._vocabulary.before
        if self._reasoning is not None:
            first = words_of([self._reasoning], self._vocabulary.size)
            allowed = self._next(known) | first
        elif self._begin_after is None:
            allowed = self._next(known)
        words[:] = 0
        words[: len(known)] = (allowed & known)[: len(words)]

    def _next(self, known: Words) -> Words:
        """The `known` tokens that may come next where the form applies."""
        if self._ended:
            return self._vocabulary.eos
        allowed = np.zeros_like(known)
        taken_s = self._fill(allowed)
        self._slow = taken_s > SLOW_MASK_S
        self._spent_s += taken_s
        if taken_s == inf:
            return self._vocabulary.before
        allowed &= self._vocabulary.any  # xgrammar sets bits beyond its vocabulary
        self._stuck = not (allowed & known).any()
        return self._vocabulary.before if self._stuck else allowed

    def _fill(self, allowed: Words) -> float:
        """Compute the mask. Returns its CPU time in seconds; infinity if it was abandoned."""
        if self._slow and self._on_costly is not None:
            matcher = self._matcher
            taken_s = run_aside(lambda: matcher.fill_next_token_bitmask(allowed), MASK_S)
            return inf if taken_s is None else taken_s
        begin_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(allowed)
        return time.thread_time() - begin_s

    def _advance(self, token_id: int) -> None:
        if self._spent_s < inf:
            begin_s = time.thread_time()
            accepted = self._matcher.accept_token(token_id)
            taken_s = time.thread_time() - begin_s
            self._slow = self._slow or taken_s > SLOW_TOKEN_S
            self._spent_s = max(self._spent_s + taken_s - STEP_S, -BURST_S)
            self._ended = not accepted or self._matcher.is_terminated()
        if self._spent_s > 0:
            error = refusal("the grammar is too ambiguous to be followed in time")
            if self._on_costly is not None:
                self._on_costly(error)
            raise error
