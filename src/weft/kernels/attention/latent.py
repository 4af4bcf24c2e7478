"""Attention to latents by a Triton kernel: all heads read one key, whose first part is the value;
see `weft.models.latent_attention`.

Shapes: T token rows, S sequences, H query heads, L the latent, R the rotated part of a key, B
blocks of a sequence.

A latent is read once for both of its uses, and by many heads at a time. Sums are in fp32, and a
result is rounded once. Launches follow from the numbers of sequences, tiles and rows alone, so that
a CUDA graph of them serves any lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache, RowWork, tile_rows
from weft.kernels.attention.latent_kernels import latent_tiles
from weft.kernels.attention.paged_kernels import combine_parts

MAX_PARTS = 32
"""The most parts that a context is cut into."""
LEAST_ROUNDS = 4
"""The fewest rounds of a part. Fewer tokens are read faster than parts are combined."""


class _Rounds(NamedTuple):
    """How a program loops over a context."""

    queries: int
    """The most queries that it has."""
    tokens: int
    warps: int
    stages: int


SHORT = _Rounds(64, 32, 8, 3)
"""The rounds over numbers of 16 bits. With latents of 512 + 64 numbers, the queries take 72 KB of
shared memory, and each stage takes 36 KB, so that a GPU needs 180 KB; the sums of 64 queries take
half of eight warps' registers."""
LONG = _Rounds(16, 16, 4, 2)
"""The rounds over numbers of 32 bits, whose products need many more registers."""


def attend(
    q_THW: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    work: RowWork,
    scale: float,
    processors: int,
    options: dict[str, bool],
) -> Tensor:
    """An `Attend` to latents, (T, H, L). `work`: of tiles of H queries for each row. `processors`:
    how many programs run at once. `options`: those of launches of kernels between others."""
    T, H, _ = q_THW.shape
    out_THL = q_THW.new_empty((T, H, cache.v.shape[-1]))
    rounds = LONG if q_THW.dtype == torch.float32 else SHORT
    launch = _Launch(q_THW, cache, batch, out_THL, scale, rounds, processors, options)
    if work.tiles is not None:
        rows = tile_rows(H)
        # Tiles of a step are fewer than there are places, most of which are empty in short steps.
        launch.run("tiles", work.tiles, len(work.tiles), cdiv(T, rows // H), rows, T)
    if work.num_decodes:  # after tiles, which are put together for all rows
        kind = "all" if work.pairs is None else "pairs"
        pairs = batch.seq_lens_S if work.pairs is None else work.pairs
        num = work.num_decodes
        launch.run(kind, pairs, num, num, H, num)
    return out_THL


class _Launch(NamedTuple):
    """The attention of one layer in one step; its tiles and its decodes are launched apart."""

    q_THW: Tensor
    cache: KVCache
    batch: AttentionBatch
    out_THL: Tensor
    scale: float
    """With log2 e in it."""
    rounds: _Rounds
    processors: int
    options: dict[str, bool]

    def run(
        self, kind: str, tiles: Tensor, num_tiles: int, num_full: int, rows: int, places: int
    ) -> None:
        """Compute tiles of up to `rows` queries, of which about `num_full` are not empty. If their
        contexts are cut into parts, these meet at so many places."""
        H, W = self.q_THW.shape[1:]
        L, rounds = self.out_THL.shape[2], self.rounds
        block_m = max(16, min(rounds.queries, next_power_of_2(rows)))
        shares = cdiv(rows, block_m)
        wanted = max(1, min(MAX_PARTS, self.processors // (num_full * shares)))
        parts = 1 << (wanted.bit_length() - 1)  # each number is compiled for
        acc = sums = self.out_THL
        if parts > 1:
            acc = self.q_THW.new_empty((places, parts, H, L), dtype=torch.float32)
            sums = self.q_THW.new_zeros((places, parts, H, 2), dtype=torch.float32)
        table_SB, block_l = self.batch.block_table_SB, max(16, next_power_of_2(L))
        latent_tiles[num_tiles * shares, parts](
            *(self.q_THW, self.cache.k, self.out_THL, acc, sums),
            *(table_SB, self.batch.seq_lens_S, tiles, self.scale, table_SB.stride(0)),
            H=H,
            L=L,
            R=W - L,
            BLOCK_L=block_l,
            BLOCK_R=max(16, next_power_of_2(W - L)),
            BLOCK_M=block_m,
            BLOCK_N=rounds.tokens,
            BLOCK_SIZE=self.cache.block_size,
            ROWS=kind,
            PARTS=parts,
            LEAST=LEAST_ROUNDS * rounds.tokens,
            SHARES=shares,
            num_warps=rounds.warps,
            num_stages=rounds.stages,
        )
        if parts > 1:
            combine_parts[places, H](
                *(self.out_THL, acc, sums, self.out_THL, tiles, H),
                D=L,
                PARTS=parts,
                BLOCK_D=block_l,
                BLOCK_P=parts,
                SINKS=False,
                PAIRS=kind == "pairs",
                num_warps=8,
                **self.options,
            )
