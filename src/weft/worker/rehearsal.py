"""Steps that are run before requests come, so that no request has to wait for a first use.

On a GPU much happens at first uses: kernels are compiled or loaded, libraries choose kernels by
shape, memory is page-locked. Captured steps have done all of that. The steps made here are of the
kinds that have no graph, or run partly outside of it:

    prompts     as many tokens as a step may have, of the base and with adapters
    mixed       a prompt beside decodes, whose number decides how their contexts are cut
    probed      prompts whose log-probabilities or vectors are asked for
    choices     decodes with each way to choose a token, for one row and for many
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.core.sampling import SamplingParams
from weft.core.targets import ImageLayout, TargetTable, layout_of
from weft.schedule.plan import Admitted, StepPlan
from weft.worker.drafting import DraftingRows
from weft.worker.inputs import RowState, StepInputs

PROMPTS = 8
"""Prompts that share a step."""
MANY = 64
"""How many rows choose tokens in one step."""
CHOICES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)),
)
SLOT = 0
"""The adapter slot that rehearsed steps use. Install `rehearsed_adapter` there before."""


def rehearsed_adapter(table: TargetTable) -> ImageLayout:
    """The layout of an adapter that adds nothing, but for which steps run all kernels of A and B,
    including those of experts."""
    return replace(layout_of(table, (0,) * len(table.targets)), has_experts=table.has_experts)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Makes the steps to rehearse, within the limits in its fields."""

    num_rows: int
    num_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_states: int
    vocab_size: int
    drafts: bool = False
    """Whether the model's own head drafts tokens; if so, it does in all of these steps."""

    def steps(self) -> Iterator[StepInputs]:
        """The inputs of all steps, one after another. They write to any block of the cache."""
        sizes = self.num_rows, self.max_model_len, self.block_size, self.vocab_size
        rows = (DraftingRows if self.drafts else RowState)(*sizes)
        greedy = self._admitted(SamplingParams(temperature=0.0))
        num = min(PROMPTS, self.num_rows, self.num_tokens)
        length = min(self.num_tokens // num, self.max_model_len - 1)
        for slot in (-1, SLOT):
            yield rows.build(self._plan([greedy._replace(slot=slot)] * num, length))
        chunk, decodes = min(length, self.block_size), 1
        while decodes < self.num_rows and decodes + chunk <= self.num_tokens:
            lengths = [chunk] + [1] * decodes
            yield rows.build(self._plan([greedy] * len(lengths), *lengths))
            decodes *= 2
        probed = [greedy._replace(num_prompt_logprobs=1), greedy._replace(pooling="mean")]
        yield rows.build(self._plan(probed[:num], chunk))
        for params in CHOICES:
            yield rows.build(self._plan([self._admitted(params)], 1))
        many = min(MANY, self.num_rows, self.num_tokens)
        mixed = [self._admitted(CHOICES[i % len(CHOICES)]) for i in range(many)]
        for slot in (-1, SLOT):
            yield rows.build(self._plan([each._replace(slot=slot) for each in mixed], 1))

    def _admitted(self, params: SamplingParams) -> Admitted:
        return Admitted("rehearsal", 0, -1, np.zeros(0, np.int64), 0, params, seed=0)

    def _plan(self, each: Sequence[Admitted], *lengths: int) -> StepPlan:
        """A step of prompts, which all sample. `lengths`: one for all prompts, or one for each."""
        counts = list(lengths) if len(lengths) == len(each) else [lengths[0]] * len(each)
        admitted = [
            a._replace(
                row=row,
                token_ids=np.zeros(count, np.int64),
                num_prompt=count,
                state=row % self.num_states if self.num_states else -1,
            )
            for row, (a, count) in enumerate(zip(each, counts, strict=True))
        ]
        num = -(-(max(counts) + 1) // self.block_size)
        blocks = [(a.row, i, (a.row + i) % self.num_blocks) for a in admitted for i in range(num)]
        rows, ones = [a.row for a in admitted], [1] * len(admitted)
        plan = StepPlan(
            0, rows, [0] * len(rows), counts, ones, sum(counts), admitted, blocks, [], []
        )
        every = [(entry, num * self.block_size) for entry in range(len(rows))]
        return replace(plan, drafted=every) if self.drafts else plan
