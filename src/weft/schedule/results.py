"""What a step's result has for each entry of its plan, and what it has for prompts and guessers."""

from __future__ import annotations

from collections.abc import Sequence as Places
from itertools import accumulate

from weft.core.requests import TokenLogprob
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.sequence import Sequence


def by_entry(
    plan: StepPlan, result: StepResult
) -> tuple[list[int], list[TokenLogprob | None] | None, Places[int]]:
    """The first token of each entry, -1 if it has none; its log-probability, if any is known; and
    at which place the tokens of each begin and, at the end, how many there are."""
    tokens, logprobs = result.tokens, result.logprobs
    if plan.num_samples.count(1) == len(plan.rows):
        return tokens, logprobs, range(len(tokens) + 1)
    ends = [0, *accumulate(plan.num_samples)]
    places = [place if num else -1 for place, num in zip(ends, plan.num_samples, strict=False)]
    firsts = [-1 if place < 0 else tokens[place] for place in places]
    told = logprobs and [None if place < 0 else logprobs[place] for place in places]
    return firsts, told, ends


def of_entry(
    result: StepResult, begin: int, end: int
) -> tuple[list[int], list[TokenLogprob] | None]:
    """The tokens from `begin` to `end`, which are of one entry, and their log-probabilities; None
    if its request didn't ask."""
    told = [each for each in (result.logprobs or ())[begin:end] if each is not None]
    return result.tokens[begin:end], told or None


def offer_drafts(planned: list[Sequence], result: StepResult) -> None:
    """Give the tokens that were drafted in a step to the requests' guessers."""
    for entry, drafts in result.drafts.items():
        seq = planned[entry]
        assert seq.rules.guesser is not None
        seq.rules.guesser.offer(len(seq.tokens), drafts)


def take_of_prompts(planned: list[Sequence], plan: StepPlan, result: StepResult) -> None:
    """Take a step's results for prompts: log-probabilities and pooled vectors."""
    for i, logprobs in result.prompt_logprobs.items():
        if (asked := planned[i].prompt_output) is not None:
            asked.take_logprobs(plan.starts[i], logprobs)
    for i, vector in result.vectors.items():
        if (asked := planned[i].prompt_output) is not None:
            asked.take_sum(plan.starts[i], vector)
