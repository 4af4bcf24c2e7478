"""The Triton backend: two launches per packed layer, whatever adapters and ranks a step mixes.

Shapes: as in `weft.kernels.lora.triton_tiles`; N sampled rows.

The rows of a slot are cut into tiles; the list of them, made once per step, is all that the kernels
learn of a batch. For every tile and group

    shrink   v[t, p, :] = x[t, K_p] @ A[slot, :, K_p]^T        p: parts that K is cut into
    expand   y[t, slice] += (sum over p of v[t, p, slice]) @ B[slot, slice]^T

with A, B and the ranks found through the pool's tables: see `triton_tiles`. Parts meet in a
workspace, so there are no atomics. There are as many programs as a device holds at once, and each
takes the same share of all tiles' work.

A row's result is a function of its input and its adapter alone, to the bit: how K is cut depends on
K and R; every part is summed from its first element to its last with the same matrix instruction,
the parts in order, then the ranks in order; and the rows of a tile don't affect each other. Which
program does which work changes no sum. Only the first half of a gated MLP of many rows is computed
in another way, unless rows must be deterministic: see `weft.kernels.lora.gluon_activate`.

Products are accumulated in fp32. With 16-bit matrices, v enters the second product as the sum of
two 16-bit numbers, which keeps 16 bits of it or more; y is rounded once.

One CUDA graph per number of rows serves every mix: grids follow from the number of rows only, and
all tensors stay where they are. `reserve` before a capture; `begin` before a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.config import MAX_RANK
from weft.core.errors import ConfigError
from weft.core.numbers import cdiv
from weft.core.targets import Group
from weft.kernels import tuned
from weft.kernels.activations import Activation
from weft.kernels.collective.peers import PeerRanks
from weft.kernels.linear import Weight
from weft.kernels.lora import gluon_activate
from weft.kernels.lora.base import AdapterPool, ExpertStep, LoraBatch, LoraStep
from weft.kernels.lora.triton_absorbed import add_absorbed
from weft.kernels.lora.triton_beside import NUM_FLAGS, launch_beside
from weft.kernels.lora.triton_many import SHARES, TOGETHER, expand_rows, shrink_rows, sum_v
from weft.kernels.lora.triton_ranks import RankExchange
from weft.kernels.lora.triton_rows import TileList, TileRows, tiles_of_experts, tiles_of_pairs
from weft.kernels.lora.triton_tiles import EXPERT
from weft.kernels.ops import Product
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    INTERPRETED,
    launch_options,
    processors,
    starts_early,
)
from weft.kernels.triton_experts import FEW_TOKENS
from weft.kernels.triton_linear import MOST_ROWS
from weft.kernels.triton_pending import KernelPending
from weft.kernels.tuned import Blocks


@dataclass(frozen=True, slots=True)
class Tuning:
    """How adapters are computed on a device. `part` and `max_parts` decide the last bits."""

    part: int = 256
    """Elements of K in one step of the shrink; parts are multiples of it."""
    max_parts: int = 16
    row_floats: int = 1024
    """W, workspace per row, at least; it bounds the parts of a high rank."""
    blocks: Blocks = field(default_factory=Blocks)
    dependent_launch: bool = False
    """Start a kernel before the one ahead has ended (sm_90 on); tables are read meanwhile."""


def _shared(group: Group) -> int:
    """The width of a group's output if a rank's part of B is for some of its columns, else 0."""
    return group.out_features if group.slices[0].b_features < group.slices[0].out_features else 0


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
            blocks=tuned.blocks_for(device), dependent_launch=starts_early(device)
        )
        most = max(len(g.slices) for g in pool.table.groups)
        self.row_floats = max(self.tuning.row_floats, MAX_RANK * most)
        self.exact = INTERPRETED or pool.arena.dtype == torch.float32
        self._tiles = TileList(device)
        self._begun: tuple[LoraBatch | None, int] = None, 0
        """The last batch, whose slots all held something, and `AdapterPool.num_changes` then."""
        self._work = torch.empty(
            (2, 0, self.row_floats), dtype=torch.float32, device=device
        ).unbind()
        """Two workspaces, as a kernel may read v of one layer and write that of the next."""
        self.flags = torch.zeros(NUM_FLAGS, dtype=torch.int32, device=device)
        """Flags by which products and what runs beside them tell each other how far they are."""
        linear = [g for g in pool.table.groups if g.kind == "linear"]
        # In 16 bits, what is added takes half as long to write and to read. With more rows, it is
        # added before it is rounded. As `deterministic` promises the same bits for any number of
        # rows, it is not rounded there either.
        held = self._work[0] if pool.deterministic else pool.arena
        self.delta = held.new_empty(MOST_ROWS * max((g.out_features for g in linear), default=0))
        """What adapters add to the product that is under way."""
        self.share = held.new_full((MOST_ROWS * max(map(_shared, linear), default=0),), -0.0)
        """The same where a rank's part of B is for some columns: -0, which changes no bit of what
        it is added to, for all others."""
        self.exchange: RankExchange | None = None
        if isinstance(pool.ranks, PeerRanks) and any(g.sums_ranks for g in pool.table.groups):
            self.exchange = RankExchange(
                pool.ranks.more_inboxes(4 * self.row_floats), pool.ranks.rank
            )
        self.reserve(MOST_ROWS)

    def reserve(self, num_rows: int) -> bool:
        """Make room for steps of that many rows; if there was less, what was captured is void."""
        if num_rows > self._work[0].shape[0]:
            self._work = self._work[0].new_empty((2, num_rows, self.row_floats)).unbind()
        self._tiles.reserve(num_rows)
        return True

    def begin(self, batch: LoraBatch) -> TritonStep:
        last, num_changes = self._begun
        if last is not batch or num_changes != self.pool.num_changes:
            for segment in batch.segments:
                self.pool.view(segment.slot, 0)  # a slot that holds nothing is an error
            self._begun = batch, self.pool.num_changes
        num_rows = max(len(batch.slot_T), len(batch.slot_N))
        if num_rows > self._work[0].shape[0]:
            self.reserve(2 * num_rows)
        return TritonStep(self, *self._tiles.fill(batch), self._work)


class TritonStep(LoraStep):
    """LoraStep of the Triton backend; ExpertStep too, where its rows are those of experts."""

    def __init__(
        self, backend: TritonBackend, rows: TileRows, sampled: TileRows, work: Sequence[Tensor]
    ) -> None:
        self._backend = backend
        self.rows = rows
        """The step's rows, as `shrink` and `expand` take them."""
        self._sampled = sampled
        self._work, self._other_work = work
        self._shrunk = False
        """Whether the shrink of the layer that is under way has been launched."""

    def start(self, x_TI: Tensor, group: int) -> None:
        # Ahead of the product, as it can start while the kernel before still runs, which after a
        # product of another library it can't.
        if not self._shrunk:
            self._reduce(x_TI, group)
        self._shrunk = True

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        if not self._shrunk:
            self._reduce(x_TI, group)
        self._shrunk = False
        self.expand(y_TO, group, self.rows)

    def product(
        self, x_TI: Tensor, weight: Weight, bias_O: Tensor | None, group: int
    ) -> Product | None:
        """Compute a layer of few rows: see `weft.kernels.lora.triton_beside`."""
        backend, rows, num_rows = self._backend, self.rows, len(x_TI)
        if rows.slots is None or len(rows.tiles) != num_rows:
            return None
        pool, of = backend.pool, backend.pool.table.groups[group]
        if of.sums_ranks and backend.exchange is None:
            return None
        launched = weight.launch(x_TI, bias_O, backend.flags)
        if launched is None:
            return None
        delta = backend.share if _shared(of) else backend.delta
        delta_TO = delta[: num_rows * of.out_features].view(num_rows, of.out_features)
        tables = (pool.a_offset_SG, pool.b_offset_SL, pool.rank_SL)
        launch_beside(
            launched,
            x_TI[:, of.a_columns(pool.ranks.rank)],
            (
                self._own_columns(delta_TO, group),
                self._work,
                backend.flags,
                pool.arena,
                rows.tiles,
                *tables,
            ),
            (group, of.slices[0].slice, pool.a_offset_SG.shape[1], pool.rank_SL.shape[1]),
            widths=tuple(s.b_features for s in of.slices),
            row_floats=backend.row_floats,
            part=backend.tuning.part,
            max_parts=backend.tuning.max_parts,
            weight_bytes=weight.num_bytes,
            exchange=backend.exchange if of.sums_ranks else None,
        )
        return Product(launched.y_TO, KernelPending(delta_TO, rows.slots))

    def gated(
        self,
        x_TI: Tensor,
        weight: Weight,
        bias_O: Tensor | None,
        group: int,
        down: int,
        activation: Activation,
    ) -> Tensor | None:
        """Compute the layer of many rows: see `weft.kernels.lora.gluon_activate`."""
        backend, tiles, num_rows = self._backend, self.rows.tiles, len(x_TI)
        pool, tuning = backend.pool, backend.tuning
        of, then = pool.table.groups[group], pool.table.groups[down]
        if pool.deterministic or len(tiles) != num_rows or activation not in ("silu", "gelu_tanh"):
            return None
        if not gluon_activate.fits(pool, of, then):
            return None
        self._reduce(x_TI, group)
        inner_TF = gluon_activate.launch(
            weight.apply(x_TI, bias_O),
            self._work,
            self._other_work,
            tiles,
            pool,
            of,
            then,
            gelu=activation == "gelu_tanh",
            part=tuning.part,
            max_parts=tuning.max_parts,
            early=tuning.dependent_launch,
        )
        self._work, self._other_work = self._other_work, self._work
        self._shrunk = True
        return inner_TF

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self.shrink(x_NI, group, self._sampled)
        self.expand(y_NV, group, self._sampled)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        self.expand(y_TO, group, self.rows, ids_T)

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        self._add_absorbed(y_THL, q_THN, group, values=False)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        self._add_absorbed(y_THV, x_THL, group, values=True)

    def _add_absorbed(self, y_THO: Tensor, x_THI: Tensor, group: int, *, values: bool) -> None:
        backend = self._backend
        add_absorbed(
            y_THO,
            x_THI,
            backend.pool,
            self.rows.tiles,
            group,
            values=values,
            exact=backend.exact,
            options=launch_options(backend.tuning.dependent_launch),
        )

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        assert self.rows.slots is not None
        return self._of_tiles(tiles_of_experts(self.rows.slots, token_P, expert_P))

    def pairs(self, expert_TK: Tensor, num_experts: int) -> ExpertStep | None:
        if self.rows.slots is None or not 0 < len(expert_TK) <= FEW_TOKENS:
            return None
        return self._of_tiles(tiles_of_pairs(self.rows.slots, expert_TK, num_experts))

    def _of_tiles(self, tiles_P4: Tensor) -> TritonStep:
        rows = TileRows(tiles_P4)
        work = self._work.new_empty((2, len(tiles_P4), self._backend.row_floats))
        return TritonStep(self._backend, rows, rows, work)

    def _reduce(self, x_TI: Tensor, group: int) -> None:
        """Write v of the step's rows to the workspace, summed over ranks."""
        backend, rows = self._backend, self.rows
        self.shrink(x_TI, group, rows)
        of = backend.pool.table.groups[group]
        if not of.sums_ranks or not len(rows.tiles):
            return
        num_rows, exchange = len(x_TI), backend.exchange
        if exchange is None:
            self._work[:num_rows] = backend.pool.ranks.sum(self._work[:num_rows])
            return
        numbers, constants = self._arguments(group, x_TI)
        for first in range(0, num_rows, exchange.num_rows):
            sum_v[min(len(rows.tiles), processors(x_TI.device)),](
                self._work,
                rows.tiles,
                backend.pool.a_offset_SG,
                backend.pool.b_offset_SL,
                backend.pool.rank_SL,
                *exchange.tensors,
                *(numbers[i] for i in (0, 1, 3, 4)),
                first,
                NUM_SLICES=len(of.slices),
                **exchange.constants,
                **{name: value for name, value in constants.items() if name != "EXACT"},
            )

    def _own_columns(self, y_TO: Tensor, group: int) -> Tensor:
        """The columns of a group's output from the first one on that this rank's B adds to."""
        pool = self._backend.pool
        return y_TO[:, pool.table.groups[group].slices[0].b_start(pool.ranks.rank) :]

    def shrink(self, x_TI: Tensor, group: int, rows: TileRows) -> None:
        """Write this rank's v of all rows to the workspace: see `shrink_rows`."""
        if not len(rows.tiles):
            return
        pool, blocks = self._backend.pool, self._backend.tuning.blocks
        stages = blocks.shrink_stages
        if pool.element_bytes == 4:
            # Numbers of 4 bytes need twice the shared memory, and a device may have only 99 KB.
            stages = min(stages, 2)
        x_TK = x_TI[:, pool.table.groups[group].a_columns(pool.ranks.rank)]
        numbers, constants = self._arguments(group, x_TK)
        shrink_rows[self._grid(blocks.shrink_programs, len(x_TK) * SHARES)](
            x_TK,
            self._work,
            pool.arena,
            rows.tiles,
            pool.a_offset_SG,
            pool.b_offset_SL,
            pool.rank_SL,
            *numbers,
            NUM_SLICES=len(pool.table.groups[group].slices),
            SHARES=SHARES,
            STAGES=stages,
            TILES=TOGETHER,
            num_warps=blocks.shrink_warps,
            **constants,
        )

    def expand(self, y_TO: Tensor, group: int, rows: TileRows, ids_T: Tensor | None = None) -> None:
        """Add to y what v, or with `ids_T` the rows of an embedding's A, give."""
        if not len(rows.tiles):
            return
        pool, blocks = self._backend.pool, self._backend.tuning.blocks
        of = pool.table.groups[group]
        y_TO = self._own_columns(y_TO, group)
        numbers, constants = self._arguments(group, y_TO)
        widths = tuple(s.b_features for s in of.slices)
        num_blocks = cdiv(pool.table.groups[group].out_features, blocks.columns)
        expand_rows[self._grid(blocks.expand_programs, len(y_TO) * num_blocks)](
            y_TO,
            self._work,
            rows.tiles if ids_T is None else ids_T,
            pool.arena,
            rows.tiles,
            pool.a_offset_SG,
            pool.b_offset_SL,
            pool.rank_SL,
            *numbers,
            WIDTHS=widths,
            BLOCK_N=blocks.columns,
            STAGES=blocks.expand_stages,
            GATHER=ids_T is not None,
            WHOLE=of.sums_ranks and self._backend.exchange is not None,
            num_warps=blocks.expand_warps,
            **ALL_AT_ONCE,
            **constants,
        )

    def _arguments(self, group: int, rows: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
        """Arguments that shrink and expand share: the numbers from `group` on, and constants."""
        assert rows.stride(1) == 1
        backend, pool, tuning = self._backend, self._backend.pool, self._backend.tuning
        of = pool.table.groups[group]
        sizes = (pool.a_offset_SG.shape[1], pool.rank_SL.shape[1])
        constants = {
            "K": of.a_features,
            "W": backend.row_floats,
            "PART": tuning.part,
            "MAX_PARTS": tuning.max_parts,
            "EXACT": backend.exact,
            **launch_options(tuning.dependent_launch),
        }
        return (group, of.slices[0].slice, rows.stride(0), *sizes), constants

    def _grid(self, programs: int, most: int) -> tuple[int]:
        """A grid of `programs` for each processor, but of no more than `most` in all."""
        return (min(programs * processors(self._backend.pool.arena.device), most),)
