"""Log-probabilities in the shapes of OpenAI's two APIs, and of vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from weft.core.requests import TokenLogprob
from weft.text import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int, as_id: bool = False) -> str:
    """How a token is shown: its text; its bytes when they are no text; its id if all else fails
    or the client wants ids."""
    if tokenizer is None or as_id:
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
    as_ids: bool,
) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        shown = token_text(tokenizer, token_id, as_ids)
        return {"token": shown, "logprob": logprob, "bytes": data}

    content = [
        entry(token_id, lp.logprob) | {"top_logprobs": [entry(*t) for t in lp.top[:num_top]]}
        for token_id, lp in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer | None,
    prompt_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    num_top: int,
    as_ids: bool,
) -> list[dict[int, dict[str, Any]] | None]:
    """The log-probabilities of a prompt as vLLM shows them: at each position the alternatives and
    the prompt's own token, by id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        shown = token_text(tokenizer, token_id, as_ids)
        return {"logprob": logprob, "rank": rank, "decoded_token": shown}

    def position(token_id: int, lp: TokenLogprob) -> dict[int, dict[str, Any]]:
        best = {t: entry(t, value, n + 1) for n, (t, value) in enumerate(lp.top[:num_top])}
        return {token_id: entry(token_id, lp.logprob, lp.rank)} | best

    return [
        None if lp is None else position(token_id, lp)
        for token_id, lp in zip(prompt_ids, logprobs, strict=True)
    ]


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece: offsets run on between pieces."""

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, skip_special: bool, as_ids: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        skips = tokenizer is not None and skip_special
        self._hidden = tokenizer.special_ids if tokenizer and skips else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def piece(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._shown(t) for t in token_ids],
            "token_logprobs": [None if lp is None else lp.logprob for lp in logprobs],
            "top_logprobs": [self._top(t, lp) for t, lp in zip(token_ids, logprobs, strict=False)],
            "text_offset": [self._advance(t) for t in token_ids],
        }

    def _shown(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, self._as_ids)

    def _top(self, token_id: int, lp: TokenLogprob | None) -> dict[str, float] | None:
        """The alternatives by their texts; the chosen token is always among them."""
        if lp is None:
            return None
        best = {self._shown(t): value for t, value in lp.top[: self._num_top]}
        return best | {self._shown(token_id): lp.logprob}

    def _advance(self, token_id: int) -> int:
        """The character at which this token begins. Its own characters are counted for the next."""
        start = self._num_chars
        if self._tokenizer is not None and token_id not in self._hidden:
            self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start
