"""Describes how a model is divided over ranks (GPUs): which rows, columns and entries each has.

The table of the whole model and that of one rank's share list the same layers, and all cuts follow
from their sizes. A *column* layer gives each rank a share of every part of its output, a *row*
layer a share of its input. So a column layer's output is the input of the row layer behind it:

    x ──> q, k, v of some heads ──> attention ──> o of these heads ──┐
    x ──> ...                                                        (+) the sum over ranks
    x ──> gate, up of some columns ──> silu, times ──> down ─────────┘

If there are fewer key and value heads than ranks, several ranks hold the same ones. Experts are cut
in one of two ways. Either each expert is cut by columns, as gate, up and down are. Or each rank
has some of the experts, whole: its table counts only these, and its part of the sum leaves out the
others. Adapters are cut as the base is: A like the columns of W, B like its rows. The vocabulary is
an exception. Embeddings are whole on every rank; the head's weight is cut by tokens, but its logits
are gathered before adapters change them, so that the adapters' tensors for the head are whole.

So one half of each pair of A and B is whole on every rank: A of a column layer, B of a row layer.
Both halves of a whole expert are on its rank alone. With *fully sharded* adapters, the half that
every rank has is cut too, A by its inputs and B by its outputs, and the ranks' parts of x A^T are
summed in between:

    column   x[share] A[share]^T ──(+)──> v ──> v B^T, the rank's columns of the output
    row      x A^T of the rank's x ──(+)──> v ──> v B[share]^T, added to a share of the partial sum
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.core.targets import Kind, Norm, Target, TargetTable


@dataclass(frozen=True)
class Shard:
    """What one of `size` ranks has of a model."""

    whole: TargetTable
    """The table of the whole model."""
    own: TargetTable
    """The table of a rank's share, which is the same for all ranks."""
    rank: int
    size: int

    def outputs(self, target: Target) -> tuple[slice, ...]:
        """The entries of the target's output that are the rank's, in order: rows of W and B,
        entries of vectors. `target`: of either table."""
        return self._slices(self._parts(self.whole, target), self._parts(self.own, target))

    def inputs(self, target: Target) -> slice:
        """The entries of the target's input that are the rank's: columns of W and A."""
        whole, own = (table.groups[target.group].in_features for table in (self.whole, self.own))
        return self._share(whole, own)

    def a_columns(self, target: Target) -> slice:
        """The columns of A that are the rank's."""
        own = self.own.groups[target.group].a_features
        return self._share(self.whole.groups[target.group].in_features, own)

    def b_rows(self, target: Target) -> tuple[slice, ...]:
        """The rows of B that are the rank's, in order."""
        whole, own = (table.targets[target.slice] for table in (self.whole, self.own))
        if own.b_features == own.out_features:
            return self.outputs(target)
        return (self._share(whole.out_features, own.b_features),)

    @cached_property
    def pairs(self) -> list[tuple[slice, slice, tuple[slice, ...]]]:
        """The `copies`, `a_columns` and `b_rows` of each slice."""
        own = self.own.targets
        return [(self.copies(each.kind), self.a_columns(each), self.b_rows(each)) for each in own]

    def copies(self, kind: Kind) -> slice:
        """Which of a target's `TargetTable.copies` of A or B are the rank's: those of the experts
        that it has."""
        return self._share(self.whole.copies(kind), self.own.copies(kind))

    def norm(self, norm: Norm) -> tuple[slice, ...]:
        """The entries of a norm's weight that are the rank's."""
        index = norm.index
        return (self._share(self.whole.norms[index].size, self.own.norms[index].size),)

    def vector(self, index: int) -> tuple[slice, ...]:
        """The entries of another tensor's first dimension that are the rank's."""
        return self._slices(self.whole.vectors[index].parts, self.own.vectors[index].parts)

    def weight_rows(self, target: Target) -> tuple[slice, ...]:
        """The rows of W that the rank has: those of `outputs`, except that the head has a share."""
        if target.kind == "head":
            vocab = target.out_features
            return (self._share(vocab, vocab // self.size),)
        return self.outputs(target)

    def adds_vectors(self, target: Target) -> bool:
        """Whether the rank adds the bias or an adapter's shift to the output. The ranks' outputs of
        a row layer are summed, so there only the first rank adds them."""
        return self.rank == 0 or self.own.groups[target.group].packed.axis != "row"

    def _slices(self, whole: tuple[int, ...], own: tuple[int, ...]) -> tuple[slice, ...]:
        found: list[slice] = []
        start = 0
        for size, own_size in zip(whole, own, strict=True):
            share = self._share(size, own_size)
            found.append(slice(start + share.start, start + share.stop))
            start += size
        return tuple(found)

    def _share(self, whole: int, own: int) -> slice:
        """The rank's share. With fewer shares than ranks, neighbouring ranks have the same one."""
        start = self.rank * whole // self.size // own * own
        return slice(start, start + own)

    def _parts(self, table: TargetTable, target: Target) -> tuple[int, ...]:
        """The parts of the packed layer that the target's output consists of."""
        group = table.groups[target.group]
        return group.packed.parts_of[target.slice - group.slices[0].slice]


def unsharded(table: TargetTable) -> Shard:
    """All of a model on one rank."""
    return Shard(table, table, 0, 1)
