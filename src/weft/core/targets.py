"""Which projections of a model LoRA may adapt, and how an adapter is laid out for them.

A *target* is one projection as PEFT names it (`model.layers.0.self_attn.q_proj`). The model
computes some of them packed (q, k, v; gate, up): such a packed layer is a *group*, and a target
is one *slice* of its group's output. Everything about layout is data in this table; the
checkpoint reader, the kernels and the models all derive what they need from it.

An adapter's *image* is one flat buffer:

    group 0: A (R, in)   B of slice 0 (out_0, r_0)   B of slice 1 ...   group 1: ...

with R the sum of the group's slice ranks, A's rows stacked in slice order, absent slices taking
nothing, the scale folded into B, and each matrix starting at a multiple of ALIGN elements. An
embedding's A is stored transposed, (vocab, r), so that a token id selects a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ALIGN = 64
"""Elements; 128 bytes in a 2-byte dtype."""

Kind = Literal["linear", "embedding", "head"]


@dataclass(frozen=True, slots=True)
class Target:
    """One projection: y (out_features) = W x (in_features)."""

    name: str
    in_features: int
    out_features: int
    kind: Kind
    group: int
    """Index of its group in `TargetTable.groups`."""
    slice: int
    """Index of this target in `TargetTable.targets`."""
    offset: int
    """First output column within the group's output."""

    @property
    def suffix(self) -> str:
        """The last part of the name: `q_proj`."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Group:
    """A packed layer of the model: its slices share the input x."""

    index: int
    kind: Kind
    in_features: int
    slices: tuple[Target, ...]

    @property
    def out_features(self) -> int:
        return sum(s.out_features for s in self.slices)


@dataclass(frozen=True)
class TargetTable:
    """All targets of one model, in layer order."""

    groups: tuple[Group, ...]

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(s for g in self.groups for s in g.slices)

    @cached_property
    def by_name(self) -> dict[str, Target]:
        return {t.name: t for t in self.targets}


def build_table(packed: list[tuple[Kind, int, list[tuple[str, int]]]]) -> TargetTable:
    """A table from rows (kind, in_features, [(target name, out_features), ...]) in layer order."""
    groups: list[Group] = []
    num_slices = 0
    for index, (kind, in_features, slices) in enumerate(packed):
        made: list[Target] = []
        offset = 0
        for name, out in slices:
            made.append(Target(name, in_features, out, kind, index, num_slices, offset))
            num_slices += 1
            offset += out
        groups.append(Group(index, kind, in_features, tuple(made)))
    return TargetTable(tuple(groups))


@dataclass(frozen=True)
class ImageLayout:
    """Where the matrices of one adapter lie in its image, in elements from its start."""

    rank: tuple[int, ...]
    """Per slice; 0 when the adapter leaves that target alone."""
    a_offset: tuple[int, ...]
    """Per group; -1 when no slice of the group is adapted."""
    b_offset: tuple[int, ...]
    """Per slice; -1 when absent."""
    num_elements: int

    @property
    def max_rank(self) -> int:
        return max(self.rank, default=0)


def layout_of(table: TargetTable, rank: tuple[int, ...]) -> ImageLayout:
    """The layout of an adapter with the given rank per slice (0: absent)."""
    a_offset: list[int] = []
    b_offset: list[int] = []
    end = 0
    for group in table.groups:
        total = sum(rank[s.slice] for s in group.slices)
        a_offset.append(end if total else -1)
        end = _align(end + total * group.in_features)
        for s in group.slices:
            r = rank[s.slice]
            b_offset.append(end if r else -1)
            end = _align(end + r * s.out_features)
    return ImageLayout(rank, tuple(a_offset), tuple(b_offset), end)


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
