"""Runs steps on the device: from a step's arrays to its tokens, by a graph or eagerly."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels.attention import AttentionBatch
from weft.kernels.delta import StateRows, StateWork, state_work
from weft.kernels.lora import AdapterPool, LoraBackend, LoraStep
from weft.kernels.lora.extras import (
    has_experts,
    has_extras,
    norms_of,
    vocabulary_of,
    vocabulary_runs,
    with_extras,
)
from weft.kernels.staging import Staging
from weft.models.decoder import Decoder, LayerCache, StepContext, stacked
from weft.worker.drafter import Drafter
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import Copies, PooledRows, PromptArrays, Segments, StepInputs
from weft.worker.sampler import (
    Logprobs,
    Put,
    Sampled,
    Sampler,
    VocabularyRun,
    logprobs_of,
    to_host,
)
from weft.worker.sizes import token_sizes
from weft.worker.step import Carried, StepTensors, hidden_states, logits, lora_batch

PROMPT_ROWS = 256
"""How many positions of prompts have their logits computed, or their hidden states summed, at a
time."""
GRAIN = 2.0**-28
"""Hidden states are rounded to whole multiples of this before they are summed."""


class _AdapterNeeds(NamedTuple):
    """What the adapters of a step ask of it. Decodes of the same rows share this."""

    segments: Segments
    """Steps have the same sampled segments too if these are the same object."""
    num_changes: int
    """`AdapterPool.num_changes`."""
    extras: bool
    """Whether any has more than A and B."""
    experts: bool
    """Whether any changes experts."""
    runs: list[VocabularyRun] | None
    """See `vocabulary_runs`."""


class StepExecutor:
    """Runs steps. It keeps the last sampled token of each row of the batch on the device, to feed
    the next step, which can so be launched before the host knows these tokens."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[LayerCache],
        pool: AdapterPool,
        lora: LoraBackend,
        sampler: Sampler,
        num_rows: int,
        drafter: Drafter | None = None,
    ) -> None:
        self._decoder, self._kv = decoder, kv
        self._drafter = drafter
        self._states = [states.unbind(1) for states in stacked(kv)]
        """By layer and number."""
        self._pool, self._lora = pool, lora
        self._sampler = sampler
        self._put: Put = sampler.put
        # One row more than the batch has, for padding.
        self._last_token_R = torch.zeros(num_rows + 1, dtype=torch.int64, device=decoder.device)
        self._staging = Staging(0, decoder.device)
        self.graphs: StepGraphs | None = None
        """None: all steps run eagerly."""
        self._needs: _AdapterNeeds | None = None
        """That of the last step."""

    def make_graphs(self, num_table_blocks: int, max_num_batched_tokens: int) -> None:
        """Prepare the graphs of steps, if on a GPU, without capturing any. `num_table_blocks`: the
        blocks of the longest context."""
        if self._decoder.device.type != "cuda" or not self._decoder.is_capturable:
            return
        with_lora = self._lora.reserve(max_num_batched_tokens)
        self.graphs = StepGraphs(
            self._decoder,
            self._kv,
            self._lora if with_lora else None,
            self._last_token_R,
            num_table_blocks,
            token_sizes(max_num_batched_tokens),
            self._drafter is not None,
        )

    def launch(self, steps: Iterable[StepInputs]) -> None:
        """Launch all kernels of the graphs, and of these steps without graphs, so that they can be
        compiled in parallel."""
        if self.graphs is not None:
            self.graphs.rehearse()
        self.rehearse(steps)

    def rehearse(self, steps: Iterable[StepInputs]) -> None:
        """Run steps with few layers and without graphs, so that the device has loaded what they use
        before requests need it."""
        short = copy.copy(self)
        short.graphs = None
        short._decoder, layers = self._decoder.abridged()
        short._kv = [self._kv[i] for i in layers]
        for inputs in steps:
            sampled = short.run(inputs)
            if self._decoder.device.type == "cuda":
                to_host(sampled)

    def capture(self) -> bool:
        """Capture the graphs. Returns whether there are any."""
        if self.graphs is None:
            return False
        self.graphs.capture()
        torch.cuda.synchronize(self._decoder.device)
        torch.cuda.empty_cache()
        return True

    def run(self, inputs: StepInputs) -> Sampled:
        """Run a step. The tensors of the result are on the device."""
        self._sampler.admit(inputs.counted)
        logits_NV = prompt = pooled_PI = hidden_TI = None
        needs = self._needs_of(inputs)
        self._copy_states(inputs.restored)
        needs_states = inputs.prompt is not None or inputs.pooled
        if self.graphs and not needs_states and not needs.extras:
            logits_NV = self.graphs.run(inputs, needs.experts)
        if logits_NV is None:
            hidden_TI, logits_NV, prompt, pooled_PI = self._run_eagerly(inputs)
        self._copy_states(inputs.snapshots)
        if logits_NV is None:
            self._draft(inputs, hidden_TI, None)
            return Sampled(self._last_token_R[:0], None, prompt, pooled_PI)
        ids_N = self._sampler.choose(logits_NV, inputs, needs.runs)
        self._last_token_R.index_copy_(0, self._put(inputs.sampled_rows_N), ids_N)
        logprobs = None
        if inputs.num_logprobs_N is not None:
            num = int(inputs.num_logprobs_N.max())
            logprobs = logprobs_of(logits_NV, ids_N, num, needs.runs)
        drafts_DK = self._draft(inputs, hidden_TI, ids_N)
        return Sampled(ids_N, logprobs, prompt, pooled_PI, drafts_DK)

    def _needs_of(self, inputs: StepInputs) -> _AdapterNeeds:
        pool, segments, last = self._pool, inputs.segments, self._needs
        if last is None or last.segments is not segments or last.num_changes != pool.num_changes:
            slots, num_rows = [slot for slot, _, _ in segments], len(inputs.sampled_rows_N)
            last = self._needs = _AdapterNeeds(
                segments,
                pool.num_changes,
                has_extras(pool, slots),
                has_experts(pool, slots),
                vocabulary_runs(pool, inputs.sampled_segments, num_rows),
            )
        return last

    def _draft(
        self, inputs: StepInputs, hidden_TI: Tensor | None, ids_N: Tensor | None
    ) -> Tensor | None:
        """Run the multi-token prediction head, if there is one, behind a step; see `Drafter.run`.
        `hidden_TI`: None if a graph computed it."""
        if self._drafter is None:
            return None
        if hidden_TI is None:
            assert self.graphs is not None
            hidden_TI = self.graphs.hidden(len(inputs.ids_T))
        return self._drafter.run(inputs, hidden_TI, ids_N)

    def _copy_states(self, copies: Copies) -> None:
        """Copy recurrent states in all layers; `copies` are (source, destination)."""
        for source, dest in copies:
            for states in self._states:
                states[dest].copy_(states[source])

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()

    # -- without a graph -----------------------------------------------------------------------

    def _run_eagerly(
        self, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None, Logprobs | None, Tensor | None]:
        """Returns the states after the last norm (T, I); logits (N, V) if any row is sampled;
        and, if asked for, the prompts' log-probabilities and the pooled states (P, I)."""
        step = self._on_device(inputs)
        hidden_TI = hidden_states(self._decoder, step, self._kv)
        logits_NV = None
        if len(inputs.sampled_tokens_N):
            logits_NV = logits(self._decoder, step, hidden_TI)
        prompt = None
        if inputs.prompt is not None:
            prompt = self._prompt_logprobs(hidden_TI, step, inputs.prompt)
        pooled_PI = _pooled(hidden_TI, inputs.pooled) if inputs.pooled else None
        return hidden_TI, logits_NV, prompt, pooled_PI

    def _on_device(self, inputs: StepInputs) -> StepTensors:
        """A step's arrays on the device, in one copy, and its adapters ready for use."""
        carried_T, state_S, query_start = inputs.from_device_T, inputs.state_S, inputs.query_start
        arrays = [
            inputs.ids_T,
            inputs.row_T,
            np.zeros(0, np.bool_) if carried_T is None else carried_T,
            inputs.positions_T,
            inputs.slot_mapping_T,
            inputs.slot_T,
            inputs.block_table_SB,
            inputs.seq_lens_S,
            inputs.sampled_tokens_N,
            inputs.slot_N,
        ]
        if state_S is not None:
            arrays += state_work(state_S, query_start, inputs.source_S, inputs.lag_S)
        ids_T, row_T, carried, positions_T, place_T, slot_T, table_SB, lens_S, sampled_N, *rest = (
            self._staging.send_all(arrays)
        )
        slot_N, *of_states = rest
        states = None
        if state_S is not None:
            states = StateRows(state_S.tolist(), query_start, StateWork(*of_states))
        attention = AttentionBatch(
            place_T, table_SB, lens_S, query_start, inputs.seq_lens_S.tolist()
        )
        lora = self._begin_lora(slot_T, inputs.segments, slot_N, inputs.sampled_segments)
        return StepTensors(
            ids_T,
            None if carried_T is None else Carried(carried, row_T, self._last_token_R),
            None if len(sampled_N) == len(ids_T) else sampled_N,
            StepContext(
                positions_T,
                attention,
                lora,
                norms_of(lora),
                vocabulary_of(lora),
                states,
                has_experts(self._pool, (slot for slot, _, _ in inputs.segments)),
            ),
        )

    def _prompt_logprobs(
        self, hidden_TI: Tensor, step: StepTensors, prompt: PromptArrays
    ) -> Logprobs:
        """The log-probabilities of the prompts' next tokens. They are computed slice by slice, as
        the logits of a long prompt are large. The step's adapters are not used any more."""
        put = self._put
        num = max(num for _, _, num in prompt.entries)
        slices: list[Logprobs] = []
        for begin in range(0, len(prompt.token_L), PROMPT_ROWS):
            end = min(begin + PROMPT_ROWS, len(prompt.token_L))
            slot_L, segments = put(prompt.slot_L[begin:end]), prompt.segments(begin, end)
            lora = self._begin_lora(slot_L, segments, slot_L, segments)
            context = replace(step.context, lora=lora, vocabulary=vocabulary_of(lora))
            part = replace(step, sampled_N=put(prompt.token_L[begin:end]), context=context)
            logits_LV = logits(self._decoder, part, hidden_TI)
            runs = vocabulary_runs(self._pool, segments, end - begin)
            target_L = put(prompt.target_L[begin:end])
            slices.append(logprobs_of(logits_LV, target_L, num, runs))
        return tuple(torch.cat(parts) for parts in zip(*slices, strict=True))

    def _begin_lora(
        self, slot_T: Tensor, segments: Segments, slot_N: Tensor, sampled_segments: Segments
    ) -> LoraStep | None:
        if not segments:
            return None
        batch = lora_batch(slot_T, segments, slot_N, sampled_segments)
        return with_extras(self._lora.begin(batch), self._pool, batch)


def _pooled(hidden_TI: Tensor, pooled: Sequence[PooledRows]) -> Tensor:
    """For each of `pooled`, the sum of its rows' hidden states: fp64 (P, I). Sums of multiples of
    GRAIN are exact, so the sum over a prompt has the same bits however it is cut into chunks."""
    return torch.stack([_exact_sum(hidden_TI[rows.first : rows.end]) for rows in pooled])


def _exact_sum(rows_TI: Tensor) -> Tensor:
    parts = torch.split(rows_TI, PROMPT_ROWS)
    sums = [(part_TI.double() / GRAIN).round().sum(0) for part_TI in parts]
    return torch.stack(sums).sum(0) * GRAIN
