"""What an engine is asked for (`EngineRequest`) and the tokens that it answers (`TokenEvent`).

Both are records of plain values, so that any codec can carry them between processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Literal, NamedTuple, TypeAlias

from weft.core.adapters import AdapterPart, AdapterRef
from weft.core.errors import WeftError, to_wire
from weft.core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
TokenArray: TypeAlias = "array[int]"
"""Token ids of 64 bits each, whose bytes can be hashed and copied as they are. To make an
`array("Q")` of a list takes half the time of other arrays."""
Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make its vector: that of its last token, or the mean of all."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue. `adapter` None means the base model.

    A request can move to another engine, with the tokens that the first has made as `output_ids`.
    The second engine then continues as the first would have done, up to rounding.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int = field(kw_only=True)
    """The noise of the sampled token at each position derives from it: `params.seed`, or one that
    was drawn where the request was built."""
    adapter: AdapterRef | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be produced: `params.bad_words`, tokenized."""
    tenant: str = ""
    """Who asks. Tenants whose requests wait are served by their weights."""
    parts: tuple[AdapterPart, ...] = ()
    """What `adapter` is the weighted sum of; (): it is registered under its own digest."""
    eos_token_ids: tuple[int, ...] = ()
    """EOS tokens of the adapter's own tokenizer: they end the output as the model's EOS does."""
    output_ids: list[int] = field(default_factory=list)
    """Output that the request has already. It counts as output everywhere and is not reported
    again, nor are the log-probabilities of the prompt."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests with the same salt."""
    pooling: Pooling | None = None
    """If set, the request ends after its prompt, and yields a vector instead of tokens."""
    in_groups: bool = False
    """Whether its reader needs tokens only when the answer is complete. Then many may be sent at a
    time, which costs less."""

    @property
    def digests(self) -> list[str]:
        """The content that the request needs."""
        if self.parts:
            return [part.ref.digest for part in self.parts]
        return [self.adapter.digest] if self.adapter else []


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural, before temperature and filters) at one output position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens, best first: (token id, log-probability)."""


class TokenEvent(NamedTuple):
    """New tokens of a request. Exactly one event of a request has `finish_reason` set: its last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    """"stop": the last token ended the request."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the request; None for EOS."""
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    num_tokens: int = 0
    """With tokens: how many the request has now, prompt included. By it, a reader who counts sees
    that no token is missing or comes twice."""
    error: tuple[str, str, str | None] | None = None
    """With finish_reason "error": see `weft.core.errors.from_wire`."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first event, if asked for: one for each token of the prompt; None for the first."""
    queue_s: float | None = None
    """With the first event: seconds from the engine's receipt of the request to its first step."""
    adapter_wait_s: float | None = None
    """With `queue_s`: the part of it in which the request was passed over because its adapter was
    not on the device, or could not join the batch."""
    vector: bytes | None = None
    """With the only event of a request that has `pooling`: the pooled hidden states after the
    model's last norm, as little-endian float32."""


def error_event(request_id: str, error: WeftError) -> TokenEvent:
    """The last event of a request that fails."""
    return TokenEvent(request_id, [], finish_reason="error", error=to_wire(error))


def each_token(event: TokenEvent) -> list[TokenEvent]:
    """An event of several tokens with log-probabilities, split into one event for each token; any
    other event, unchanged, in a list of its own."""
    ids, logprobs = event.token_ids, event.logprobs
    if logprobs is None or len(ids) < 2:
        return [event]
    more = event._replace(finish_reason=None, stop_reason=None)
    parts = [more._replace(token_ids=[i], logprobs=[p]) for i, p in zip(ids, logprobs, strict=True)]
    parts[1:] = [part._replace(prompt_logprobs=None) for part in parts[1:]]
    reason, stop = event.finish_reason, event.stop_reason
    return [*parts[:-1], parts[-1]._replace(finish_reason=reason, stop_reason=stop)]


_new = tuple.__new__


def next_tokens(
    request_id: str,
    token_ids: list[int],
    logprobs: list[TokenLogprob] | None,
    num_cached_tokens: int,
    num_tokens: int,
) -> TokenEvent:
    """The event of a request that continues. Each step makes one for each request, so it is made
    with `tuple.__new__`, which takes half the time of calling the class."""
    return _new(TokenEvent, (
        request_id, token_ids, logprobs, None, None, num_cached_tokens, num_tokens,
        None, None, None, None, None,
    ))  # fmt: skip


class FollowingTokens(NamedTuple):
    """One more token for each of these requests, which all go on. A record of them all takes much
    less time to make and to send than an event for each."""

    request_ids: list[str]
    token_ids: list[int]
    num_cached_tokens: list[int]
    """See `TokenEvent`."""
    positions: list[int]
    """The position, counted from 0, of the token that each new token follows."""
    logprobs: list[TokenLogprob | None] | None
    """Those of the tokens whose requests ask for them; None if no request does."""

    def without(self, places: Iterable[int]) -> FollowingTokens:
        """All but the tokens at these places."""
        kept = bytearray(b"\1" * len(self.token_ids))
        for i in places:
            kept[i] = 0
        return FollowingTokens._make(each and list(compress(each, kept)) for each in self)

    @property
    def events(self) -> list[TokenEvent]:
        """The same as events."""
        names, tokens, cached, positions, logprobs = self
        each = zip(names, tokens, cached, positions, logprobs or repeat(None), strict=False)
        return [
            next_tokens(name, [token], None if told is None else [told], num, at + 2)
            for name, token, num, at, told in each
        ]
