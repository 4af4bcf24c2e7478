"""A linear layer for few rows: the base product, and beside it what adapters add.

Shapes: T token rows, K inputs and O outputs of a group, S slots, G groups, L slices of the model,
R the summed ranks of a group's slices in one adapter, W floats of workspace a row.

With few rows a product only reads its weights. So its programs keep many bytes in flight, and
ask for the first ones before the kernel ahead has ended. A second kernel, which starts when all
programs of the product have, computes the adapters' part meanwhile: v = x A^T of all tiles of rows
and, when each of them is done with that, delta = v B^T. It ends after the product; the kernel that
reads y next adds delta to it: see `Pending`.

Programs that wait for each other only count; no sum depends on who comes first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from weft.kernels import tuned
from weft.kernels.lora.triton_tiles import dot, expand_tile, num_blocks_of, shrink_tile, wait_for

FEW_ROWS = 64


@triton.jit
def _prefetch(at):
    """Ask for the lines of 128 bytes that `at` points into, in the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _meet(count_ptr, mates, teams, all_ptr, turn_ptr):
    """Wait until all of a team's programs are here. The last ones to leave, of the team and of all
    teams, make the flags ready for the next launch."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")
    wait_for(count_ptr, mates)
    if tl.atomic_add(count_ptr + 1, 1, sem="relaxed") == mates - 1:
        tl.store(count_ptr, 0)
        tl.store(count_ptr + 1, 0)
        if tl.atomic_add(all_ptr, 1, sem="relaxed") == teams - 1:
            tl.store(all_ptr, 0)
            tl.store(turn_ptr, 0)


@triton.jit(do_not_specialize=["T", "turn"])
def _product(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    flags_ptr,
    T,
    x_stride,
    turn,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    TURNS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns [tile * BLOCK_O, ...) of y (T, O) = x @ w^T + bias, over one of SPLIT parts of K;
    the program that is the last of its tile adds the parts in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    tile = pid // SPLIT
    part = pid % SPLIT
    EACH: tl.constexpr = K // SPLIT
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    k = part * EACH + tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    w_row = w_ptr + o[:, None].to(tl.int64) * K
    if PDL:
        if AHEAD > 0:
            _prefetch(w_row + part * EACH + 64 * tl.arange(0, AHEAD)[None, :])
        tl.extra.cuda.gdc_wait()
    if pid == 0:  # x is there: see `_adapters`
        tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + turn % TURNS, turn, sem="release")
    x_row = x_ptr + t[:, None] * x_stride
    acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
    for step in tl.range(0, EACH // BLOCK_K, num_stages=STAGES):
        w = tl.load(w_row + (step * BLOCK_K + k)[None, :], eviction_policy="evict_first")
        x = tl.load(x_row + (step * BLOCK_K + k)[None, :], mask=(t < T)[:, None], other=0.0)
        acc = dot(w, tl.trans(x), acc, EXACT)
    last = True
    if SPLIT > 1:
        i = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + t[None, :]
        size: tl.constexpr = BLOCK_O * BLOCK_T
        tl.store(parts_ptr + (tile * SPLIT + part) * size + i, acc)
        tl.debug_barrier()
        last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.full((BLOCK_O, BLOCK_T), 0.0, tl.float32)
            for p in tl.static_range(SPLIT):
                acc += tl.load(parts_ptr + (tile * SPLIT + p) * size + i, cache_modifier=".cg")
            tl.store(tickets_ptr + tile, 0)
    if last:
        if BIAS:
            acc += tl.load(bias_ptr + o).to(tl.float32)[:, None]
        y = tl.trans(acc).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + t[:, None] * O + o[None, :], y, mask=(t < T)[:, None])


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
    PDL: tl.constexpr,
):
    """delta of the rows that have adapters, beside the product of the same x, launched just before.

    Each tile of rows has a team of programs, at most PER_TILE; a team takes more where there are
    more tiles than programs. Programs wait for their own team alone: those with lower numbers are
    there or were, so that it takes no more than PER_TILE places for all to come through.

    They may have started before x is there, so the product tells: flags int32 (NUM_FLAGS,) has a
    flag for each of TURNS launches, as those that follow may be waiting for theirs, then a counter
    of teams and two of each team's programs."""
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
        _meet(all_ptr + 1 + 2 * team, mates, teams, all_ptr, turn_ptr)
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
                EXACT,
            )
    if pid == 0:
        if PDL:  # whoever waits for this kernel waits for the product too
            tl.extra.cuda.gdc_wait()
        if num_tiles == 0:
            tl.store(turn_ptr, 0)


INTERPRETED = not isinstance(_product, triton.runtime.JITFunction)
"""Whether this process runs kernels in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a base product is cut for the device."""

    step: int
    """Elements of K that a program takes at a time."""
    split: int
    """Parts of K."""
    stages: int
    columns: int = 64
    """Of a program."""
    ahead: int = 2
    """Lines of 128 bytes of each row of its weights that a program asks for early."""

    def fits(self, num_rows: int, outputs: int, inputs: int) -> bool:
        """Whether such a product can be cut so."""
        if min(self.columns, self.step) < 16 or outputs % self.columns:
            return False
        num_floats, num_tiles = outputs * self.split * num_rows, outputs // self.columns
        meet = self.split == 1 or (num_floats <= MEETING_FLOATS and num_tiles <= MEETING_TILES)
        return meet and inputs % (self.split * self.step) == 0


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters' part of a launch."""

    tensors: tuple[Tensor, ...]
    """delta, workspace, flags, arena, tiles, a_offset, b_offset, rank."""
    numbers: tuple[int, ...]
    """group, first slice, number of groups, of targets."""
    widths: tuple[int, ...]
    """Of the slices."""
    row_floats: int
    part: int
    max_parts: int


PER_TILE = 16
"""Programs for each tile of rows, at most."""

MOST_PROGRAMS = 1024
"""For adapters beside a product."""

TURNS = 64
"""Many more than launches that can be under way at once, as each is there with all its programs."""

NUM_FLAGS = TURNS + 1 + 2 * MOST_PROGRAMS
"""See `_adapters`."""

_launches = itertools.count()

MEETING_FLOATS, MEETING_TILES = 1 << 22, 1 << 12


@cache
def _meeting_place(device: torch.device, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the parts of products meet, counters, and flags that nobody waits for. Launches of one
    stream share them; those of two streams may run at once. Graphs are for the default stream, 0.
    """
    parts = torch.empty(MEETING_FLOATS, dtype=torch.float32, device=device)
    counters = torch.zeros(MEETING_TILES + NUM_FLAGS, dtype=torch.int32, device=device)
    return parts, counters[:MEETING_TILES], counters[MEETING_TILES:]


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs_beside(device: torch.device) -> int:
    """For adapters beside a product: as many as a device holds at once. The interpreter runs one
    program after the other, so that none may wait for a later one."""
    return 1 if INTERPRETED else min(4 * processors(device), MOST_PROGRAMS)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a processor's shared memory holds two programs of every cut."""
    if device.type == "cpu":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return bool(found >= 200 << 10)


def cut_of(x_TK: Tensor, weight_OK: Tensor) -> Cut | None:
    """None: another kernel is better, or this one can't."""
    (T, K), O = x_TK.shape, len(weight_OK)  # noqa: E741
    if not 0 < T <= FEW_ROWS or O % 64 or K % 128 or not _has_room(x_TK.device):
        return None
    if x_TK.dtype == torch.float32 and not INTERPRETED:
        return None
    if not (weight_OK.is_contiguous() and x_TK.stride(1) == 1):
        return None
    found = tuned.cut_for(Cut, x_TK.device, T, O, K)
    if found is not None:
        return found
    enough = processors(x_TK.device) * (4 if T > 32 else 2) // 3
    split = 1
    while split < 4 and O // 64 * split < enough and K % (256 * split) == 0:
        split *= 2
    cut = Cut(128, split, 3 if T > 32 else 4)
    if T <= 16 and split > 1 and K % (256 * split) == 0:
        cut = replace(cut, step=256, stages=3)
    return cut


def linear(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b`, (T, O)."""
    cut = cut_of(x_TK, weight_OK)
    if cut is None:
        return F.linear(x_TK, weight_OK, bias_O)
    return launch(x_TK, weight_OK, bias_O, cut, None)


def launch(
    x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, cut: Cut, adapters: Adapters | None
) -> Tensor:
    """The base product, (T, O); beside it, delta is written to where `adapters` says."""
    (T, K), O = x_TK.shape, len(weight_OK)  # noqa: E741
    y_TO = x_TK.new_empty(T, O)
    stream = 0
    if x_TK.is_cuda and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(x_TK.device).cuda_stream
    parts, tickets, nobody = _meeting_place(x_TK.device, stream)
    dependent = starts_early(x_TK.device)
    turn = 1 + next(_launches) % (1 << 30)
    exact = INTERPRETED or x_TK.dtype == torch.float32
    options = {"launch_pdl": True} if dependent else {}
    product = _product[O // cut.columns * cut.split,](
        x_TK,
        weight_OK,
        y_TO if bias_O is None else bias_O,
        y_TO,
        parts,
        tickets,
        adapters.tensors[2] if adapters else nobody,
        T,
        x_TK.stride(0),
        turn,
        O=O,
        K=K,
        BLOCK_T=max(16, triton.next_power_of_2(T)),
        BLOCK_O=cut.columns,
        BLOCK_K=cut.step,
        SPLIT=cut.split,
        STAGES=cut.stages,
        AHEAD=cut.ahead,
        BIAS=bias_O is not None,
        TURNS=TURNS,
        EXACT=exact,
        PDL=dependent,
        num_warps=4,
        **options,
    )
    if adapters:
        grid = (programs_beside(x_TK.device),)
        beside = _adapters[grid]
        if not (INTERPRETED or isinstance(product, CompiledKernel)):
            # The product is being compiled, and did not run: nobody would tell that x is there.
            beside = partial(_adapters.warmup, grid=grid)
        beside(
            x_TK,
            *adapters.tensors,
            x_TK.stride(0),
            turn,
            *adapters.numbers,
            O=O,
            K=K,
            PER_TILE=PER_TILE,
            TURNS=TURNS,
            WIDTHS=adapters.widths,
            W=adapters.row_floats,
            BLOCK_N=128,
            PART=adapters.part,
            MAX_PARTS=adapters.max_parts,
            SHRINK_STAGES=3,
            EXPAND_STAGES=4,
            EXACT=exact,
            PDL=dependent,
            num_warps=4,
            **options,
        )
    return y_TO
