"""Collects a request's results for its prompt: log-probabilities of tokens, or one vector."""

from __future__ import annotations

from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.schedule.plan import Vector


class PromptOutput:
    """The results for one prompt. They come chunk by chunk, and go out with the first event. A
    preempted prompt is computed again, with the same results."""

    __slots__ = ("_count", "_logprobs", "_sum", "needs_all", "num_logprobs")

    def __init__(self, request: EngineRequest) -> None:
        asked, pooling = request.params.prompt_logprobs, request.pooling
        self.num_logprobs = -1 if asked is None else asked
        """How many alternatives to report at each position; -1: no log-probabilities at all."""
        self.needs_all = asked is not None or pooling == "mean"
        """Whether each position must be computed, cached or not."""
        self._logprobs: list[TokenLogprob] = []
        self._sum: Vector | None = None
        """The sum of the pooled hidden states so far."""
        self._count = len(request.prompt_ids) if pooling == "mean" else 1

    @staticmethod
    def asked_by(request: EngineRequest) -> PromptOutput | None:
        """None if the request wants nothing of its prompt, or has had it from another engine."""
        wants_logprobs = request.params.prompt_logprobs is not None and not request.output_ids
        return PromptOutput(request) if wants_logprobs or request.pooling else None

    def take_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Take the log-probabilities of a chunk that begins at `start`; earlier results stay."""
        self._logprobs += logprobs[len(self._logprobs) - start :]

    def take_sum(self, start: int, chunk: Vector) -> None:
        """Add the sum over the pooled positions of a chunk that begins at `start`."""
        self._sum = chunk if self._sum is None or start == 0 else self._sum + chunk

    def into(self, event: TokenEvent) -> TokenEvent:
        """The first event with these results. The token of a pooled request is dropped."""
        if self._sum is not None:
            vector = (self._sum / self._count).astype("<f4").tobytes()
            event = event._replace(token_ids=[], finish_reason="stop", vector=vector)
        if self.num_logprobs >= 0:
            event = event._replace(prompt_logprobs=[None, *self._logprobs])
        return event
