"""The output of one request: engine events in, text and tokens out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft.core.errors import InvalidRequest, from_wire
from weft.core.requests import FinishReason, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.text.reader import TokenReader

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
        tokenizer: TokenReader,
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

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. They are decoded at once where nothing of them has
        to wait for its end, which takes a fraction of the time for each by itself."""
        if len(token_ids) > 1:
            new = [t for t in token_ids if t not in self._skip]
            after = self._tokenizer.decode(self._window + new)
            if _UNKNOWN not in after and after != self._before and after.startswith(self._before):
                self._window += new
                return self._advance(after)
        return "".join([self.feed(t) for t in token_ids])

    def flush(self) -> str:
        """The output has ended: the text that was held back."""
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


class StopStrings:
    """Passes text on up to the first complete stop string.

    Text that may be the beginning of a stop string is held back. The stop that ends first wins,
    of those the longest, however the text was cut into pieces. Each stop string is matched by
    its own Knuth-Morris-Pratt automaton: constant time a character, and the states say how much
    of the text's end must wait.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after it."""

    def __bool__(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def feed(self, text: str, may_end: bool = True) -> str:
        """The text that can be given out now. Unless it `may_end`, no stop string ends in `text`,
        though one may begin there."""
        assert self.matched is None
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        for i, char in enumerate(text):
            if self._step(char, may_end):
                return self._cut(self._held + text[: i + 1])
        text = self._held + text
        num_ready = len(text) - max(self._states)
        self._held = text[num_ready:]
        return text[:num_ready]

    def flush(self) -> str:
        """The output has ended: the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, may_end: bool) -> bool:
        """Advance all automata by one character; true when a stop string is complete."""
        for n, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[n]
            while state and stop[state] != char:
                state = borders[state - 1]
            self._states[n] = state + (stop[state] == char)
            if self._states[n] < len(stop):
                continue
            if not may_end:
                self._states[n] = borders[-1]
            elif len(stop) > len(self.matched or ""):
                self.matched = stop
        return self.matched is not None

    def _cut(self, text: str) -> str:
        assert self.matched is not None
        self._held = ""
        return text if self._include else text[: len(text) - len(self.matched)]


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[state] != stop[i]:
            state = borders[state - 1]
        state += stop[state] == stop[i]
        borders[i] = state
    return borders


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one event adds to the output. The last one has `finish_reason` set."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """These come with the first delta, if they were asked for."""
    abort: bool = False
    """A stop string ended the output here: the engine does not know, so its request must be
    aborted (its iterator closed)."""


class OutputStream:
    """Turns the events of one request into deltas. Without a tokenizer there is no text.

    `shown_ids` are special tokens that show in the text whatever the parameters say. With
    `text_at_end`, the text comes with the last delta as a whole, which takes less time than token
    by token, unless there are stop strings to look for.
    """

    def __init__(
        self,
        tokenizer: TokenReader | None,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
        text_at_end: bool = False,
    ) -> None:
        if tokenizer is None and params.stop:
            raise InvalidRequest("stop strings need a tokenizer, and none is loaded", "stop")
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, shown_ids)
            if tokenizer
            else None
        )
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, self._include_stop)
        self._num_early = params.min_tokens
        """How many of the next tokens can't end a stop string."""
        self._held: list[int] | None = [] if text_at_end else None
        """Tokens whose text will come with the last delta; None: each delta has its own text."""

    def holds(self, event: TokenEvent) -> bool:
        """Keep an event's tokens for the last delta, if it has nothing else and there are no stop
        strings. Returns False if the event must be fed instead."""
        if self._held is None or self._stops or event.finish_reason is not None:
            return False
        if event.logprobs is not None or event.prompt_logprobs is not None:
            return False
        self._held += event.token_ids
        return True

    def feed(self, event: TokenEvent) -> OutputDelta:
        """What this event adds. Raises the request's own error when the engine reports one."""
        if event.error is not None:
            raise from_wire(event.error)
        text, num_used = self._text(event, self._num_written(event))
        if event.finish_reason is not None and self._stops.matched is None:
            text += self._flush()
        stop = self._stops.matched
        return OutputDelta(
            text=text,
            token_ids=event.token_ids[:num_used],
            logprobs=None if event.logprobs is None else event.logprobs[:num_used],
            finish_reason=event.finish_reason if stop is None else "stop",
            stop_reason=event.stop_reason if stop is None else stop,
            num_cached_tokens=event.num_cached_tokens,
            prompt_logprobs=event.prompt_logprobs,
            abort=stop is not None and event.finish_reason is None,
        )

    def _num_written(self, event: TokenEvent) -> int:
        """How many of the tokens are text. One that ended the output is not, unless asked for."""
        ended = event.finish_reason == "stop" and not self._include_stop
        return max(len(event.token_ids) - ended, 0)

    def _text(self, event: TokenEvent, num_written: int) -> tuple[str, int]:
        """The text of the tokens, and how many were used until a stop string was found."""
        token_ids = event.token_ids
        if self._detokenizer is None:
            return "", len(token_ids)
        if not self._stops:
            written = token_ids[:num_written]
            if self._held is not None:
                self._held += written
                written = [] if event.finish_reason is None else self._held
            return self._detokenizer.feed_all(written), len(token_ids)
        parts: list[str] = []
        for n in range(num_written):
            may_end = self._num_early == 0
            self._num_early -= not may_end
            parts.append(self._stops.feed(self._detokenizer.feed(token_ids[n]), may_end))
            if self._stops.matched is not None:
                return "".join(parts), n + 1
        return "".join(parts), len(token_ids)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.feed(self._detokenizer.flush(), self._num_early == 0)
        return text + ("" if self._stops.matched is not None else self._stops.flush())
