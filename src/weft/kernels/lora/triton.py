"""The Triton backend: two launches per packed layer, whatever adapters and ranks a step mixes.

Shapes: T token rows, N sampled rows, K inputs and O outputs of a group, S slots, G groups,
L slices of the model, R the summed ranks of a group's slices in one adapter, W floats of
workspace a row.

The rows of a slot are cut into tiles of at most `rows` rows; the list of tiles, made once per
step, is all that the kernels learn of a batch. For every tile and group

    shrink   v[t, p, :] = x[t, K_p] @ A[slot, :, K_p]^T        p: parts that K is cut into
    expand   y[t, slice] += (sum over p of v[t, p, slice]) @ B[slot, slice]^T

with A, B and the ranks found through the pool's tables. Parts meet in a workspace, so there are
no atomics.

What a row gets is a function of its input and its adapter alone, to the bit: how K is cut
depends on K and R; every part is summed from its first element to its last with the same matrix
instruction, the parts in order, then the ranks in order; and a row of a tile does not see the
others. Tile sizes over rows, columns and ranks, and who works on what, change no sum.

Products are accumulated in fp32. With 16-bit matrices, v enters the second product as the sum of
two 16-bit numbers, which keeps 16 bits of it or more; y is rounded once.

One CUDA graph per number of rows serves every mix: grids follow from the number of rows only, and
all tensors stay where they are. `reserve` before a capture; `begin` before a replay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from weft.core.config import MAX_RANK
from weft.core.errors import ConfigError
from weft.core.targets import ALIGN, Group
from weft.kernels import tuned
from weft.kernels.lora.base import AdapterPool, ExpertStep, LoraBatch, Segment
from weft.kernels.pending import Pending
from weft.kernels.staging import Staging
from weft.kernels.triton_linear import (
    FEW_ROWS,
    NUM_FLAGS,
    Adapters,
    cut_of,
    launch,
)
from weft.kernels.triton_linear import dot as _dot
from weft.kernels.triton_linear import parts_of as _parts
from weft.kernels.triton_linear import sum_parts as _sum_parts
from weft.kernels.triton_linear import times_b as _times_b

_ALIGN = tl.constexpr(ALIGN)

EXPERT = 1 << 16
"""A tile's first word is its slot, and this times its expert, where a group has experts."""
_EXPERT = tl.constexpr(EXPERT)

SPARE_SHARERS = 32
"""Programs for the tiles of many rows, beyond as many as there would be of full tiles."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How work is cut for the device. None of it changes a result."""

    rows: int = 16
    """Of a tile. Below 64: from there on another matrix instruction is used on Hopper."""
    ranks: int = 16
    columns: int = 128
    expand_ranks: int = 16
    shrink_units: int = 32
    """Programs that share the parts and ranks of one tile."""
    shrink_programs: int = 4096
    """Bound on programs in all; beyond it a program takes several tiles."""
    shrink_warps: int = 2
    shrink_stages: int = 2
    expand_programs: int = 4096
    expand_warps: int = 4
    expand_stages: int = 3
    wide: int = 4
    """Tiles of columns that a program of the expand takes when there are many tiles of rows."""
    wide_from: int = 16
    """Tiles of rows from which on they are many."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Of one device. `part` and `max_parts` decide how K is cut, hence the last bits."""

    part: int = 256
    """Elements of K in one step of the shrink; parts are multiples of it."""
    max_parts: int = 16
    row_floats: int = 1024
    """W, workspace per row, at least; it bounds the parts of a high rank."""
    few_rows: int = 16
    """Up to here there is a program for each tile that there may be. Beyond, programs read how
    many there are, and share them."""
    blocks: Blocks = field(default_factory=Blocks)
    dependent_launch: bool = False
    """Start a kernel before the one ahead has ended (sm_90 on); adapters are read meanwhile."""


@triton.jit
def _shrink_part(
    x_at,
    a_at,
    rows,
    r0,
    R,
    K,
    x_stride,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PART: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x (rows, K) @ A[r0:, :]^T over steps [first, last) of K: fp32 (BLOCK_M, BLOCK_R)."""
    m = tl.arange(0, BLOCK_M)
    r = r0 + tl.arange(0, BLOCK_R)
    acc = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    for step in range(first, last):
        k = step * PART + tl.arange(0, PART)
        a = tl.load(
            a_at + r[:, None] * K + k[None, :],
            mask=(r < R)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        x = tl.load(
            x_at + m[:, None].to(tl.int64) * x_stride + k[None, :],
            mask=(m < rows)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        acc = _dot(x, tl.trans(a), acc, EXACT)
    return acc


@triton.jit
def _aligned(n):
    return (n.to(tl.int64) + (_ALIGN - 1)) // _ALIGN * _ALIGN


@triton.jit
def _slot_and_expert(tile_ptr):
    """Of a tile; see EXPERT."""
    packed = tl.load(tile_ptr)
    return packed % _EXPERT, packed // _EXPERT


@triton.jit(do_not_specialize=["num_tiles", "group", "first_slice"])
def _shrink(
    x_ptr,
    work_ptr,
    arena_ptr,
    tiles_ptr,
    a_offset_ptr,
    rank_ptr,
    num_tiles,
    group,
    first_slice,
    x_stride,
    num_groups,
    num_targets,
    K,
    W: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    COUNTED: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """v = x @ A[slot]^T for the rows of all tiles.

    x (T, K) with unit stride along K; work fp32 (T, W), row t holding v[t] as (parts, R rounded
    up to 16); tiles int32 (num_tiles, 4) of slot and expert, first row, number of rows (0: nothing
    to do) and, in the first one, how many there are, for COUNTED; a_offset int64 (S, G); rank int32
    (S, L). Programs: axis 0 shares a tile's blocks of ranks and parts, axis 1 the tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.arange(0, BLOCK_M)
    if COUNTED:
        num_tiles = tl.load(tiles_ptr + 3)
    for i in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot, expert = _slot_and_expert(tiles_ptr + 4 * i)
        row = tl.load(tiles_ptr + 4 * i + 1)
        rows = tl.load(tiles_ptr + 4 * i + 2)
        if rows > 0:
            a_offset = tl.load(a_offset_ptr + slot * num_groups + group)
            R = 0
            for j in tl.static_range(NUM_SLICES):
                R += tl.load(rank_ptr + slot * num_targets + first_slice + j)
            a_offset = tl.multiple_of(a_offset + expert * _aligned(R * K), _ALIGN)
            if R > 0:
                R_padded = (R + 15) // 16 * 16
                each, parts = _parts(R, K, W, PART, MAX_PARTS)
                steps = (K + PART - 1) // PART
                blocks = (R + BLOCK_R - 1) // BLOCK_R
                x_at = x_ptr + row.to(tl.int64) * x_stride
                a_at = arena_ptr + a_offset
                work_at = work_ptr + (row + m)[:, None].to(tl.int64) * W
                if PDL:  # not in the loop of a part, which is pipelined: it would ask for x before
                    tl.extra.cuda.gdc_wait()
                for u in range(tl.program_id(0), blocks * parts, tl.num_programs(0)):
                    p = u % parts
                    r0 = u // parts * BLOCK_R
                    v = _shrink_part(
                        x_at,
                        a_at,
                        rows,
                        r0,
                        R,
                        K,
                        x_stride,
                        p * each,
                        tl.minimum((p + 1) * each, steps),
                        BLOCK_M,
                        BLOCK_R,
                        PART,
                        EXACT,
                    )
                    r = r0 + tl.arange(0, BLOCK_R)
                    mask = (m < rows)[:, None] & (r < R)[None, :]
                    tl.store(work_at + p * R_padded + r[None, :], v, mask=mask)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_columns(
    y_at,
    v_at,
    b_at,
    rows,
    rank,
    count,
    parts,
    part_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y (rows, count) += (sum of the parts of v) (rows, rank) @ B (count, rank)^T.

    `y_at` points to the first column of each of BLOCK_M rows, `v_at` likewise to v. SINGLE: count
    is at most BLOCK_N.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    if rank <= BLOCK_R and SINGLE:
        b = tl.load(
            b_at + n[:, None] * rank + r[None, :],
            mask=(n < count)[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        if PDL:  # b is no work of the kernels ahead
            tl.extra.cuda.gdc_wait()
        mask = (m < rows)[:, None] & (n < count)[None, :]
        y = tl.load(y_at + n[None, :], mask=mask, other=0.0)
        v = _sum_parts(v_at, rows, 0, rank, parts, part_stride, BLOCK_M, BLOCK_R, WHOLE)
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc = _times_b(acc, v, b, EXACT)
        tl.store(y_at + n[None, :], (y.to(tl.float32) + acc).to(y.dtype), mask=mask)
    elif rank <= BLOCK_R:
        if PDL:
            tl.extra.cuda.gdc_wait()
        v = _sum_parts(v_at, rows, 0, rank, parts, part_stride, BLOCK_M, BLOCK_R, WHOLE)
        for n0 in tl.range(0, count, BLOCK_N, num_stages=STAGES):
            there = n0 + n < count
            b = tl.load(
                b_at + (n0 + n)[:, None] * rank + r[None, :],
                mask=there[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            mask = (m < rows)[:, None] & there[None, :]
            y = tl.load(y_at + (n0 + n)[None, :], mask=mask, other=0.0)
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
            acc = _times_b(acc, v, b, EXACT)
            tl.store(y_at + (n0 + n)[None, :], (y.to(tl.float32) + acc).to(y.dtype), mask=mask)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for n0 in range(0, count, BLOCK_N):
            there = n0 + n < count
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                b = tl.load(
                    b_at + (n0 + n)[:, None] * rank + (r0 + r)[None, :],
                    mask=there[:, None] & (r0 + r < rank)[None, :],
                    other=0.0,
                )
                v = _sum_parts(v_at, rows, r0, rank, parts, part_stride, BLOCK_M, BLOCK_R, WHOLE)
                acc = _times_b(acc, v, b, EXACT)
            mask = (m < rows)[:, None] & there[None, :]
            y = tl.load(y_at + (n0 + n)[None, :], mask=mask, other=0.0)
            tl.store(y_at + (n0 + n)[None, :], (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "group", "first_slice"])
def _expand(
    y_ptr,
    work_ptr,
    ids_ptr,
    arena_ptr,
    tiles_ptr,
    columns_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    num_tiles,
    group,
    first_slice,
    y_stride,
    num_groups,
    num_targets,
    K,
    copy_width,
    W: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    VEC: tl.constexpr,
    COUNTED: tl.constexpr,
    GATHER: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, slice] += v[t, ranks of slice] @ B[slot, slice]^T for the rows of all tiles.

    y (T, O) with unit stride along O; work and tiles as `_shrink` has them; columns int32
    (column ranges, 4): slice within the group, index of the range of WIDTH within the slice, and
    in units of VEC the number of columns and the first column of y; copy_width the columns of a
    slice, all of one width where a group has experts. GATHER: v[t] is row ids[t]
    (int64) of A (K, R) instead. Programs: axis 0 is the range of columns, axis 1 shares the row
    tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.arange(0, BLOCK_M)
    column = columns_ptr + 4 * tl.program_id(0)
    slice_ = tl.load(column)
    start = tl.load(column + 1) * WIDTH
    count = tl.load(column + 2) * VEC
    y_start = tl.load(column + 3) * VEC
    if COUNTED:
        num_tiles = tl.load(tiles_ptr + 3)
    for i in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot, expert = _slot_and_expert(tiles_ptr + 4 * i)
        row = tl.load(tiles_ptr + 4 * i + 1)
        rows = tl.load(tiles_ptr + 4 * i + 2)
        if rows > 0:
            b_offset = tl.load(b_offset_ptr + slot * num_targets + first_slice + slice_)
            R = 0
            rank = 0
            r_start = 0
            for j in tl.static_range(NUM_SLICES):
                of_slice = tl.load(rank_ptr + slot * num_targets + first_slice + j)
                R += of_slice
                rank += tl.where(j == slice_, of_slice, 0)
                r_start += tl.where(j < slice_, of_slice, 0)
            b_offset = tl.multiple_of(b_offset + expert * _aligned(rank * copy_width), _ALIGN)
            if rank > 0:
                t = (row + m)[:, None].to(tl.int64)
                parts = 1
                part_stride = (R + 15) // 16 * 16
                if GATHER:
                    if PDL:
                        tl.extra.cuda.gdc_wait()
                    a_offset = tl.load(a_offset_ptr + slot * num_groups + group)
                    ids = tl.load(ids_ptr + t, mask=(m < rows)[:, None], other=0)
                    v_at = arena_ptr + a_offset + ids * R + r_start
                else:
                    v_at = work_ptr + t * W + r_start
                    _, parts = _parts(R, K, W, PART, MAX_PARTS)
                y_at = y_ptr + t * y_stride + y_start
                # Rows of B are wide loads when the rank is known to be a multiple of 8.
                if rank % 8 == 0:
                    rank_8 = rank // 8 * 8
                    _add_columns(
                        y_at,
                        v_at,
                        arena_ptr + b_offset + start * rank_8,
                        rows,
                        rank_8,
                        count,
                        parts,
                        part_stride,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_R,
                        STAGES,
                        WIDTH == BLOCK_N,
                        GATHER,
                        EXACT,
                        PDL,
                    )
                else:
                    _add_columns(
                        y_at,
                        v_at,
                        arena_ptr + b_offset + start * rank,
                        rows,
                        rank,
                        count,
                        parts,
                        part_stride,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_R,
                        STAGES,
                        WIDTH == BLOCK_N,
                        GATHER,
                        EXACT,
                        PDL,
                    )
    if PDL:
        tl.extra.cuda.gdc_wait()


INTERPRETED = not isinstance(_shrink, triton.runtime.JITFunction)
"""Whether this process runs kernels in Triton's interpreter."""


class _Rows(NamedTuple):
    """The tiles of a step's rows, or of its sampled rows."""

    tiles: Tensor
    num_tiles: int
    """A bound; entries in excess have no rows."""
    sharers: int
    """Programs that share the tiles."""
    counted: bool
    """Whether programs read how many tiles there are."""
    slots: Tensor | None = None
    """int32, of each row, -1 for base rows; of the step's rows only."""

    @classmethod
    def of(cls, tiles: Tensor, tuning: Tuning) -> _Rows:
        """As many tiles as rows, as no tile is without a row."""
        num_rows = len(tiles)
        counted = num_rows > tuning.few_rows
        sharers = num_rows
        if counted:
            sharers = min(num_rows, num_rows // tuning.blocks.rows + SPARE_SHARERS)
        return cls(tiles, num_rows, sharers, counted)


class _TileList:
    """The tiles of a step at a fixed place on the device: of its rows, then of its sampled rows.
    Where each begins follows from the numbers of rows."""

    def __init__(self, tuning: Tuning, device: torch.device) -> None:
        self._tuning = tuning
        self._staging = Staging(0, device)

    def reserve(self, num_tiles: int) -> None:
        """Make room for so many of rows and as many of sampled rows."""
        self._staging.reserve(9 * num_tiles)

    def fill(self, batch: LoraBatch) -> tuple[_Rows, _Rows]:
        """Lay a step's tiles out, ahead of its kernels on the current stream."""
        parts = [(batch.segments, len(batch.slot_T))]
        if batch.slot_N is not batch.slot_T:
            parts.append((batch.sampled_segments, len(batch.slot_N)))
        bound = sum(num_rows for _, num_rows in parts)
        num_words = 4 * bound + len(batch.slot_T)
        self._staging.reserve(num_words)
        words = self._staging.begin(num_words)
        words[:] = 0
        slots = words[4 * bound :]
        slots[:] = -1
        for slot, start, stop in batch.segments:
            slots[start:stop] = slot
        first = 0
        rows: list[_Rows] = []
        for segments, num_rows in parts:
            place = slice(4 * first, 4 * (first + num_rows))
            rows.append(self._lay_out(segments, words[place], self._staging.device_words[place]))
            first += num_rows
        self._staging.send(len(words))
        tokens = rows[0]._replace(slots=self._staging.device_words[4 * bound : num_words])
        return tokens, rows[-1]

    def _lay_out(
        self, segments: tuple[Segment, ...], words: NDArray[np.int32], place: Tensor
    ) -> _Rows:
        """The tiles of as many rows as there is room for."""
        size = self._tuning.blocks.rows
        found = [
            (slot, first, min(size, stop - first), 0)
            for slot, start, stop in segments
            for first in range(start, stop, size)
        ]
        if found:
            words[: 4 * len(found)] = np.array(found, np.int32).reshape(-1)
            words[3] = len(found)
        return _Rows.of(place.view(-1, 4), self._tuning)


def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class TritonBackend:
    """LoraBackend for CUDA devices (and, in Triton's interpreter, for the CPU).

    Ranks of a slice are at most MAX_RANK. Raises ConfigError where its kernels can't run.
    """

    def __init__(self, pool: AdapterPool, tuning: Tuning | None = None) -> None:
        device = pool.arena.device
        if device.type == "cpu" and not INTERPRETED:
            raise ConfigError("the triton LoRA backend needs a GPU", "lora_backend")
        assert pool.num_slots <= EXPERT
        self.pool = pool
        self.tuning = tuning or Tuning(
            blocks=tuned.blocks_for(Blocks(), device),
            dependent_launch=_has_dependent_launch(device),
        )
        most = max(len(g.slices) for g in pool.table.groups)
        self.row_floats = max(self.tuning.row_floats, MAX_RANK * most)
        self.exact = INTERPRETED or pool.arena.dtype == torch.float32
        self._tiles = _TileList(self.tuning, device)
        self._work = torch.empty((0, self.row_floats), dtype=torch.float32, device=device)
        self._columns: dict[tuple[tuple[int, ...], int], tuple[Tensor, int]] = {}
        self.flags = torch.zeros(NUM_FLAGS, dtype=torch.int32, device=device)
        """Where products and what runs beside them tell each other how far they are."""
        linear = [g.out_features for g in pool.table.groups if g.kind == "linear"]
        self.delta = torch.empty(
            FEW_ROWS * max(linear, default=0), dtype=torch.float32, device=device
        )
        """What adapters add to the product that is under way."""
        self.reserve(self.tuning.few_rows)

    def reserve(self, num_rows: int) -> bool:
        """What was captured before is void if this makes more room than there was."""
        if num_rows > len(self._work):
            self._work = self._work.new_empty((num_rows, self.row_floats))
        self._tiles.reserve(num_rows)
        for group in self.pool.table.groups:
            blocks = self.tuning.blocks
            for wide in (1, blocks.wide):
                self.columns(group, blocks.columns * wide)
        return True

    def begin(self, batch: LoraBatch) -> TritonStep:
        for segment in batch.segments:
            self.pool.view(segment.slot, 0)  # a slot that holds nothing is an error
        num_rows = max(len(batch.slot_T), len(batch.slot_N))
        if num_rows > len(self._work):
            self.reserve(2 * num_rows)
        return TritonStep(self, *self._tiles.fill(batch), self._work)

    def columns(self, group: Group, width: int) -> tuple[Tensor, int]:
        """Column tiles of a group's output as `_expand` reads them, and their VEC."""
        key = (tuple(s.out_features for s in group.slices), width)
        if key not in self._columns:
            vec = math.gcd(16, *key[0])
            rows = [
                (
                    j,
                    first // width,
                    min(width, s.out_features - first) // vec,
                    (s.offset + first) // vec,
                )
                for j, s in enumerate(group.slices)
                for first in range(0, s.out_features, width)
            ]
            table = torch.tensor(rows, dtype=torch.int32, device=self.pool.arena.device)
            self._columns[key] = (table, vec)
        return self._columns[key]


class TritonStep:
    """LoraStep of the Triton backend."""

    def __init__(self, backend: TritonBackend, tokens: _Rows, sampled: _Rows, work: Tensor) -> None:
        self._backend = backend
        self._tokens = tokens
        self._sampled = sampled
        self._work = work
        self._shrunk = False
        """Whether the shrink of the layer that is under way has been launched."""

    def start(self, x_TI: Tensor, group: int) -> None:
        # Ahead of the product, as it can start while the kernel before still runs, which after a
        # product of another library it can't.
        self.shrink(x_TI, group, self._tokens)
        self._shrunk = True

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        if not self._shrunk:
            self.shrink(x_TI, group, self._tokens)
        self._shrunk = False
        self.expand(y_TO, group, self._tokens)

    @property
    def rows(self) -> _Rows:
        """Of the step, as `shrink` and `expand` take them."""
        return self._tokens

    def product(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: int
    ) -> tuple[Tensor, Pending] | None:
        """See `FusedStep`."""
        backend, rows = self._backend, self._tokens
        pool, tuning = backend.pool, backend.tuning
        of = pool.table.groups[group]
        cut = cut_of(x_TI, weight_OI)
        if cut is None or rows.slots is None or rows.num_tiles != len(x_TI):
            return None
        num_rows = len(x_TI)
        delta_TO = backend.delta[: num_rows * of.out_features].view(num_rows, of.out_features)
        tables = (pool.a_offset_SG, pool.b_offset_SL, pool.rank_SL)
        adapters = Adapters(
            (delta_TO, self._work, backend.flags, pool.arena, rows.tiles, *tables),
            (group, of.slices[0].slice, pool.a_offset_SG.shape[1], pool.rank_SL.shape[1]),
            widths=tuple(s.out_features for s in of.slices),
            row_floats=backend.row_floats,
            part=tuning.part,
            max_parts=tuning.max_parts,
        )
        y_TO = launch(x_TI, weight_OI, bias_O, cut, adapters)
        return y_TO, Pending(delta_TO, rows.slots)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self._apply(y_NV, x_NI, group, self._sampled)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        self.expand(y_TO, group, self._tokens, ids_T)

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        from weft.kernels.lora.triton_experts import TritonExperts

        slot_T = self._tokens.slots
        assert slot_T is not None
        return TritonExperts(self._backend, slot_T, token_P, expert_P)

    def _apply(self, y: Tensor, x: Tensor, group: int, rows: _Rows) -> None:
        self.shrink(x, group, rows)
        self.expand(y, group, rows)

    def shrink(self, x_TK: Tensor, group: int, rows: _Rows) -> None:
        """v of all rows, into the workspace: see `_shrink`."""
        if not rows.num_tiles:
            return
        assert x_TK.stride(1) == 1
        backend, pool, tuning = self._backend, self._backend.pool, self._backend.tuning
        blocks = tuning.blocks
        of = pool.table.groups[group]
        units = blocks.shrink_units
        sharers = max(1, min(rows.sharers, blocks.shrink_programs // units))
        _shrink[units, sharers](
            x_TK,
            self._work,
            pool.arena,
            rows.tiles,
            pool.a_offset_SG,
            pool.rank_SL,
            rows.num_tiles,
            group,
            of.slices[0].slice,
            x_TK.stride(0),
            pool.a_offset_SG.shape[1],
            pool.rank_SL.shape[1],
            of.in_features,
            W=backend.row_floats,
            NUM_SLICES=len(of.slices),
            BLOCK_M=blocks.rows,
            BLOCK_R=blocks.ranks,
            PART=tuning.part,
            MAX_PARTS=tuning.max_parts,
            COUNTED=rows.counted,
            EXACT=backend.exact,
            PDL=tuning.dependent_launch,
            num_warps=blocks.shrink_warps,
            num_stages=blocks.shrink_stages,
            **self._launch_options(),
        )

    def expand(self, y_TO: Tensor, group: int, rows: _Rows, ids_T: Tensor | None = None) -> None:
        """Adds to y what v, or with `ids_T` the rows of an embedding's A, give."""
        if not rows.num_tiles:
            return
        assert y_TO.stride(1) == 1
        backend, pool, tuning = self._backend, self._backend.pool, self._backend.tuning
        blocks = tuning.blocks
        of = pool.table.groups[group]
        width = blocks.columns * (blocks.wide if rows.num_tiles >= blocks.wide_from else 1)
        columns, vec = backend.columns(of, width)
        sharers = max(1, min(rows.sharers, blocks.expand_programs // len(columns)))
        gather = ids_T is not None
        _expand[len(columns), sharers](
            y_TO,
            self._work,
            ids_T if gather else rows.tiles,
            pool.arena,
            rows.tiles,
            columns,
            pool.a_offset_SG,
            pool.b_offset_SL,
            pool.rank_SL,
            rows.num_tiles,
            group,
            of.slices[0].slice,
            y_TO.stride(0),
            pool.a_offset_SG.shape[1],
            pool.rank_SL.shape[1],
            of.in_features,
            of.slices[0].out_features,
            W=backend.row_floats,
            NUM_SLICES=len(of.slices),
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_R=blocks.expand_ranks,
            WIDTH=width,
            STAGES=blocks.expand_stages,
            PART=tuning.part,
            MAX_PARTS=tuning.max_parts,
            VEC=vec,
            COUNTED=rows.counted,
            GATHER=gather,
            EXACT=backend.exact,
            PDL=tuning.dependent_launch,
            num_warps=blocks.expand_warps,
            **self._launch_options(),
        )

    def _launch_options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._backend.tuning.dependent_launch else {}
