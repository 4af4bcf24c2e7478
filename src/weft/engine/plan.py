"""What the scheduler hands to the runner for one step, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.types import SamplingParams, TokenLogprob
from weft.residency.slots import Load


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that takes a row of the batch with this step."""

    row: int
    slot: int
    """Adapter slot, -1 for the base."""
    token_ids: list[int]
    """All tokens known so far: the prompt, and after a preemption the output until then."""
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The lists run in parallel, one entry per sequence in the step."""

    step: int
    rows: list[int]
    starts: list[int]
    """Position of the first token to compute."""
    counts: list[int]
    """Number of tokens to compute; 1 for decode."""
    samples: list[bool]
    """Whether the last computed position yields a token."""
    num_tokens: int
    admitted: list[Admitted]
    new_blocks: list[tuple[int, int, int]]
    """(row, index in the row's block table, block)."""
    loads: list[Load]
    """Adapter loads to start; they do not hold up this step."""

    @property
    def empty(self) -> bool:
        return not self.rows


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of the entries that sample, in the plan's order."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
