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

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionBatch, RowWork, row_work, tile_rows
from weft.kernels.delta import CHUNK, StateRows, StateWork, Table, state_work
from weft.kernels.lora.base import LoraBackend, LoraStep
from weft.kernels.staging import Staging
from weft.models.decoder import Decoder, LayerCache, StepContext
from weft.worker.capture import no_garbage_collection, record
from weft.worker.inputs import Segments, StepInputs
from weft.worker.sizes import FULL, MANY_TOKENS, batch_sizes
from weft.worker.step import Carried, StepTensors, hidden_states, logits, lora_batch

MAX_CHUNKS = 64
"""The most chunks of prompts that a step with a graph may have."""

CHUNK_TOKENS = 8
"""A step whose chunks are shorter on average takes a graph of more tokens. Room for more chunks
would slow down all other steps, in which each unused one has some hundred idle programs a layer."""

MAX_CONTEXT = 8192
"""The longest context of a decode in a mixed step with a graph, where contexts are not cut into
parts, as the cuts would depend on the number of decodes."""


_Kind = Literal["base", "linear", "experts"]
"""base: the step has no adapters. linear: its adapters change no experts. experts: some do."""


class _Form(NamedTuple):
    """Sizes of a captured step."""

    num_tokens: int
    num_seqs: int
    num_tiles: int
    """The tiles of rows for chunks; 0: there are only decodes, each of which samples."""
    has_states: bool
    """Whether the model has recurrent states."""

    @property
    def num_runs(self) -> int:
        """The most sequences of several rows in the step, if the model has recurrent states."""
        wanted = self.has_states and self.num_tiles > 0
        return min(self.num_seqs, self.num_tokens // 2, MAX_CHUNKS) if wanted else 0


Buffer = TypeVar("Buffer", NDArray[Any], Tensor)


class _StepParts(NamedTuple, Generic[Buffer]):
    """The inputs of a step, as views of one buffer of 32-bit words: arrays on the host, tensors on
    the device. Each part begins at a multiple of 16 bytes, which makes kernels faster.

        0                                          words of the form      words of the step
        | ids | row | position | place | carried | lengths | sampled | pairs | tiles | blocks |
        |   8 bytes each, T of each    | 1, T    | 4, S    | 8, S    | 8, S  | 16    | 4      |
                                                           '-- none for decodes --'

    and before the blocks, for models with recurrent states, the tables of `StateWork`.

    The sizes of all parts but the last follow from the form, so a captured step finds them at fixed
    addresses. The block tables, which are as wide as the step's longest context, are copied from
    the end of the buffer to tables of full width.
    """

    ids_T: Buffer
    """int64, as `position_T`."""
    row_T: Buffer
    """int64, rows of the batch."""
    position_T: Buffer
    place_T: Buffer
    """int64, slots of the cache; -1 for padding."""
    carried_T: Buffer
    """bool, whether the id is the last one sampled for its row."""
    lengths_S: Buffer
    """int32, of contexts."""
    sampled_S: Buffer
    """int64, the tokens that sample; empty if all do."""
    pairs: Buffer
    """int32 (S, 2), see `RowWork`; empty if all sequences are decodes."""
    tiles: Buffer
    """int32 (tiles, 4), see `RowWork`; empty if all sequences are decodes."""
    state_decodes: Buffer
    """int32 (S, 4), see `StateWork`, as the next two."""
    state_chunks: Buffer
    """int32 (chunks, 6)"""
    state_runs: Buffer
    """int32 (runs, 6)"""
    blocks: Buffer
    """int32, the block tables, one after the other; on the host, all the rest of the buffer."""


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
        self._decodes = [_Form(n, n, 0, has_states) for n in batch_sizes(max_seqs)]
        self._mixed = [self._mixed_form(size, max_seqs) for size in token_sizes]
        largest = max(_num_words(form) for form in (self._decodes[-1], self._mixed[-1]))
        self._staging = Staging(largest + max_seqs * num_table_blocks, self._device)
        self._host_parts: dict[tuple[int, _Form], _StepParts[NDArray[Any]]] = {}
        """By the staging's host buffer, of which there are several, and the form."""
        make = self._make
        self._table_SW = make((max_seqs, num_table_blocks), torch.int32)
        most = max(max_seqs, token_sizes[-1])
        self._slot_T = make((most,), torch.int32)
        hidden = make((most, decoder.config.hidden_size), decoder.dtype) if gives_hidden else None
        self._outputs = _Outputs(make((max_seqs, decoder.num_logits), decoder.dtype), hidden)
        kinds: tuple[_Kind, ...] = ("base", "linear", "experts")
        self._kinds = kinds[: 1 if lora is None else 2 if decoder.config.moe is None else 3]
        self._replays: dict[tuple[_Form, _Kind], Callable[[], None]] = {}

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
        self, form: _Form, decoder: Decoder, kv: list[LayerCache]
    ) -> list[tuple[_Kind, Callable[[], None]]]:
        """For each kind, a function that runs the form's step; its inputs are set to padding."""
        num_words = _num_words(form)
        parts = self._on_host(form)
        self._lay_out([0], np.zeros(0, np.int32), form, parts)
        _lay_out_states(state_work([], [0]), form, parts)
        self._pad(parts, 0, 0)
        self._staging.send(num_words)
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
        if form is None or replay is None or not self._stage(inputs, form):
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

    def _mixed_form(self, num_tokens: int, max_seqs: int) -> _Form:
        num_tiles = most_tiles(num_tokens, self._num_groups)
        has_states = self._decodes[0].has_states
        return _Form(num_tokens, min(num_tokens, max_seqs), num_tiles, has_states)

    def _form(self, inputs: StepInputs) -> _Form | None:
        """The smallest form that a step may fit into; None: it runs without a graph."""
        num_tokens = len(inputs.ids_T)
        decodes = len(inputs.seq_lens_S) == num_tokens == len(inputs.sampled_rows_N)
        forms = self._decodes if decodes else self._mixed
        at = bisect_left(forms, num_tokens, key=lambda form: form.num_tokens)
        if decodes:
            return forms[at] if at < len(forms) else None
        counts = [b - a for a, b in pairwise(inputs.query_start) if b - a > 1]
        num_tiles = sum(_whole_tiles(count, self._num_groups) for count in counts)
        for form in forms[at:]:
            if form.num_tokens > MANY_TOKENS and num_tokens < FULL * form.num_tokens:
                return None
            padding = _whole_tiles(form.num_tokens - num_tokens, self._num_groups)
            if num_tiles + padding <= form.num_tiles:
                return form
        return None

    # -- inputs --------------------------------------------------------------------------------

    def _on_host(self, form: _Form) -> _StepParts[NDArray[Any]]:
        """The host arrays for the inputs of a step of this form, to be filled."""
        words, at = self._staging.begin(), (self._staging.turn, form)
        parts = self._host_parts.get(at)
        if parts is None:
            places, end = _places(form)
            views = [words[p.words].view(p.kind)[: p.num_elements].reshape(p.shape) for p in places]
            parts = self._host_parts[at] = _StepParts._make((*views, words[end:]))
        return parts

    def _stage(self, inputs: StepInputs, form: _Form) -> bool:
        """Copy a step's inputs to the device, all at once. Returns whether they fit the form."""
        table_SB, lengths = inputs.block_table_SB, inputs.seq_lens_S
        num_tokens, (num_seqs, width) = len(inputs.ids_T), table_SB.shape
        num_words = _num_words(form)
        parts = self._on_host(form)
        if not self._lay_out(inputs.query_start, lengths, form, parts):
            return False
        states = inputs.state_S
        if states is not None:
            of_states = states, inputs.query_start, inputs.source_S, inputs.lag_S
            if not _lay_out_states(state_work(*of_states), form, parts):
                return False
        self._pad(parts, num_tokens, num_seqs)
        if form.num_tiles:
            parts.sampled_S[: len(inputs.sampled_tokens_N)] = inputs.sampled_tokens_N
        parts.ids_T[:num_tokens] = inputs.ids_T
        parts.row_T[:num_tokens] = inputs.row_T
        parts.position_T[:num_tokens] = inputs.positions_T
        parts.place_T[:num_tokens] = inputs.slot_mapping_T
        carried_T = inputs.from_device_T
        parts.carried_T[:num_tokens] = False if carried_T is None else carried_T
        parts.lengths_S[:num_seqs] = lengths
        parts.blocks[: table_SB.size] = table_SB.reshape(-1)
        blocks = self._staging.send(num_words + table_SB.size)[num_words:]
        self._table_SW[:num_seqs, :width].copy_(blocks.view(num_seqs, width))
        return True

    def _lay_out(
        self,
        query_start: list[int],
        lengths: NDArray[np.int32],
        form: _Form,
        parts: _StepParts[NDArray[Any]],
    ) -> bool:
        """Fill `pairs` and `tiles`: which rows attention computes how. Returns whether they fit."""
        if not form.num_tiles:
            return True
        num_padding = form.num_tokens - query_start[-1]
        pairs, tiles = row_work(query_start, lengths, self._num_groups, num_padding)
        if np.any(lengths[pairs[:, 0]] > MAX_CONTEXT):
            return False
        parts.pairs[: len(pairs)] = pairs
        parts.pairs[len(pairs) :] = -1
        parts.tiles[: len(tiles)] = tiles
        parts.tiles[len(tiles) :] = 0
        return True

    def _pad(self, parts: _StepParts[NDArray[Any]], num_tokens: int, num_seqs: int) -> None:
        """Fill the tokens and sequences beyond a step's own with ones that touch no cache."""
        parts.ids_T[num_tokens:] = 0
        parts.row_T[num_tokens:] = len(self._last_token_R) - 1
        parts.position_T[num_tokens:] = 0
        parts.place_T[num_tokens:] = -1
        parts.carried_T[num_tokens:] = False
        parts.lengths_S[num_seqs:] = 0
        parts.sampled_S[:] = 0

    def _begin_lora(
        self, lora: LoraBackend, segments: Segments, sampled_segments: Segments, form: _Form
    ) -> LoraStep:
        slot_T = slot_N = self._slot_T[: form.num_tokens]
        if form.num_tiles:
            slot_N = self._slot_T[: form.num_seqs]
        return lora.begin(lora_batch(slot_T, segments, slot_N, sampled_segments))

    # -- the captured step ---------------------------------------------------------------------

    def _forward(
        self, form: _Form, kind: _Kind, decoder: Decoder, kv: list[LayerCache]
    ) -> Callable[[], None]:
        """A function that runs a step of this form on the inputs at the fixed addresses."""
        parts = _on_device(self._staging.device_words[: _num_words(form)], form)
        mixed = form.num_tiles > 0
        work = RowWork(form.num_seqs, *((parts.pairs, parts.tiles) if mixed else (None, None)))
        attention = AttentionBatch(
            slot_mapping_T=parts.place_T,
            block_table_SB=self._table_SW[: form.num_seqs],
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


def most_tiles(num_tokens: int, num_groups: int) -> int:
    """How many tiles a graph of `num_tokens` tokens has room for."""
    return _whole_tiles(num_tokens, num_groups) + min(num_tokens // CHUNK_TOKENS + 1, MAX_CHUNKS)


def _whole_tiles(num_tokens: int, num_groups: int) -> int:
    """How many tiles a chunk of `num_tokens` tokens takes."""
    return -(-num_tokens // (tile_rows(num_groups) // num_groups))


def _lay_out_states(
    work: tuple[Table, Table, Table], form: _Form, parts: _StepParts[NDArray[Any]]
) -> bool:
    """Fill the tables of rows and recurrent states. Returns whether they fit."""
    decodes, chunks, runs = work
    if len(chunks) > len(parts.state_chunks) or len(runs) > len(parts.state_runs):
        return False
    parts.state_decodes[: len(decodes)] = decodes
    parts.state_decodes[len(decodes) :] = -1
    if form.has_states and not form.num_tiles:  # rows of padding give zeros
        parts.state_decodes[len(decodes) :, 0] = range(len(decodes), form.num_seqs)
    for part, own in ((parts.state_chunks, chunks), (parts.state_runs, runs)):
        part[: len(own)] = own
        part[len(own) :] = 0
    return True


class _Place(NamedTuple):
    """Where a part of fixed size lies in the buffer."""

    words: slice
    kind: str
    """The name of its dtype."""
    num_elements: int
    shape: tuple[int, ...]


@cache
def _places(form: _Form) -> tuple[tuple[_Place, ...], int]:
    """Where all parts but the last lie, in `_StepParts`' order, and how many words they take."""
    tokens, mixed = (form.num_tokens,), form.num_seqs if form.num_tiles else 0
    wanted: list[tuple[str, tuple[int, ...]]] = [
        *[("int64", tokens)] * 4,
        ("bool", tokens),
        ("int32", (form.num_seqs,)),
        ("int64", (mixed,)),
        ("int32", (mixed, 2)),
        ("int32", (form.num_tiles, 4)),
        ("int32", (form.num_seqs if form.has_states else 0, 4)),
        ("int32", (form.num_tokens // CHUNK + form.num_runs if form.num_runs else 0, 6)),
        ("int32", (form.num_runs, 6)),
    ]
    places: list[_Place] = []
    end = 0
    for kind, shape in wanted:
        start, num_elements = end, math.prod(shape)
        end += -(-np.dtype(kind).itemsize * num_elements // 16) * 4
        places.append(_Place(slice(start, end), kind, num_elements, shape))
    return tuple(places), end


def _num_words(form: _Form) -> int:
    """How many words all parts but the last take."""
    return _places(form)[1]


def _on_device(words: Tensor, form: _Form) -> _StepParts[Tensor]:
    places, end = _places(form)
    dtypes = (getattr(torch, p.kind) for p in places)
    views = [
        words[p.words].view(dtype)[: p.num_elements].reshape(p.shape)
        for p, dtype in zip(places, dtypes, strict=True)
    ]
    return _StepParts._make((*views, words[end:]))
