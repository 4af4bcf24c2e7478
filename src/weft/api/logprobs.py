"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from weft.core.types import TokenLogprob
from weft.text import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """How a token is shown: its text; its bytes when they are no text; its id if all else fails."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    num_top: int,
) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": data}

    content = [
        entry(token_id, lp.logprob) | {"top_logprobs": [entry(*t) for t in lp.top[:num_top]]}
        for token_id, lp in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece: offsets run on between pieces."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        skips = tokenizer is not None and skip_special
        self._hidden = tokenizer.special_ids if tokenizer and skips else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def piece(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [token_text(self._tokenizer, t) for t in token_ids],
            "token_logprobs": [lp.logprob for lp in logprobs],
            "top_logprobs": [self._top(t, lp) for t, lp in zip(token_ids, logprobs, strict=False)],
            "text_offset": [self._advance(t) for t in token_ids],
        }

    def _top(self, token_id: int, lp: TokenLogprob) -> dict[str, float]:
        """The alternatives, and always the chosen token."""
        best = {token_text(self._tokenizer, t): value for t, value in lp.top[: self._num_top]}
        return best | {token_text(self._tokenizer, token_id): lp.logprob}

    def _advance(self, token_id: int) -> int:
        """The character at which this token begins; counts its own."""
        start = self._num_chars
        if self._tokenizer is not None and token_id not in self._hidden:
            self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start
