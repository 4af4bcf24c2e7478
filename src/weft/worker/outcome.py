"""What a step gives: from device tensors to the records that the scheduler commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.requests import TokenLogprob
from weft.kernels.sampling import top_logprobs
from weft.schedule.plan import StepResult
from weft.worker.inputs import Array, StepInputs
from weft.worker.sampler import VocabularyRun

Logprobs = tuple[Tensor, ...]
"""What `top_logprobs` gives."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's outcome, in the order of its inputs; `logprobs` and `prompt` are there only if a
    request asks for them."""

    ids_N: Tensor
    logprobs: Logprobs | None
    prompt: Logprobs | None


def logprobs_of(
    logits_NV: Tensor, ids_N: Tensor, num: int, runs: list[VocabularyRun] | None
) -> Logprobs:
    """`top_logprobs` of rows that may have several vocabularies."""
    if runs is None:
        return top_logprobs(logits_NV, ids_N, num)
    parts = [top_logprobs(logits_NV[i:j, :size], ids_N[i:j], num) for i, j, size in runs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def to_host(sampled: Sampled) -> Sampled:
    """Start to copy an outcome to page-locked memory, where it is when the stream has got there."""
    return Sampled(
        _to_host(sampled.ids_N),
        tuple(map(_to_host, sampled.logprobs)) if sampled.logprobs else None,
        tuple(map(_to_host, sampled.prompt)) if sampled.prompt else None,
    )


def _to_host(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def step_result(inputs: StepInputs, sampled: Sampled) -> StepResult:
    """The records of an outcome that is on the host, in the order of the plan."""
    order = inputs.plan_order_N
    logprobs = None
    if sampled.logprobs is not None and inputs.num_logprobs_N is not None:
        in_order = [t.numpy()[order] for t in sampled.logprobs]
        records = _records(in_order, inputs.num_logprobs_N[order].tolist())
        logprobs = [None if record is None else [record] for record in records]
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    if sampled.prompt is not None and inputs.prompt is not None:
        begin = 0
        for entry, count, num in inputs.prompt.entries:
            part = [t.numpy()[begin : begin + count] for t in sampled.prompt]
            prompt_logprobs[entry] = [r for r in _records(part, [num] * count) if r is not None]
            begin += count
    return StepResult(sampled.ids_N.numpy()[order, None].tolist(), logprobs, prompt_logprobs)


def _records(arrays: Sequence[Array], nums: list[int]) -> list[TokenLogprob | None]:
    """Records from what `top_logprobs` gave, with so many alternatives each; None for -1."""
    chosen, rank, values, top_ids = arrays
    return [
        None
        if n < 0
        else TokenLogprob(
            float(chosen[i]),
            int(rank[i]),
            list(zip(top_ids[i, :n].tolist(), values[i, :n].tolist(), strict=True)),
        )
        for i, n in enumerate(nums)
    ]
