"""Attention by Triton kernels that read the paged cache in place.

Shapes: T token rows, S sequences, H query heads, K key and value heads, G = H / K query heads of
one key head, D head dimension, B blocks of a sequence, P parts that a decode's context is cut into.

If rows are to be *deterministic*, a row has the same bits as a decode and in any chunk:
`prefill_tiles` then computes all rows, in rounds that begin at multiples of their size in the
context, so that the order of a row's sums follows from its position alone.

Sums are in fp32, and a result is rounded once. A decode's launches follow from the number of
sequences alone, so that a CUDA graph of them serves any lengths; a sequence of length 0 (padding
of a graph) reads no cache and gives zeros.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.numbers import next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache, RowWork, latent, row_work, tile_rows
from weft.kernels.attention.paged_kernels import combine_parts, decode_rows, prefill_tiles
from weft.kernels.attention.rounds import (
    CHUNKS,
    FEW_DECODES,
    few_decodes,
    many_decodes,
    rows_at_once,
)
from weft.kernels.triton_base import launch_options, meeting_place, processors, starts_early

MAX_PARTS = 16
"""The most parts that a decode's context is cut into."""

PROGRAMS = 2
"""How many programs for each processor keep a device busy with chunks. If there are more, contexts
of chunks are not cut into parts."""

PART_BYTES = 16 << 10
"""The fewest bytes of a head's keys in a part of a decode's context, rounded to whole rounds. Fewer
bytes are read faster than parts are combined."""

CHUNK_PARTS = (8, 16)
"""Into how many parts a chunk's context may be cut, if its tiles alone would leave most processors
idle: a few tokens after a long context. The numbers are few, as each is compiled for."""

LOG2E = math.log2(math.e)


class PagedAttention:
    """The kernels above on one device: an `Attend`."""

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._programs = processors(device)
        self._part_bytes = PART_BYTES
        self._shared_bytes = 0
        """How much shared memory a program may have."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._shared_bytes = properties.shared_memory_per_block_optin
        self._options = launch_options(starts_early(device))

    def __call__(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        chunked: bool = False,
        sinks_H: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        (H, D), K = q_THD.shape[1:], cache.k.shape[2]
        table_SB, work = batch.block_table_SB, batch.work
        if work is None:
            work = batch.once(("triton", H // K), partial(_plan, batch, H // K))
        if cache.v.shape[-1] < D:
            assert K == 1 and window is sinks_H is cap is None
            device = self._programs, self._shared_bytes, self._options
            return latent.attend(q_THD, cache, batch, work, scale * LOG2E, *device)
        out_THD = q_THD.new_empty(q_THD.shape)
        tensors = (q_THD, cache.k, cache.v, out_THD)
        numbers = (scale * LOG2E, window or 0, q_THD.stride(0), table_SB.stride(0), K)
        constants = {
            "G": H // K,
            "D": D,
            "BLOCK_D": max(16, next_power_of_2(D)),
            "BLOCK_SIZE": cache.block_size,
            "WINDOW": window is not None,
            "CHUNKED": chunked and window is not None,
            "SINKS": sinks_H is not None,
            "CAP": 0.0 if cap is None else cap * LOG2E,
        }
        sinks = out_THD if sinks_H is None else sinks_H
        parts: list[tuple[str, int, Tensor]] = []
        if work.tiles is not None:
            parts.append(("tiles", len(work.tiles), work.tiles))
        if self._deterministic and work.pairs is not None:
            parts.append(("pairs", work.num_decodes, work.pairs))
        elif self._deterministic and work.num_decodes:
            parts.append(("all", work.num_decodes, table_SB))
        # Parts of tiles are put together for all rows, so that those of decodes come after them.
        for kind, num_tiles, tiles in parts:
            self._prefill(tensors, batch, kind, num_tiles, tiles, sinks, numbers, constants)
        if work.num_decodes and not self._deterministic:
            self._decode(tensors, batch, work, sinks, numbers, constants)
        return out_THD

    def _prefill(
        self,
        tensors: tuple[Tensor, ...],
        batch: AttentionBatch,
        kind: str,
        num_tiles: int,
        tiles: Tensor,
        sinks: Tensor,
        numbers: tuple[float, ...],
        constants: dict[str, float],
    ) -> None:
        q_THD, *_, out_THD = tensors
        T, H, D = q_THD.shape
        G, block_d = constants["G"], constants["BLOCK_D"]
        K, rows, row_bytes = H // G, tile_rows(G), block_d * q_THD.element_size()
        block_m = rows_at_once(self._shared_bytes, rows, row_bytes, q_THD.dtype)
        rounds = CHUNKS.within(self._shared_bytes, block_m, row_bytes)
        num_parts, acc, sums = 1, out_THD, out_THD
        if not self._deterministic and constants["WINDOW"] == constants["CHUNKED"]:
            # Tiles of a step are fewer than `num_tiles`, most of which are empty in short steps.
            wanted = self._cut(K * -(-T // (rows // G)), PROGRAMS)
            few, many = CHUNK_PARTS
            num_parts = many if wanted >= many else few if 2 * wanted >= few else 1
        if num_parts > 1:
            acc = q_THD.new_empty((T, num_parts, H, D), dtype=torch.float32)
            sums = q_THD.new_zeros((T, num_parts, H, 2), dtype=torch.float32)
        prefill_tiles[K, num_tiles * (rows // block_m), num_parts](
            *tensors,
            acc,
            sums,
            batch.block_table_SB,
            batch.seq_lens_S,
            tiles,
            sinks,
            *numbers,
            BLOCK_M=block_m,
            BLOCK_N=rounds.tokens,
            ROWS=kind,
            ALIKE=self._deterministic,
            PARTS=num_parts,
            SHARES=rows // block_m,
            num_warps=rounds.warps,
            num_stages=rounds.stages,
            **constants,
        )
        if num_parts > 1:
            combine_parts[T, H](
                *(out_THD, acc, sums, sinks, sinks),
                H,
                D=D,
                PARTS=num_parts,
                BLOCK_D=block_d,
                BLOCK_P=next_power_of_2(num_parts),
                SINKS=constants["SINKS"],
                PAIRS=False,
                num_warps=4,
                **self._options,
            )

    def _decode(
        self,
        tensors: tuple[Tensor, ...],
        batch: AttentionBatch,
        work: RowWork,
        sinks: Tensor,
        numbers: tuple[float, ...],
        constants: dict[str, float],
    ) -> None:
        q_THD, *_, out_THD = tensors
        S, (H, D), block_d = work.num_decodes, q_THD.shape[1:], constants["BLOCK_D"]
        K, row_bytes = H // constants["G"], block_d * q_THD.element_size()
        enough = few_decodes(row_bytes)
        parts = self._cut(S * K, enough)
        few = S * K * parts <= enough * self._programs
        rounds = FEW_DECODES if few else many_decodes(row_bytes)
        acc = sums = out_THD
        if parts > 1:
            acc = q_THD.new_empty((S, parts, H, D), dtype=torch.float32)
            sums = q_THD.new_empty((S, parts, H, 2), dtype=torch.float32)
        pairs = batch.seq_lens_S if work.pairs is None else work.pairs
        block_g = max(16, next_power_of_2(H // K))
        rounds = rounds.within(self._shared_bytes, block_g, row_bytes)
        least = max(self._part_bytes // row_bytes, rounds.tokens)
        more = {"PARTS": parts, "LEAST": least, "PAIRS": work.pairs is not None}
        _, tickets, _ = meeting_place(q_THD.device)
        decode_rows[S, K, parts](
            *tensors,
            acc,
            sums,
            batch.block_table_SB,
            batch.seq_lens_S,
            pairs,
            sinks,
            tickets,
            *numbers,
            BLOCK_G=block_g,
            HEADS=next_power_of_2(H // K),
            BLOCK_N=rounds.tokens,
            num_warps=rounds.warps,
            num_stages=rounds.stages,
            **constants,
            **more,
            **self._options,
        )

    def _cut(self, num_programs: int, enough: int) -> int:
        """The most parts that contexts are cut into, when so many programs would read whole
        contexts and `enough` keep a processor busy."""
        wanted = max(1, min(MAX_PARTS, enough * self._programs // num_programs))
        return 1 << (wanted.bit_length() - 1)  # each number is compiled for


def _plan(batch: AttentionBatch, num_groups: int) -> RowWork:
    num_seqs = len(batch.query_start) - 1
    if all(b - a == 1 for a, b in pairwise(batch.query_start)):
        return RowWork(num_seqs, None, None)
    pairs, tiles = row_work(batch.query_start, batch.seq_lens, num_groups)
    device = batch.block_table_SB.device
    return RowWork(len(pairs), _upload(pairs, device), _upload(tiles, device))


def _upload(rows: NDArray[np.int32], device: torch.device) -> Tensor | None:
    if not len(rows):
        return None
    host = torch.from_numpy(rows)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
