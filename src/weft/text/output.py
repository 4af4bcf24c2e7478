"""The output of one request: engine events in, text and tokens out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft.core.errors import InvalidRequest, from_wire
from weft.core.requests import FinishReason, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.text.detokenizer import Detokenizer
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer


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

    `shown_ids` are special tokens that show in the text whatever the parameters say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
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

    def feed(self, event: TokenEvent) -> OutputDelta:
        """What this event adds. Raises the request's own error when the engine reports one."""
        if event.error is not None:
            raise from_wire(event.error)
        text, num_used = self._text(event.token_ids, self._num_written(event))
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
        """The tokens that are text: a token that ended the output is not, unless asked for."""
        ended = event.finish_reason == "stop" and not self._include_stop
        return max(len(event.token_ids) - ended, 0)

    def _text(self, token_ids: list[int], num_written: int) -> tuple[str, int]:
        """The text of the tokens, and how many were used until a stop string was found."""
        if self._detokenizer is None:
            return "", len(token_ids)
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
