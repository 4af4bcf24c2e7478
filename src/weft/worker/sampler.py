"""Chooses tokens from logits, with the token counts that the device keeps for penalties, and makes
the records that the scheduler commits.

Shapes: see `weft.kernels.sampling`; R rows of the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.requests import TokenLogprob
from weft.kernels.sampling import (
    Bias,
    Mask,
    Penalties,
    SamplingBatch,
    count_tokens,
    sample,
    shape,
    top_logprobs,
)
from weft.schedule.plan import StepResult, Vector
from weft.worker.choosing import Counted, PenaltyArrays, SamplingArrays, ShapingArrays, part_of
from weft.worker.inputs import Array, StepInputs

Put = Callable[[Array], Tensor]
"""Brings a host array to the device."""
COPIES = 16
"""How many copies of host arrays are kept on the device for later steps."""
VocabularyRun = tuple[int, int, int]
"""(first, end, V): consecutive sampled rows whose vocabulary has V tokens."""
Logprobs = tuple[Tensor, ...]
"""The result of `top_logprobs`."""


class Sampler:
    """Owner of the token counts by row, for penalties. They are on the device, so that penalties
    include the last step's tokens before the host knows these. `vocab_size`: the largest."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, put: Put) -> None:
        self.put = put
        self._counts_RV = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)

    def admit(self, counted: Iterable[Counted]) -> None:
        """Set the token counts of new rows, before the step that first runs them."""
        put = self.put
        for c in counted:
            count_tokens(self._counts_RV[c.row], put(c.prompt_ids), put(c.output_ids))

    def choose(
        self, logits_NV: Tensor, inputs: StepInputs, runs: Sequence[VocabularyRun] | None = None
    ) -> Tensor:
        """Token ids, int64 (N,), of a step's sampled rows. Call it for steps in their order.
        `runs`: the rows' vocabularies; None: all have one as wide as the logits."""
        sampling = inputs.sampling and inputs.sampling.at(inputs.position_M)
        shaping = inputs.shaping
        if runs is None:
            return self._choose(logits_NV, sampling, shaping)
        parts = [
            self._choose(
                logits_NV[begin:end, :size],
                sampling and part_of(sampling, begin, end),
                shaping and shaping.part(begin, end),
            )
            for begin, end, size in runs
        ]
        return torch.cat(parts)

    def _choose(
        self, logits_NV: Tensor, sampling: SamplingArrays | None, shaping: ShapingArrays | None
    ) -> Tensor:
        put = self.put
        batch = SamplingBatch(*self._put_all(sampling)) if sampling else None
        if shaping is None:
            return sample(logits_NV, batch)
        b, penalties, m = shaping.bias, shaping.penalties, shaping.mask
        shaped_NV = shape(
            logits_NV,
            Bias(*self._put_all(b)) if b else None,
            self._penalties(penalties, logits_NV.shape[1]) if penalties else None,
            Mask(*self._put_all(m)) if m else None,
        )
        ids_N = sample(shaped_NV, batch)
        if penalties is not None:
            row_P, ids_P = put(penalties.row_P), ids_N[put(penalties.sampled_P)]
            self._counts_RV[row_P, ids_P] += 1
        return ids_N

    def _penalties(self, arrays: PenaltyArrays, vocab_size: int) -> Penalties:
        sampled_P, row_P, *values = self._put_all(arrays)
        return Penalties(sampled_P, self._counts_RV[row_P, :vocab_size], *values)

    def _put_all(self, arrays: tuple[Any, ...]) -> list[Any]:
        """The arrays of a record as device tensors; None stays None."""
        return [None if array is None else self.put(array) for array in arrays]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's results, in the order of its inputs. All but the ids are None if no request asks for
    them."""

    ids_N: Tensor
    logprobs: Logprobs | None
    prompt: Logprobs | None
    pooled_PI: Tensor | None = None
    """fp64, a sum of hidden states for each of the step's `PooledRows`."""
    drafts_DK: Tensor | None = None
    """int64, for the requests in `StepInputs.drafts`."""


def logprobs_of(
    logits_NV: Tensor, ids_N: Tensor, num: int, runs: list[VocabularyRun] | None
) -> Logprobs:
    """`top_logprobs` of rows that may have several vocabularies."""
    if runs is None:
        return top_logprobs(logits_NV, ids_N, num)
    parts = [top_logprobs(logits_NV[i:j, :size], ids_N[i:j], num) for i, j, size in runs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def to_host(sampled: Sampled) -> Sampled:
    """Start to copy results to page-locked host memory, behind the stream's work so far."""
    return Sampled(
        _to_host(sampled.ids_N),
        tuple(map(_to_host, sampled.logprobs)) if sampled.logprobs else None,
        tuple(map(_to_host, sampled.prompt)) if sampled.prompt else None,
        None if sampled.pooled_PI is None else _to_host(sampled.pooled_PI),
        None if sampled.drafts_DK is None else _to_host(sampled.drafts_DK),
    )


def _to_host(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def step_result(inputs: StepInputs, sampled: Sampled) -> StepResult:
    """The records of results that are on the host, in the order of the plan."""
    order = inputs.plan_order_N
    logprobs = None
    if sampled.logprobs is not None and inputs.num_logprobs_N is not None:
        in_order = [t.numpy()[order] for t in sampled.logprobs]
        logprobs = _records(in_order, inputs.num_logprobs_N[order].tolist())
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    if sampled.prompt is not None and inputs.prompt is not None:
        begin = 0
        for entry, count, num in inputs.prompt.entries:
            part = [t.numpy()[begin : begin + count] for t in sampled.prompt]
            prompt_logprobs[entry] = [r for r in _records(part, [num] * count) if r is not None]
            begin += count
    vectors: dict[int, Vector] = {}
    if sampled.pooled_PI is not None:
        entries = [rows.entry for rows in inputs.pooled]
        vectors = dict(zip(entries, sampled.pooled_PI.numpy(), strict=True))
    drafts: dict[int, list[int]] = {}
    if sampled.drafts_DK is not None and inputs.drafts is not None:
        drafts = dict(zip(inputs.drafts.entries, sampled.drafts_DK.tolist(), strict=True))
    tokens = sampled.ids_N.numpy()[order].tolist()
    return StepResult(tokens, logprobs, prompt_logprobs, vectors, drafts)


def _records(arrays: Sequence[Array], nums: list[int]) -> list[TokenLogprob | None]:
    """Records from results of `top_logprobs`, with `nums` alternatives each; None for -1."""
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


class RecentCopies:
    """Copies host arrays, which must not change any more, to the device, and keeps recent copies:
    successive steps of the same requests share most arrays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[int, tuple[Array, Tensor]] = OrderedDict()
        """By the array's id, which stays valid as the array is kept too."""

    def put(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        kept = self._kept.get(id(array))
        if kept is None:
            kept = array, tensor.pin_memory().to(self._device, non_blocking=True)
            self._kept[id(array)] = kept
            if len(self._kept) > COPIES:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(id(array))
        return kept[1]
