"""The plan of a step, which the scheduler hands to the worker, and the results it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.requests import Pooling, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.schedule.slots import Load

Vector = NDArray[np.float64]
Words = NDArray[np.int32]
"""A mask of the tokens that may be chosen: bit t % 32 of word t // 32 is set for token t."""


class Matcher(Protocol):
    """Says which tokens may come next in one request's output. It has to be told every token of the
    output, so the request's next step is planned only when all its tokens are known."""

    def accept(self, token_id: int) -> None:
        """Take a chosen token that does not end the output. Raises WeftError if the output can't go
        on after it: the request ends with that error."""

    def fill(self, words: Words) -> None:
        """Clear the bits of the tokens that may not come next. On entry, the bits of all tokens of
        the request's vocabulary are set."""


class Admitted(NamedTuple):
    """A request that takes a row of the batch with this step."""

    request_id: str
    row: int
    slot: int
    """Adapter slot, -1 for the base."""
    token_ids: NDArray[np.int64]
    """All tokens known so far: the prompt, and after a preemption the output until then."""
    num_prompt: int
    params: SamplingParams
    seed: int
    endings: frozenset[int] = frozenset()
    """EOS and stop tokens, which can't be chosen before `params.min_tokens`."""
    bad_tokens: tuple[int, ...] = ()
    """Tokens that can never be chosen."""
    bad_sequences: Matcher | None = None
    grammar: Matcher | None = None
    num_prompt_logprobs: int = -1
    """Alternatives to report at each position of the prompt; -1: nothing is to be reported."""
    adapter_wait_s: float = 0.0
    """How long it was passed over because its adapter was not available."""
    active_from: int = 0
    vocab_size: int = 0
    """The vocabulary of its adapter; 0: it is the base's."""
    state: int = -1
    """Its recurrent state; -1: the model has none."""
    restored: int = -1
    """The snapshot that is copied to its state before the step; -1: none is."""
    pooling: Pooling | None = None
    """Which of the prompt's hidden states are summed for it; None: none, it generates tokens."""
    blocks: Sequence[int] = ()
    """All KV blocks that it holds, in order."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. `rows`, `starts`, `counts` and `num_samples` have one entry for each
    sequence in the step, or several: one more where its adapter becomes active or a snapshot is
    taken, and one for each guess."""

    step: int
    rows: list[int]
    starts: list[int]
    """The position of the first token to compute."""
    counts: list[int]
    num_samples: list[int]
    """How many of the last computed positions yield a token each: 0 or 1, or more where the tokens
    are computed together."""
    num_tokens: int
    admitted: list[Admitted]
    new_blocks: list[tuple[int, int, int]]
    """(row, index in the row's block table, block): new blocks of requests that were running."""
    loads: list[Load]
    """Adapter loads to start; they do not hold up this step."""
    snapshots: list[tuple[int, int]]
    """(recurrent state, its snapshot): the state after the first of the sequence's entries."""
    fed: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, position, token) of decodes whose token the device does not have as the row's last one:
    it is a guess, or came from a step with guesses. A row with guesses has an entry for each."""
    lags: list[tuple[int, int]] = field(default_factory=list)
    """(recurrent state, number of tokens) of decodes whose state lacks the last tokens before them,
    which were guessed right. The device has kept what it needs to add them."""
    drafted: list[tuple[int, int]] = field(default_factory=list)
    """(entry, room) of decodes after which the model's multi-token prediction head drafts, behind
    the last valid token. `room`: the tokens for which the row's blocks have room."""
    num_guesses: int = 0
    """How many of the entries are guesses."""

    @property
    def empty(self) -> bool:
        return not self.rows

    @property
    def awaited(self) -> bool:
        """Whether the next plan needs this step's tokens, as it has guesses or drafts some."""
        return bool(self.num_guesses or self.drafted)

    @property
    def decodes(self) -> bool:
        """Whether it computes one token for each entry and admits no request."""
        return self.num_tokens == len(self.rows) and not self.admitted


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step."""

    tokens: list[int]
    """`num_samples` tokens of each entry of the plan."""
    logprobs: list[TokenLogprob | None] | None = None
    """One for each token, None where its request didn't ask; None if no request did."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """By entry of the plan: for each computed position of a prompt, that of the next token."""
    vectors: dict[int, Vector] = field(default_factory=dict)
    """By entry of the plan: the sum of the entry's hidden states that are pooled."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By entry of the plan: the drafted tokens, for the entries in `StepPlan.drafted`."""
