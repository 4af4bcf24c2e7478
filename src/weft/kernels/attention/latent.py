"""Attention to latents by a Triton kernel: all heads read one key, whose first part is also the
value. `weft.models.latent_attention` explains why.

Shapes: T token rows, S sequences, H query heads, L the latent, R the rotated part of a key, W = L +
R, B blocks of a sequence.

A program reads a latent once, as key and as value, for many heads. Sums are in fp32, and a result
is rounded once. Launches depend only on the numbers of sequences, tiles and rows, so a CUDA graph
of them serves contexts of any lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.numbers import cdiv, next_power_of_2
from weft.kernels.attention import AttentionBatch, KVCache, RowWork, tile_rows
from weft.kernels.attention.latent_kernels import latent_tiles
from weft.kernels.attention.paged_kernels import combine_parts

MAX_PARTS = 64
"""The most parts that a context is cut into."""


class _Rounds(NamedTuple):
    """How a program loops over a context."""

    queries: int
    """The most queries that a program has."""
    tokens: int
    """How many tokens of the context it reads in a round. A part has at least so many."""
    warps: int
    stages: int
    """How many rounds overlap, counting the one whose latents are in use."""

    def within(self, shared_bytes: int, num_queries: int, width: int, itemsize: int) -> _Rounds:
        """These with as many tokens as fit into shared memory beside so many queries, and with two
        stages where even 16 tokens would not fit. `shared_bytes`: 0 if there is no limit."""
        fitting = self
        for tokens, stages in ((32, self.stages), (16, self.stages), (16, 2)):
            numbers = num_queries + (fitting.stages - 1) * fitting.tokens
            taken = (numbers * width + num_queries * fitting.tokens) * itemsize
            if not 0 < shared_bytes < taken:
                break
            fitting = fitting._replace(tokens=min(tokens, self.tokens), stages=stages)
        return fitting


FEW = _Rounds(32, 64, 8, 3)
"""The rounds of up to 32 queries of 16-bit numbers."""
MANY = _Rounds(64, 32, 8, 3)
"""The rounds of more queries, whose sums take half of the registers of eight warps."""
LONG = _Rounds(16, 16, 4, 2)
"""The rounds of 32-bit numbers, whose products need many more registers."""


def attend(
    q_THW: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    work: RowWork,
    scale: float,
    processors: int,
    shared_bytes: int,
    options: dict[str, bool],
) -> Tensor:
    """Attention as `Attend` defines it, to latents. Returns (T, H, L). `work`: as `row_work` makes
    it for H queries a row. `scale`: the factor of scores, times log2 e. `processors`: how many
    programs run at once. `shared_bytes`: how much shared memory a program may have; 0: no limit.
    `options`: `launch_options` of the kernels."""
    T, H, _ = q_THW.shape
    out_THL = q_THW.new_empty((T, H, cache.v.shape[-1]))
    launch = _Launch(q_THW, cache, batch, out_THL, scale, processors, shared_bytes, options)
    if work.tiles is not None:
        rows = tile_rows(H)
        # `work.tiles` has a place for each possible tile. Most are empty in short steps.
        launch.run("tiles", work.tiles, len(work.tiles), cdiv(T, rows // H), rows, T)
    if work.num_decodes:  # after tiles, as combining the parts of tiles writes to all rows
        kind = "all" if work.pairs is None else "pairs"
        pairs = batch.seq_lens_S if work.pairs is None else work.pairs
        num = work.num_decodes
        launch.run(kind, pairs, num, num, H, num)
    return out_THL


class _Launch(NamedTuple):
    """The attention of one layer in one step. Tiles and decodes have a launch each."""

    q_THW: Tensor
    cache: KVCache
    batch: AttentionBatch
    out_THL: Tensor
    scale: float
    """The factor of scores, times log2 e."""
    processors: int
    shared_bytes: int
    options: dict[str, bool]

    def run(
        self, kind: str, tiles: Tensor, num_tiles: int, num_full: int, rows: int, places: int
    ) -> None:
        """Compute `num_tiles` tiles of up to `rows` queries each, of which about `num_full` are not
        empty. `kind` and `tiles`: ROWS and tiles of the kernel. `places`: for how many rows parts
        of contexts are combined, if contexts are cut into parts."""
        H, W = self.q_THW.shape[1:]
        L, itemsize = self.out_THL.shape[2], self.q_THW.element_size()
        rounds = LONG if itemsize == 4 else FEW if rows <= FEW.queries else MANY
        block_m = max(16, min(rounds.queries, next_power_of_2(rows)))
        rounds = rounds.within(self.shared_bytes, block_m, W, itemsize)
        shares = cdiv(rows, block_m)
        wanted = max(1, min(MAX_PARTS, self.processors // (num_full * shares)))
        parts = 1 << (wanted.bit_length() - 1)  # a power of 2, as each number is compiled apart
        acc = sums = self.out_THL
        if parts > 1:
            acc = self.q_THW.new_empty((places, parts, H, L), dtype=torch.float32)
            make = self.q_THW.new_zeros if kind == "tiles" else self.q_THW.new_empty
            sums = make((places, parts, H, 2), dtype=torch.float32)
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
            LEAST=rounds.tokens,
            SHARES=shares,
            **self.options,
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
