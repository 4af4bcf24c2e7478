"""The inputs of captured steps: their sizes, how they lie in a buffer, and how they get there.

Shapes: see `weft.worker.graphs`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import row_work, tile_rows
from weft.kernels.delta import CHUNK, Table, state_work
from weft.kernels.staging import Staging
from weft.worker.inputs import StepInputs

MAX_CHUNKS = 64
"""The most chunks of prompts that a step with a graph may have."""

CHUNK_TOKENS = 8
"""A step whose chunks are shorter on average takes a graph of more tokens. Room for more chunks
would slow down all other steps, in which each unused one has some hundred idle programs a layer."""

MAX_CONTEXT = 8192
"""The longest context of a decode in a mixed step with a graph, where contexts are not cut into
parts, as the cuts would depend on the number of decodes."""


class GraphForm(NamedTuple):
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


class StepParts(NamedTuple, Generic[Buffer]):
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


class GraphInputs:
    """The inputs of captured steps, at fixed addresses on the device, and the host arrays that feed
    them. Decodes of the same rows share arrays, which are staged once."""

    def __init__(
        self, staging: Staging, table_SW: Tensor, num_groups: int, padding_row: int
    ) -> None:
        """`table_SW`: where graphs read block tables. `num_groups`: query heads for each head of
        keys. `padding_row`: the row of the batch that tokens of padding have."""
        self._staging = staging
        self.table_SW = table_SW
        self._num_groups = num_groups
        self._padding_row = padding_row
        self._host_parts: dict[tuple[int, GraphForm], StepParts[NDArray[Any]]] = {}
        """By the staging's host buffer, of which there are several, and the form."""
        self._staged: dict[int, tuple[GraphForm, StepInputs]] = {}
        """By the staging's host buffer: the step whose inputs it has."""
        self._tables: tuple[Tensor, tuple[int, int], Tensor, Tensor] | None = None
        """Of the last step: what was sent, where in it its block tables are, these tables, and
        where graphs read them."""

    def on_device(self, form: GraphForm) -> StepParts[Tensor]:
        return _on_device(self._staging.device_words[: num_words_of(form)], form)

    def pad(self, form: GraphForm) -> None:
        """Set all inputs of a form to padding."""
        self._staged.clear()
        parts = self._on_host(form)
        self._lay_out([0], np.zeros(0, np.int32), form, parts)
        _lay_out_states(state_work([], [0]), form, parts)
        self._pad(parts, 0, 0)
        self._staging.send(num_words_of(form))

    def _on_host(self, form: GraphForm) -> StepParts[NDArray[Any]]:
        """The host arrays for the inputs of a step of this form, to be filled."""
        words, at = self._staging.begin(), (self._staging.turn, form)
        parts = self._host_parts.get(at)
        if parts is None:
            places, end = _places(form)
            views = [words[p.words].view(p.kind)[: p.num_elements].reshape(p.shape) for p in places]
            parts = self._host_parts[at] = StepParts._make((*views, words[end:]))
        return parts

    def stage(self, inputs: StepInputs, form: GraphForm) -> bool:
        """Copy a step's inputs to the device, all at once. Returns whether they fit the form."""
        table_SB, lengths = inputs.block_table_SB, inputs.seq_lens_S
        num_tokens, (num_seqs, width) = len(inputs.ids_T), table_SB.shape
        num_words = num_words_of(form)
        parts = self._on_host(form)
        last_form, last = self._staged.pop(self._staging.turn, (None, inputs))
        if not self._lay_out(inputs.query_start, lengths, form, parts):
            return False
        states = inputs.state_S
        if states is not None:
            of_states = states, inputs.query_start, inputs.source_S, inputs.lag_S
            if not _lay_out_states(state_work(*of_states), form, parts):
                return False
        same_rows = last_form is form and last.row_T is inputs.row_T
        if not same_rows:
            self._pad(parts, num_tokens, num_seqs)
            if form.num_tiles:
                parts.sampled_S[: len(inputs.sampled_tokens_N)] = inputs.sampled_tokens_N
            parts.row_T[:num_tokens] = inputs.row_T
        if not same_rows or last.ids_T is not inputs.ids_T:
            carried_T = inputs.from_device_T
            parts.ids_T[:num_tokens] = inputs.ids_T
            parts.carried_T[:num_tokens] = False if carried_T is None else carried_T
        parts.position_T[:num_tokens] = inputs.positions_T
        parts.place_T[:num_tokens] = inputs.slot_mapping_T
        parts.lengths_S[:num_seqs] = lengths
        parts.blocks[: table_SB.size] = table_SB.reshape(-1)
        self._staged[self._staging.turn] = form, inputs
        self._send(num_words, num_seqs, width)
        return True

    def _send(self, num_words: int, num_seqs: int, width: int) -> None:
        """Send what was staged, and bring the block tables behind it to where graphs read them."""
        words, place = self._staging.send(num_words + num_seqs * width), (num_words, num_seqs)
        if self._tables is None or self._tables[0] is not words or self._tables[1] != place:
            sent = words[num_words:].view(num_seqs, width)
            self._tables = words, place, sent, self.table_SW[:num_seqs, :width]
        _, _, sent, table = self._tables
        table.copy_(sent)

    def _lay_out(
        self,
        query_start: list[int],
        lengths: NDArray[np.int32],
        form: GraphForm,
        parts: StepParts[NDArray[Any]],
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

    def _pad(self, parts: StepParts[NDArray[Any]], num_tokens: int, num_seqs: int) -> None:
        """Fill the tokens and sequences beyond a step's own with ones that touch no cache."""
        parts.ids_T[num_tokens:] = 0
        parts.row_T[num_tokens:] = self._padding_row
        parts.position_T[num_tokens:] = 0
        parts.place_T[num_tokens:] = -1
        parts.carried_T[num_tokens:] = False
        parts.lengths_S[num_seqs:] = 0
        parts.sampled_S[:] = 0


def most_tiles(num_tokens: int, num_groups: int) -> int:
    """How many tiles a graph of `num_tokens` tokens has room for."""
    return whole_tiles(num_tokens, num_groups) + min(num_tokens // CHUNK_TOKENS + 1, MAX_CHUNKS)


def whole_tiles(num_tokens: int, num_groups: int) -> int:
    """How many tiles a chunk of `num_tokens` tokens takes."""
    return -(-num_tokens // (tile_rows(num_groups) // num_groups))


def _lay_out_states(
    work: tuple[Table, Table, Table], form: GraphForm, parts: StepParts[NDArray[Any]]
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
def _places(form: GraphForm) -> tuple[tuple[_Place, ...], int]:
    """Where all parts but the last lie, in `StepParts`' order, and how many words they take."""
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


def num_words_of(form: GraphForm) -> int:
    """How many words all parts but the last take."""
    return _places(form)[1]


def _on_device(words: Tensor, form: GraphForm) -> StepParts[Tensor]:
    places, end = _places(form)
    dtypes = (getattr(torch, p.kind) for p in places)
    views = [
        words[p.words].view(dtype)[: p.num_elements].reshape(p.shape)
        for p, dtype in zip(places, dtypes, strict=True)
    ]
    return StepParts._make((*views, words[end:]))
