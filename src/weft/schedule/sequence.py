"""A request inside the scheduler, what bounds it, and what of it is refused."""

from __future__ import annotations

from typing import NamedTuple

from weft.core.errors import ContextLengthExceeded, InvalidRequest, WeftError
from weft.core.requests import EngineRequest, TokenLogprob
from weft.schedule.blocks import BlockKey
from weft.schedule.masks import BadSequences
from weft.schedule.plan import Matcher
from weft.schedule.queue import Account

NEVER = 1 << 62
"""Beyond any position."""


class Limits(NamedTuple):
    """What bounds a step and a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    max_loras: int
    max_adapter_wait: float
    """Seconds, as those of `plan`."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    enable_prefix_caching: bool

    def eos_of(self, request: EngineRequest, vocab_size: int) -> frozenset[int]:
        """What ends a request's output: of the model and of its adapter, as far as its vocabulary
        (0: the base's) has them."""
        eos = self.eos_token_ids.union(request.eos_token_ids)
        return frozenset(i for i in eos if i < (vocab_size or self.vocab_size))


class Sequence:
    """A request inside the scheduler."""

    __slots__ = (
        "account",
        "active_from",
        "adapter_wait_s",
        "bad_sequences",
        "bad_tokens",
        "began_at",
        "blocks",
        "charged",
        "compiling",
        "computed",
        "digest",
        "done",
        "early_endings",
        "endings",
        "grammar",
        "in_flight",
        "keys",
        "known",
        "known_limit",
        "limit",
        "next_full",
        "num_cached",
        "num_prompt",
        "order",
        "paced",
        "params",
        "prompt_logprobs",
        "request_id",
        "row",
        "seed",
        "slot",
        "tokens",
        "vocab_size",
    )

    def __init__(
        self,
        request: EngineRequest,
        active_from: int | None,
        vocab_size: int,
        order: int,
        seed: int,
        limits: Limits,
        account: Account,
    ) -> None:
        params = request.params
        self.account = account
        self.request_id = request.request_id
        self.params = params
        self.order = order
        self.seed = seed
        self.tokens = list(request.prompt_ids)
        self.num_prompt = self.charged = len(self.tokens)
        self.began_at = 0
        """Tokens that it had when it was admitted last."""
        self.adapter_wait_s = 0.0
        """How long its adapter's requests had been passed over when it came."""
        longest = limits.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, self.num_prompt + params.max_tokens)
        self.limit = longest
        """Tokens, prompt included, at which the request ends."""
        self.digest: str | None = None
        self.active_from = NEVER
        """Position from which on its adapter is active."""
        if request.adapter is not None and active_from is not None:
            self.digest, self.active_from = request.adapter.digest, active_from
        self.vocab_size = vocab_size
        """Of its adapter; 0: the base's."""
        eos = limits.eos_of(request, vocab_size)
        self.early_endings = eos.union(params.stop_token_ids)
        """Token ids that are not to be chosen too early."""
        self.endings = frozenset(params.stop_token_ids)
        """Token ids that end the output."""
        if not params.ignore_eos or params.structured_outputs:
            self.endings |= eos
        self.bad_tokens = tuple(ids[0] for ids in request.bad_token_ids if len(ids) == 1)
        sequences = [ids for ids in request.bad_token_ids if len(ids) > 1]
        self.bad_sequences = BadSequences(sequences) if sequences else None
        self.grammar: Matcher | None = None
        self.compiling = params.structured_outputs is not None
        self.paced = bool(sequences) or self.compiling
        self.known_limit = self.limit
        """What `known` may reach now; of a paced sequence with a pending token, its value."""
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """As far as they are there; None once they were handed out, or if nobody asked."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.known = self.num_prompt
        """Tokens, those included that are sampled already and only the device knows yet."""
        self.in_flight = 0
        """Steps planned and not committed."""
        self.computed = 0
        """Positions whose KV is computed once all planned steps have run."""
        self.blocks: list[int] = []
        self.keys: list[BlockKey] = []
        """Prefix keys of full blocks of `tokens`, as far as they were needed."""
        self.next_full = limits.block_size
        """Tokens at which the next block is full and offered to the prefix index."""
        self.row = -1
        """Row in the batch; -1 while waiting."""
        self.slot = -1
        """Leased adapter slot; -1 without a lease."""
        self.num_cached = -1
        self.done = False
        if self.paced:
            self._pace()

    def match(self, token: int) -> WeftError | None:
        """The newest token of a paced sequence is known now; an error ends its request."""
        try:
            for matcher in (self.grammar, self.bad_sequences):
                if matcher is not None:
                    matcher.accept(token)
        except WeftError as error:
            return error
        self._pace()
        return None

    def _pace(self) -> None:
        self.known_limit = min(self.limit, len(self.tokens) + 1)

    def take_prompt_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Those that follow the computed position `start`. A preempted prompt is computed again:
        what is there already stays."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order


def check_request(request: EngineRequest, limits: Limits, vocab_size: int) -> None:
    """Raises InvalidRequest or ContextLengthExceeded for what can't be served, whatever else is
    under way. `vocab_size` is that of the request's adapter, or the base's."""
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise InvalidRequest(f"the prompt has a token id outside of [0, {vocab_size})", "prompt")
    if len(request.prompt_ids) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.prompt_ids)} tokens, which leaves no room for an "
            f"answer in a context of {limits.max_model_len}",
            "prompt",
        )
    _check_tokens(request, limits, vocab_size)


def _check_tokens(request: EngineRequest, limits: Limits, vocab_size: int) -> None:
    """Token ids must be in the vocabulary, and there must be one that can be chosen."""
    params = request.params
    params.check_vocab(vocab_size)
    if any(not 0 <= i < vocab_size for i in request.eos_token_ids):
        raise InvalidRequest("an EOS token is not in the vocabulary", "eos_token_ids")
    eos = limits.eos_of(request, vocab_size)
    of_model = limits.eos_token_ids
    if params.structured_outputs and of_model and not eos & of_model:
        raise InvalidRequest(
            "structured_outputs: the adapter's vocabulary lacks the model's EOS token, which"
            " ends every form",
            "structured_outputs",
        )
    forbidden: set[int] = set()
    for ids in request.bad_token_ids:
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            message = f"bad_words has no token ids in [0, {vocab_size}): {ids}"
            raise InvalidRequest(message, "bad_words")
        if len(ids) == 1:
            forbidden.add(ids[0])
    allowed = set(params.allowed_token_ids)
    _check_choice(allowed, forbidden, vocab_size, "bad_words")
    if params.min_tokens:
        endings = eos.union(params.stop_token_ids)
        _check_choice(allowed, forbidden | endings, vocab_size, "min_tokens")


def _check_choice(allowed: set[int], forbidden: set[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if no token is left. `allowed` empty: all."""
    if allowed <= forbidden if allowed else len(forbidden) >= vocab_size:
        raise InvalidRequest(f"{param} leaves no token that could be chosen", param)
