"""The table of a model's projections, and how an adapter is laid out for them.

A *target* is one projection as PEFT names it (`model.layers.0.self_attn.q_proj`). The model
computes some of them packed (q, k, v; gate, up): such a packed layer is a *group*, and a target
is one *slice* of its group's output. This table describes all of the layout; the loading of
weights, the checkpoint reader, the kernels and the models derive from it what they need.

An adapter's *image* is one flat buffer:

    group 0: A (R, in)   B of slice 0 (out_0, r_0)   B of slice 1 ...   group 1: ...

R is the sum of the group's slice ranks, and A's rows are stacked in slice order. Absent slices take
no room, the scale is folded into B, and each matrix starts at a multiple of ALIGN elements. An
embedding's A is stored transposed, (vocab, r), so that a token id selects a row. A group of experts
has A and B for each expert in turn, all of the same rank.

Behind these, the few adapters that hold more than A and B have *extras*: vectors that scale and
shift a slice's output, norms, and rows of the embedding and of the head (see `ImageLayout`).
Numbers that are not of the serving dtype (fp32 vectors, int32 token ids) keep their own bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

ALIGN = 64
"""Elements; 128 bytes in a 2-byte dtype."""

Kind = Literal["linear", "embedding", "head", "experts"]
"""experts: a linear layer of which there are `TargetTable.num_experts`."""

Axis = Literal["column", "row", "vocab", "expert"]
"""How a weight is cut for several ranks; see `weft.core.shards`. column: each takes a share of
every part of the output. row: each takes a share of the input, and the outputs are summed. vocab:
each takes some tokens. expert: each takes some whole experts."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One row of a model's table: a layer whose weight is one matrix for one or more projections.
    `names` are the projections' names in PEFT and checkpoints, `parts` the output features:

                     in_features                 names, where there is
                   +-------------+            one for each   one for all
    parts[0]  q    |             |               q_proj      +
    parts[1]  k    |             |               k_proj      | qkv_proj
    parts[2]  v    |             |               v_proj      +
                   +-------------+
    """

    key: str
    """The name of its weight, such as "3.qkv". Experts' gate and up share one, even as two rows."""
    kind: Kind
    in_features: int
    parts: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool = False
    axis: Axis | None = None
    """None: every rank has all of it."""
    pair_ranks: int = 1
    """Over how many ranks the half of A and B is divided that is not cut with the weight: A of a
    column layer by its inputs, B of a row layer by its outputs. 1: each rank has all of that half.
    """
    float32: bool = False
    """Whether its weight is float32; else it has the model's dtype."""
    absorbed: bool = False
    """Whether it projects latents to each head's key, and then its value, but is never applied to
    latents. Its part for keys is applied to queries, and its part for values to sums of latents:
    see `weft.models.latent_attention`."""
    transposed: bool = False
    """Whether PEFT takes the inputs of experts for their outputs, as their matrices are stored as
    (experts, in, out): its A is then (E * r, out), and its B (in, r * E)."""
    degree: int = 1
    """How an activation that follows the projection depends on the last part of its output: if that
    part is multiplied by a positive factor f, the result is multiplied by f ** degree. 2 is for the
    square of ReLU, and 0 for an activation of which no power of f says what happens."""

    @property
    def any_format(self) -> bool:
        """Whether its weight may be in a quantized format; else it is always a dense matrix."""
        return self.kind == "linear" and not self.absorbed

    @property
    def parts_of(self) -> tuple[tuple[int, ...], ...]:
        """The parts of each projection. With more parts than projections, the first has several."""
        first = len(self.parts) - len(self.names) + 1
        return self.parts[:first], *((part,) for part in self.parts[first:])

    @property
    def widths(self) -> tuple[int, ...]:
        """The output features of each projection."""
        return tuple(map(sum, self.parts_of))


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
    b_features: int
    """How many outputs B has: `out_features`, or a rank's share of these."""

    def b_start(self, rank: int) -> int:
        """The first column of the group's output that a rank's B adds to."""
        return self.offset + (rank * self.b_features if self.b_features < self.out_features else 0)

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
    packed: Packed

    @property
    def out_features(self) -> int:
        return sum(s.out_features for s in self.slices)

    @property
    def a_features(self) -> int:
        """How many inputs A has: `in_features`, or a rank's share of these."""
        return self.in_features // (self.packed.pair_ranks if self.packed.axis == "column" else 1)

    def a_columns(self, rank: int) -> slice:
        """The columns of x that a rank's A is multiplied with."""
        start = rank * self.a_features if self.a_features < self.in_features else 0
        return slice(start, start + self.a_features)

    @property
    def sums_ranks(self) -> bool:
        """Whether x A^T is a sum over ranks, of which each computes a part from its share of x."""
        return self.packed.pair_ranks > 1 and self.packed.axis in ("column", "row")


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's weight, which an adapter may replace; `index`: its place in `TargetTable.norms`."""

    name: str
    size: int
    index: int


class Vector(NamedTuple):
    """A tensor of the model that no adapter changes."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    """The sizes that its first dimension consists of; each rank has a share of each."""
    of_tokens: bool = False
    """Whether it has a row for each token of the vocabulary."""


@dataclass(frozen=True)
class TargetTable:
    """All targets of one model, in layer order."""

    groups: tuple[Group, ...]
    norms: tuple[Norm, ...] = ()
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    num_experts: int = 1
    vectors: tuple[Vector, ...] = ()
    naming: tuple[tuple[str, str], ...] = ()
    """Prefixes of names in this table, each with the one that checkpoints and PEFT have instead."""

    def copies(self, kind: Kind) -> int:
        """How many copies of A and B a target of this kind has: one, or one for each expert."""
        return self.num_experts if kind == "experts" else 1

    @property
    def fixed_vocabulary(self) -> str | None:
        """The name of a tensor with a row for each token, which added tokens would lack; None if
        there is none."""
        return next((vector.name for vector in self.vectors if vector.of_tokens), None)

    def has_bias(self, target: Target) -> bool:
        """Whether the target has a bias in the base model."""
        return self.groups[target.group].packed.bias

    @cached_property
    def has_experts(self) -> bool:
        return any(group.kind == "experts" for group in self.groups)

    @cached_property
    def of_experts(self) -> frozenset[int]:
        """The slices of experts, and of routers whose logits are float32."""
        groups = (g for g in self.groups if g.kind == "experts" or g.packed.float32)
        return frozenset(s.slice for group in groups for s in group.slices)

    @cached_property
    def absorbed(self) -> frozenset[int]:
        """The slices of projections that are absorbed; see `Packed`."""
        groups = (group for group in self.groups if group.packed.absorbed)
        return frozenset(s.slice for group in groups for s in group.slices)

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(s for g in self.groups for s in g.slices)

    @cached_property
    def by_name(self) -> dict[str, Target]:
        return {t.name: t for t in self.targets}

    @cached_property
    def by_key(self) -> dict[str, tuple[Group, ...]]:
        """The groups that adapt a weight, by its key: one, or two for experts' gate and up."""
        found: dict[str, tuple[Group, ...]] = {}
        for group in self.groups:
            found[group.packed.key] = (*found.get(group.packed.key, ()), group)
        return found

    @cached_property
    def norms_by_name(self) -> dict[str, Norm]:
        return {n.name: n for n in self.norms}


def build_table(
    rows: Sequence[Packed],
    norms: Sequence[tuple[str, int]] = (),
    tied: bool = False,
    num_experts: int = 1,
    vectors: Sequence[Vector] = (),
    naming: tuple[tuple[str, str], ...] = (),
) -> TargetTable:
    """A table of a model's packed layers, in layer order, of its norms as (name, size) and of its
    other tensors."""
    groups: list[Group] = []
    num_slices = 0
    for index, row in enumerate(rows):
        made: list[Target] = []
        offset = 0
        for name, out in zip(row.names, row.widths, strict=True):
            b_out = out // row.pair_ranks if row.axis == "row" else out
            made.append(
                Target(name, row.in_features, out, row.kind, index, num_slices, offset, b_out)
            )
            num_slices += 1
            offset += out
        groups.append(Group(index, row.kind, row.in_features, tuple(made), row))
    listed = tuple(Norm(name, size, index) for index, (name, size) in enumerate(norms))
    return TargetTable(tuple(groups), listed, tied, num_experts, tuple(vectors), naming)


TEXT_PREFIXES: tuple[tuple[str, str | None], ...] = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.language_model.", "model."),
    ("model.visual.", None),
    ("model.vision_tower.", None),
    ("vision_model.", None),
    ("model.embed_vision.", None),
    ("model.audio_tower.", None),
    ("model.embed_audio.", None),
    ("model.multi_modal_projector.", None),
    ("visual.", None),
    ("vision_tower.", None),
    ("embed_vision.", None),
    ("audio_tower.", None),
    ("embed_audio.", None),
    ("multi_modal_projector.", None),
)
"""Prefixes of module names in models that see images too, or that name their parts differently.
Each has its prefix in tables, or None if it is no part of the text model. transformers has named
the text model in two ways, and a model without a head has names of its own. If a name has several
of the prefixes, the first counts."""
_PREFIXES = tuple(prefix for prefix, _ in TEXT_PREFIXES)


def text_name(name: str) -> str | None:
    """The name in the text model alone of a module, tensor or parameter of a model that may see
    images too; None if it belongs to another part of that model."""
    if not name.startswith(_PREFIXES):
        return name
    prefix, own = next(each for each in TEXT_PREFIXES if name.startswith(each[0]))
    return None if own is None else own + name.removeprefix(prefix)


@dataclass(frozen=True)
class ImageLayout:
    """Where the parts of one adapter lie in its image, in elements from its start. The offset of a
    part that is absent is -1; a field of extras is () if the adapter has none of them."""

    rank: tuple[int, ...]
    """Per slice; 0 where it is not adapted."""
    a_offset: tuple[int, ...]
    """Per group."""
    b_offset: tuple[int, ...]
    """Per slice."""
    num_elements: int
    scale_offset: tuple[int, ...] = ()
    """Per slice: fp32 (out_features,), the factors of the output including A's and B's part."""
    shift_offset: tuple[int, ...] = ()
    """Per slice: fp32 (out_features,) that is then added to the output."""
    norm_offset: tuple[int, ...] = ()
    """Per norm of the table: the weight in place of the base's."""
    embedding_rows: tuple[int, ...] = ()
    """(offset of the rows that replace the base's, offset of their ascending int32 token ids, or -1
    if all rows are there, number of rows)."""
    head_rows: tuple[int, ...] = ()
    """The same for the head; these may be the embedding's own."""
    vocab_size: int = 0
    """The number of tokens if it differs from the base's, else 0. If tokens were added, the last
    rows of embedding and head are theirs, and include what the adapter's A and B add to them. If
    there are fewer, A, B and vectors have no effect for the tokens beyond."""
    has_experts: bool = False
    """Whether it changes experts, or a router whose logits are float32. What adapters add to these
    is computed only in steps that have such an adapter."""

    @property
    def max_rank(self) -> int:
        return max(self.rank, default=0)

    @property
    def has_extras(self) -> bool:
        """Whether there is more than A and B."""
        vectors = self.scale_offset or self.shift_offset or self.norm_offset
        return bool(vectors or self.embedding_rows or self.head_rows)


@dataclass(frozen=True)
class Extras:
    """What an adapter has besides A and B: indices of slices and norms, and numbers of rows."""

    scaled: frozenset[int] = frozenset()
    shifted: frozenset[int] = frozenset()
    norms: frozenset[int] = frozenset()
    embedding_rows: int = 0
    head_rows: int = 0
    shared_rows: bool = False
    """The head's rows are the embedding's."""
    vocab_size: int = 0
    """See `ImageLayout.vocab_size`."""


def layout_of(
    table: TargetTable, rank: tuple[int, ...], extras: Extras | None = None, element_bytes: int = 4
) -> ImageLayout:
    """The layout of an adapter with the given rank per slice (0: absent). The size of the serving
    dtype, `element_bytes`, matters to extras only."""
    a_offset: list[int] = []
    b_offset: list[int] = []
    end = 0
    for group in table.groups:
        total = sum(rank[s.slice] for s in group.slices)
        a_offset.append(end if total else -1)
        copies = table.copies(group.kind)
        end += copies * aligned(total * group.a_features)
        for s in group.slices:
            r = rank[s.slice]
            b_offset.append(end if r else -1)
            end += copies * aligned(r * s.b_features)
    vectors = extras.scaled | extras.shifted if extras else ()
    experts = any(rank[i] or i in vectors for i in table.of_experts)
    plain = ImageLayout(rank, tuple(a_offset), tuple(b_offset), end, has_experts=experts)
    return _with_extras(plain, table, extras, 4 // element_bytes) if extras else plain


def _with_extras(plain: ImageLayout, table: TargetTable, extras: Extras, word: int) -> ImageLayout:
    """`plain` with the extras behind it. `word`: how many elements 32 bits take."""
    end = plain.num_elements

    def place(size: int) -> int:
        nonlocal end
        start, end = end, aligned(end + size)
        return start

    def place_each(present: Collection[int], sizes: list[int]) -> tuple[int, ...]:
        if not present:
            return ()
        return tuple(place(size) if i in present else -1 for i, size in enumerate(sizes))

    def place_rows(num_rows: int, kind: Kind) -> tuple[int, ...]:
        if not num_rows:
            return ()
        vocab, hidden = vocabulary(table, kind)
        ids = -1 if num_rows == (extras.vocab_size or vocab) else place(num_rows * word)
        return place(num_rows * hidden), ids, num_rows

    outs = [target.out_features * word for target in table.targets]
    scale_offset = place_each(extras.scaled, outs)
    shift_offset = place_each(extras.shifted, outs)
    norm_offset = place_each(extras.norms, [norm.size for norm in table.norms])
    embedding_rows = place_rows(extras.embedding_rows, "embedding")
    shared = extras.shared_rows
    head_rows = embedding_rows if shared else place_rows(extras.head_rows, "head")
    return replace(
        plain,
        num_elements=end,
        scale_offset=scale_offset,
        shift_offset=shift_offset,
        norm_offset=norm_offset,
        embedding_rows=embedding_rows,
        head_rows=head_rows,
        vocab_size=extras.vocab_size,
    )


def vocabulary(table: TargetTable, kind: Kind) -> tuple[int, int]:
    """(vocab, hidden), the shape of the weight of the embedding or of the head."""
    target = next(group.slices[0] for group in table.groups if group.kind == kind)
    if kind == "embedding":
        return target.in_features, target.out_features
    return target.out_features, target.in_features


def resized(table: TargetTable, vocab_size: int) -> TargetTable:
    """The table of the same model with another number of rows in embedding and head."""
    rows = [_resized(group.packed, vocab_size) for group in table.groups]
    norms = [(norm.name, norm.size) for norm in table.norms]
    return build_table(rows, norms, table.tied, table.num_experts)


def _resized(row: Packed, vocab_size: int) -> Packed:
    if row.kind == "embedding":
        return replace(row, in_features=vocab_size)
    return replace(row, parts=(vocab_size,)) if row.kind == "head" else row


def aligned(n: int) -> int:
    """The elements that a matrix of `n` takes."""
    return -(-n // ALIGN) * ALIGN
