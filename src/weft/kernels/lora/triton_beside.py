"""What adapters add to a product of few rows, computed beside it.

Shapes: as in `weft.kernels.lora.triton_tiles`.

    base product   ---- x is there ----- y --------|
                          | flag                   |  the kernel that reads y
    adapters       tables | v = x A^T | v B^T -----|  next adds delta to it

The second kernel starts when all programs of the product have, and computes the adapters' part
meanwhile: v = x A^T of all tiles of rows and, when each of them is done with that, delta = v B^T.
It ends after the product; the kernel that reads y next adds delta to it: see `Pending`.

Programs that wait for each other only count; no sum depends on who comes first.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from weft.kernels.collective.peers import Inboxes
from weft.kernels.lora.triton_tiles import expand_tile, num_blocks_of, shrink_tile, sum_tile
from weft.kernels.triton_base import INTERPRETED, launch_options, processors, starts_early, wait_for
from weft.kernels.triton_linear import TURNS, Launched


@triton.jit
def _meet(count_ptr, mates, teams, all_ptr, turn_ptr, LAST: tl.constexpr):
    """Wait until all of a team's programs are here. The last ones to leave, of the team and, where
    it is the LAST time that they meet, of all teams, make the flags ready for the next launch."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")
    wait_for(count_ptr, mates)
    if tl.atomic_add(count_ptr + 1, 1, sem="relaxed") == mates - 1:
        tl.store(count_ptr, 0)
        tl.store(count_ptr + 1, 0)
        if LAST:  # noqa: SIM102 - known to the compiler, which "and" would not be
            if tl.atomic_add(all_ptr, 1, sem="relaxed") == teams - 1:
                tl.store(all_ptr, 0)
                tl.store(turn_ptr, 0)


@triton.jit(do_not_specialize=["turn", "group", "first_slice", "num_groups", "num_targets"])
def _adapters(
    x_ptr,
    add_ptr,
    work_ptr,
    flags_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    inbox_ptrs,
    uses_ptr,
    x_stride,
    turn,
    group,
    first_slice,
    num_groups,
    num_targets,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    PER_TILE: tl.constexpr,
    TURNS: tl.constexpr,
    WIDTHS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """delta of the rows that have adapters, beside the product of the same x, launched just before.

    Each tile of rows has a team of programs, at most PER_TILE; a team takes more where there are
    more tiles than programs. Programs wait for their own team alone: those with lower numbers are
    there or were, so that it takes no more than PER_TILE places for all to come through.

    They may have started before x is there, so the product tells: flags int32 (NUM_FLAGS,) has a
    flag for each of TURNS launches, as those that follow may be waiting for theirs, then a counter
    of teams and four of each team's programs.

    With SIZE > 1, v is summed over ranks in between, by the first program of each team. Others
    wait for it, and it for the same tiles of other ranks. Take the lowest tile that is not done
    with on all ranks: its team has its places on each of them, as above, and sends before it waits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    NUM_SLICES: tl.constexpr = len(WIDTHS)
    turn_ptr = flags_ptr + turn % TURNS
    num_tiles = tl.load(tiles_ptr + 3)
    mates = tl.maximum(tl.minimum(PER_TILE, tl.num_programs(0) // tl.maximum(num_tiles, 1)), 1)
    teams = tl.minimum(num_tiles, tl.num_programs(0) // mates)
    team = pid // mates
    if team < teams:
        for i in range(team, num_tiles, teams):
            shrink_tile(
                x_ptr,
                work_ptr,
                arena_ptr,
                tiles_ptr + 4 * i,
                a_offset_ptr,
                rank_ptr,
                group,
                first_slice,
                x_stride,
                num_groups,
                num_targets,
                pid % mates,
                pid % mates + 1,
                mates,
                turn_ptr,
                turn,
                K,
                W,
                NUM_SLICES,
                PART,
                MAX_PARTS,
                SHRINK_STAGES,
                True,
                EXACT,
                PDL,
            )
        all_ptr = flags_ptr + TURNS
        count_ptr = all_ptr + 1 + 4 * team
        if SIZE > 1:
            _meet(count_ptr + 2, mates, teams, all_ptr, turn_ptr, False)
            if pid % mates == 0:
                for i in range(team, num_tiles, teams):
                    sum_tile(
                        work_ptr,
                        tiles_ptr + 4 * i,
                        rank_ptr,
                        inbox_ptrs,
                        uses_ptr,
                        first_slice,
                        num_targets,
                        0,
                        K,
                        W,
                        NUM_SLICES,
                        PART,
                        MAX_PARTS,
                        ROWS,
                        RANK,
                        SIZE,
                    )
        _meet(count_ptr, mates, teams, all_ptr, turn_ptr, True)
        num_blocks = num_blocks_of(WIDTHS, BLOCK_N)
        for i in range(team, num_tiles, teams):
            expand_tile(
                add_ptr,
                work_ptr,
                tiles_ptr,
                arena_ptr,
                tiles_ptr + 4 * i,
                a_offset_ptr,
                b_offset_ptr,
                rank_ptr,
                group,
                first_slice,
                O,
                num_groups,
                num_targets,
                pid % mates * num_blocks // mates,
                (pid % mates + 1) * num_blocks // mates,
                WIDTHS,
                K,
                W,
                BLOCK_N,
                PART,
                MAX_PARTS,
                EXPAND_STAGES,
                False,
                False,
                SIZE > 1,
                EXACT,
            )
    if pid == 0:
        if PDL:  # whoever waits for this kernel waits for the product too
            tl.extra.cuda.gdc_wait()
        if num_tiles == 0:
            tl.store(turn_ptr, 0)


PER_TILE = 16
"""The most programs for a tile of rows."""

MOST_PROGRAMS = 1024
"""The most programs for adapters beside a product."""

NUM_FLAGS = TURNS + 1 + 4 * MOST_PROGRAMS
"""How many flags and counters there are: see `_adapters`."""


ALONE = {"ROWS": 1, "RANK": 0, "SIZE": 1}


class RankExchange(NamedTuple):
    """Where ranks sum v; see `sum_tile`."""

    inboxes: Inboxes
    """For rows as long as those of the workspace."""
    rank: int

    @property
    def num_rows(self) -> int:
        return len(self.inboxes.uses_R)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.inboxes.address_S, self.inboxes.uses_R

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.num_rows, "RANK": self.rank, "SIZE": len(self.inboxes.inbox_S)}


def programs_beside(device: torch.device) -> int:
    """How many programs adapters beside a product have: as many as a device holds at once. The
    interpreter runs one program after the other, so that none may wait for a later one."""
    return 1 if INTERPRETED else min(4 * processors(device), MOST_PROGRAMS)


def launch_beside(
    product: Launched,
    x_TK: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    *,
    widths: tuple[int, ...],
    row_floats: int,
    part: int,
    max_parts: int,
    exchange: RankExchange | None,
) -> None:
    """Write delta beside a product of the same x that was launched just before with the same flags.

    `x_TK`: the columns that A is for. `tensors`: delta, workspace, flags, arena, tiles, a_offset,
    b_offset, rank. `numbers`: group, first slice, number of groups, number of targets. `widths`:
    the rows of B of each slice. `exchange`: where v is summed over ranks; None: it is whole.
    """
    grid = (programs_beside(x_TK.device),)
    beside = _adapters[grid]
    if not (INTERPRETED or isinstance(product.kernel, CompiledKernel)):
        # The product is being compiled, and did not run: nobody would tell that x is there.
        beside = partial(_adapters.warmup, grid=grid)
    beside(
        x_TK,
        *tensors,
        *((tensors[2], tensors[2]) if exchange is None else exchange.tensors),
        x_TK.stride(0),
        product.turn,
        *numbers,
        O=tensors[0].stride(0),
        K=x_TK.shape[1],
        PER_TILE=PER_TILE,
        TURNS=TURNS,
        WIDTHS=widths,
        W=row_floats,
        BLOCK_N=128,
        PART=part,
        MAX_PARTS=max_parts,
        SHRINK_STAGES=3,
        EXPAND_STAGES=4,
        EXACT=INTERPRETED or x_TK.dtype == torch.float32,
        **(ALONE if exchange is None else exchange.constants),
        num_warps=4,
        **launch_options(starts_early(x_TK.device)),
    )
