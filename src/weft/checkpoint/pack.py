"""Packs an adapter's parts into its image.

`weft.core.targets` describes the layout of an image. For a model that is divided over ranks
(`weft.core.shards`), an image has the parts of all ranks, one after another, all of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.checkpoint.base import (
    BaseWeights,
    Replaced,
    affine,
    array_of,
    check_residual,
    is_finite,
    name_of,
    replaced_norm,
    replaced_rows,
    tensor_of,
    with_pair,
)
from weft.checkpoint.examine import check_values
from weft.checkpoint.kinds import CONVERSION_TOLERANCE, sort_adapter
from weft.checkpoint.parts import (
    AdapterParts,
    TargetParts,
    check_activated,
    nothing_in,
    same_rows,
)
from weft.checkpoint.read import AdapterFiles, Raw
from weft.checkpoint.refuse import refuse
from weft.core.config import MAX_ADDED_TOKENS
from weft.core.files import WEIGHTS_FILE
from weft.core.shards import Shard, unsharded
from weft.core.targets import (
    Extras,
    ImageLayout,
    Target,
    TargetTable,
    aligned,
    layout_of,
    vocabulary,
)

_BLOCK = 1 << 14
"""Elements copied at a time: few enough to stay in the cache, and for torch not to wake a pool
of threads, which would take the cores from a step that runs meanwhile."""


@dataclass(frozen=True)
class AdapterImage:
    """One adapter version, packed for the kernels."""

    digest: str
    """The digest of its two files, see `weft.checkpoint.read.AdapterFiles.digest`."""
    layout: ImageLayout
    """The layout of each rank's part."""
    data: torch.Tensor
    """(ranks * layout.num_elements,), the serving dtype, CPU; the gaps between parts are zero."""
    targets: tuple[str, ...]
    """Names of the adapted modules without the layer, in table order, norms last."""
    provisional: bool = False
    """Whether it was packed without the base's weights though it depends on them: its sizes are
    upper bounds, and it can't be served."""
    conversion_error: float = 0.0
    conversion_worst: str = ""
    """These two: the largest `TargetParts.error`, 0 for a LoRA, and the target that has it."""
    invocation: tuple[int, ...] = ()
    """The token ids that activate an activated LoRA; (): it is always active."""
    checksums: tuple[int, ...] = ()
    """The `weft.kernels.checksum` of each rank's data when they were packed; (): not computed."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all ranks' parts."""
        return self.data.numel() * self.data.element_size()

    def data_of(self, rank: int) -> torch.Tensor:
        """The part of one rank, (layout.num_elements,), a view."""
        size = self.layout.num_elements
        return self.data[rank * size : (rank + 1) * size]


@dataclass(slots=True)
class _Beside:
    """What an image has besides A and B; vectors in float32, the rest in the serving dtype."""

    scale: dict[int, torch.Tensor]
    """By slice."""
    shift: dict[int, torch.Tensor]
    norms: dict[int, torch.Tensor]
    """By their index in the table."""
    embedding: Replaced | None = None
    head: Replaced | None = None
    vocab_size: int = 0

    @property
    def shared(self) -> bool:
        return self.embedding is not None and self.head is self.embedding

    def extras(self) -> Extras:
        return Extras(
            frozenset(self.scale),
            frozenset(self.shift),
            frozenset(self.norms),
            0 if self.embedding is None else len(self.embedding.rows),
            0 if self.head is None else len(self.head.rows),
            self.shared,
            self.vocab_size,
        )


def pack_image(
    files: AdapterFiles,
    table: TargetTable,
    dtype: torch.dtype,
    max_rank: int,
    base: BaseWeights | None = None,
    conversion_tolerance: float = CONVERSION_TOLERANCE,
    max_added_tokens: int = MAX_ADDED_TOKENS,
    shards: Sequence[Shard] = (),
    untrained: bool = False,
) -> AdapterImage:
    """The image of an adapter from the content of its files; see `sort_adapter` for the arguments.
    Without `base`, it may be provisional. `table`: of the whole model. `shards`: those of all
    ranks, if the model is divided. `untrained`: A and B may change nothing. Raises
    AdapterInvalid."""
    shards = shards or (unsharded(table),)
    config, parts = sort_adapter(files, table, max_rank, conversion_tolerance, max_added_tokens)
    if config.residual_init and base is not None:
        check_residual(config.residual_init, parts, base)
    beside = _beside(parts, table, dtype, base)
    layout = layout_of(shards[0].own, parts.ranks(table), beside.extras(), dtype.itemsize)
    data = allocate(len(shards) * layout.num_elements, dtype)
    each = list(zip(shards, data.view(len(shards), layout.num_elements), strict=True))
    changes = _fill_pairs(each, parts.targets, layout)
    if len(data) and not is_finite(data):
        check_values(parts, name_of(dtype))
        refuse(WEIGHTS_FILE, f"holds values too large for {name_of(dtype)}")
    for shard, part in each:
        _fill_beside(part, beside, shard, layout)
    bounds = base is None and parts.needs_base
    changes = changes or (untrained and any(layout.rank))
    if not (changes or layout.has_extras or layout.vocab_size or bounds):
        refuse(WEIGHTS_FILE, f"the adapter would change nothing: {nothing_in(parts)}")
    if config.invocation:
        check_activated(config.invocation, parts, layout, table, bounds)
    return AdapterImage(
        files.digest,
        layout,
        data,
        parts.names,
        bounds or (bool(config.residual_init) and base is None),
        *parts.worst,
        config.invocation,
    )


def allocate(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_elements,), zeros, CPU. Raises MemoryError.

    NumPy asks for huge pages where torch does not: 84 MB are then given back in half a
    millisecond, not in six, during which no other thread of the process can run.
    """
    return torch.from_numpy(np.zeros(num_elements * dtype.itemsize, np.uint8)).view(dtype)


# -- A and B ---------------------------------------------------------------------------------------


def _fill_pairs(
    each: list[tuple[Shard, torch.Tensor]], targets: list[TargetParts], layout: ImageLayout
) -> bool:
    """Copy each rank's A and B to its data, scaled in float32, without those of added tokens, which
    are in these tokens' rows. Returns whether they change anything."""
    changes = False
    arrays = [(shard, array_of(data)) for shard, data in each]
    for parts in targets:
        if parts.a is None or parts.b is None:
            continue
        # A (E, r, in) and B (E, out, r), where E is 1 except for experts.
        stacked_a, stacked_b = (v.array.reshape(-1, *v.shape[-2:]) for v in (parts.a, parts.b))
        for shard, data in arrays:
            target = shard.own.targets[parts.target.slice]
            copies, inputs, outputs = shard.pairs[target.slice]
            own = zip(stacked_a[copies], stacked_b[copies], strict=True)
            for expert, (whole_a, whole_b) in enumerate(own):
                a, b = pair_views(data, target, shard.own, layout, expert)
                fill(a, whole_a[:, inputs], 1.0)
                start = 0
                for rows in outputs:
                    fill(b[start:], whole_b[rows], parts.scaling)
                    start += rows.stop - rows.start
                changes = changes or bool(tensor_of(a).any() and tensor_of(b).any())
    return changes


def fill(dest: Raw, source: Raw, scale: float) -> None:
    """dest = scale * source, for the rows and columns that both have; see `Stored.array`."""
    if dest.shape != source.shape:
        rows, columns = map(min, dest.shape, source.shape)
        dest, source = dest[:rows, :columns], source[:rows, :columns]
    if scale == 1.0 and dest.dtype == source.dtype:
        # NumPy copies all of it in this thread, and lets others run meanwhile.
        np.copyto(dest, source)
        return
    into, what = tensor_of(dest), tensor_of(source)
    if into.stride(1) > 1:
        into, what = into.t(), what.t()
    step = max(1, _BLOCK // into.shape[1])
    for start in range(0, len(into), step):
        values = what[start : start + step]
        values = values if values.dtype == into.dtype else values.float()
        torch.mul(values, scale, out=into[start : start + step])


def pair_views(
    data: Raw, target: Target, table: TargetTable, layout: ImageLayout, expert: int
) -> tuple[Raw, Raw]:
    """Views of a target's A (r, in) and B (out, r) in the image; `expert`: 0 if there are none."""
    group = table.groups[target.group]
    rank = layout.rank[target.slice]
    ranks = [layout.rank[s.slice] for s in group.slices]
    total, row = sum(ranks), sum(ranks[: target.slice - group.slices[0].slice])
    start = layout.a_offset[target.group] + expert * aligned(total * group.a_features)
    stacked = data[start : start + total * group.a_features]
    if group.kind == "embedding":
        a = stacked.reshape(group.a_features, total)[:, row : row + rank].T
    else:
        a = stacked.reshape(total, group.a_features)[row : row + rank]
    start = layout.b_offset[target.slice] + expert * aligned(target.b_features * rank)
    b = data[start : start + target.b_features * rank].reshape(target.b_features, rank)
    return a, b


# -- what comes beside them ------------------------------------------------------------------------


def _beside(
    parts: AdapterParts, table: TargetTable, dtype: torch.dtype, base: BaseWeights | None
) -> _Beside:
    beside = _Beside({}, {}, {}, vocab_size=parts.vocab_size)
    vocab, _ = vocabulary(table, "embedding")
    beside.embedding = replaced_rows(parts.embedding, "embedding", table, dtype, base)
    beside.head = beside.embedding
    if not same_rows(parts.embedding, parts.head):
        beside.head = replaced_rows(parts.head, "head", table, dtype, base)
    for each in parts.targets:
        target = table.targets[each.target.slice]
        whole = {"embedding": beside.embedding, "head": beside.head}.get(target.kind)
        scale, shift = affine(each, base, whole) if each.vectors else (None, None)
        if parts.vocab_size > vocab and whole is not None:
            final = with_pair(whole, each, vocab, (scale, shift))
            if target.kind == "embedding":
                beside.embedding = final
            else:
                beside.head = final
        if scale is not None:
            beside.scale[target.slice] = _of_length(scale, target.out_features, 1.0)
        if shift is not None:
            beside.shift[target.slice] = _of_length(shift, target.out_features, 0.0)
    for norm, stored in parts.norms:
        weight = replaced_norm(norm, stored, dtype, base)
        if weight is not None:
            beside.norms[norm.index] = weight
    return beside


def _of_length(vector: torch.Tensor, size: int, more: float) -> torch.Tensor:
    """The first `size` entries of a vector, or the vector filled up with `more`."""
    return F.pad(vector[:size], (0, max(size - len(vector), 0)), value=more)


def _fill_beside(data: torch.Tensor, beside: _Beside, shard: Shard, layout: ImageLayout) -> None:
    """Fill in one rank's part of what is besides A and B."""
    targets = shard.own.targets
    for index, scale in beside.scale.items():
        _put(data, layout.scale_offset[index], _entries(scale, shard.outputs(targets[index])))
    for index, shift in beside.shift.items():
        if shard.adds_vectors(targets[index]):
            _put(data, layout.shift_offset[index], _entries(shift, shard.outputs(targets[index])))
    for index, weight in beside.norms.items():
        own = _entries(weight, shard.norm(shard.own.norms[index]))
        _put(data, layout.norm_offset[index], own)
    _put_rows(data, beside.embedding, layout.embedding_rows)
    if not beside.shared:
        _put_rows(data, beside.head, layout.head_rows)


def _entries(vector: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    return torch.cat([vector[each] for each in slices])


def _put_rows(data: torch.Tensor, replaced: Replaced | None, at: tuple[int, ...]) -> None:
    if replaced is None:
        return
    start, ids, _ = at
    _put(data, start, replaced.rows)
    if ids >= 0:
        _put(data, ids, replaced.ids)


def _put(data: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy values to `start` with their own bits, whatever their dtype."""
    size = values.numel() * values.element_size() // data.element_size()
    data[start : start + size].view(values.dtype).copy_(values.flatten())
