"""CUDA graphs of steps: one launch in place of several hundred.

A graph computes logits from inputs at fixed addresses. Graphs are captured for some sizes, and
steps in between are padded. Each size has up to three graphs: one without adapters, one for
adapters that change no experts, and one for adapters that do. As kernels find adapters, contexts
and chunks of prompts through tables in device memory, each graph serves every mix of adapters,
ranks and lengths.

Decode-only steps have graphs by the number of sequences, and other steps by the number of tokens:
up to MANY_TOKENS, and one for the most tokens that a step may have, as most steps have while
prompts wait.

Shapes: T tokens and S sequences of a step, both padded to sizes that were captured, W blocks of the
longest context possible, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.kernels.attention import AttentionBatch, RowWork
from weft.kernels.delta import StateRows, StateWork
from weft.kernels.lora.base import LoraBackend, LoraBatch, LoraStep
from weft.kernels.staging import Staging
from weft.models.decoder import Decoder, LayerCache, StepContext
from weft.worker.capture import no_garbage_collection, record
from weft.worker.graph_inputs import GraphForm, GraphInputs, most_tiles, num_words_of, whole_tiles
from weft.worker.inputs import Segments, StepInputs
from weft.worker.sizes import FULL, MANY_TOKENS, batch_sizes
from weft.worker.step import Carried, StepTensors, hidden_states, logits, lora_batch

_Kind = Literal["base", "linear", "experts"]
"""base: the step has no adapters. linear: its adapters change neither experts nor routers whose
logits are float32. experts: some do."""


class _Outputs(NamedTuple):
    """The outputs of a step, at fixed addresses that the next run overwrites."""

    logits_SV: Tensor
    """fp32"""
    hidden_TI: Tensor | None
    """The states after the last norm; None: nobody reads them."""


class StepGraphs:
    """Captured steps over a model and its caches. `lora` None: the backend's kernels can't be
    captured, so steps with adapters run without a graph."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[LayerCache],
        lora: LoraBackend | None,
        last_token_R: Tensor,
        num_table_blocks: int,
        token_sizes: Sequence[int],
        gives_hidden: bool = False,
    ) -> None:
        """`last_token_R`: the last token of every row of the batch, and one more for padding.
        `num_table_blocks`: W. `token_sizes`: tokens of the mixed steps to capture, ascending.
        `gives_hidden`: whether `hidden` will be called."""
        short, layers = decoder.abridged()
        self._whole, self._short = (decoder, kv), (short, [kv[i] for i in layers])
        self._lora = lora
        self._last_token_R = last_token_R
        self._device = last_token_R.device
        max_seqs = len(last_token_R) - 1
        self._num_groups = decoder.config.most_groups
        has_states = decoder.config.linear is not None
        self._decodes = [GraphForm(n, n, 0, has_states) for n in batch_sizes(max_seqs)]
        self._mixed = [self._mixed_form(size, max_seqs) for size in token_sizes]
        largest = max(num_words_of(form) for form in (self._decodes[-1], self._mixed[-1]))
        make = self._make
        self._inputs = GraphInputs(
            Staging(largest + max_seqs * num_table_blocks, self._device),
            make((max_seqs, num_table_blocks), torch.int32),
            self._num_groups,
            padding_row=max_seqs,
        )
        most = max(max_seqs, token_sizes[-1])
        self._slot_T = make((most,), torch.int32)
        hidden = make((most, decoder.config.hidden_size), decoder.dtype) if gives_hidden else None
        self._outputs = _Outputs(make((max_seqs, decoder.num_logits), decoder.dtype), hidden)
        kinds: tuple[_Kind, ...] = ("base", "linear", "experts")
        self._kinds = kinds[: 1 if lora is None else 2 if decoder.config.moe is None else 3]
        self._replays: dict[tuple[GraphForm, _Kind], Callable[[], None]] = {}
        self._adapters: tuple[Segments, GraphForm, LoraBatch] | None = None
        """What the backend was given last, and what that was made of."""

    def rehearse(self) -> None:
        """Launch the kernels of all sizes, so that they can be compiled in parallel."""
        for form in (*self._decodes, *self._mixed):
            for _, forward in self._steps(form, *self._short):
                forward()

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that smaller ones reuse its memory. Each is run
        with a few layers before, as the first run of a kernel can't be captured."""
        pool = stream = None
        if self._device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with no_garbage_collection():
            for form in (*reversed(self._mixed), *reversed(self._decodes)):
                short = self._steps(form, *self._short)
                whole = self._steps(form, *self._whole)
                for (_, rehearse), (kind, forward) in zip(short, whole, strict=True):
                    rehearse()
                    self._replays[form, kind] = record(forward, pool, stream)

    def _steps(
        self, form: GraphForm, decoder: Decoder, kv: list[LayerCache]
    ) -> list[tuple[_Kind, Callable[[], None]]]:
        """For each kind, a function that runs the form's step; its inputs are set to padding."""
        self._inputs.pad(form)
        return [(kind, self._forward(form, kind, decoder, kv)) for kind in self._kinds]

    def run(self, inputs: StepInputs, changes_experts: bool = False) -> Tensor | None:
        """The logits of a step's sampled tokens, (N, V), overwritten by the next run; None if
        there is no graph for such a step. `changes_experts`: whether one of the step's adapters
        changes experts."""
        form = self._form(inputs)
        kind: _Kind = "base"
        if inputs.segments:
            kind = "experts" if changes_experts else "linear"
        replay = self._replays.get((form, kind)) if form else None
        if form is None or replay is None or not self._inputs.stage(inputs, form):
            return None
        if inputs.segments and self._lora:
            self._begin_lora(self._lora, inputs.segments, inputs.sampled_segments, form)
        replay()
        return self._outputs.logits_SV[: len(inputs.sampled_rows_N)]

    def hidden(self, num_tokens: int) -> Tensor:
        """The states after the last norm in the last run, (T, I)."""
        assert self._outputs.hidden_TI is not None
        return self._outputs.hidden_TI[:num_tokens]

    def close(self) -> None:
        """Let go of the graphs, which hold on to the model's tensors."""
        self._replays.clear()

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _mixed_form(self, num_tokens: int, max_seqs: int) -> GraphForm:
        num_tiles = most_tiles(num_tokens, self._num_groups)
        has_states = self._decodes[0].has_states
        return GraphForm(num_tokens, min(num_tokens, max_seqs), num_tiles, has_states)

    def _form(self, inputs: StepInputs) -> GraphForm | None:
        """The smallest form that a step may fit into; None: it runs without a graph."""
        num_tokens = len(inputs.ids_T)
        decodes = len(inputs.seq_lens_S) == num_tokens == len(inputs.sampled_rows_N)
        forms = self._decodes if decodes else self._mixed
        at = bisect_left(forms, num_tokens, key=lambda form: form.num_tokens)
        if decodes:
            return forms[at] if at < len(forms) else None
        counts = [b - a for a, b in pairwise(inputs.query_start) if b - a > 1]
        num_tiles = sum(whole_tiles(count, self._num_groups) for count in counts)
        for form in forms[at:]:
            if form.num_tokens > MANY_TOKENS and num_tokens < FULL * form.num_tokens:
                return None
            padding = whole_tiles(form.num_tokens - num_tokens, self._num_groups)
            if num_tiles + padding <= form.num_tiles:
                return form
        return None

    # -- the captured step ---------------------------------------------------------------------

    def _begin_lora(
        self, lora: LoraBackend, segments: Segments, sampled_segments: Segments, form: GraphForm
    ) -> LoraStep:
        last = self._adapters
        if last is None or last[0] is not segments or last[1] is not form:
            slot_T = slot_N = self._slot_T[: form.num_tokens]
            if form.num_tiles:
                slot_N = self._slot_T[: form.num_seqs]
            batch = lora_batch(slot_T, segments, slot_N, sampled_segments)
            last = self._adapters = segments, form, batch
        return lora.begin(last[2])

    def _forward(
        self, form: GraphForm, kind: _Kind, decoder: Decoder, kv: list[LayerCache]
    ) -> Callable[[], None]:
        """A function that runs a step of this form on the inputs at the fixed addresses."""
        parts = self._inputs.on_device(form)
        mixed = form.num_tiles > 0
        work = RowWork(form.num_seqs, *((parts.pairs, parts.tiles) if mixed else (None, None)))
        attention = AttentionBatch(
            slot_mapping_T=parts.place_T,
            block_table_SB=self._inputs.table_SW[: form.num_seqs],
            seq_lens_S=parts.lengths_S,
            query_start=[],
            seq_lens=[],
            work=work,
        )
        lora, states = None, None
        if kind != "base" and self._lora:
            lora = self._begin_lora(self._lora, (), (), form)
        if form.has_states:
            state_parts = parts.state_decodes, parts.state_chunks, parts.state_runs
            states = StateRows([], [], StateWork(*state_parts))
        step = StepTensors(
            parts.ids_T,
            Carried(parts.carried_T, parts.row_T, self._last_token_R),
            parts.sampled_S if mixed else None,
            StepContext(
                parts.position_T, attention, lora, states=states, changes_experts=kind == "experts"
            ),
        )

        def forward() -> None:
            hidden_TI = hidden_states(decoder, step, kv)
            self._outputs.logits_SV[: form.num_seqs].copy_(logits(decoder, step, hidden_TI))
            if self._outputs.hidden_TI is not None:
                self._outputs.hidden_TI[: form.num_tokens].copy_(hidden_TI)

        return forward
