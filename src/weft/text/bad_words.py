"""Words that must not be produced, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.errors import InvalidRequest
from weft.text.tokenizer import Tokenizer


def bad_token_ids(tokenizer: Tokenizer | None, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text and as it follows a space, for
    `EngineRequest.bad_token_ids`.

    Other ways to tokenize a word are not forbidden. Raises InvalidRequest if there is no
    tokenizer, or no token in a word.
    """
    words = list(words)
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer, and none is loaded", "bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        found = [
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)
        ]
        if not all(found):
            raise InvalidRequest(f"bad_words: {word!r} has no tokens", "bad_words")
        sequences |= dict.fromkeys(found)
    return _shortest(sequences)


def _shortest(sequences: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The sequences that end in no other one: a longer one is forbidden by the shorter."""
    kept: list[tuple[int, ...]] = []
    for backwards in sorted(sequence[::-1] for sequence in sequences):
        if not kept or backwards[: len(kept[-1])] != kept[-1]:
            kept.append(backwards)
    return tuple(sequence[::-1] for sequence in kept)
