"""Checks the limits of steps and requests, and refuses requests that exceed them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from weft.core.errors import ContextLengthExceeded, InvalidRequest
from weft.core.requests import EngineRequest, TokenArray


class SchedulerLimits(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int
    max_adapter_wait: float
    """The most time for which requests wait for an adapter, in the unit of `plan`'s now."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    speculative: str = "off"
    """How tokens are guessed for requests that don't say how: off, ngram or mtp."""
    max_chunk_delay: float | None = None
    """Seconds by which chunks of prompts may delay the decodes of a step; None: any."""

    def eos_of(self, request: EngineRequest, vocab_size: int) -> frozenset[int]:
        """The EOS tokens of the model and of the request's adapter, as far as they are in the
        adapter's vocabulary (0: it is the base's)."""
        eos = self.eos_token_ids.union(request.eos_token_ids)
        return frozenset(i for i in eos if i < (vocab_size or self.vocab_size))

    def endings_of(self, request: EngineRequest, vocab_size: int) -> frozenset[int]:
        """The token ids that end the request's output."""
        params = request.params
        ends = params.structured_outputs is not None or not params.ignore_eos
        eos = self.eos_of(request, vocab_size) if ends else frozenset[int]()
        return eos.union(params.stop_token_ids)

    def longest(self, request: EngineRequest) -> int:
        """The number of tokens, prompt included, at which the request ends. A pooled request
        samples one token, which shows that its prompt is done."""
        if request.pooling is not None:
            return len(request.prompt_ids) + 1
        if request.params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(request.prompt_ids) + request.params.max_tokens)


def check_request(request: EngineRequest, limits: SchedulerLimits, vocab_size: int) -> TokenArray:
    """The tokens of the prompt, then of the output that the request came with. Raises
    InvalidRequest or ContextLengthExceeded for a request that can never be served. `vocab_size`:
    of the request's adapter, or of the base."""
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    tokens = _checked(request.prompt_ids, vocab_size, "the prompt", "prompt")
    too_long = limits.max_model_len + (request.pooling is not None)
    if len(request.prompt_ids) >= too_long:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.prompt_ids)} tokens, and a context of "
            f"{limits.max_model_len} has room for {too_long - 1}",
            "prompt",
        )
    _check_tokens(request, limits, vocab_size)
    if request.params.speculative == "mtp" and limits.speculative != "mtp":
        message = "speculative mtp is served by servers that were started with --speculative mtp"
        raise InvalidRequest(message, "speculative")
    if request.output_ids:
        tokens += _checked(request.output_ids, vocab_size, "output_ids", "output_ids")
        _check_output(request, limits, vocab_size)
    return tokens


def _checked(ids: list[int], vocab_size: int, what: str, param: str) -> TokenArray:
    """The ids, at least one, as an array. Raises InvalidRequest if one is not in the vocabulary."""
    try:
        tokens = array("Q", ids)
    except OverflowError:  # one is negative, or has more bits
        tokens = array("Q", [vocab_size])
    if np.frombuffer(tokens, np.uint64).max() >= vocab_size:
        raise InvalidRequest(f"{what} has a token id outside of [0, {vocab_size})", param)
    return tokens


def _check_output(request: EngineRequest, limits: SchedulerLimits, vocab_size: int) -> None:
    """Raise InvalidRequest unless the output that a request comes with can go on."""
    output = request.output_ids
    room = limits.longest(request) - len(request.prompt_ids)
    if len(output) >= room:
        message = f"output_ids has {len(output)} tokens, and the request ends at {room}"
        raise InvalidRequest(message, "output_ids")
    if not limits.endings_of(request, vocab_size).isdisjoint(output):
        raise InvalidRequest("output_ids has a token that ends the request", "output_ids")


def _check_tokens(request: EngineRequest, limits: SchedulerLimits, vocab_size: int) -> None:
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
    """Raise InvalidRequest if no token is left. An empty `allowed` allows all tokens."""
    if allowed <= forbidden if allowed else len(forbidden) >= vocab_size:
        raise InvalidRequest(f"{param} leaves no token that could be chosen", param)
