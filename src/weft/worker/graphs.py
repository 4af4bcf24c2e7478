"""CUDA graphs of steps: one launch in place of several hundred.

A graph computes logits from inputs at fixed places. There is one for each of some sizes (steps in
between are padded), with adapters and without; as kernels find adapters, contexts and chunks of
prompts through tables in device memory, each serves every mix of adapters, ranks and lengths.
Steps of decodes only have graphs of their own, by the number of sequences. Other steps have theirs
by the number of tokens, up to where the device takes longer than the host does without a graph.

Shapes: T tokens and S sequences of a step, both padded to sizes that were captured, W blocks of the
longest context possible, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionBatch, KVCache, RowWork, row_work, tile_rows
from weft.kernels.lora import LoraBatch, Segment
from weft.kernels.lora.base import LoraBackend, LoraStep
from weft.kernels.staging import Staging
from weft.models.decoder import Decoder, StepContext
from weft.worker.inputs import Segments, StepInputs

MAX_CHUNKS = 64
"""Of prompts in a step with a graph."""

MAX_CONTEXT = 8192
"""Tokens of a decode in a mixed step with a graph: its context is not cut into parts there, as
they would have to follow from the number of decodes."""


def batch_sizes(max_seqs: int) -> list[int]:
    """Decodes to capture: fine steps where one more is a large share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4096, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


def token_sizes(max_tokens: int) -> list[int]:
    """Tokens of mixed steps to capture: fewer rows of padding take no less time, or more (448)."""
    sizes = [16, 32, *range(64, 385, 64), *range(512, 1025, 128)]
    most = min(max_tokens, sizes[-1])
    return [size for size in sizes if size < most] + [most]


class _Form(NamedTuple):
    """Sizes of a captured step."""

    num_tokens: int
    num_seqs: int
    num_tiles: int
    """Of chunks; 0: decodes only, each of which samples."""


class _Parts(NamedTuple):
    """What a step reads, cut out of one buffer of 32-bit words on the host (numpy) or the device
    (torch)."""

    longs: Any
    """int64 (4, T): token ids, rows of the batch, positions, slots of the cache."""
    on_device: Any
    """int32 (T,), whether the id is the last one sampled for its row."""
    lengths: Any
    """int32 (S,), of contexts."""
    sampled: Any
    """int64 (S,), the tokens that sample; empty if all do."""
    pairs: Any
    """int32 (S, 2), see `RowWork`; empty if all sequences are decodes."""
    tiles: Any
    """int32 (tiles, 4), likewise."""
    blocks: Any
    """int32, the rest: block tables."""


class StepGraphs:
    """Captured steps over the runner's model and caches. `lora` None: its kernels can't be
    captured, and steps with adapters run without a graph."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[KVCache],
        lora: LoraBackend | None,
        last_token_R: Tensor,
        num_table_blocks: int,
        token_sizes: Sequence[int],
    ) -> None:
        """`last_token_R`: the last token of every row of the batch, and one row more for
        padding to point to. `num_table_blocks`: W. `token_sizes`: of mixed steps,
        rising."""
        self._decoder, self._kv, self._lora = decoder, kv, lora
        self._last_token_R = last_token_R
        self._device = last_token_R.device
        max_seqs = len(last_token_R) - 1
        self._num_groups = decoder.config.num_heads // decoder.config.num_kv_heads
        self._decodes = [_Form(size, size, 0) for size in batch_sizes(max_seqs)]
        self._mixed = [self._mixed_form(size, max_seqs) for size in token_sizes]
        largest = max(_num_words(form) for form in (self._decodes[-1], self._mixed[-1]))
        self._staging = Staging(largest + max_seqs * num_table_blocks, self._device)
        make = self._make
        self._table_SW = make((max_seqs, num_table_blocks), torch.int32)
        self._slot_T = make((max(max_seqs, token_sizes[-1]),), torch.int32)
        self._logits_SV = make((max_seqs, decoder.num_logits), torch.float32)
        self._replays: dict[tuple[_Form, bool], Callable[[], None]] = {}

    def compile(self) -> None:
        """Compile what all sizes need, side by side."""
        if self._device.type != "cuda":
            return
        from weft.kernels.compiling import compiling_ahead  # Triton is for Linux

        with compiling_ahead():
            for form in (*self._decodes, *self._mixed):
                for forward in self._steps(form).values():
                    forward()

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones use its memory."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        with _no_garbage_collection():
            for form in (*reversed(self._mixed), *reversed(self._decodes)):
                for with_lora, forward in self._steps(form).items():
                    forward()
                    self._replays[form, with_lora] = _record(forward, pool)

    def _steps(self, form: _Form) -> dict[bool, Callable[[], None]]:
        """The step of a form without adapters and with them, over inputs of nothing but padding."""
        num_words = _num_words(form)
        parts = _cut(self._staging.begin(num_words), form, np.int64)
        self._lay_out([0], np.zeros(0, np.int32), form, parts)
        self._pad(parts, 0, 0)
        self._staging.send(num_words)
        kinds = (False, True) if self._lora else (False,)
        return {with_lora: self._forward(form, with_lora) for with_lora in kinds}

    def run(self, inputs: StepInputs) -> Tensor | None:
        """The logits of a step's sampled tokens, fp32 (N, V), overwritten by the next run; None if
        there is no graph for such a step."""
        form = self._form(inputs)
        replay = self._replays.get((form, bool(inputs.segments))) if form else None
        if form is None or replay is None or not self._stage(inputs, form):
            return None
        if inputs.segments and self._lora:
            self._begin_lora(self._lora, inputs.segments, inputs.sampled_segments, form)
        replay()
        return self._logits_SV[: len(inputs.sampled_rows_N)]

    def close(self) -> None:
        """Let go of the graphs, which hold on to the model's tensors."""
        self._replays.clear()

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _mixed_form(self, num_tokens: int, max_seqs: int) -> _Form:
        tokens = tile_rows(self._num_groups) // self._num_groups
        num_tiles = -(-num_tokens // tokens) + min(num_tokens, MAX_CHUNKS)
        return _Form(num_tokens, min(num_tokens, max_seqs), num_tiles)

    def _form(self, inputs: StepInputs) -> _Form | None:
        """The smallest that a step may fit into."""
        num_tokens = len(inputs.ids_T)
        decodes = len(inputs.seq_lens_S) == num_tokens == len(inputs.sampled_rows_N)
        forms = self._decodes if decodes else self._mixed
        at = bisect_left(forms, num_tokens, key=lambda form: form.num_tokens)
        return forms[at] if at < len(forms) else None

    # -- inputs --------------------------------------------------------------------------------

    def _stage(self, inputs: StepInputs, form: _Form) -> bool:
        """Bring a step's inputs to their places: one copy from the host. Whether they fit."""
        table_SB, lengths = inputs.block_table_SB, inputs.seq_lens_S
        num_tokens, (num_seqs, width) = len(inputs.ids_T), table_SB.shape
        num_words = _num_words(form)
        parts = _cut(self._staging.begin(num_words + table_SB.size), form, np.int64)
        if not self._lay_out(inputs.query_start, lengths, form, parts):
            return False
        self._pad(parts, num_tokens, num_seqs)
        if form.num_tiles:
            parts.sampled[: len(inputs.sampled_tokens_N)] = inputs.sampled_tokens_N
        longs = (inputs.ids_T, inputs.row_T, inputs.positions_T, inputs.slot_mapping_T)
        for row, values in zip(parts.longs, longs, strict=True):
            row[:num_tokens] = values
        on_device_T = inputs.from_device_T
        parts.on_device[:num_tokens] = 0 if on_device_T is None else on_device_T
        parts.lengths[:num_seqs] = lengths
        parts.blocks[:] = table_SB.reshape(-1)
        blocks = self._staging.send(num_words + table_SB.size)[num_words:]
        self._table_SW[:num_seqs, :width].copy_(blocks.view(num_seqs, width))
        return True

    def _lay_out(
        self, query_start: list[int], lengths: NDArray[np.int32], form: _Form, parts: _Parts
    ) -> bool:
        """Which rows go to which kernel. Whether there is room."""
        if not form.num_tiles:
            return True
        num_padding = form.num_tokens - query_start[-1]
        pairs, tiles = row_work(query_start, lengths, self._num_groups, num_padding)
        if len(tiles) > form.num_tiles or np.any(lengths[pairs[:, 0]] > MAX_CONTEXT):
            return False
        parts.pairs[: len(pairs)] = pairs
        parts.pairs[len(pairs) :] = -1
        parts.tiles[: len(tiles)] = tiles
        parts.tiles[len(tiles) :] = 0
        return True

    def _pad(self, parts: _Parts, num_tokens: int, num_seqs: int) -> None:
        """Tokens and sequences beyond a step's own, that read no cache and write none."""
        parts.longs[:, num_tokens:] = np.array([0, len(self._last_token_R) - 1, 0, -1])[:, None]
        parts.on_device[num_tokens:] = 0
        parts.lengths[num_seqs:] = 0
        parts.sampled[:] = 0

    def _begin_lora(
        self, lora: LoraBackend, segments: Segments, sampled_segments: Segments, form: _Form
    ) -> LoraStep:
        slot_T = slot_N = self._slot_T[: form.num_tokens]
        if form.num_tiles:
            slot_N = self._slot_T[: form.num_seqs]
        each, sampled = (tuple(map(Segment._make, s)) for s in (segments, sampled_segments))
        return lora.begin(LoraBatch(slot_T, each, slot_N, sampled))

    # -- the captured step ---------------------------------------------------------------------

    def _forward(self, form: _Form, with_lora: bool) -> Callable[[], None]:
        """The step of a form as a function of what lies at the fixed places."""
        parts = _cut(self._staging.device_words[: _num_words(form)], form, torch.int64)
        ids_T, row_T, position_T, slot_T = parts.longs
        mixed = form.num_tiles > 0
        work = RowWork(form.num_seqs, *((parts.pairs, parts.tiles) if mixed else (None, None)))
        attention = AttentionBatch(
            slot_mapping_T=slot_T,
            block_table_SB=self._table_SW[: form.num_seqs],
            seq_lens_S=parts.lengths,
            query_start=[],
            seq_lens=[],
            work=work,
        )
        lora = self._begin_lora(self._lora, (), (), form) if with_lora and self._lora else None
        step = StepContext(position_T, attention, lora)

        def forward() -> None:
            known_T = torch.where(parts.on_device != 0, self._last_token_R[row_T], ids_T)
            hidden_TI = self._decoder.forward(known_T, step, self._kv)
            if mixed:
                hidden_TI = hidden_TI[parts.sampled]
            self._logits_SV[: form.num_seqs].copy_(self._decoder.logits(hidden_TI, step))

        return forward


def _shapes(form: _Form) -> list[tuple[int, tuple[int, ...]]]:
    """(words of an element, shape) of all parts but the last."""
    mixed = form.num_seqs if form.num_tiles else 0
    return [
        (2, (4, form.num_tokens)),
        (1, (form.num_tokens,)),
        (1, (form.num_seqs,)),
        (2, (mixed,)),
        (1, (mixed, 2)),
        (1, (form.num_tiles, 4)),
    ]


def _num_words(form: _Form) -> int:
    """Of all parts but the last. Each begins at 16 bytes, as kernels like it."""
    return sum(_padded(size, shape) for size, shape in _shapes(form))


def _padded(element_words: int, shape: tuple[int, ...]) -> int:
    return -(-element_words * int(np.prod(shape)) // 4) * 4


def _cut(words: Any, form: _Form, long: Any) -> _Parts:
    """Views of a buffer; `long` is the 64-bit integer of its kind."""
    parts: list[Any] = []
    for size, shape in _shapes(form):
        part = words[: size * int(np.prod(shape))]
        parts.append((part.view(long) if size == 2 else part).reshape(shape))
        words = words[_padded(size, shape) :]
    return _Parts._make([*parts, words])


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The end of another graph, found by the collector, would spoil a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record(forward: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture what has run once already. Without a GPU, where only tests come here, it is run
    again each time."""
    if pool is None:
        return forward
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        forward()

    def replay(_keep: object = forward) -> None:
        graph.replay()

    return replay
