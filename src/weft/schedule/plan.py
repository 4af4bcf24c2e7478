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

Vector = NDArray[np.float32]
Words = NDArray[np.int32]
"""Tokens that may be chosen, one bit each: bit t % 32 of word t // 32 is token t's."""


class Matcher(Protocol):
    """Which tokens the output of one request allows next. It is told every token of the output,
    so its request's next step is planned only when all tokens are known."""

    def accept(self, token_id: int) -> None:
        """A token was chosen that is not the last one. Raises WeftError if the output can't go on:
        its request ends with that error."""

    def fill(self, words: Words) -> None:
        """Clear the bits of the tokens that may not come next. On entry those of all tokens of
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
    """EOS and stop tokens: not to be chosen before `params.min_tokens`."""
    bad_tokens: tuple[int, ...] = ()
    """Never to be chosen."""
    bad_sequences: Matcher | None = None
    grammar: Matcher | None = None
    num_prompt_logprobs: int = -1
    """Alternatives to report at each position of the prompt; -1: nothing is to be reported."""
    adapter_wait_s: float = 0.0
    """How long it was passed over because its adapter was not to be had."""
    active_from: int = 0
    vocab_size: int = 0
    """The vocabulary of its adapter; 0: it is the base's."""
    state: int = -1
    """Its recurrent state; -1: the model has none."""
    restored: int = -1
    """The snapshot that is copied to its state before the step; -1: none is."""
    pooling: Pooling | None = None
    """Whose hidden states are summed up for it."""
    blocks: Sequence[int] = ()
    """All that it holds."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The lists run in parallel, one entry per sequence in the step: two, if its adapter
    becomes active in this step, the base's part first, and more where tokens are guessed."""

    step: int
    rows: list[int]
    starts: list[int]
    """Position of the first token to compute."""
    counts: list[int]
    num_samples: list[int]
    """How many of the last computed positions yield a token each: 0 or 1, or more where the tokens
    are computed together."""
    num_tokens: int
    admitted: list[Admitted]
    new_blocks: list[tuple[int, int, int]]
    """(row, index in the row's block table, block) of those that go on."""
    loads: list[Load]
    """Adapter loads to start; they do not hold up this step."""
    snapshots: list[tuple[int, int]]
    """(recurrent state, its snapshot): as it is behind the first of the sequence's entries."""
    fed: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, position, token) of decodes whose token the device does not know, or not yet: it is a
    guess, or came in a step with guesses. A row with guesses has an entry for each."""
    lags: list[tuple[int, int]] = field(default_factory=list)
    """(recurrent state, tokens) of decodes whose state lacks so many tokens before them, which were
    guessed right. The device has kept what it needs of them."""
    drafted: list[tuple[int, int]] = field(default_factory=list)
    """(entry, places) of decodes behind whose tokens, once it is known which of them count, the
    model's head for several tokens is to draft more. The row's blocks have so many places."""
    num_guesses: int = 0
    """How many of the entries are guesses."""

    @property
    def empty(self) -> bool:
        return not self.rows

    @property
    def awaited(self) -> bool:
        """Whether the next plan needs its tokens, as some are guesses, or will be."""
        return bool(self.num_guesses or self.drafted)

    @property
    def decodes(self) -> bool:
        """Whether it has one token of each of its sequences, and nobody begins."""
        return self.num_tokens == len(self.rows) and not self.admitted


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has yielded, in lists with an element for each entry of the plan that samples."""

    tokens: list[list[int]]
    """`num_samples` tokens each."""
    logprobs: list[list[TokenLogprob] | None] | None = None
    """One for each token; None for entries whose request did not ask, or if none did."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """By entry of the plan: what each computed token of a prompt says of the one after it."""
    vectors: dict[int, Vector] = field(default_factory=dict)
    """By entry of the plan: the sum of the hidden states that are pooled for its request."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By entry of the plan, of those that `StepPlan.drafted` names."""
