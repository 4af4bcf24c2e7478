"""Text from tokens, as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_CONTEXT_TOKENS = 6
_MAX_PENDING = 32
_MAX_READ = 8
"""How many tokens a window holds before a new one begins: more take longer to decode."""


class Detokenizer:
    """Text deltas of one request's tokens; the deltas add up to the decoded whole.

    What a token looks like can depend on its neighbours: sentencepiece drops the space of the
    first word, and a character may be spread over several tokens. So two windows over the tokens
    are decoded, and what the longer has more is new:

        ... t3  t4 | t5  t6 | t7  t8
            prefix ^  read  ^       ^ end
            `---- before ---'       |
            `-------- after --------'

    While `after` ends in U+FFFD a character may be incomplete, and the text waits; after
    `_MAX_PENDING` tokens without an end in sight it is no character, and is passed on as it is.
    The first window holds the end of the prompt, so that an answer which continues a text keeps
    its leading space. `shown_ids` are special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skip = special.difference(shown_ids)
        context = [t for t in prompt_ids[-4 * _CONTEXT_TOKENS :] if t not in self._skip]
        self._window = context[-_CONTEXT_TOKENS:]
        self._read = len(self._window)
        self._before = tokenizer.decode(self._window)

    def feed(self, token_id: int) -> str:
        """The text that this token completes; often empty."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        after = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._read
        if pending < _MAX_PENDING and (after.endswith(_UNKNOWN) or after == self._before):
            return ""
        return self._advance(after)

    def flush(self) -> str:
        """The text that still waits, when the end of the output has come."""
        if len(self._window) == self._read:
            return ""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, after: str) -> str:
        text = self._new_text(after)
        self._before = after
        if len(self._window) > _MAX_READ:
            del self._window[: self._read]
            self._before = self._tokenizer.decode(self._window)
        self._read = len(self._window)
        return text

    def _new_text(self, after: str) -> str:
        if after.startswith(self._before):
            return after[len(self._before) :]
        whole = self._before.rstrip(_UNKNOWN)
        if whole != self._before and after.startswith(whole):
            return after[len(whole) :]  # the prompt ended inside a character
        return self._tokenizer.decode(self._window[self._read :])  # text given out stays
