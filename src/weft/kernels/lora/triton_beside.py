"""Computes the adapters' part of a product of few rows beside that product.

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

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import next_power_of_2
from weft.kernels.lora.triton_ranks import ALONE, RankExchange, sum_tile
from weft.kernels.lora.triton_tiles import (
    TILE_ROWS,
    expand_tile,
    num_blocks_of,
    read_tile,
    shrink_tile,
)
from weft.kernels.triton_base import (
    INTERPRETED,
    TURNS,
    launch_options,
    processors,
    starts_early,
    wait_for,
)
from weft.kernels.triton_linear import MOST_ROWS, Launched


@triton.jit(
    do_not_specialize=["turn", "places", "group", "first_slice", "num_groups", "num_targets"]
)
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
    places,
    group,
    first_slice,
    num_groups,
    num_targets,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    PER_TILE: tl.constexpr,
    TURNS: tl.constexpr,
    COUNTERS: tl.constexpr,
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

    Each tile of rows has a team of programs, at most PER_TILE, or twice as many if it is the only
    one, and of one program at least; all teams together have no more than `places` otherwise.
    Programs wait for their own team alone: those with lower numbers are there or were, so that it
    takes no more than the places of one team for all to come through.

    They may have started before x is there, so the product tells: flags int32 (NUM_FLAGS,) has a
    flag for each of TURNS launches, as those that follow may be waiting for theirs. Meanwhile they
    read tables. Behind that is a counter of the programs that wait for nobody any more, and two for
    each team. The last program of all, which has no team, makes all of them ready for the next
    launch, and waits for the product.

    With SIZE > 1, v is summed over ranks in between, by the first program of each team. Others
    wait for it, and it for the same tiles of other ranks. Take the lowest tile that is not done
    with on all ranks: its team has its places on each of them, as above, and sends before it waits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    last = tl.num_programs(0) - 1
    num_tiles = tl.load(tiles_ptr + 3)
    most = tl.where(num_tiles == 1, 2 * PER_TILE, PER_TILE)
    mates = tl.minimum(most, tl.maximum(places // tl.maximum(num_tiles, 1), 1))
    turn_ptr = flags_ptr + turn % TURNS
    done_ptr = flags_ptr + TURNS
    if pid == last:
        wait_for(turn_ptr, turn)  # the launch before has left the counters ready
        wait_for(done_ptr, num_tiles * mates)
        counters = tl.arange(0, COUNTERS)
        tl.store(done_ptr + counters, 0, mask=counters <= 2 * num_tiles)
        tl.store(turn_ptr, 0)
        if PDL:  # whoever waits for this kernel waits for the product too
            tl.extra.cuda.gdc_wait()
    elif pid < num_tiles * mates:
        mate = pid % mates
        tile = read_tile(
            tiles_ptr + 4 * (pid // mates),
            a_offset_ptr,
            b_offset_ptr,
            rank_ptr,
            group,
            first_slice,
            num_groups,
            num_targets,
            len(WIDTHS),
        )
        wait_for(turn_ptr, turn)
        shrink_tile(
            x_ptr,
            work_ptr,
            arena_ptr,
            tile,
            x_stride,
            mate,
            mate + 1,
            mates,
            K,
            W,
            PART,
            MAX_PARTS,
            SHRINK_STAGES,
            EXACT,
        )
        count_ptr = done_ptr + 1 + 2 * (pid // mates)
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release")
        if SIZE > 1:
            if mate == 0:
                wait_for(count_ptr, mates)
                sum_tile(
                    work_ptr, tile, inbox_ptrs, uses_ptr, 0, K, W, PART, MAX_PARTS, ROWS, RANK, SIZE
                )
                tl.debug_barrier()
                tl.atomic_add(count_ptr + 1, 1, sem="release")
            wait_for(count_ptr + 1, 1)
        else:
            wait_for(count_ptr, mates)
        tl.atomic_add(done_ptr, 1, sem="relaxed")
        num_blocks = num_blocks_of(WIDTHS, BLOCK_N)
        expand_tile(
            add_ptr,
            work_ptr,
            tiles_ptr,
            arena_ptr,
            tile,
            O,
            mate * num_blocks // mates,
            (mate + 1) * num_blocks // mates,
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


PER_TILE = 1 if INTERPRETED else 16
"""The most programs for one of several tiles of rows. The interpreter runs one program after the
other, so that none may wait for a later one."""

NUM_WARPS, PER_PROCESSOR = 4, 4
"""The warps of a program, and how many programs fit on a processor, if each thread has the 128
registers that most products leave it."""
REGISTERS = 1 << 16
"""The registers of a processor."""
KILOBYTE = 1 << 10
"""The shared memory that the system takes of each program, and about what a program takes besides
its buffers."""
BESIDE_BYTES_PER_US, PRODUCT_BYTES_PER_US, BEHIND_US = 5e3, 3.6e6, 15.0
"""Measured on an H200: the bytes of adapters that a program reads in a microsecond beside a
product, the bytes that the product reads in one, and the microseconds that programs which begin
when the product ends take to end themselves."""
SHRINK_STAGES = 3
"""One more than the steps of the shrink whose x and A are on their way to shared memory."""

NUM_FLAGS = TURNS + 1 + 2 * MOST_ROWS
"""How many flags and counters there are: see `_adapters`."""


def _most_places(device: torch.device) -> int:
    """How many programs for adapters a device holds at once."""
    return 0 if INTERPRETED else PER_PROCESSOR * processors(device)


def _places(
    product: Launched, x_TK: Tensor, widths: tuple[int, ...], part: int, weight_bytes: int
) -> int:
    """How many programs share the tiles of rows: as many as have places while the product runs, if
    these can read an adapter of rank 16 for each row in not much more time than the product takes.
    Others would begin when the product ends, and those beside it would have nothing left to do.
    Where there are few places or much to read, they are as many as the device holds."""
    device, kernel, (num_rows, K) = x_TK.device, product.kernel, x_TK.shape
    if INTERPRETED or not product.has_begun:
        return _most_places(device)
    buffers = (SHRINK_STAGES - 1) * 2 * TILE_ROWS * part * x_TK.itemsize
    left = places_left(
        processors(device),
        torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor,
        product.num_programs,
        (kernel.metadata.shared, kernel.n_regs * 32 * kernel.metadata.num_warps),
        (buffers + KILOBYTE, product.room * 32 * NUM_WARPS),
    )
    num_bytes = num_rows * 16 * (len(widths) * K + sum(widths)) * x_TK.itemsize
    enough_us = weight_bytes / PRODUCT_BYTES_PER_US + BEHIND_US
    is_enough = left * BESIDE_BYTES_PER_US * enough_us >= num_bytes
    return left if is_enough and left >= processors(device) else _most_places(device)


@cache
def places_left(
    num_processors: int, shared: int, num_programs: int, size: tuple[int, int], own: tuple[int, int]
) -> int:
    """For how many programs of the size `own` there are places beside so many others of another
    size, on processors that have `shared` bytes of shared memory each. Sizes are in bytes of shared
    memory and in registers. The others are spread evenly."""
    theirs = size[0] + KILOBYTE, size[1]
    fit = min(shared // theirs[0], REGISTERS // theirs[1])
    each, more = divmod(min(num_programs, fit * num_processors), num_processors)

    def left(num: int) -> int:
        by_shared = (shared - num * theirs[0]) // (own[0] + KILOBYTE)
        by_registers = (REGISTERS - num * theirs[1]) // own[1]
        return max(min(by_shared, by_registers), 0)

    return more * left(each + 1) + (num_processors - more) * left(each)


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
    weight_bytes: int,
    exchange: RankExchange | None,
) -> None:
    """Write delta beside a product of the same x that was launched just before with the same flags.

    `x_TK`: the columns that A is for. `tensors`: delta, workspace, flags, arena, tiles, a_offset,
    b_offset, rank. `numbers`: group, first slice, number of groups, number of targets. `widths`:
    the rows of B of each slice. `weight_bytes`: what the product reads. `exchange`: where
    v is summed over ranks; None: it is whole.
    """
    grid = (max(_most_places(x_TK.device), len(x_TK)) + 1,)
    beside = _adapters[grid]
    if not product.has_begun:  # nobody would tell that x is there
        beside = partial(_adapters.warmup, grid=grid)
    beside(
        x_TK,
        *tensors,
        *((tensors[2], tensors[2]) if exchange is None else exchange.tensors),
        x_TK.stride(0),
        product.turn,
        _places(product, x_TK, widths, part, weight_bytes),
        *numbers,
        O=tensors[0].stride(0),
        K=x_TK.shape[1],
        PER_TILE=PER_TILE,
        TURNS=TURNS,
        COUNTERS=next_power_of_2(1 + 2 * MOST_ROWS),
        WIDTHS=widths,
        W=row_floats,
        BLOCK_N=128,
        PART=part,
        MAX_PARTS=max_parts,
        SHRINK_STAGES=SHRINK_STAGES,
        EXPAND_STAGES=4,
        EXACT=INTERPRETED or x_TK.dtype == torch.float32,
        **(ALONE if exchange is None else exchange.constants),
        num_warps=NUM_WARPS,
        maxnreg=product.room,
        **launch_options(starts_early(x_TK.device)),
    )
