"""Tries a compiled form: follows it for a while before a request depends on it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from weft.grammar.compiler import Compiler

NUM_WALKS = 3
NUM_TOKENS = 32
"""How many tokens each of the walks has."""


def try_masks(compiler: Compiler, compiled: Any) -> None:
    """Follow a compiled form along some outputs. Raises InvalidRequest if that takes more of the
    processor's time than a request's matcher may take."""
    vocabulary = compiler.vocabulary
    num_words = len(vocabulary.any)
    for walk in range(NUM_WALKS):
        rng = random.Random(walk)
        matcher = compiler.matcher(compiled)
        for _ in range(NUM_TOKENS):
            words = np.full(num_words, -1, dtype=np.int32)
            matcher.fill(words)
            if matcher.over:
                break
            words &= vocabulary.before
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            some = [int(rng.choice(allowed)) for _ in range(4)]
            longest = max(some, key=lambda token_id: len(vocabulary.spelled[token_id]))
            matcher.accept(some[0] if walk else longest)
