"""CUDA graphs of decode steps: one launch in place of several hundred.

A graph computes logits from inputs at fixed places. There is one for each of some batch sizes
(steps in between are padded), with adapters and without; as kernels find adapters and contexts
through tables in device memory, each serves every mix of adapters, ranks and lengths.

Shapes: S sequences of a step, N its rows padded to a size that was captured, W blocks of the
longest context possible, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.inputs import StepInputs
from weft.kernels.attention import AttentionBatch, KVCache
from weft.kernels.lora import LoraBatch, Segment
from weft.kernels.lora.base import LoraBackend, LoraStep
from weft.kernels.staging import Staging
from weft.models.decoder import Decoder, StepContext

_LONGS, _INTS = 4, 2
"""Input arrays of a row, besides its blocks: ids, batch row, position and slot as int64, context
length and whether the id is on the device as int32."""
_WORDS = 2 * _LONGS + _INTS

Ints = NDArray[np.int32]


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: fine steps where a row more is a large share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4096, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class DecodeGraphs:
    """Captured decodes over the runner's model and caches. `lora` None: its kernels can't be
    captured, and steps with adapters run without a graph."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[KVCache],
        lora: LoraBackend | None,
        last_token_R: Tensor,
        num_table_blocks: int,
    ) -> None:
        """`last_token_R`: the last token of every row of the batch, and one row more for
        padding to point to. `num_table_blocks`: W."""
        self._decoder, self._kv, self._lora = decoder, kv, lora
        self._last_token_R = last_token_R
        self._device = last_token_R.device
        max_rows = len(last_token_R) - 1
        self._sizes = bucket_sizes(max_rows)
        self._staging = Staging(max_rows * (_WORDS + num_table_blocks), self._device)
        make = self._make
        self._table_NW = make((max_rows, num_table_blocks), torch.int32)
        self._slot_N = make((max_rows,), torch.int32)
        self._logits_NV = make((max_rows, decoder.num_logits), torch.float32)
        self._replays: dict[tuple[int, bool], Callable[[], None]] = {}

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones use its memory."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for size in reversed(self._sizes):
            self._pad(self._staging.begin(size * _WORDS), 0, size)
            self._staging.send(size * _WORDS)
            for with_lora in (False, True) if self._lora else (False,):
                forward = self._forward(size, with_lora)
                forward()
                self._replays[size, with_lora] = _record(forward, pool)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """The logits of a step's sequences, fp32 (S, V), overwritten by the next run; None if
        there is no graph for such a step."""
        num_seqs = len(inputs.seq_lens_S)
        if not num_seqs == len(inputs.ids_T) == len(inputs.sampled_rows_N):
            return None
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        replay = self._replays.get((size, bool(inputs.segments)))
        if replay is None:
            return None
        self._stage(inputs, size)
        if inputs.segments and self._lora:
            self._begin_lora(self._lora, inputs.segments, size)
        replay()
        return self._logits_NV[:num_seqs]

    def close(self) -> None:
        """Let go of the graphs, which hold on to the model's tensors."""
        self._replays.clear()

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    # -- inputs --------------------------------------------------------------------------------

    def _stage(self, inputs: StepInputs, size: int) -> None:
        """Bring a step's inputs to their places: one copy from the host."""
        table_SB = inputs.block_table_SB
        num_seqs, width = table_SB.shape
        num_words = size * _WORDS + num_seqs * width
        words = self._staging.begin(num_words)
        self._pad(words, num_seqs, size)
        longs, ints, blocks = _split(words, size)
        longs[0, :num_seqs] = inputs.ids_T
        longs[1, :num_seqs] = inputs.row_T
        longs[2, :num_seqs] = inputs.positions_T
        longs[3, :num_seqs] = inputs.slot_mapping_T
        ints[0, :num_seqs] = inputs.seq_lens_S
        ints[1, :num_seqs] = 0 if inputs.from_device_T is None else inputs.from_device_T
        blocks[:] = table_SB.reshape(-1)
        flat_X = self._staging.send(num_words)[size * _WORDS :]
        self._table_NW[:num_seqs, :width].copy_(flat_X.view(num_seqs, width))

    def _pad(self, words: Ints, num_seqs: int, size: int) -> None:
        """Rows that read no cache and write none."""
        longs, ints, _ = _split(words, size)
        longs[:, num_seqs:] = np.array([0, len(self._last_token_R) - 1, 0, -1])[:, None]
        ints[:, num_seqs:] = 0

    def _begin_lora(
        self, lora: LoraBackend, segments: tuple[tuple[int, int, int], ...], size: int
    ) -> LoraStep:
        slot_N = self._slot_N[:size]
        each = tuple(Segment(*segment) for segment in segments)
        return lora.begin(LoraBatch(slot_N, each, slot_N, each))

    # -- the captured step ---------------------------------------------------------------------

    def _forward(self, size: int, with_lora: bool) -> Callable[[], None]:
        """The step of `size` rows as a function of what lies at the fixed places."""
        words, end = self._staging.device_words, 2 * _LONGS * size
        ids_N, row_N, position_N, slot_N = words[:end].view(torch.int64).view(_LONGS, size)
        length_N, on_device_N = words[end : size * _WORDS].view(_INTS, size)
        attention = AttentionBatch(
            slot_mapping_T=slot_N,
            block_table_SB=self._table_NW[:size],
            seq_lens_S=length_N,
            query_start=list(range(size + 1)),
            seq_lens=[],
        )
        lora = self._begin_lora(self._lora, (), size) if with_lora and self._lora else None
        step = StepContext(position_N, attention, lora)

        def forward() -> None:
            known_N = torch.where(on_device_N != 0, self._last_token_R[row_N], ids_N)
            hidden_NI = self._decoder.forward(known_N, step, self._kv)
            self._logits_NV[:size].copy_(self._decoder.logits(hidden_NI, step))

        return forward


def _split(words: Ints, size: int) -> tuple[NDArray[np.int64], Ints, Ints]:
    """The parts of a buffer: int64 (4, N), int32 (2, N), and blocks, flat."""
    end = 2 * _LONGS * size
    longs = words[:end].view(np.int64).reshape(_LONGS, size)
    ints = words[end : end + _INTS * size].reshape(_INTS, size)
    return longs, ints, words[end + _INTS * size :]


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
